"""The buffers of one graph, and how a replay fills them: :class:`GraphInputs`.

A graph reads what lies at the addresses that it recorded, padded rows included. So each write
says what all rows hold: the real ones, then zeros; or whatever a padding logic writes; offsets go
on to the end, so that padding is a sequence like others. The rule: everything is checked before
anything is written.
"""

from collections.abc import Mapping

import torch

from cgcompile.encoder.defs import (
    ZERO,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
)
from cgcompile.errors import EncoderError

_CAPTURE = "prepare_encoder_cudagraph_capture_inputs()"
_REPLAY = "prepare_encoder_cudagraph_replay_buffers()"
_POISON = 0x7F  # an index that no buffer has, in an integer of any width


class GraphInputs:
    """What one graph reads. Not for several threads at a time.

    Args:
        config: which buffers there are, and how they are padded.
        made: what the model made for the capture; its tensors are kept, and always the same.

    Attributes:
        values: the very tensors that the model made, by key.

    Raises:
        EncoderError: no tensors by key.
        EncoderError: a key is missing or unknown.
    """

    def __init__(self, config: EncoderCudaGraphConfig, made: EncoderCudaGraphCaptureInputs) -> None:
        values = getattr(made, "values", None)
        if not isinstance(values, dict):
            expected = "EncoderCudaGraphCaptureInputs(values={key: tensor})"
            raise EncoderError.returned(
                method=_CAPTURE[:-2], found=type(made).__name__, expected=expected
            )
        check_keys(values, config, _CAPTURE)
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                found = f"{type(value).__name__} for {key!r}"
                raise EncoderError.returned(
                    method=_CAPTURE[:-2], found=found, expected="a tensor for each key"
                )
        self._config = config
        self.values: dict[str, torch.Tensor] = dict(values)
        # A copy, as the buffer itself is overwritten; read on the device, so nothing synchronises.
        self._ends = {key: values[key][-1:].clone() for key in config.offset_keys}
        self._steps = {
            key: torch.arange(1, len(values[key]) + 1, device=values[key].device) * longest
            for key, longest in config.longest_padding.items()
            if longest is not None
        }

    @property
    def nbytes(self) -> int:
        """Memory of the buffers and of what writes them, in bytes."""
        kept = [*self.values.values(), *self._ends.values(), *self._steps.values()]
        return sum(each.nbytes for each in kept)

    def check_offsets(self) -> None:
        """Raise unless offsets end where their buffer does. Synchronises, so for captures alone.

        Raises:
            EncoderError: the last offset is 0 or not the largest, or there is none: padded
                rows would be written by no kernel, and NaN of stale memory spread.
        """
        for key in self._config.offset_keys:
            found = self.values[key].reshape(-1).tolist()
            if not found or found[-1] < 1 or found[-1] < max(found):
                raise EncoderError.no_offset_end(key=key, last=found[-1] if found else None)

    def write(self, given: EncoderCudaGraphReplayBuffers, poison: bool = False) -> list[str]:
        """Fill the buffers for a replay. Nothing synchronises, but copies from pageable memory.

        Args:
            given: real rows, by key; cast to the dtype of the buffer, as ``torch.can_cast`` allows.
            poison: first fill what is about to be written with NaN, or with integers that are no
                index, so that rows which nobody writes show.

        Returns:
            The keys that stay as they were, since their value is None.

        Raises:
            EncoderError: a key is missing or unknown, or a value does not fit; nothing is
                written then. Or a padding logic failed.
        """
        values = given.values
        check_keys(values, self._config, _REPLAY)
        for key in self._config.buffer_keys:
            if values[key] is not None:
                self._check(key, values[key])
        kept: list[str] = []
        for key, dst in self.values.items():
            value = values[key]
            if value is None and self._config.on_none.get(key) != ZERO:
                kept.append(key)
                continue
            if poison:
                _poison(dst)
            self._put(key, dst, value)
        return kept

    def _check(self, key: str, value: torch.Tensor | None) -> None:
        if not isinstance(value, torch.Tensor):
            raise EncoderError.buffer_value(
                key=key, found=type(value).__name__, expected="a tensor, or None"
            )
        if key in self._config.padding_logics:
            return
        dst = self.values[key]
        alike = value.dim() == dst.dim() and value.shape[1:] == dst.shape[1:]
        alike = alike and torch.can_cast(value.dtype, dst.dtype)
        if not alike or (dst.dim() and len(value) > len(dst)):
            rows = f"at most the rows of {_layout(dst)}" if dst.dim() else _layout(dst)
            if alike:
                raise EncoderError.buffer_value(key=key, found=_layout(value), expected=rows)
            raise EncoderError.buffer_layout(key=key, found=_layout(value), expected=rows)
        if key in self._ends and len(value) == len(dst):
            raise EncoderError.no_offset_room(key=key, entries=len(value))

    def _put(self, key: str, dst: torch.Tensor, value: torch.Tensor | None) -> None:
        logic = self._config.padding_logics.get(key)
        if value is None:
            dst.zero_()
            value = dst[:1] if dst.dim() else dst
        elif logic is not None:
            self._pad(key, dst, value)
            return
        if not dst.dim():
            dst.copy_(value)
            return
        real = len(value)
        dst[:real].copy_(value, non_blocking=True)
        if key not in self._ends:
            dst[real:].zero_()
            return
        self._go_on(key, dst, real)

    def _go_on(self, key: str, dst: torch.Tensor, real: int) -> None:
        """Offsets to the end: padded rows as one sequence, or as many no longer than declared."""
        if not real:
            dst[:1].zero_()
            real = 1
        tail, end = dst[real:], self._ends[key]
        if key not in self._steps:
            tail.copy_(end.expand_as(tail))
            return
        rising = dst[real - 1 : real] + self._steps[key][: len(tail)]
        tail.copy_(torch.minimum(rising, end))
        dst[-1:].copy_(end)

    def _pad(self, key: str, dst: torch.Tensor, value: torch.Tensor) -> None:
        before, room = dst.data_ptr(), _layout(dst)
        place = dst.untyped_storage(), dst.storage_offset(), dst.size(), dst.stride()
        try:
            self._config.padding_logics[key](dst, value)
        except Exception as error:
            dst.set_(*place)
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EncoderError.padding_failed(
                key=key, found=_layout(value), room=room, error=found
            ) from error
        if dst.data_ptr() != before or _layout(dst) != room:
            found = _layout(dst)
            dst.set_(*place)  # so that the next good call works
            raise EncoderError.buffer_moved(key=key, found=found, room=room)


def check_keys(values: Mapping[str, object], config: EncoderCudaGraphConfig, where: str) -> None:
    """Raise unless exactly the configured keys are there.

    Raises:
        EncoderError: one is missing, or unknown.
    """
    for key in values:
        if key not in config.buffer_keys:
            raise EncoderError.unknown_buffer(where=where, key=key, known=config.buffer_keys)
    for key in config.buffer_keys:
        if key not in values:
            raise EncoderError.no_value(where=where, key=key, known=sorted(values))


def _layout(value: torch.Tensor) -> str:
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _poison(dst: torch.Tensor) -> None:
    dst.fill_(float("nan") if dst.is_floating_point() or dst.is_complex() else _POISON)
