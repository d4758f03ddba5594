"""Buffers that graphs are bound to: :class:`StaticInputs` are read, :class:`OutputBuffers` written.

A graph is captured for a padded size, so each step writes its real rows to the front of a buffer
and something harmless behind them. Without the second half, the rows of an earlier, larger batch
stay there: a stale slot mapping writes into the cache of a request that is gone. The rule: declare
for each buffer what its tail holds (:attr:`InputBuffer.tail`), and stage before metadata is built.

The FULL graphs of all sizes copy their results to the front of one set of output buffers, inside
the graph. The rule: what a step returned is valid until the next one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.errors import CaptureError, InputBufferError, ManagerError
from cgcompile.graphs.arena import address
from cgcompile.graphs.device import any_capture, device_named
from cgcompile.graphs.pinned_buffers import Turns, host_memory
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

TOKENS, REQS, BOUNDARIES = "tokens", "reqs", "reqs+1"
NUM_TOKENS = "num_tokens"


def _has(dtype: torch.dtype, number: object) -> bool:
    """Return whether a dtype can hold a number; a floating point dtype may round it."""
    try:
        value = torch.empty((), dtype=dtype).fill_(number).item()  # type: ignore[call-overload]
    except (RuntimeError, TypeError, OverflowError):
        return False
    return dtype.is_floating_point or bool(value == number)


@dataclass(frozen=True)
class InputBuffer:
    """The declaration of one persistent buffer.

    Attributes:
        name: of the argument of the model, or what metadata finds it by.
        shape: sizes; one of them is ``"tokens"``, ``"reqs"`` or ``"reqs+1"`` (query start
            locations), which is allocated for the largest batch.
        dtype: of the buffer; data of another one is refused.
        tail: what rows hold that are not real: a number that the dtype has (token 0, slot -1,
            sequence length 0 or 1), or None to repeat the last real value, as offsets do.
        argument: the model takes it as a keyword argument; else metadata alone reads it. What
            counts requests varies within a PIECEWISE graph, whose key says tokens alone: it may
            reach the boundaries of a compiled model then, and no piece.
        optional: a step may leave it out (``inputs_embeds``); the model gets None then. Whether it
            is there is part of the key of the graphs.
        host_slots: for data from the host: how many pinned copies to own; with 2 the host may
            prepare a step while the one before is still uploaded. The largest number of all
            buffers is what each of them has.
        dummy_value: what rows hold in :meth:`dummy`: a number that the dtype has, or
            ``"num_tokens"``, the tokens of the batch, so that attention is warmed up and captured
            with sequences that are not empty. Left out: the tail's.

    Raises:
        InputBufferError: a shape, tail or dummy value that cannot be.
        ConfigError: another name, dtype or number of slots than above.
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
        require(
            isinstance(self.name, str) and bool(self.name),
            "name",
            "InputBuffer",
            self.name,
            "a non-empty text",
        )
        require_fields(self, but=("name", "shape", "dtype", "tail", "host_slots"))
        expected = "a torch.dtype such as torch.int32"
        require(isinstance(self.dtype, torch.dtype), "dtype", "InputBuffer", self.dtype, expected)
        slots = parsed("host_slots", "InputBuffer", self.host_slots, parse_count(1))
        object.__setattr__(self, "host_slots", slots)
        listed = self.shape if isinstance(self.shape, (tuple, list)) else ()
        sizes = tuple(size if isinstance(size, str) else whole(size) for size in listed)
        if any(size is None or (isinstance(size, int) and size < 0) for size in sizes):
            raise InputBufferError.shape(name=self.name, shape=self.shape)
        object.__setattr__(self, "shape", sizes or self.shape)
        named = [size for size in sizes if not isinstance(size, int)]
        if len(named) != 1 or named[0] not in (TOKENS, REQS, BOUNDARIES):
            raise InputBufferError.shape(name=self.name, shape=self.shape)
        if self.tail is not None and not _has(self.dtype, self.tail):
            raise InputBufferError.tail(name=self.name, tail=self.tail, dtype=str(self.dtype))
        if self.dummy_value not in (None, NUM_TOKENS) and not _has(self.dtype, self.dummy_value):
            raise InputBufferError.dummy_value(
                name=self.name, found=self.dummy_value, dtype=str(self.dtype)
            )

    @cached_property
    def dim(self) -> int:
        """The dimension that grows with the batch."""
        return next(d for d, size in enumerate(self.shape) if not isinstance(size, int))

    @cached_property
    def counts(self) -> str:
        """What grows it: ``"tokens"``, ``"reqs"`` or ``"reqs+1"``."""
        return str(self.shape[self.dim])

    @checked
    def dummy(self, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """Rows for a warm-up, on the CPU: ``dummy_value``, or the tail's; offsets grow evenly.

        Queries have ``num_tokens // num_reqs`` tokens, the last one takes what is left.
        """
        require_whole("num_tokens", "InputBuffer.dummy", num_tokens, 0, LARGEST_TABLE)
        require_whole("num_reqs", "InputBuffer.dummy", num_reqs, 1, LARGEST_TABLE)
        rows = self.rows(num_tokens, num_reqs)
        sizes = tuple(size if isinstance(size, int) else rows for size in self.shape)
        dummy = torch.zeros(sizes, dtype=self.dtype)
        value = self.tail if self.dummy_value is None else self.dummy_value
        if value is not None:
            return dummy.fill_(num_tokens if isinstance(value, str) else value)
        if self.counts == BOUNDARIES:
            offsets = torch.arange(rows) * (num_tokens // num_reqs)
            offsets[-1] = num_tokens
            dummy.movedim(self.dim, -1).copy_(offsets)
        return dummy

    def rows(self, num_tokens: int, num_reqs: int) -> int:
        """How many rows a batch has."""
        if not (type(num_tokens) is type(num_reqs) is int):  # a step asks for each buffer
            values = {"num_tokens": num_tokens, "num_reqs": num_reqs}
            require_arguments("InputBuffer.rows", values, dict.fromkeys(values, int))
        if self.counts == TOKENS:
            return num_tokens
        return num_reqs if self.counts == REQS else num_reqs + 1


class _Buffer:
    """One buffer and what is known of its rows."""

    def __init__(self, spec: InputBuffer, rows: int, device: torch.device) -> None:
        sizes = tuple(size if isinstance(size, int) else rows for size in spec.shape)
        self.spec = spec
        self._before, self._behind = sizes[: spec.dim], sizes[spec.dim + 1 :]
        with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
            self.whole = torch.empty(sizes, dtype=spec.dtype, device=device)
            self.whole.fill_(0 if spec.tail is None else spec.tail)
        self._host: dict[int, torch.Tensor] = {}
        self.shared = False  # others write here too: nothing is known of the tail
        self._clean = 0  # from this row on all hold the tail
        self._version = self.whole._version  # as this class left it; others' writes raise it

    def front(self, rows: int) -> torch.Tensor:
        return self.whole.narrow(self.spec.dim, 0, rows)

    def fits(self, value: torch.Tensor, rows: int) -> bool:
        """Whether a value has the dtype and the sizes that were declared."""
        if not isinstance(value, torch.Tensor) or value.dtype is not self.spec.dtype:
            return False
        shape, dim = value.shape, self.spec.dim
        return (
            len(shape) > dim
            and shape[dim] == rows
            and shape[:dim] == self._before
            and shape[dim + 1 :] == self._behind
        )

    def is_uploaded(self, value: torch.Tensor) -> bool:
        """Whether a value goes through pinned memory: rows of the host, for a device."""
        return value.device.type == "cpu" and self.whole.is_cuda

    def write(self, value: torch.Tensor, padded: int) -> None:
        """Real rows to the front, and the tail behind them as far as a graph reads."""
        real = value.shape[self.spec.dim]
        end = self._end(real, padded)
        if not self.is_front(value):
            self.front(real).copy_(value)
        if end > real:
            self._fill(self.whole, real, end)
        self._version = self.whole._version

    def upload(self, value: torch.Tensor, padded: int, turn: int) -> None:
        """As :meth:`write`, by one copy: the tail is filled in on the host."""
        host = self._host.get(turn)
        if host is None:
            host = self._host[turn] = host_memory(self.whole)
        dim = self.spec.dim
        real = value.shape[dim]
        end = max(self._end(real, padded), real)
        host.narrow(dim, 0, real).copy_(value)
        if end > real:
            self._fill(host, real, end)
        # Rows of rows, each of which is one copy: torch would gather them in memory of its own.
        lines = zip(self.whole.flatten(0, dim - 1), host.flatten(0, dim - 1), strict=True)
        for line, source in lines if dim else ((self.whole, host),):
            line[:end].copy_(source[:end], non_blocking=True)
        self._version = self.whole._version

    def _end(self, real: int, padded: int) -> int:
        """Up to which row the tail has to be written, behind the real ones.

        A model or a ``metadata`` that writes into a buffer changes tails too. Its replays do so
        unseen, but not its warm-ups, and so all tails are written from then on.
        """
        if self.whole._version != self._version:
            self.shared = True
        end = padded if self.shared or self.spec.tail is None else min(padded, self._clean)
        if padded >= self._clean:
            self._clean = real
        return end

    def is_front(self, value: torch.Tensor) -> bool:
        """Whether the caller has written into the buffer already."""
        return value.data_ptr() == self.whole.data_ptr() and value.stride() == self.whole.stride()

    def _fill(self, memory: torch.Tensor, real: int, end: int) -> None:
        tail = memory.narrow(self.spec.dim, real, end - real)
        if self.spec.tail is None and not real:
            tail.zero_()  # there is no last value to repeat, only one of an earlier step
        elif self.spec.tail is None:
            tail.copy_(memory.narrow(self.spec.dim, real - 1, 1).expand_as(tail))
        else:
            tail.fill_(self.spec.tail)


class StaticInputs:
    """The persistent buffers of one manager. Not for several threads at a time.

    Args:
        specs: what there is; names are unique.
        max_num_tokens: rows of ``"tokens"`` buffers.
        max_num_reqs: rows of ``"reqs"`` buffers.
        device: where the buffers are.

    Attributes:
        buffers: the whole buffers, by name.

    Raises:
        InputBufferError: two buffers of one name.
        ConfigError: something else than buffers, or no device.
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
        require_whole("max_num_tokens", "StaticInputs", max_num_tokens, 1, LARGEST_ROWS)
        require_whole("max_num_reqs", "StaticInputs", max_num_reqs, 1, LARGEST_ROWS)
        self._held = {
            spec.name: _Buffer(spec, spec.rows(max_num_tokens, max_num_reqs), where)
            for spec in self.specs
        }
        self.buffers: dict[str, torch.Tensor] = {n: h.whole for n, h in self._held.items()}
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._turns = Turns(where, max((spec.host_slots for spec in self.specs), default=1))
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
            InputBufferError: an unknown name, a missing one, a wrong shape or dtype, a None that
                may not be, or more rows than the buffers have.
        """
        if type(values) is not dict:
            require_kind("inputs", "batch", values, Mapping)
        for name, value in values.items():
            self._check(name, value, real)
        for spec in self.specs if len(values) < len(self.specs) else ():
            if not spec.optional and spec.name not in values:
                raise InputBufferError.missing(name=spec.name)
        if real[0] > self._most[0] or real[1] > self._most[1]:
            raise InputBufferError.too_large(real=real, most=self._most)

    def stage(
        self,
        values: Mapping[str, torch.Tensor | None],
        real: tuple[int, int],
        padded: tuple[int, int],
    ) -> dict[str, torch.Tensor | None]:
        """Write the rows of a step and the tails behind them. Nothing synchronises the device.

        Rows of the host go through pinned memory, one copy a buffer, tails included; the host waits
        only until the copies that last used that memory are done.

        Args:
            values: by name, [rows, ...] each as declared, with the real number of rows, on the
                device or on the host; or None for an optional one. A front of the buffer itself is
                not copied. Only optional ones may be left out: the rows that a buffer still holds
                are those of another batch.
            real: (tokens, requests) of the batch.
            padded: (tokens, requests) that the graph was captured for.

        Returns:
            By name the front of each buffer, padded: the same tensor objects at each step of these
            sizes; None where a value is left out.

        Raises:
            CaptureError: inside of a capture, which would record the copies; likewise.
            InputBufferError: an unknown name, a missing one, a wrong shape or dtype, or a None
                that may not be; nothing has been written then.
        """
        if any_capture():
            raise CaptureError.refused(op="staging inputs")
        self.follow_stream()
        if type(values) is not dict:
            require_kind("inputs", "batch", values, Mapping)
        for name, value in values.items():
            held = self._held.get(name)
            if held is None or held.shared or not isinstance(value, torch.Tensor):
                continue
            held.shared = held.is_front(value)
        self.check(values, real)
        if padded[0] > self._most[0] or padded[1] > self._most[1]:
            raise InputBufferError.too_large(real=padded, most=self._most)
        if real[0] > padded[0] or real[1] > padded[1]:
            raise InputBufferError.not_padded(real=real, padded=padded)
        self._write(values, padded)
        left_out = {name for name, value in values.items() if value is None}
        left_out |= {s.name for s in self.specs if s.optional and s.name not in values}
        views = self.views(*padded)
        return {name: None if name in left_out else view for name, view in views.items()}

    def follow_stream(self) -> None:
        """Steps on another stream come first: they read the buffers. Nothing waits on the host."""
        self._turns.follow_stream()

    def written_by_others(self) -> None:
        """Note that the engine writes into the buffers itself: each tail is written from now on."""
        for held in self._held.values():
            held.shared = True

    def _write(self, values: Mapping[str, torch.Tensor | None], padded: tuple[int, int]) -> None:
        uploads = []
        for name, value in values.items():
            if value is None:
                continue
            held = self._held[name]
            rows = held.spec.rows(*padded)
            if held.is_uploaded(value):
                uploads.append((held, value, rows))
            else:
                held.write(value, rows)
        if uploads:
            turn = self._turns.begin()
            try:
                for held, value, rows in uploads:
                    held.upload(value, rows, turn)
            finally:
                self._turns.end()

    def views(self, num_tokens: int, num_reqs: int) -> dict[str, torch.Tensor]:
        """The fronts of all buffers for a padded batch, by name; the same objects each time."""
        key = (num_tokens, num_reqs)
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = {
                name: held.front(held.spec.rows(*key)) for name, held in self._held.items()
            }
        return views

    def idle(self) -> dict[str, torch.Tensor]:
        """Values of one request without tokens, by name, on the device; made once.

        Rows of a request hold what its tail would, or 0.
        """
        if not self._idle:
            for spec in self.specs:
                rows = spec.rows(0, 1)
                sizes = tuple(size if isinstance(size, int) else rows for size in spec.shape)
                like = self.buffers[spec.name]
                with torch.inference_mode(False), torch.no_grad():
                    idle = torch.full(sizes, spec.tail or 0, dtype=spec.dtype, device=like.device)
                self._idle[spec.name] = idle
        return dict(self._idle)

    def _check(self, name: str, value: torch.Tensor | None, real: tuple[int, int]) -> None:
        held = self._held.get(name)
        if held is None:
            raise InputBufferError.unknown(name=name, known=sorted(self._held))
        spec = held.spec
        if value is None:
            if not spec.optional:
                raise InputBufferError.missing(name=name)
            return
        if getattr(value, "requires_grad", False) and torch.is_grad_enabled():
            raise InputBufferError.gradients(name=name)
        rows = spec.rows(*real)
        if not held.fits(value, rows):
            wanted = [size if isinstance(size, int) else rows for size in spec.shape]
            found = type(value).__name__
            if isinstance(value, torch.Tensor):
                found = f"{value.dtype} {list(value.shape)}"
            raise InputBufferError.value(
                name=name, expected=f"{spec.dtype} {wanted}", found=found, counts=spec.counts
            )


class Outputs:
    """What the rows of a model's results stand for."""

    def __init__(self, rows: str | Sequence[str]) -> None:
        self._rows = rows if isinstance(rows, str) else tuple(rows)
        self._known: dict[tuple[int, int], tuple[Any, list[Any], list[int], Any]] = {}
        for name in (rows,) if isinstance(rows, str) else rows:
            if name not in (TOKENS, REQS):
                raise ManagerError.rows(found=name)

    def counted(self, leaves: Sequence[Any], sizes: tuple[int, int]) -> list[int]:
        """Return for each result 0 if its rows are tokens, 1 if they are requests."""
        rows = [self._rows] * len(leaves) if isinstance(self._rows, str) else list(self._rows)
        if len(rows) != len(leaves):
            raise ManagerError.count(declared=len(rows), found=len(leaves))
        kinds = [(TOKENS, REQS).index(name) for name in rows]
        for leaf, kind, name in zip(leaves, kinds, rows, strict=True):
            tensor = isinstance(leaf, torch.Tensor)
            if not tensor or not leaf.dim() or leaf.shape[0] != sizes[kind]:
                found = str(list(leaf.shape)) if tensor else type(leaf).__name__
                raise ManagerError.output(found=found, rows=name, size=sizes[kind])
        return kinds

    def real(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """The rows of a padded result that are real, as views."""
        leaves = compat.tree_leaves(result)
        kinds = self.counted(leaves, padded)
        if padded == real:
            return result
        return _cut(leaves, kinds, real, compat.tree_spec(result))

    def replayed(self, result: Any, padded: tuple[int, int], real: tuple[int, int]) -> Any:
        """As :meth:`real`, of the result of a graph: the same object at each step, checked once."""
        known = self._known.get(padded)
        if known is None or known[0] is not result:
            leaves = compat.tree_leaves(result)
            kinds = self.counted(leaves, padded)
            known = self._known[padded] = (result, leaves, kinds, compat.tree_spec(result))
        _, leaves, kinds, spec = known
        if leaves and leaves[0] is result:
            return result[: real[kinds[0]]]
        return _cut(leaves, kinds, real, spec)

    def forget(self) -> None:
        """Drop results: the graphs are released."""
        self._known.clear()


def _cut(leaves: list[Any], kinds: list[int], real: tuple[int, int], spec: Any) -> Any:
    cut = [leaf[: real[kind]] for leaf, kind in zip(leaves, kinds, strict=True)]
    return compat.tree_unflatten(cut, spec)


class OutputBuffers:
    """Buffers for what a model returns: a tensor, or tensors in tuples, lists and dicts."""

    def __init__(self, outputs: Outputs, most: tuple[int, int]) -> None:
        self._outputs = outputs
        self._most = most
        self._buffers: list[torch.Tensor] = []
        self._spec: Any = None

    @property
    def nbytes(self) -> int:
        """Memory of the buffers, in bytes; 0 before the first step."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def owns(self, start: int) -> bool:
        """Return whether a storage that begins at an address is one of the buffers."""
        return any(address(buffer) == start for buffer in self._buffers)

    def poison(self) -> None:
        """Fill the buffers with NaN, or with -1: the next step overwrites them."""
        for buffer in self._buffers:
            buffer.view(torch.uint8).fill_(0xFF)

    @property
    def whole(self) -> Any:
        """The buffers in the structure of the results; None before the first step."""
        if self._spec is None:
            return None
        return compat.tree_unflatten(list(self._buffers), self._spec)

    def keep(self, result: Any, sizes: tuple[int, int]) -> Any:
        """Copy the result of a step to the front of the buffers; return views of those.

        The first result allocates the buffers; later ones must have its structure.
        """
        leaves, spec = compat.tree_leaves(result), compat.tree_spec(result)
        kinds = self._outputs.counted(leaves, sizes)
        if self._spec is None:
            self._spec = spec
            pairs = zip(leaves, kinds, strict=True)
            self._buffers = [_empty(leaf, self._most[kind]) for leaf, kind in pairs]
        if spec != self._spec or not all(map(_fits, self._buffers, leaves)):
            raise ManagerError.other_outputs()
        fronts = [b[: leaf.shape[0]] for b, leaf in zip(self._buffers, leaves, strict=True)]
        for front, leaf in zip(fronts, leaves, strict=True):
            front.copy_(leaf)
        return compat.tree_unflatten(fronts, spec)

    def release(self) -> None:
        """Forget the buffers."""
        self._buffers, self._spec = [], None


def _empty(like: torch.Tensor, rows: int) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
        return torch.empty((rows, *like.shape[1:]), dtype=like.dtype, device=like.device)


def _fits(buffer: torch.Tensor, leaf: torch.Tensor) -> bool:
    return buffer.dtype == leaf.dtype and buffer.shape[1:] == leaf.shape[1:]
