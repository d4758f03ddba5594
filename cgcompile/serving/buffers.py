"""What graphs read at each step, at addresses that stay: :class:`StaticInputs`.

A graph was captured for a padded size, so each step writes its real rows to the front of a buffer
and something harmless behind them. Without the second half, the rows of an earlier, larger batch
stay there: a stale slot mapping writes into the cache of a request that is gone. The rule: declare
for each buffer what its tail holds (:attr:`InputBuffer.tail`), and stage before metadata is built.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from cgcompile.errors import InputBufferError
from cgcompile.graphs.staging import HostStaging

TOKENS, REQS, BOUNDARIES = "tokens", "reqs", "reqs+1"


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
        argument: the model takes it as a keyword argument; else metadata alone reads it.
        optional: a step may leave it out (``inputs_embeds``); the model gets None then. Whether it
            is there is part of the key of the graphs.
        host_slots: for data from the host: how many pinned copies to own; with 2 the host may
            prepare a step while the one before is still uploaded.

    Raises:
        InputBufferError: a shape or tail that cannot be.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: torch.dtype
    tail: float | None = 0
    argument: bool = True
    optional: bool = False
    host_slots: int = 1

    def __post_init__(self) -> None:
        named = [size for size in self.shape if not isinstance(size, int)]
        if len(named) != 1 or named[0] not in (TOKENS, REQS, BOUNDARIES):
            raise InputBufferError.shape(self.name, self.shape)
        if self.tail is not None:
            try:
                found = torch.empty((), dtype=self.dtype).fill_(self.tail).item()
            except (RuntimeError, TypeError, OverflowError):
                found = None
            if found is None or (not self.dtype.is_floating_point and found != self.tail):
                raise InputBufferError.tail(self.name, self.tail, str(self.dtype))

    @cached_property
    def dim(self) -> int:
        """The dimension that grows with the batch."""
        return next(d for d, size in enumerate(self.shape) if not isinstance(size, int))

    @cached_property
    def counts(self) -> str:
        """What grows it: ``"tokens"``, ``"reqs"`` or ``"reqs+1"``."""
        return str(self.shape[self.dim])

    def dummy(self, num_tokens: int, num_reqs: int) -> torch.Tensor:
        """Rows for a warm-up, on the CPU: the tail's value; offsets grow evenly to the tokens.

        Queries have ``num_tokens // num_reqs`` tokens, the last one takes what is left.
        """
        rows = self.rows(num_tokens, num_reqs)
        sizes = tuple(size if isinstance(size, int) else rows for size in self.shape)
        found = torch.zeros(sizes, dtype=self.dtype)
        if self.tail is not None:
            return found.fill_(self.tail)
        if self.counts == BOUNDARIES:
            offsets = torch.arange(rows) * (num_tokens // num_reqs)
            offsets[-1] = num_tokens
            found.movedim(self.dim, -1).copy_(offsets)
        return found

    def rows(self, num_tokens: int, num_reqs: int) -> int:
        """How many rows a batch has."""
        if self.counts == TOKENS:
            return num_tokens
        return num_reqs if self.counts == REQS else num_reqs + 1


class _Held:
    """One buffer and what is known of its rows."""

    def __init__(self, spec: InputBuffer, rows: int, device: torch.device) -> None:
        sizes = tuple(size if isinstance(size, int) else rows for size in spec.shape)
        self.spec = spec
        with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
            self.whole = torch.empty(sizes, dtype=spec.dtype, device=device)
            self.whole.fill_(0 if spec.tail is None else spec.tail)
        self._staging: HostStaging | None = None
        self._clean = 0  # from this row on all hold the tail

    def front(self, rows: int) -> torch.Tensor:
        return self.whole.narrow(self.spec.dim, 0, rows)

    def write(self, value: torch.Tensor, padded: int) -> None:
        """Real rows to the front, and the tail behind them as far as a graph reads."""
        dim = self.spec.dim
        real = value.shape[dim]
        if not self._is_front(value):
            if dim == 0 and value.device.type == "cpu" and self.whole.is_cuda:
                self._stage(value)
            else:
                self.front(real).copy_(value, non_blocking=True)
        end = padded if self.spec.tail is None else min(padded, self._clean)
        if end > real:
            self._fill(real, end)
        self._clean = real if padded >= self._clean else self._clean

    def _is_front(self, value: torch.Tensor) -> bool:
        """Whether the caller has written into the buffer already."""
        return value.data_ptr() == self.whole.data_ptr() and value.stride() == self.whole.stride()

    def _stage(self, value: torch.Tensor) -> None:
        if self._staging is None:
            self._staging = HostStaging(self.whole, num_slots=self.spec.host_slots)
        self._staging.fill(value)

    def _fill(self, real: int, end: int) -> None:
        tail = self.whole.narrow(self.spec.dim, real, end - real)
        if self.spec.tail is None and not real:
            tail.zero_()  # there is no last value to repeat, only one of an earlier step
        elif self.spec.tail is None:
            tail.copy_(self.whole.narrow(self.spec.dim, max(real - 1, 0), 1).expand_as(tail))
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
    """

    def __init__(
        self,
        specs: Iterable[InputBuffer],
        max_num_tokens: int,
        max_num_reqs: int,
        device: torch.device | str,
    ) -> None:
        self.specs = tuple(specs)
        names = [spec.name for spec in self.specs]
        for name in names:
            if names.count(name) > 1:
                raise InputBufferError.twice(name)
        self._most = (max_num_tokens, max_num_reqs)
        where = torch.device(device)
        self._held = {
            spec.name: _Held(spec, spec.rows(max_num_tokens, max_num_reqs), where)
            for spec in self.specs
        }
        self.buffers: dict[str, torch.Tensor] = {n: h.whole for n, h in self._held.items()}
        self._views: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        self._idle: dict[str, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory of all buffers, in bytes."""
        return sum(each.nbytes for each in self.buffers.values())

    def stage(
        self,
        values: Mapping[str, torch.Tensor | None],
        real: tuple[int, int],
        padded: tuple[int, int],
    ) -> dict[str, torch.Tensor | None]:
        """Write the rows of a step and the tails behind them. Nothing synchronises the device.

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
            InputBufferError: an unknown name, a missing one, a wrong shape or dtype, or a None
                that may not be; nothing has been written then.
        """
        for name, value in values.items():
            self._check(name, value, real)
        for spec in self.specs if len(values) < len(self.specs) else ():
            if not spec.optional and spec.name not in values:
                raise InputBufferError.missing(spec.name)
        if padded[0] > self._most[0] or padded[1] > self._most[1]:
            raise InputBufferError.too_large(*padded, *self._most)
        for name, value in values.items():
            if value is not None:
                held = self._held[name]
                held.write(value, held.spec.rows(*padded))
        left_out = {name for name, value in values.items() if value is None}
        left_out |= {s.name for s in self.specs if s.optional and s.name not in values}
        views = self.views(*padded)
        return {name: None if name in left_out else view for name, view in views.items()}

    def views(self, num_tokens: int, num_reqs: int) -> dict[str, torch.Tensor]:
        """The fronts of all buffers for a padded batch, by name; the same objects each time."""
        key = (num_tokens, num_reqs)
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = {
                name: held.front(held.spec.rows(*key)) for name, held in self._held.items()
            }
        return found

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
                    found = torch.full(sizes, spec.tail or 0, dtype=spec.dtype, device=like.device)
                self._idle[spec.name] = found
        return dict(self._idle)

    def _check(self, name: str, value: torch.Tensor | None, real: tuple[int, int]) -> None:
        held = self._held.get(name)
        if held is None:
            raise InputBufferError.unknown(name, sorted(self._held))
        spec = held.spec
        if value is None:
            if not spec.optional:
                raise InputBufferError.missing(name)
            return
        rows = spec.rows(*real)
        wanted = tuple(size if isinstance(size, int) else rows for size in spec.shape)
        if tuple(value.shape) != wanted or value.dtype != spec.dtype:
            found = f"{value.dtype} {list(value.shape)}"
            raise InputBufferError.value(name, f"{spec.dtype} {list(wanted)}", found, spec.counts)
