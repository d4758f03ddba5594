"""What must be true of the form of a graph before and after every pass.

:func:`problem_in` checks: the graph is well formed (FX's own lint), the inputs are the ones that
Dynamo will pass, and the number of outputs is unchanged. Every computing node has a fake value
then, which ``fakes.py`` sees to, and each output is what it was, which ``outputs.py`` checks.

What a pass did, as plain values: :class:`PassRecord`, and a table of them.

What each output of a graph must still be after a pass: :func:`changed_output`.

Dynamo's code around the graph, and the pieces behind a piece, were traced with what the outputs
were. Without this check a caller silently gets another shape or dtype.

Shape, dtype, device and layout stay, always. Strides stay where another piece takes the output: it
was compiled for them, and Inductor's code asserts them. An output that only the caller sees may be
laid out in another way: nothing that was traced depends on it, and whoever asks a tensor for more,
as ``view`` does, is told by torch.

A pass, and the manager that runs a list of them.

A pass is a small object with a ``name``, a ``uuid()`` that changes when its effect does, and a
``__call__(gm) -> gm``. It may assume a valid graph and must leave one (:mod:`.verify`); between
the two, anything goes. The manager verifies after every pass (also that each output is what it was,
:mod:`.outputs`), records what it did and, on request,
writes the graph before and after each to a folder.
"""

import functools
import hashlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import sympy
import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.boundaries import target_name
from cgcompile.errors import CGCompileError, ConfigError, PassError
from cgcompile.passes.fakes import calls_of, fill_values, known_value
from cgcompile.passes.nodes import COMPUTING, is_symbolic_number, value
from cgcompile.passes.symbols import Symbols, dtype_text
from cgcompile.settings import checked, require, require_callable


def signature(gm: fx.GraphModule) -> tuple[tuple[str, ...], int]:
    """What a pass must keep: the names of the inputs in order, and the number of outputs."""
    inputs = tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
    return inputs, len(compat.tree_leaves(gm.graph.output_node().args[0]))


def problem_in(gm: fx.GraphModule, expected: tuple[tuple[str, ...], int]) -> str | None:
    """The first thing wrong with the graph, in words; None if it is valid."""
    try:
        gm.graph.lint()
        found = signature(gm)
    except Exception as error:  # lint raises RuntimeError, KeyError, AttributeError, ...
        return f"{type(error).__name__}: {error}"
    if found[0] != expected[0]:
        return f"its inputs are {list(found[0])}, expected {list(expected[0])}"
    if found[1] != expected[1]:
        return f"it has {found[1]} outputs, expected {expected[1]}"
    return None


@dataclass(frozen=True)
class PassRecord:
    """One run of one pass.

    Attributes:
        name: of the pass.
        label: what it ran over: ``graph``, or the name of a piece.
        seconds: how long it took, without the checks and dumps around it.
        ops_before: nodes that compute, before.
        ops_after: nodes that compute, after.
        difference: how many more of each op there are after it: ``{"clone": -3}``. An op that was
            replaced by another of the same kind does not show.
    """

    name: str
    label: str
    seconds: float = field(compare=False)
    ops_before: int
    ops_after: int
    difference: Mapping[str, int] = field(hash=False)

    def text(self, *, seconds: bool = True) -> str:
        """One line; ``seconds=False`` leaves out the time, which no two runs share."""
        return table([self], seconds=seconds)

    def __str__(self) -> str:
        return self.text()


def op_counts(gm: fx.GraphModule) -> Counter[str]:
    """How many nodes of each op compute, by the names that dumps show."""
    targets = (node.target for node in gm.graph.nodes if node.op in COMPUTING)
    # Functions of torch that are written in C++ live in a class that nobody knows.
    return Counter(target_name(each).replace("_VariableFunctionsClass.", "") for each in targets)


