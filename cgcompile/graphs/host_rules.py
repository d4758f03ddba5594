"""What ops read on the host and what they write: rules of the CPU recorder that others share.

The recorder itself is ``cgcompile.testing.host``.
"""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat

aten = torch.ops.aten
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)
# Their running statistics. Inference mode shows the composite ones whole.
_WRITE_UNDECLARED = {aten.native_batch_norm, aten._batch_norm_impl_index, aten.batch_norm}
_WRITE_UNDECLARED |= {aten.instance_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
_WRITE_UNDECLARED |= {aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts}
_WRITE_UNDECLARED |= {aten.batch_norm_update_stats}
_COUNT_INSIDE = {aten.nonzero_numpy}  # composite: torch tags the ops in its body alone


class Refusal(NamedTuple):
    """Why a capture refuses a call."""

    what: str  # the call, in words
    generator: bool = False  # it draws from a random generator of the program's own
    shape: bool = False  # the size of its result depends on data; otherwise a value of it does


def refusal(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_number: Callable[[torch.Tensor], bool] | None = None,
) -> Refusal | None:
    """Return why a capture refuses a call, or None. Reads no tensor.

    ``is_number`` returns whether a tensor is a 0-dim tensor on the CPU, whose value a kernel takes.
    Without it, one that is written at a mask is such a tensor, and one that is read is not.
    """
    packet = getattr(func, "overloadpacket", None)
    if isinstance(kwargs.get("generator"), torch.Generator):
        return Refusal(f"{func} with a random generator that is not registered", generator=True)
    if packet in _INDEXING:
        indices = compat.tree_tensors(args[1])
        masked = any(index.dtype in _MASKS for index in indices)
        fills = packet in (aten.index_put, aten.index_put_) and len(indices) == 1
        fills = fills and (is_number or _has_one_item)(args[2]) and not any(args[3:])
        return Refusal(f"{func} with a mask", shape=True) if masked and not fills else None
    if packet is aten.repeat_interleave:
        repeats = kwargs.get("repeats", args[min(1, len(args) - 1)])
        counts = isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
        return Refusal(str(func), shape=True) if counts else None
    if packet in _COUNT_INSIDE or (packet is aten.where and len(args) == 1):
        return Refusal(str(func), shape=True)
    if compat.call_reads(func, args, kwargs, is_number):
        return Refusal(str(func), shape=torch.Tag.dynamic_output_shape in func.tags)
    return None


def _has_one_item(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1


def write_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes, those included that torch does not declare."""
    if getattr(func, "overloadpacket", None) in _WRITE_UNDECLARED:
        return compat.tree_tensors((args, kwargs))
    return compat.written_tensors(func, args, kwargs)


# -------------------------------------------------------------- the state of a recording

recording = threading.local()  # .graph: the one that records in this thread; CUDA keeps the same


def is_recording() -> bool:
    """Return whether the CPU recorder records in this thread."""
    return getattr(recording, "graph", None) is not None


# Ids of tensors that stay on the CPU where others are on a GPU, so that a capture may read them.
_host_values: ContextVar[Collection[int]] = ContextVar("host_values", default=())


@contextmanager
def host_values(ids: Collection[int]) -> Iterator[None]:
    """Let captures inside call ``tolist()`` and ``numpy()`` of these tensors."""
    token = _host_values.set(ids)
    try:
        yield
    finally:
        _host_values.reset(token)


def values_on_host() -> Collection[int]:
    """Return the ids of the tensors that a capture may read here."""
    return _host_values.get()
