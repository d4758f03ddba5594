"""Remove calls without effect (:class:`EliminateNoOps`) and copies (:class:`EliminateClones`).

Both keep every bit of every result, and which results alias, so they are on by default. A call that
is a boundary, or in an eager region, stays.
"""

from collections.abc import Iterator

import torch
from torch import fx

from cgcompile.boundaries import Boundaries, in_eager_region
from cgcompile.passes.memory import Memory, same_layout, same_tensor
from cgcompile.passes.nodes import (
    COMPUTING,
    given_argument,
    is_allocation,
    is_known_view,
    is_torchs,
    short_name,
    storages,
    value,
    written,
)


class _Elimination:
    """A pass that removes calls; calls of the splitting ops stay."""

    name: str

    def __init__(self, boundaries: Boundaries | None = None) -> None:
        self._boundaries = boundaries

    def uuid(self) -> str:
        return f"{self.name}/1/{self._boundaries.uuid() if self._boundaries else ''}"


class EliminateNoOps(_Elimination):
    """Remove calls that return their argument: dropout that is off, ``to`` of the same type, ...

    A call is removed if it is known to create views at most, writes nothing, and its result has the
    memory, dtype, sizes and strides of its argument. Dropout is decided by its arguments, because
    its fake result is a copy although the real one is not. Arithmetic is removed for integers alone
    (``arange(n) + 0``): for floating point ``x + 0`` loses the sign of -0.0, and ``x * 1`` may
    change the bits of a NaN.

    Args:
        boundaries: splitting ops, which stay.
    """

    name = "eliminate_noops"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        memory = Memory(gm)
        # Dropout first: its fake result is a copy, and hides that a view is one of an input.
        for node in filter(_dropout_is_off, _removable(gm, self._boundaries)):
            _remove_alias(memory, node)
        for node in _removable(gm, self._boundaries):
            if _returns_its_argument(gm, node):
                _remove_alias(memory, node)
            else:
                number = _unchanged_number(node)
                if number is not None:
                    _remove_copy(memory, node, number, node)
        return gm


class EliminateClones(_Elimination):
    """Remove copies that can share the memory of their source without a change of any result.

    A copy is ``clone``, ``to(copy=True)``, or ``copy_`` into memory just allocated. It is removed
    if the layouts are equal, and either the source (or memory that it shares) is not used after it,
    or neither is written after it and the caller does not get both. It stays if the source is an
    input of the graph, the result of an op other than torch's, or part of a gradient's history.

    Args:
        boundaries: splitting ops, which stay.
    """

    name = "eliminate_clones"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        memory = Memory(gm)
        for node in _removable(gm, self._boundaries):
            name = short_name(node.target)
            if name in ("clone", "to", "_to_copy"):
                _remove_copy(memory, node, node.args[0], node)  # type: ignore[arg-type]
            elif name == "copy_" and len(node.args) > 1 and isinstance(node.args[1], fx.Node):
                _remove_filled(memory, node, node.args[0], node.args[1])  # type: ignore[arg-type]
        return gm


def _removable(gm: fx.GraphModule, boundaries: Boundaries | None) -> Iterator[fx.Node]:
    """Yield calls of torch on a tensor that are no boundary, in order; the caller may erase one."""
    for node in list(gm.graph.nodes):
        if node.op not in COMPUTING or not is_torchs(node) or in_eager_region(node):
            continue
        first = node.args[0] if node.args else None
        on_tensor = isinstance(first, fx.Node) and isinstance(value(first), torch.Tensor)
        if on_tensor and (boundaries is None or boundaries.match(node) is None):
            yield node


# ---------------------------------------------------------------- no-ops

# Views of the same layout that are not their argument: they lack its history.
_NOT_ITSELF = {"detach", "getattr", "alias"}


def _returns_its_argument(gm: fx.GraphModule, node: fx.Node) -> bool:
    if _dropout_is_off(node):
        return True  # in place too
    if not is_known_view(node) or short_name(node.target) in _NOT_ITSELF or written(gm, node):
        return False
    return same_tensor(value(node), value(node.args[0]))  # type: ignore[arg-type]


def _dropout_is_off(node: fx.Node) -> bool:
    if node.op != "call_function" or short_name(node.target) != "dropout":
        return False
    if node.target is torch.nn.functional.dropout:
        p, on = given_argument(node, "p"), given_argument(node, "training")
    elif len(node.args) == 3:  # torch.dropout and aten::dropout
        p, on = node.args[1:]
    else:
        return False
    return on is False or (isinstance(p, (int, float)) and p == 0)


def _remove_alias(memory: Memory, node: fx.Node) -> None:
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    alike = same_layout(value(node), value(source)) and memory.interchangeable(node, source)
    # Dropout that is off returns its argument itself.
    if alike and (_dropout_is_off(node) or not memory.changes_a_result(node, source)):
        memory.unite(node, source)


def _unchanged_number(node: fx.Node) -> fx.Node | None:
    """Return the integer tensor to which a call adds 0, or which it multiplies by 1; or None."""
    name = short_name(node.target)
    if name not in ("add", "sub", "mul") or len(node.args) != 2 or node.kwargs:
        return None
    tensor, number = node.args
    fake = value(tensor) if isinstance(tensor, fx.Node) else None
    if not isinstance(fake, torch.Tensor) or fake.dtype not in _INTEGERS:
        return None
    neutral = 1 if name == "mul" else 0
    return tensor if type(number) is int and number == neutral else None  # type: ignore[return-value]


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---------------------------------------------------------------- copies


def _remove_copy(memory: Memory, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
    """Replace a copy by its source, if it is a copy and no result changes."""
    return (
        same_layout(value(copy), value(source))
        and storages(value(copy)) != storages(value(source))
        and memory.interchangeable(copy, source)
        and memory.sharing_is_unseen(copy, source, filled)
        and memory.unite(copy, source)
    )


def _remove_filled(memory: Memory, fill: fx.Node, target: fx.Node, source: fx.Node) -> None:
    """As :func:`_remove_copy`, of memory that ``copy_`` fills before any other use."""
    if not is_allocation(target) or not is_torchs(target):
        return
    if memory.first_user(target) is fill and _remove_copy(memory, target, source, fill):
        memory.erase(fill, source)