def difference(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Op -> how many more there are, in the order of names; ops that stayed are left out."""
    names = sorted({*before, *after})
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in names}
    return {name: change for name, change in changes.items() if change}


def table(records: Iterable[PassRecord], *, seconds: bool = True) -> str:
    """A line for each record: what ran over what, its time, the number of ops, the difference."""
    rows = []
    for each in records:
        changes = ", ".join(f"{name} {change:+}" for name, change in each.difference.items())
        time = [f"{each.seconds * 1e3:.2f} ms"] if seconds else []
        ops = f"{each.ops_before} -> {each.ops_after} ops"
        rows.append([each.label, each.name, *time, ops, changes or "-"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


_UNKNOWN = object()  # of a node that has no fake value


class Change(NamedTuple):
    """An output that is not what it was: its number, and both as text."""

    place: int
    found: str
    expected: str


def outputs_of(gm: fx.GraphModule) -> tuple[Any, ...]:
    """The fake value of each output, in order."""
    leaves = compat.tree_leaves(gm.graph.output_node().args[0])
    return tuple(_output(gm, each) for each in leaves)


def _output(gm: fx.GraphModule, leaf: Any) -> Any:
    if not isinstance(leaf, fx.Node):
        return leaf
    known = leaf.op == "get_attr" or "example_value" in leaf.meta
    return known_value(gm, leaf) if known else _UNKNOWN


def changed_output(
    gm: fx.GraphModule, expected: Iterable[Any], strided: Collection[int] = ()
) -> Change | None:
    """The first output that is not what it was; None if there is none.

    Sizes are compared as expressions: two that no allowed size tells apart are equal. A size that
    only the data tell is equal to any other, and so is what is neither tensor nor number.

    Args:
        gm: a graph after a pass, with fake values.
        expected: what :func:`outputs_of` told before it; as many as now.
        strided: numbers of the outputs whose strides must stay as well.
    """
    symbols: Symbols | None = None
    for place, (found, before) in enumerate(zip(outputs_of(gm), expected, strict=True)):
        if found is before or found is _UNKNOWN or before is _UNKNOWN:
            continue
        symbols = symbols or Symbols(gm)
        if not _same(found, before, symbols, place in strided):
            texts = [_text(each, symbols, place in strided) for each in (found, before)]
            return Change(place, *texts)
    return None


def _same(one: Any, other: Any, symbols: Symbols, strided: bool) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.layout, one.dim()) != (other.dtype, other.layout, other.dim()):
            return False
        if one.device != other.device or not _all_same(one.shape, other.shape, symbols):
            return False
        if not strided or one.layout is not torch.strided:
            return True
        # The stride of a dimension of size 1 is never used.
        matter = [dim for dim, size in enumerate(one.shape) if type(size) is not int or size != 1]
        one_strides, other_strides = one.stride(), other.stride()
        return _all_same(
            [one_strides[d] for d in matter], [other_strides[d] for d in matter], symbols
        )
    if _is_whole(one) and _is_whole(other):
        return _all_same([one], [other], symbols)
    return isinstance(one, torch.Tensor) is isinstance(other, torch.Tensor)


def _is_whole(found: Any) -> bool:
    return isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool)


def _all_same(some: Iterable[Any], others: Iterable[Any], symbols: Symbols) -> bool:
    return all(_same_number(a, b, symbols) for a, b in zip(some, others, strict=True))


def _same_number(one: Any, other: Any, symbols: Symbols) -> bool:
    if one is other:
        return True
    if not all(type(n) is int or hasattr(n.node, "expr") for n in (one, other)):
        return True  # a length of nested tensors: nobody can tell
    a, b = symbols.number(one), symbols.number(other)
    free: set[sympy.Symbol] = a.free_symbols | b.free_symbols
    if a == b or any(symbol not in symbols for symbol in free):
        return True
    if sympy.expand(a - b) == 0:
        return True
    if not free:
        return False
    tried = (symbols.numbers_with(symbol, size) for symbol in free for size in _TRIED)
    values = ((a.subs(each), b.subs(each)) for each in tried if each is not None)
    return all(x == y for x, y in values)


# Sizes at which two expressions are compared that sympy does not know to be equal.
_TRIED = (2, 3, 4, 5, 7, 8, 12, 16, 24, 30, 31, 32, 48, 64, 100, 128, 240, 256, 1000, 1024, 4096)


def _text(found: Any, symbols: Symbols, strided: bool) -> str:
    """``f32[s0, 16] on cpu``."""
    if is_symbolic_number(found):
        return symbols.pretty(found.node.expr)
    if not isinstance(found, torch.Tensor):
        return f"{found!r}"
    if found.layout is not torch.strided:
        return f"{dtype_text(found.dtype)}{list(found.shape)} {found.layout} on {found.device}"
    text = f"{symbols.shape_text(found)} on {found.device}"
    if not strided:
        return text
    strides = ", ".join(symbols.pretty(symbols.number(stride)) for stride in found.stride())
    return f"{text}, strides ({strides})"


log = logging.getLogger(__name__)


@runtime_checkable
class GraphPass(Protocol):
    """What every pass, ours or a user's, looks like."""

    name: str

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Change ``gm`` in place, or return another graph with the same inputs and outputs."""

    def uuid(self) -> str:
        """Equal for two passes that change every graph in the same way; part of cache keys."""


@dataclass(frozen=True)
class FunctionPass:
    """A plain function as a pass.

    Args:
        name: shown in messages and dumps.
        function: ``(gm) -> gm``, or ``(gm) -> None`` if it works in place.
        version: change it when the function changes what it does, or what it is bound to.

    Raises:
        ConfigError: a name that is no text, or a function that cannot be called.
    """

    name: str
    function: Callable[[fx.GraphModule], fx.GraphModule | None]
    version: str = "1"

    def __post_init__(self) -> None:
        for name in ("name", "version"):
            given = getattr(self, name)
            expected = "a non-empty text"
            require(isinstance(given, str) and bool(given), name, "FunctionPass", given, expected)
        require_callable("function", "FunctionPass", self.function)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return self.function(gm) or gm

    def uuid(self) -> str:
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)
        return f"{self.name}/{named.__module__}.{named.__qualname__}/{self.version}"


class PassManager:
    """Runs passes in order and checks the graph after each.

    Args:
        passes: objects that follow :class:`GraphPass`.
        dump_dir: a folder (made if absent) for ``00.before.txt``, ``00.<name>.txt``, ...
        disabled: names of passes to leave out.

    Attributes:
        passes: those that run, in order.

    Raises:
        PassError: something in ``passes`` is not a pass.
    """

    @checked
    def __init__(
        self,
        passes: Iterable[Any],
        dump_dir: str | None = None,
        disabled: Collection[str] = (),
    ) -> None:
        given = tuple(passes)
        for candidate in given:
            if not isinstance(candidate, GraphPass):
                raise PassError.not_a_pass(found=candidate)
        self.passes: tuple[GraphPass, ...] = tuple(p for p in given if p.name not in disabled)
        require("\0" not in (dump_dir or ""), "dump_dir", "PassManager", dump_dir, "a path")
        self._dump_dir = dump_dir
        self._records: list[PassRecord] = []

    @property
    def records(self) -> tuple[PassRecord, ...]:
        """What the passes did, one record for each run of each, in order."""
        return tuple(self._records)

    def uuid(self) -> str:
        """A hash over the uuids of the passes that run, in order."""
        rows = "\n".join(each.uuid() for each in self.passes)
        return hashlib.sha256(rows.encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, label: str = "graph", *, strided: Collection[int] = ()
    ) -> fx.GraphModule:
        """Run all passes.

        Args:
            gm: the graph, with fake values.
            label: what dumps and records call it.
            strided: numbers of the outputs whose strides must stay.

        Raises:
            PassError: a pass raised, left an invalid graph, or changed what an output is.
                cgcompile's own errors pass through.
        """
        expected, outputs, before = signature(gm), outputs_of(gm), op_counts(gm)
        self._dump(gm, label, 0, "before")
        for number, each in enumerate(self.passes):
            calls = calls_of(gm)
            started = time.perf_counter()
            try:
                gm = each(gm)
            except Exception as error:
                if isinstance(error, (CGCompileError, *compat.restarts())):
                    raise
                raise PassError.raised(name=each.name, error=error) from error
            seconds = time.perf_counter() - started
            problem = problem_in(gm, expected) or fill_values(gm, calls)
            if problem is not None:
                raise PassError.invalid(name=each.name, problem=problem)
            changed = changed_output(gm, outputs, strided)
            if changed is not None:
                place, found, wanted = changed
                raise PassError.changed_output(
                    name=each.name, graph=label, place=place, found=found, expected=wanted
                )
            after = op_counts(gm)
            changes = difference(before, after)
            record = PassRecord(each.name, label, seconds, before.total(), after.total(), changes)
            log.debug("pass: %s", record)
            self._records.append(record)
            before = after
            self._dump(gm, label, number, each.name)
        return gm

    def _dump(self, gm: fx.GraphModule, label: str, number: int, name: str) -> None:
        if self._dump_dir is None:
            return
        file_name = re.sub(r"[^\w.-]", "_", f"{label}.{number:02}.{name}.txt")
        try:
            os.makedirs(self._dump_dir, exist_ok=True)
            with open(os.path.join(self._dump_dir, file_name), "w", encoding="utf-8") as file:
                file.write(graph_text(gm) + "\n")
        except OSError as error:
            expected = f"a folder that can be written ({error})"
            raise ConfigError.bad_value(
                name="dump_passes", where="dump", value=self._dump_dir, expected=expected
            ) from None


def graph_text(gm: fx.GraphModule) -> str:
    """One line per node: ``name = target(arguments)  # shape``; stable and free of paths."""
    lines = []
    for node in gm.graph.nodes:
        arguments = [str(a) for a in node.args] + [f"{k}={v}" for k, v in node.kwargs.items()]
        found = value(node)
        shape = f"  # {tuple(found.shape)}" if hasattr(found, "shape") else ""
        target = target_name(node.target)
        lines.append(f"{node.name} = {node.op} {target}({', '.join(arguments)}){shape}")
    return "\n".join(lines)
