"""Splitting ops: one registry for the FX split, breakable capture and audits.

A *splitting op* ends a piece and runs outside of piecewise CUDA graphs, because its work depends on
the step (attention metadata, host values). :class:`Boundaries` is an immutable value made from the
built-in list and the user's ``splitting_ops``. :meth:`~Boundaries.match` is for a node of an FX
graph, :meth:`~Boundaries.match_call` for a function or op that runs.
"""

import difflib
import fnmatch
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from cgcompile.context import REGION_MARK
from cgcompile.errors import BoundaryError
from cgcompile.modes import AttentionCGSupport
from cgcompile.settings import NO_BUILTIN, checked_but, items_of, require_fields
from cgcompile.torch_compat import torch_ops

log = logging.getLogger(__name__)


def target_name(target: Any) -> str:
    """Return the name of an op, function or method for messages and snapshots."""
    if isinstance(target, str):
        return target
    if torch_ops.is_op(target):
        return torch_ops.op_names(target)[0].split(".")[0]
    if target is F.scaled_dot_product_attention:
        return "torch.nn.functional.scaled_dot_product_attention"
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    module = getattr(target, "__module__", None)
    if name is None:
        return type(target).__name__
    name = name.removeprefix("_VariableFunctionsClass.")  # torch.sigmoid and the like
    return f"{module}.{name}" if module and module != "builtins" else str(name)


def _checked_target(target: Any) -> Any:
    overload = torch_ops.custom_op_overload(target)
    if overload is not None:
        return overload
    if (isinstance(target, str) and target) or callable(target):
        return target
    raise BoundaryError.not_an_op(found=target)


@dataclass(frozen=True)
class SplittingOp:
    """One entry of the registry. Give ``target`` or ``predicate``.

    Attributes:
        target: ``"ns::op"``, ``"ns.op"``, ``"ns::op.overload"``, a pattern ``"ns::*"``, the dotted
            path of a function, an op of ``torch.ops``, a higher-order op, or a function that
            appears in the graph (a torch function, or one under ``allow_in_graph``).
        predicate: a test on ``fx.Node``; it works for the FX split alone.
        support: how far the op can go into a FULL graph.
        compiled: compile the op on its own although it is not captured (flex attention is slow
            and large when it runs uncompiled).
        name: what messages call it; made from the target if left out.
        impl: a function, or one per device type (``{"cuda": f}``), that a replay calls in place of
            the op, with the arguments of the op by position: it saves the way through the
            dispatcher. It must do what the op does.

    Example:
        >>> op = cgcompile.SplittingOp(torch.relu, support=cgcompile.AttentionCGSupport.ALWAYS)
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> model[1].forward = torch.relu
        >>> split = cgcompile.explain(model, torch.randn(4, 8), config={"splitting_ops": (op,)})
        >>> [piece.captured for piece in split.pieces]
        [True, False, True]
    """

    target: Any = None
    predicate: Callable[[fx.Node], bool] | None = None
    support: AttentionCGSupport = AttentionCGSupport.NEVER
    compiled: bool = False
    name: str = ""
    impl: Callable[..., Any] | Mapping[str, Callable[..., Any]] | None = None

    def __post_init__(self) -> None:
        if (self.target is None) == (self.predicate is None):
            raise BoundaryError.target_or_predicate()
        require_fields(self, but=("target", "predicate", "support", "impl"))
        if not self.name:
            shown = self.predicate or _checked_target(self.target)
            object.__setattr__(self, "name", target_name(shown))
        if self.predicate is None:
            _checked_target(self.target)
        elif not callable(self.predicate):
            raise BoundaryError.not_an_op(found=self.predicate)
        if not isinstance(self.support, AttentionCGSupport):
            raise BoundaryError.bad_support(name=self.name, found=self.support)
        per_device = self.impl.values() if isinstance(self.impl, Mapping) else [self.impl]
        if self.impl is not None and not all(map(callable, per_device)):
            raise BoundaryError.bad_impl(name=self.name, found=self.impl)

    def impl_for(self, device_type: str) -> Callable[..., Any] | None:
        """The function that a replay on such a device calls in place of the op, or None."""
        return self.impl.get(device_type) if isinstance(self.impl, Mapping) else self.impl


