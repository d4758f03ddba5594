"""What looks like attention or a cache write without being registered: by names and by structure.

Names decide for ops of other libraries; for those that are called otherwise, their arguments: three
or more tensors [..., heads, head_dim] of one dtype and head_dim, one of which is written. Attention
that is written out in torch is a softmax between two matmuls of activations.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.host_rules import written
from cgcompile.passes.lines import Line
from cgcompile.passes.nodes import short_name

_ATTENTION = re.compile(r"attn|attention|paged|(^|_)(mha|mla|mqa|gqa|sdpa)(_|$)", re.I)
_CACHE = re.compile(r"cache|(^|_)kv(_|$)", re.I)
_TORCHS = ("aten", "prims", "prim", "inductor", "c10d", "_c10d_functional", "higher_order")
_HEADS = 3  # dimensions of a tensor [tokens, heads, head_dim]


def is_attention_name(name: str) -> bool:
    """Whether a function of this name would be attention."""
    return bool(_ATTENTION.search(name))


def resembles(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, str] | None:
    """(kind of finding, why) of an op that is not registered, or None.

    Args:
        func: an op of the dispatcher.
        args: what it is called with.
        kwargs: likewise.
    """
    if getattr(func, "namespace", "aten") in _TORCHS:
        return None
    name = short_name(func)
    targets = written(func, args, kwargs)
    if is_attention_name(name) and not (_writes_alone(func) and _CACHE.search(name)):
        return "unregistered_attention", "its name is that of attention"
    if _CACHE.search(name) and targets:
        return "cache_write", "it writes a cache"
    if _has_heads(compat.tree_tensors((args, kwargs)), targets):
        return "unregistered_attention", "it takes queries, keys and values, and writes one"
    return None


def _writes_alone(func: Any) -> bool:
    return compat.returns_nothing(func) and not re.search(r"out(put)?\b|decode|prefill", str(func))


def _has_heads(given: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    wide = [t for t in given if t.dim() >= _HEADS and t.is_floating_point()]
    alike = [t for t in wide if any(_same_heads(t, other) for other in targets)]
    return len(alike) >= _HEADS


def _same_heads(one: torch.Tensor, other: torch.Tensor) -> bool:
    return other.dim() >= _HEADS and one.shape[-1] == other.shape[-1] and one.dtype == other.dtype


_MATMULS = {"matmul", "bmm", "baddbmm", "einsum", "__matmul__"}
_SOFTMAX = {"softmax", "_softmax", "_safe_softmax"}
# What happens to scores between the matmuls, beside views and changes of the dtype.
_BETWEEN = {"add", "add_", "sub", "mul", "mul_", "div", "div_", "masked_fill", "masked_fill_"}
_BETWEEN |= {"where", "dropout", "native_dropout", "view", "_unsafe_view", "reshape", "expand"}
_BETWEEN |= {"_to_copy", "to", "tanh", "clone", "unsqueeze", "squeeze", "transpose", "permute"}
_BETWEEN |= {"contiguous", "type_as", "detach"}


def identity(tensor: torch.Tensor) -> int:
    """Equal for tensors of one storage, while it lives; 0 for those that have none of their own."""
    return compat.storage_identity(tensor) if compat.is_plain_tensor(tensor) else 0


class WrittenOut:
    """Watches ops for attention that is written out in torch.

    Args:
        weights: storages of parameters and buffers: a product with one of them is a projection.
    """

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        # identity of a storage -> its life, and where its softmax was, or None before it
        self._scores: dict[int, tuple[compat.StorageLife, Line | None]] = {}

    def see(
        self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], line: Any
    ) -> Line | None:
        """Where the softmax was, if this op is the second matmul of attention.

        Args:
            name: the short name of the op.
            given: its tensors.
            made: what it made.
            line: a function that tells where it is; asked only if it matters.
        """
        if name in _MATMULS:
            ended = next((found for t in given for found in [self._softmaxed(t)] if found), None)
            plain = not any(identity(t) in self._weights for t in given)
            if ended is None and plain and len(given) > 1:
                self._mark(made, None)
            return ended
        if name in _SOFTMAX and any(self._found(t) for t in given):
            self._mark(made, line())
        elif name in _BETWEEN:
            known = next((found for t in given for found in [self._found(t)] if found), None)
            if known is not None:
                self._mark(made, known[1])
        return None

    def _softmaxed(self, tensor: torch.Tensor) -> Line | None:
        found = self._found(tensor)
        return None if found is None else found[1]

    def _found(self, tensor: torch.Tensor) -> tuple[compat.StorageLife, Line | None] | None:
        found = self._scores.get(identity(tensor))
        return None if found is None or found[0].ended else found

    def _mark(self, made: Sequence[torch.Tensor], line: Line | None) -> None:
        for tensor in filter(compat.is_plain_tensor, made):
            self._scores[identity(tensor)] = (compat.StorageLife(tensor), line)
