"""What looks like attention or a cache write without being registered: by names and by structure.

Names decide for ops of other libraries; for those that are called otherwise, their arguments: three
or more tensors [..., heads, head_dim] of one dtype and head_dim, one of which is written.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.host_rules import written
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
