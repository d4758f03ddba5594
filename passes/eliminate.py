"""Remove what computes nothing: :class:`EliminateNoOps`, then copies that nobody needs:
:class:`EliminateClones`.

Both keep every bit of every result, what aliases what included, so they are on by default. Where a
boundary is declared for such an op, or a region asks for it to run, it stays.
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


class EliminateNoOps:
    """Remove calls that return their argument: dropout that is off, ``to`` of the same type, ...

    A call goes if it is known to make views at most, writes nothing, and its result lies where its
    argument lies, with the same dtype, sizes and strides; dropout goes by its arguments, because
    its fake result is a copy although the real one is not. Of arithmetic, whole numbers alone go
    (``arange(n) + 0``): for floating point ``x + 0`` loses the sign of -0.0, and ``x * 1`` may
    change the bits of a NaN.

    Args:
        boundaries: splitting ops, which stay.
    """

    name = "eliminate_noops"

    def __init__(self, boundaries: Boundaries | None = None) -> None:
        self._boundaries = boundaries

    def uuid(self) -> str:
        return f"eliminate_noops/1/{self._boundaries.uuid() if self._boundaries else ''}"

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


class EliminateClones:
    """Remove copies that nothing can tell from their source, so that in-place ops write that.

    A copy is ``clone``, ``to(copy=True)``, or ``copy_`` into memory just allocated. It goes if the
    layouts are equal, and either nothing uses the source (or memory that it shares) any more, or
    neither is written any more and the caller does not get both. Never if the source is memory
    that the graph was given, that an op other than torch's made, or that gradients flow through.

    Args:
        boundaries: splitting ops, which stay.
    """

    name = "eliminate_clones"

    def __init__(self, boundaries: Boundaries | None = None) -> None:
        self._boundaries = boundaries

    def uuid(self) -> str:
        return f"eliminate_clones/1/{self._boundaries.uuid() if self._boundaries else ''}"

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
    """Calls of torch's own on a tensor that are no boundary, in order; one may be erased."""
    for node in list(gm.graph.nodes):
        if node.op not in COMPUTING or not is_torchs(node) or in_eager_region(node):
            continue
        first = node.args[0] if node.args else None
        on_tensor = isinstance(first, fx.Node) and isinstance(value(first), torch.Tensor)
        if on_tensor and (boundaries is None or boundaries.match(node) is None):
            yield node


# ---------------------------------------------------------------- no-ops

# Views of the same layout that are not their argument: they are cut from its history.
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
    # Of dropout the caller gets the argument itself.
    if alike and (_dropout_is_off(node) or not memory.changes_a_result(node, source)):
        memory.unite(node, source)


def _unchanged_number(node: fx.Node) -> fx.Node | None:
    """The tensor of whole numbers to which a call adds 0, or which it multiplies by 1."""
    name = short_name(node.target)
    if name not in ("add", "sub", "mul") or len(node.args) != 2 or node.kwargs:
        return None
    tensor, number = node.args
    found = value(tensor) if isinstance(tensor, fx.Node) else None
    if not isinstance(found, torch.Tensor) or found.dtype not in _WHOLE:
        return None
    neutral = 1 if name == "mul" else 0
    return tensor if type(number) is int and number == neutral else None  # type: ignore[return-value]


_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


# ---------------------------------------------------------------- copies


def _remove_copy(memory: Memory, copy: fx.Node, source: fx.Node, filled: fx.Node) -> bool:
    """Let a copy lie in the memory of its source, if it is one and nothing can tell."""
    if not same_layout(value(copy), value(source)):
        return False
    if storages(value(copy)) == storages(value(source)):
        return False
    alike = memory.interchangeable(copy, source)
    if not alike or not memory.sharing_is_unseen(copy, source, filled):
        return False
    return memory.unite(copy, source)


def _remove_filled(memory: Memory, fill: fx.Node, target: fx.Node, source: fx.Node) -> None:
    """The same for memory that is allocated, and then filled by ``copy_`` before any other use."""
    if not is_allocation(target) or not is_torchs(target):
        return
    if memory.first_user(target) is fill and _remove_copy(memory, target, source, fill):
        memory.erase(fill, source)