_ALWAYS = AttentionCGSupport.ALWAYS

BUILTIN_SPLITTING_OPS: tuple[SplittingOp, ...] = (
    # Dense attention: its result depends only on tensors.
    SplittingOp(F.scaled_dot_product_attention, support=_ALWAYS),
    SplittingOp("aten::scaled_dot_product_attention", support=_ALWAYS),
    SplittingOp("aten::_scaled_dot_product_*attention*", support=_ALWAYS),
    SplittingOp("aten::_native_multi_head_attention", support=_ALWAYS),
    SplittingOp("aten::_transformer_encoder_layer_fwd", support=_ALWAYS),
    SplittingOp(F.multi_head_attention_forward, support=_ALWAYS),
    SplittingOp("higher_order::flex_attention", support=_ALWAYS, compiled=True),
    # Packages that may not be installed: names as they register them.
    SplittingOp("flash_attn*::*fwd*"),
    SplittingOp("flash_attn*::*forward*"),
    SplittingOp("xformers*::*attention_forward*"),
    SplittingOp("xformers_flash*::*fwd*"),
    SplittingOp("flashinfer::*prefill*"),
    SplittingOp("flashinfer::*decode*"),
    SplittingOp("flashinfer::*attention*"),
    SplittingOp("flashinfer::*mla*"),
    # Experts of transformers where no grouped kernel fits: reads their offsets on the host.
    SplittingOp("transformers::*grouped_mm_fallback*"),
)


def _called_name(op: SplittingOp) -> str | None:
    """Return the ``aten::op`` of an entry, the same for all spellings of it."""
    if op.predicate is not None:
        return None
    if isinstance(op.target, str):
        name: str | None = op.target
    elif torch_ops.is_op(op.target):
        name = torch_ops.op_names(op.target)[0]
    else:
        name = torch_ops.aten_name(op.target)
    return None if name is None else name.removesuffix(".default")


def in_eager_region(node: fx.Node) -> bool:
    """Whether ``node`` was traced inside of ``cgcompile.eager_region()``."""
    custom = node.meta.get("custom") or {}
    return all(custom.get(key) == value for key, value in REGION_MARK.items())


class _Table:
    """Entries by kind of match: op name, function, name pattern, predicate."""

    def __init__(self) -> None:
        self.exact: dict[Any, SplittingOp] = {}  # op name or function -> entry
        # By name of the aten op: entries declared as functions, and for all overloads.
        self.called: dict[str, SplittingOp] = {}
        self.packets: dict[str, SplittingOp] = {}
        self.patterns: list[SplittingOp] = []
        self.predicates: list[SplittingOp] = []

    def add(self, op: SplittingOp) -> None:
        """Add an entry whose target is resolved."""
        if op.predicate is not None:
            self.predicates.append(op)
        elif isinstance(op.target, str) and "*" in op.target:
            self.patterns.append(op)
        else:
            present = self.exact.setdefault((*torch_ops.op_names(op.target), op.target)[0], op)
            if replace(present, target=op.target, name=op.name) != op:
                raise BoundaryError.declared_twice(name=op.name)
        name = _called_name(op)
        if name is not None:  # names of single overloads are never looked up
            by_name = isinstance(op.target, str) or torch_ops.is_op(op.target)
            (self.packets if by_name else self.called).setdefault(name, op)

    def __iter__(self) -> Iterator[SplittingOp]:
        yield from (*self.exact.values(), *self.patterns, *self.predicates)

    def match(self, function: Any, name: str | None) -> SplittingOp | None:
        """Return the entry of a function or op; ``name`` is the ``aten::op`` that it calls."""
        for op_name in torch_ops.op_names(function):
            entry = self.exact.get(op_name) or self._match_pattern(op_name)
            if entry is not None:
                return entry
        try:
            entry = self.exact.get(function)
        except TypeError:  # an unhashable callable has no entry
            entry = None
        if entry is not None or name is None:
            return entry
        entry = self.called.get(name)
        if entry is None and not torch_ops.is_op(function):
            entry = self.packets.get(name) or self._match_pattern(name)
        return entry

    def _match_pattern(self, name: str) -> SplittingOp | None:
        return next((op for op in self.patterns if fnmatch.fnmatchcase(name, op.target)), None)

    def match_predicate(self, node: fx.Node) -> SplittingOp | None:
        for op in self.predicates:
            assert op.predicate is not None
            try:
                if op.predicate(node):
                    return op
            except Exception as error:
                raise BoundaryError.predicate_raised(
                    name=op.name, node=node.name, error=error
                ) from error
        return None


