"""A pass, and the manager that runs a list of them.

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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import fx

from cgcompile import compat
from cgcompile.boundaries import target_name
from cgcompile.errors import CGCompileError, ConfigError, PassError
from cgcompile.passes.fakes import calls_of, fill_values
from cgcompile.passes.nodes import value
from cgcompile.passes.outputs import changed_output, outputs_of
from cgcompile.passes.records import PassRecord, difference, op_counts
from cgcompile.passes.verify import problem_in, signature
from cgcompile.settings import checked, require, require_callable

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
