"""What a capture refuses of one ATen call, and what a call writes: rules without a recorder.

The host recorder asks them during a capture, :func:`cgcompile.doctor` before one.
"""

from typing import Any, NamedTuple

import torch

from cgcompile import compat

aten = torch.ops.aten
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)
# Their running statistics. Inference mode shows the composite ones whole.
_WRITE_UNDECLARED = {aten.native_batch_norm, aten._batch_norm_impl_index, aten.batch_norm}
_WRITE_UNDECLARED |= {aten.instance_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
_WRITE_UNDECLARED |= {aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts}
_WRITE_UNDECLARED |= {aten.batch_norm_update_stats}
# Composite ops that inference mode shows whole, and whose bodies read: torch tags the bodies alone.
_READ_INSIDE = {aten.is_nonzero}
_COUNT_INSIDE = {aten.nonzero_numpy}
# Replace the memory of their first argument, once: what Dynamo emits for ``x.data = y``.
_REPLACE_MEMORY = {"aten::shallow_copy_data_", "aten::set_data", "aten::set_"}


class Refusal(NamedTuple):
    """Why a capture cannot hold a call.

    Attributes:
        what: the call, in words.
        generator: it draws from a random generator of the program's own.
        shape: the size of its result depends on data; otherwise a value of it does.
    """

    what: str
    generator: bool = False
    shape: bool = False


def refusal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Refusal | None:
    """Why a capture refuses a call, or None. Reads no tensor."""
    packet = getattr(func, "overloadpacket", None)
    if isinstance(kwargs.get("generator"), torch.Generator):
        return Refusal(f"{func} with a random generator that is not registered", generator=True)
    if packet in _INDEXING:
        masked = any(index.dtype in _MASKS for index in compat.tree_tensors(args[1]))
        fills = packet in (aten.index_put, aten.index_put_) and args[2].numel() == 1
        return Refusal(f"{func} with a mask", shape=True) if masked and not fills else None
    if packet is aten.repeat_interleave:
        repeats = kwargs.get("repeats", args[min(1, len(args) - 1)])
        counts = isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
        return Refusal(str(func), shape=True) if counts else None
    if packet in _COUNT_INSIDE or (packet is aten.where and len(args) == 1):
        return Refusal(str(func), shape=True)
    if packet in _READ_INSIDE or compat.reads_on_host(func):
        return Refusal(str(func), shape=torch.Tag.dynamic_output_shape in func.tags)
    return None


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call writes, as far as torch says, and where it is known not to."""
    if getattr(func, "overloadpacket", None) in _WRITE_UNDECLARED:
        return compat.tree_tensors((args, kwargs))
    return compat.written_tensors(func, args, kwargs)


def copies_python_data(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call wraps Python data that a device would copy from pageable memory.

    Not a 0-dim tensor: that stays on the CPU, and kernels take it by value.
    """
    if getattr(func, "overloadpacket", None) is not aten.lift_fresh:
        return False
    return bool(args[0].dim() and args[0].numel())


def replaced_memory(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """The tensor whose memory a call is known to replace."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name not in _REPLACE_MEMORY or not args:
        return None
    return args[0] if isinstance(args[0], torch.Tensor) else None