class Boundaries:
    """The registry of one configuration: the user's entries, then the built-in ones.

    Args:
        entries: the user's splitting ops, in any form that :class:`SplittingOp` takes as target,
            or ``SplittingOp`` objects; one alone, or names as one text, will do. ``"-builtin"``
            stands for ``builtin=False``.
        builtin: whether the built-in attention ops are boundaries.

    Attributes:
        declared: the names of the user's entries.
        named: those of them that are neither patterns nor predicates, with the op that each stands
            for; entries of one op are other spellings of it.

    Raises:
        BoundaryError: a name that nothing defines (with close matches), an object that is no op,
            or one op declared twice with different settings.
    """

    @checked_but("entries")
    def __init__(self, entries: Iterable[Any] = (), *, builtin: bool = True) -> None:
        user, builtins = _Table(), _Table()
        one = isinstance(entries, (str, torch.Tensor)) or not isinstance(entries, Iterable)
        for entry in items_of(entries) if one else entries:
            if isinstance(entry, str) and entry == NO_BUILTIN:
                builtin = False
                continue
            op = entry if isinstance(entry, SplittingOp) else SplittingOp(entry)
            user.add(_resolved_entry(op))
        for op in BUILTIN_SPLITTING_OPS if builtin else ():
            builtins.add(op)  # not resolved: its package may not be installed
        self._tables = (user, builtins)
        self.declared = tuple(op.name for op in user)
        self.named = {op.name: _called_name(op) or op.name for op in user.exact.values()}

    def __iter__(self) -> Iterator[SplittingOp]:
        for table in self._tables:
            yield from table

    def are_met_by(self, other: "Boundaries") -> bool:
        """Return whether no captured piece of a graph split by ``other`` has one of these ops."""
        # Compiled code may call the aten ops of a function that the graph does not name.
        own = all("::" in n and "*" not in n and not n.startswith("aten::") for n in self.declared)
        entries = [*other]
        return own and all(entry in entries for entry in self)

    def without_builtin(self) -> "Boundaries":
        """Return a registry with only the user's entries."""
        users = copy(self)
        users._tables = (self._tables[0], _Table())
        return users

    def uuid(self) -> str:
        """Return a text that is equal for registries with the same entries by name."""
        rows = [
            (op.name, target_name(op.target or op.predicate), int(op.support), op.compiled)
            for op in self
        ]
        return repr(rows)

    def match(self, node: fx.Node) -> SplittingOp | None:
        """Return the entry that makes ``node`` a boundary, or None."""
        entry = None
        on_numbers = not isinstance(node.meta.get("example_value"), torch.Tensor)
        if node.op == "call_method":
            entry = self._find(None, torch_ops.aten_name(node.target))
        elif node.op == "call_function" and not (
            on_numbers and torch_ops.is_python_operator(node.target)
        ):
            entry = self.match_call(node.target, torch_ops.given_argument(node, "inplace") is True)
        matches = (table.match_predicate(node) for table in self._tables)
        return entry or next((op for op in matches if op is not None), None)

    def _find(self, function: Any, name: str | None) -> SplittingOp | None:
        matches = (table.match(function, name) for table in self._tables)
        return next((op for op in matches if op is not None), None)

    def match_call(self, function: Any, in_place: bool = False) -> SplittingOp | None:
        """Return the entry of a function or op that is about to run, or None, without predicates.

        Args:
            function: the function or op.
            in_place: whether the call writes its argument, as ``relu(x, inplace=True)`` does.
        """
        name = torch_ops.aten_name(function)
        entry = self._find(function, f"{name}_" if in_place and name is not None else name)
        if entry is not None:
            return entry
        unsafe = torch.Tag.cudagraph_unsafe
        if any(unsafe in overload.tags for overload in torch_ops.op_overloads(function)):
            return SplittingOp(function, name=f"{target_name(function)} (tag cudagraph_unsafe)")
        return None


