"""What ops read on the host and what they write: rules of the CPU recorder that others share.

The recorder itself is ``cgcompile.testing.host``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from cgcompile.errors import CaptureError
from cgcompile.torch_compat import torch_ops

aten = torch.ops.aten
_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
_MASKS = (torch.bool, torch.uint8)
# They write running statistics. In inference mode composite ops arrive as one op.
_WRITE_UNDECLARED = {aten.native_batch_norm, aten._batch_norm_impl_index, aten.batch_norm}
_WRITE_UNDECLARED |= {aten.instance_norm, aten.cudnn_batch_norm, aten.miopen_batch_norm}
_WRITE_UNDECLARED |= {aten.batch_norm_gather_stats, aten.batch_norm_gather_stats_with_counts}
_WRITE_UNDECLARED |= {aten.batch_norm_update_stats}
_COUNT_INSIDE = {aten.nonzero_numpy}  # composite ops: torch tags only the ops in their bodies


def _refused(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_number: Callable[[torch.Tensor], bool],
) -> str | None:
    """Return a call in words, if the host reads a value of the device in it."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _INDEXING:
        indices = torch_ops.tree_tensors(args[1])
        masked = any(index.dtype in _MASKS for index in indices)
        fills = packet in (aten.index_put, aten.index_put_) and len(indices) == 1
        fills = fills and is_number(args[2]) and not any(args[3:])
        return f"{func} with a mask" if masked and not fills else None
    if packet is aten.repeat_interleave:
        repeats = kwargs.get("repeats", args[min(1, len(args) - 1)])
        counts = isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
        return str(func) if counts else None
    if packet in _COUNT_INSIDE or (packet is aten.where and len(args) == 1):
        return str(func)
    return str(func) if torch_ops.call_reads(func, args, kwargs, is_number) else None


class OpRules(torch_ops.DispatchMode):
    """The rules of captures, op by op: what is refused, and which tensors are Python numbers.

    The CPU recorder raises a refusal. :func:`cgcompile.debug.doctor` notes it and runs the op.
    """

    def __init__(self) -> None:
        super().__init__()
        # Addresses of 0-dim tensors that CUDA has on the CPU: Python numbers, and what is computed
        # from them alone. Two cases look the same on a CPU: ``torch.tensor(1.0, device=device)``
        # counts as such a number, the result of ``torch.zeros(())`` as a tensor of the device.
        self._numbers: set[int] = set()
        self.generators: Sequence[torch.Generator] = ()  # registered, beside the default one

    def refusal(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CaptureError | None:
        """Return the error with which a capture refuses a call, or None. Reads no tensor."""
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and not self._is_registered(generator):
            unregistered = f"{func} with a random generator that is not registered"
            return CaptureError.refused(op=unregistered)
        what = _refused(func, args, kwargs, self.is_number)
        if what is not None:
            return CaptureError.refused(op=what)
        packet = getattr(func, "overloadpacket", None)
        # A device copies Python data from pageable memory; kernels take a 0-dim tensor by value.
        if packet is aten.lift_fresh and args[0].dim() and args[0].numel():
            return CaptureError.pageable(op=str(func), shape=shown(args[0]))
        if packet is aten.copy_ and self.is_number(args[0]) != self.is_number(args[1]):
            return CaptureError.pageable(op=str(func), shape=shown(args[1]))
        return None

    def _is_registered(self, generator: torch.Generator) -> bool:
        """Return whether a generator, which an op gets as another object, is registered."""
        for registered in self.generators:
            state, seed = registered.get_state(), registered.initial_seed()
            registered.manual_seed(seed ^ 1)
            is_same = generator.initial_seed() == seed ^ 1
            registered.set_state(state)
            if is_same and generator.initial_seed() == seed:
                return True
        return False

    def is_number(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor would stay on the CPU if the model were on a GPU."""
        return tensor.dim() == 0 and tensor.untyped_storage().data_ptr() in self._numbers

    def are_numbers(self, tensors: Collection[torch.Tensor]) -> bool:
        """Return whether there are tensors, and all are numbers."""
        return bool(tensors) and all(map(self.is_number, tensors))

    def mark(self, addresses: Iterable[int], numbers: bool) -> None:
        """Note whether storages, which were made or written, hold numbers."""
        (self._numbers.update if numbers else self._numbers.difference_update)(addresses)


def shown(tensor: torch.Tensor) -> str:
    """Return the shape and dtype of a tensor, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def write_targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes, those included that torch does not declare."""
    if getattr(func, "overloadpacket", None) in _WRITE_UNDECLARED:
        return torch_ops.tree_tensors((args, kwargs))
    return torch_ops.written_tensors(func, args, kwargs)


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
