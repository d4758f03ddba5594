"""Buffers that graphs are bound to: :class:`StaticInputs` are read, :class:`Outputs` written.

A graph is captured for a padded size, so each step writes its real rows to the front of a buffer
and something harmless behind them. Otherwise the rows of an earlier, larger batch stay there: a
stale slot mapping writes into the cache of a finished request. The rule: declare for each buffer
what its tail holds (:attr:`InputBuffer.tail`), and stage before metadata is built.

The FULL graphs of all sizes copy their results to the front of one set of output buffers, inside
the graph. The rule: what a step returned is valid until the next one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from cgcompile.errors import BatchError, CaptureError, ManagerError
from cgcompile.graphs.arena import address
from cgcompile.graphs.device import any_capture, device_named
from cgcompile.graphs.pinned_buffers import UploadRing, can_represent, host_memory
from cgcompile.graphs.results import Slices
from cgcompile.serving.errors import InputBufferError
from cgcompile.settings import (
    LARGEST_ROWS,
    LARGEST_TABLE,
    checked,
    checked_but,
    parse_count,
    parsed,
    require,
    require_arguments,
    require_fields,
    require_items,
    require_kind,
    require_whole,
    whole,
)
from cgcompile.torch_compat import torch_ops

TOKENS, REQS, BOUNDARIES = "tokens", "reqs", "reqs+1"
NUM_TOKENS = "num_tokens"


# ---------------------------------------------------------------- inputs


@dataclass(frozen=True)
class InputBuffer:
    """The declaration of one persistent buffer.

    Attributes:
        name: of the argument of the model, or of the entry that metadata reads.
        shape: sizes; one of them is ``"tokens"``, ``"reqs"`` or ``"reqs+1"`` (query start
            locations), which is allocated for the largest batch.
        dtype: of the buffer; data of another one is refused.
        tail: what padding rows hold: a number that the dtype can represent (token 0, a scratch
            slot, sequence length 0 or 1), or None to repeat the last real value, as offsets need
            in order not to decrease. Slot -1 fits only kernels that skip negative slots: torch
            indexing wraps around, and padding would overwrite the last slot.
        argument: the model takes it as a keyword argument; else metadata alone reads it. Request
            counts vary within a PIECEWISE graph, whose key has tokens alone: such a buffer may
            then reach the boundaries of a compiled model, and no piece.
        optional: a step may leave it out (``inputs_embeds``); the model gets None then. Whether it
            is present is part of the key of the graphs.
        host_slots: for data from the host: how many pinned copies to own; with 2 the host may
            prepare a step while the one before is still uploaded. Each buffer has as many as the
            largest number of all buffers.
        dummy_value: what rows hold in :meth:`dummy`: a number that the dtype can represent, or
            ``"num_tokens"``, the tokens of the batch, for sequence lengths that are not less than
            the queries. Left out: the tail; where that is None, even offsets or zeros.

    Raises:
        InputBufferError: an impossible shape, tail or dummy value.
        ConfigError: an invalid name, dtype or number of slots.

    Example:
        >>> slots = cgcompile.serving.InputBuffer("slots", ("tokens",), torch.int64, tail=0)
        >>> buffers = cgcompile.serving.StaticInputs([slots], 8, 8, "cpu")
        >>> buffers.buffers["slots"].shape
        torch.Size([8])
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    tail: float | None = 0
    argument: bool = True
    optional: bool = False
    host_slots: int = 1
    dummy_value: float | str | None = None

    def __post_init__(self) -> None:
        where, name = "InputBuffer", self.name
        require(isinstance(name, str) and bool(name), "name", where, name, "a non-empty text")
        require_fields(self, but=("name", "shape", "dtype", "tail", "host_slots"))
        expected = "a torch.dtype such as torch.int32"
        require(isinstance(self.dtype, torch.dtype), "dtype", where, self.dtype, expected)
        slots = parsed("host_slots", where, self.host_slots, parse_count(1))
        object.__setattr__(self, "host_slots", slots)
        listed = self.shape if isinstance(self.shape, (tuple, list)) else ()
        sizes = tuple(size if isinstance(size, str) else whole(size) for size in listed)
        valid = all(size in (TOKENS, REQS, BOUNDARIES) or _is_size(size) for size in sizes)
        if not valid or sum(isinstance(size, str) for size in sizes) != 1:
            raise InputBufferError.shape(name=name, shape=self.shape)
        object.__setattr__(self, "shape", sizes)
        if self.tail is not None and not can_represent(self.dtype, self.tail):
            raise InputBufferError.tail(name=name, tail=self.tail, dtype=str(self.dtype))
        dummy = self.dummy_value
        if dummy not in (None, NUM_TOKENS) and not can_represent(self.dtype, dummy):
            raise InputBufferError.dummy_value(name=name, found=dummy, dtype=str(self.dtype))

    @cached_property
    def dim(self) -> int:
        """The dimension that grows with the batch."""
        return next(d for d, size in enumerate(self.shape) if not isinstance(size, int))

    @cached_property
    def counts(self) -> str:
        """The unit of the first dimension: ``"tokens"``, ``"reqs"`` or ``"reqs+1"``."""
        return str(self.shape[self.dim])

    @checked
    def dummy(self, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """Return rows for a warm-up, on the CPU: ``dummy_value``, or the tail; even offsets.

        Queries have ``num_tokens // num_reqs`` tokens, the last one has the rest.
        """
        require_whole("num_tokens", "InputBuffer.dummy", num_tokens, 0, LARGEST_TABLE)
        require_whole("num_reqs", "InputBuffer.dummy", num_reqs, 1, LARGEST_TABLE)
        rows = self.rows(num_tokens, num_reqs)
        dummy = torch.zeros(_sizes(self, rows), dtype=self.dtype)
        value = self.tail if self.dummy_value is None else self.dummy_value
        if value is not None:
            return dummy.fill_(num_tokens if isinstance(value, str) else value)
        if self.counts == BOUNDARIES:
            offsets = torch.arange(rows) * (num_tokens // num_reqs)
            offsets[-1] = num_tokens
            dummy.movedim(self.dim, -1).copy_(offsets)
        return dummy

    def rows(self, num_tokens: int, num_reqs: int) -> int:
        """Return how many rows a batch has."""
        if not (type(num_tokens) is type(num_reqs) is int):  # each step calls this per buffer
            values = {"num_tokens": num_tokens, "num_reqs": num_reqs}
            require_arguments("InputBuffer.rows", values, dict.fromkeys(values, int))
        if self.counts == TOKENS:
            return num_tokens
        return num_reqs if self.counts == REQS else num_reqs + 1


def _is_size(size: Any) -> bool:
    return isinstance(size, int) and size >= 0


def _sizes(spec: InputBuffer, rows: int) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else rows for size in spec.shape)


class _Buffer:
    """One buffer, and the row from which it holds the tail value."""

    def __init__(self, spec: InputBuffer, rows: int, device: torch.device) -> None:
        sizes = _sizes(spec, rows)
        self.spec = spec
        self._before, self._behind = sizes[: spec.dim], sizes[spec.dim + 1 :]
        with torch.inference_mode(False), torch.no_grad():  # written in any mode
            self.whole = torch.full(sizes, spec.tail or 0, dtype=spec.dtype, device=device)
        self._host: dict[int, torch.Tensor] = {}
        self.shared = False  # the caller writes here too, so the tail is unknown
        self._clean = 0  # rows from here on hold the tail value
        self._version = self.whole._version  # after our last write; other writes raise it

    def fits(self, value: torch.Tensor, rows: int) -> bool:
        """Return whether a value has the declared dtype and sizes."""
        if not isinstance(value, torch.Tensor) or value.dtype is not self.spec.dtype:
            return False
        shape, dim = value.shape, self.spec.dim
        return (
            len(shape) > dim
            and shape[dim] == rows
            and shape[:dim] == self._before
            and shape[dim + 1 :] == self._behind
        )

    def is_front(self, value: torch.Tensor) -> bool:
        """Return whether the caller has written into the buffer itself."""
        return value.data_ptr() == self.whole.data_ptr() and value.stride() == self.whole.stride()

    def write(self, value: torch.Tensor, padded: int) -> None:
        """Write real rows to the front, and the tail behind them as far as a graph reads."""
        real = value.shape[self.spec.dim]
        end = self._end(real, padded)
        if not self.is_front(value):
            self.whole.narrow(self.spec.dim, 0, real).copy_(value)
        if end > real:
            self._fill(self.whole, real, end)
        self._version = self.whole._version

    def upload(self, value: torch.Tensor, padded: int, slot: int) -> None:
        """Like :meth:`write`, with one copy: the host fills in the tail."""
        host = self._host.get(slot)
        if host is None:
            host = self._host[slot] = host_memory(self.whole)
        dim = self.spec.dim
        real = value.shape[dim]
        end = max(self._end(real, padded), real)
        host.narrow(dim, 0, real).copy_(value)
        if end > real:
            self._fill(host, real, end)
        # One copy for each contiguous line: torch would gather several in temporary memory.
        lines = zip(self.whole.flatten(0, dim - 1), host.flatten(0, dim - 1), strict=True)
        for line, source in lines if dim else ((self.whole, host),):
            line[:end].copy_(source[:end], non_blocking=True)
        self._version = self.whole._version

    def _end(self, real: int, padded: int) -> int:
        """Return the row up to which the tail has to be written behind the real rows."""
        # Other writers may change the padding. Those that ``_version`` shows, as warm-ups, are
        # followed by a full write of it from then on; replays do not raise the version.
        if self.whole._version != self._version:
            self.shared = True
        end = padded if self.shared or self.spec.tail is None else min(padded, self._clean)
        if padded >= self._clean:
            self._clean = real
        return end

    def _fill(self, memory: torch.Tensor, real: int, end: int) -> None:
        tail = memory.narrow(self.spec.dim, real, end - real)
        if self.spec.tail is not None:
            tail.fill_(self.spec.tail)
        elif real:
            tail.copy_(memory.narrow(self.spec.dim, real - 1, 1).expand_as(tail))
        else:
            tail.zero_()  # rows of an earlier step would stay


class StaticInputs:
    """The persistent input buffers of one manager. Not for several threads at a time.

    Args:
        specs: the declarations; names are unique.
        max_num_tokens: rows of ``"tokens"`` buffers.
        max_num_reqs: rows of ``"reqs"`` buffers.
        device: of the buffers.

    Attributes:
        specs: as given.
        buffers: the whole buffers, by name.

    Raises:
        InputBufferError: two buffers with one name.
        ConfigError: ``specs`` are no declarations, or ``device`` is no device.

    Example:
        >>> from cgcompile.serving import InputBuffer, StaticInputs
        >>> ids = InputBuffer("input_ids", ("tokens",), torch.int64)
        >>> inputs = StaticInputs([ids], max_num_tokens=8, max_num_reqs=4, device="cpu")
        >>> inputs.buffers["input_ids"].shape
        torch.Size([8])
    """

    @checked_but("specs", "device")
    def __init__(
        self,
        specs: Iterable[InputBuffer],
        max_num_tokens: int,
        max_num_reqs: int,
        device: torch.device | str,
    ) -> None:
        require_items("inputs", "StaticInputs", specs)
        self.specs = tuple(specs)
        require_items("inputs", "StaticInputs", self.specs, InputBuffer)
        names = [spec.name for spec in self.specs]
        for name in names:
            if names.count(name) > 1:
                raise InputBufferError.twice(name=name)
        self._most = (max_num_tokens, max_num_reqs)
        where = device_named(device, "StaticInputs")
        count = torch.cuda.device_count()
        there = where.type != "cuda" or (where.index or 0) < count
        expected = f"a device that is there; torch finds {count} CUDA devices"
        require(there, "device", "StaticInputs", device, expected)
        require_whole("max_num_tokens", "StaticInputs", max_num_tokens, 1, LARGEST_ROWS)
        require_whole("max_num_reqs", "StaticInputs", max_num_reqs, 1, LARGEST_ROWS)
        self._held = {
            spec.name: _Buffer(spec, spec.rows(max_num_tokens, max_num_reqs), where)
            for spec in self.specs
        }
        self.buffers: dict[str, torch.Tensor] = {n: h.whole for n, h in self._held.items()}
        self._optional = [spec.name for spec in self.specs if spec.optional]
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._ring = UploadRing(where, max((spec.host_slots for spec in self.specs), default=1))
        self._idle: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, in bytes."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def check(self, values: Mapping[str, torch.Tensor | None], real: tuple[int, int]) -> None:
        """Raise unless :meth:`stage` would take these values of a batch; write nothing.

        Args:
            values: by name, as for :meth:`stage`.
            real: (tokens, requests) of the batch.

        Raises:
            InputBufferError: an unknown name, a missing one, a wrong shape or dtype, a None for an
                input that is not optional, or more rows than the buffers have.
        """
        self._check(values, real)
        self.check_sizes(real)

    def _check(self, values: Mapping[str, torch.Tensor | None], real: tuple[int, int]) -> None:
        if type(values) is not dict:
            require_kind("inputs", "batch", values, Mapping)
        for name, value in values.items():
            held = self._held.get(name)
            if held is None:
                raise InputBufferError.unknown(name=name, known=sorted(self._held))
            if value is None:
                if not held.spec.optional:
                    raise InputBufferError.missing(name=name)
                continue
            if getattr(value, "requires_grad", False) and torch.is_grad_enabled():
                raise InputBufferError.gradients(name=name)
            rows = held.spec.rows(*real)
            if not held.fits(value, rows):
                raise _misfit(held.spec, rows, value)
        for spec in self.specs if len(values) < len(self.specs) else ():
            if not spec.optional and spec.name not in values:
                raise InputBufferError.missing(name=spec.name)

    def check_sizes(self, real: tuple[int, int]) -> None:
        """Raise InputBufferError if (tokens, requests) are more than the buffers have."""
        if real[0] > self._most[0] or real[1] > self._most[1]:
            raise InputBufferError.too_large(real=real, most=self._most)

    def check_uniform(
        self, values: Mapping[str, torch.Tensor | None], num_tokens: int, num_reqs: int
    ) -> None:
        """Raise BatchError if the query starts on the host are not evenly spaced."""
        # Other offsets, such as those of pages, may have the ends of query starts by chance: one
        # buffer that has the starts of equal queries is enough.
        uneven: dict[str, list[int]] = {}
        values = values if isinstance(values, Mapping) else {}  # ``check`` raises for it
        for spec in self.specs if num_tokens and num_reqs else ():
            value = values.get(spec.name) if spec.shape == (BOUNDARIES,) else None
            if spec.tail is not None or not isinstance(value, torch.Tensor):
                continue
            starts = value.tolist() if value.device.type == "cpu" and value.dim() == 1 else []
            if len(starts) != num_reqs + 1 or (starts[0], starts[-1]) != (0, num_tokens):
                continue
            if starts == [*range(0, num_tokens + 1, max(num_tokens // num_reqs, 1))]:
                return
            uneven[spec.name] = [end - start for start, end in pairwise(starts)]
        for name, queries in uneven.items():
            raise BatchError.not_uniform_starts(name=name, queries=queries)

    def stage(
        self,
        values: Mapping[str, torch.Tensor | None],
        real: tuple[int, int],
        padded: tuple[int, int],
    ) -> dict[str, torch.Tensor | None]:
        """Write the rows of a step and the tails behind them. Does not synchronise the device.

        Rows of the host go through pinned memory, one copy a buffer, tails included; the host waits
        only until the copies that last used that memory are done.

        Args:
            values: by name, [rows, ...] each as declared, with the real number of rows, on the
                device or on the host; or None for an optional one. A front of the buffer itself is
                not copied. Only optional ones may be left out.
            real: (tokens, requests) of the batch.
            padded: (tokens, requests) that the graph was captured for.

        Returns:
            By name the front of each buffer, padded: the same tensor objects at each step of these
            sizes; None where a value is left out.

        Raises:
            CaptureError: inside of a capture, which would record the copies.
            InputBufferError: as of :meth:`check`. After either error nothing has been written.
        """
        if any_capture():
            raise CaptureError.refused(op="staging inputs")
        if self._ring.device is not None:
            self.follow_stream()
        if type(values) is not dict:
            require_kind("inputs", "batch", values, Mapping)
        for name, value in values.items():  # also for batches that are refused below
            held = self._held.get(name)
            if held is not None and not held.shared and isinstance(value, torch.Tensor):
                held.shared = held.is_front(value)
        self._check(values, real)
        if padded[0] > self._most[0] or padded[1] > self._most[1]:
            self.check_sizes(real)
            raise InputBufferError.too_large(real=padded, most=self._most)
        if real[0] > padded[0] or real[1] > padded[1]:
            self.check_sizes(real)
            raise InputBufferError.not_padded(real=real, padded=padded)
        self._write(values, padded)
        views: dict[str, torch.Tensor | None] = {**self.views(*padded)}
        for name in self._optional:
            if values.get(name) is None:
                views[name] = None
        return views

    def _write(self, values: Mapping[str, torch.Tensor | None], padded: tuple[int, int]) -> None:
        uploads = []
        for name, value in values.items():
            if value is None:
                continue
            held = self._held[name]
            rows = held.spec.rows(*padded)
            if held.whole.is_cuda and value.device.type == "cpu":
                uploads.append((held, value, rows))
            else:
                held.write(value, rows)
        if uploads:
            slot = self._ring.begin()
            try:
                for held, value, rows in uploads:
                    held.upload(value, rows, slot)
            finally:
                self._ring.end()

    def follow_stream(self) -> None:
        """Wait for steps on another stream, which read the buffers; the host does not wait."""
        self._ring.follow_stream()

    def written_by_others(self) -> None:
        """Note that the engine writes into the buffers itself: each tail is written from now on."""
        for held in self._held.values():
            held.shared = True

    def views(self, num_tokens: int, num_reqs: int) -> dict[str, torch.Tensor]:
        """Return the fronts of all buffers for a padded batch; the same objects each time."""
        key = (num_tokens, num_reqs)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = {
                name: held.whole.narrow(held.spec.dim, 0, held.spec.rows(*key))
                for name, held in self._held.items()
            }
        return views

    def idle(self) -> dict[str, torch.Tensor]:
        """Return values of one request without tokens, on the device; allocated once.

        Rows of a request hold the tail, or 0.
        """
        for spec in self.specs if not self._idle else ():
            sizes, like = _sizes(spec, spec.rows(0, 1)), self.buffers[spec.name]
            with torch.inference_mode(False), torch.no_grad():
                idle = torch.full(sizes, spec.tail or 0, dtype=spec.dtype, device=like.device)
            self._idle[spec.name] = idle
        return dict(self._idle)


def _misfit(spec: InputBuffer, rows: int, value: Any) -> InputBufferError:
    text = type(value).__name__
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype} {list(value.shape)}"
    expected = f"{spec.dtype} {list(_sizes(spec, rows))}"
    return InputBufferError.value(name=spec.name, expected=expected, found=text, counts=spec.counts)


# ---------------------------------------------------------------- outputs


class Outputs:
    """The results of a model: cuts them to real rows; owns the output buffers of FULL graphs."""

    def __init__(self, rows: str | Sequence[str], most: tuple[int, int]) -> None:
        self._rows = rows if isinstance(rows, str) else tuple(rows)  # for all results, or each
        for name in (rows,) if isinstance(rows, str) else rows:
            if name not in (TOKENS, REQS):
                raise ManagerError.rows(found=name)
        self._most = most  # (tokens, requests) of the largest FULL graph
        self._buffers: list[torch.Tensor] = []
        self._spec: Any = None  # the structure of the results; None before the first step
        self._slices: dict[tuple[int, int], Slices] = {}  # of the results of graphs, by size

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, in bytes; 0 before the first step."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def whole(self) -> Any:
        """The buffers in the structure of the results; None before the first step."""
        if self._spec is None:
            return None
        return torch_ops.tree_unflatten(list(self._buffers), self._spec)

    def owns(self, start: int) -> bool:
        """Return whether the storage at an address is an output buffer."""
        return any(address(buffer) == start for buffer in self._buffers)

    def poison(self) -> None:
        """Fill the buffers with NaN, or with -1: the next step overwrites them."""
        for buffer in self._buffers:
            buffer.view(torch.uint8).fill_(0xFF)

    def release(self) -> None:
        """Drop the buffers and the results of graphs."""
        self._buffers, self._spec = [], None
        self._slices.clear()

    def keep(self, result: Any, sizes: tuple[int, int]) -> Any:
        """Copy the result of a step to the front of the buffers; return views of those."""
        leaves, spec = torch_ops.tree_leaves(result), torch_ops.tree_spec(result)
        kinds = self._kinds(leaves, sizes)
        if self._spec is None:
            buffers = []  # all, or none where memory runs out
            with torch.inference_mode(False), torch.no_grad():  # written in any mode
                for leaf, kind in zip(leaves, kinds, strict=True):
                    shape = (self._most[kind], *leaf.shape[1:])
                    buffers.append(torch.empty(shape, dtype=leaf.dtype, device=leaf.device))
            self._buffers, self._spec = buffers, spec
        fits = spec == self._spec and all(
            buffer.dtype == leaf.dtype and buffer.shape[1:] == leaf.shape[1:]
            for buffer, leaf in zip(self._buffers, leaves, strict=True)
        )
        if not fits:
            raise ManagerError.other_outputs()
        fronts = [b[: leaf.shape[0]] for b, leaf in zip(self._buffers, leaves, strict=True)]
        for front, leaf in zip(fronts, leaves, strict=True):
            front.copy_(leaf)
        return torch_ops.tree_unflatten(fronts, spec)

    def real(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """Return the real rows of a padded result, as views."""
        leaves = torch_ops.tree_leaves(result)
        kinds = self._kinds(leaves, padded)
        return result if padded == real else Slices(result, leaves, kinds).cut(real)

    def replayed(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """Do as :meth:`real` for a graph, whose result is the same object at each step."""
        slices = self._slices.get(padded)
        if slices is None or slices.result is not result:
            leaves = torch_ops.tree_leaves(result)
            slices = self._slices[padded] = Slices(result, leaves, self._kinds(leaves, padded))
        return slices.cut(real)

    def _kinds(self, leaves: Sequence[Any], sizes: tuple[int, int]) -> list[int]:
        """Return for each leaf 0 if its rows are tokens, 1 if they are requests."""
        rows = [self._rows] * len(leaves) if isinstance(self._rows, str) else list(self._rows)
        if len(rows) != len(leaves):
            raise ManagerError.count(declared=len(rows), found=len(leaves))
        kinds = [(TOKENS, REQS).index(name) for name in rows]
        for leaf, kind, name in zip(leaves, kinds, rows, strict=True):
            tensor = isinstance(leaf, torch.Tensor)
            if not tensor or not leaf.dim() or leaf.shape[0] != sizes[kind]:
                output = str(list(leaf.shape)) if tensor else type(leaf).__name__
                raise ManagerError.output(found=output, rows=name, size=sizes[kind])
        return kinds