class UnmetOps:
    """The declared splitting ops that no graph of a backend has; no patterns or predicates."""

    def __init__(self, boundaries: Boundaries) -> None:
        self._boundaries = boundaries
        self._unmet = dict(boundaries.named)
        self._seen: set[str] = set()
        self._warned = False

    def discard_met(self, module: torch.nn.Module) -> None:
        """Remove the ops of a graph, and of graphs inside of its ops."""
        for inner in module.modules() if self._unmet else ():
            for node in inner.graph.nodes if isinstance(inner, fx.GraphModule) else ():
                if node.op not in ("call_function", "call_method"):
                    continue
                entry = self._boundaries.match(node)
                if entry is not None and entry.name in self._unmet:
                    op = self._unmet[entry.name]
                    self._unmet = {name: of for name, of in self._unmet.items() if of != op}
                self._seen.add(torch_ops.aten_name(node.target) or target_name(node.target))

    def warn_once(self) -> None:
        """Warn once of declared ops in no graph so far; called when the first graph is captured."""
        if self._warned:
            return
        self._warned = True
        for name in sorted(self._unmet):
            close = difflib.get_close_matches(name, sorted(self._seen), n=3, cutoff=0.5)
            log.warning(
                "splitting op %s is in no graph that was compiled so far, so nothing is split "
                "there. %s",
                name,
                f"Similar in the graphs: {', '.join(close)}" if close else "Leave it out.",
            )


def _resolved_entry(op: SplittingOp) -> SplittingOp:
    """Return the entry with its target resolved."""
    if op.predicate is not None:
        return op
    target = _checked_target(op.target)
    if not isinstance(target, str):
        return replace(op, target=target)
    target = _resolved(target)
    spelled_out = target if isinstance(target, str) else target_name(target)
    return replace(op, target=target, name=spelled_out if op.name == op.target else op.name)


def _resolved(name: str) -> Any:
    """Return the registry key or the function of a name; raise BoundaryError for other names."""
    spelled = name if "::" in name or "." not in name else name.replace(".", "::", 1)
    if _is_op(spelled):
        return spelled
    ops = torch_ops.all_op_names()  # takes milliseconds
    packets = {op.split(".")[0] for op in ops}
    known = {*ops, *packets}
    # 'ns::op.default' is the overload that the dispatcher lists without a name.
    if spelled in known or spelled.removesuffix(".default") in known:
        return spelled
    if "*" in spelled and fnmatch.filter(known, spelled):
        return spelled
    if f"higher_order::{name}" in known:
        return f"higher_order::{name}"
    function = None if "*" in spelled else _imported(name)
    if function is None:
        raise BoundaryError.unknown(name=name, known=sorted(packets))
    return function


def _is_op(name: str) -> bool:
    """Return whether torch has an op, or an overload, of a name like ``ns::op.overload``."""
    namespace, _, op = name.partition("::")
    packet, _, overload = op.partition(".")
    if not packet.isidentifier() or not namespace.isidentifier():
        return False
    op_packet = getattr(getattr(torch.ops, namespace), packet, None)
    return op_packet is not None and (overload in ("", "default") or hasattr(op_packet, overload))


def _imported(path: str) -> Any:
    """Return the callable at a dotted path, or None."""
    module, _, attribute = path.rpartition(".")
    if not module:
        return None
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None
    return _checked_target(function) if callable(function) else None
