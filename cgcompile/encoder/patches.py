"""The protocol for the common layout, from a handful of functions: :class:`PatchEncoder`.

Many vision towers take patches of all images one after the other, [rows, C], with a grid (t, h, w)
for each image or video, and merge m x m neighbours into one output token. What they compute from
the grids on the host, tables by row and offsets of sequences, becomes a buffer of each graph. The
rule: the recorded forward reads these buffers alone, never a grid.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.protocol import (
    DEFAULT,
    OFFSETS,
    PATCHES,
    TOKENS,
    ZEROS,
    EncoderBuffer,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPaddingLogic,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
    check_cast,
    check_row_count,
    layout,
    row_counts,
    two_tails,
    unpadded_forward,
)
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.reads import modules_of
from cgcompile.settings import (
    LARGEST_TABLE,
    checked,
    require,
    require_arguments,
    require_fields,
    require_kind,
    require_whole,
    takes_earlier,
    whole,
)

Grid = tuple[int, int, int]
"""Frames, rows and columns of one image or video, in patches."""

PIXELS = "pixel_values"
POSITIONS = "positions"


@dataclass(frozen=True)
class PatchTable:
    """A value that a tower reads for each patch, or for each output token.

    Attributes:
        make: ``make(grids)``: ``[rows, *shape]`` for these items together, on any device.
        shape: sizes behind the first.
        dtype: of the buffer; None: that of the encoder, which refuses integers, because it would
            round them: give ``torch.long`` for indices and positions.
        rows: what the first dimension counts, ``"patches"`` or ``"tokens"``.
        tail: contents of padding rows: ``"zeros"``; ``"positions"``, the number of the row itself,
            which makes a permutation of all real rows one of all rows; or a function that writes
            the buffer, see :data:`EncoderCudaGraphPaddingLogic`. Zeros behind a permutation are
            refused at capture.

    Example:
        >>> def places(grids):  # a row for each patch
        ...     rows = [torch.linspace(0, 1, t * h * w) for t, h, w in grids]
        ...     return torch.cat(rows)[:, None]
        >>> table = cgcompile.encoder.PatchTable(places, shape=(1,))
        >>> table.make([(1, 2, 2)]).shape
        torch.Size([4, 1])
    """

    make: Callable[[Sequence[Grid]], torch.Tensor]
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    rows: str = PATCHES
    tail: str | EncoderCudaGraphPaddingLogic = ZEROS

    def __post_init__(self) -> None:
        require_fields(self)
        _require_one_of("rows", self, (PATCHES, TOKENS))
        if not callable(self.tail):
            _require_one_of("tail", self, (ZEROS, POSITIONS))

    @property
    def rule(self) -> EncoderBuffer:
        """How its buffer is filled."""
        tail = positions_tail if self.tail == POSITIONS else self.tail
        return EncoderBuffer(self.rows, tail)


@dataclass(frozen=True)
class PatchOffsets:
    """Where sequences of attention begin and end, such as ``cu_seqlens``.

    Attributes:
        make: ``make(grids)``: integers [sequences + 1], from 0 to the number of rows. On the CPU
            each call checks them; on a device the number of entries alone, so that nothing
            synchronises, and the contents at capture and with ``CompilationConfig(debug="stale")``.
        most: ``most(token_budget, max_items, max_frames)``: how many sequences there can be in a
            replay; left out: exactly one for each frame.
        longest_padding: most rows of a sequence of padding rows; one long sequence would cost more
            attention than all real ones. None: no limit.
        rows: what offsets count, ``"patches"`` or ``"tokens"``.
        dtype: of the buffer.

    Example:
        >>> def starts(grids):  # one sequence for each item
        ...     sizes = torch.tensor([0, *(t * h * w for t, h, w in grids)])
        ...     return sizes.cumsum(0).to(torch.int32)
        >>> offsets = cgcompile.encoder.PatchOffsets(starts, most=lambda tokens, items, _: items)
        >>> offsets.make([(1, 2, 2), (1, 4, 4)])
        tensor([ 0,  4, 20], dtype=torch.int32)
    """

    make: Callable[[Sequence[Grid]], torch.Tensor]
    most: Callable[[int, int, int], int] | None = None
    longest_padding: int | None = 1024
    rows: str = PATCHES
    dtype: torch.dtype = torch.int32

    def __post_init__(self) -> None:
        require_fields(self)
        _require_one_of("rows", self, (PATCHES, TOKENS))
        if self.longest_padding is not None:
            padding = self.longest_padding
            require_whole("longest_padding", "PatchOffsets", padding, 1, LARGEST_TABLE)

    @property
    def rule(self) -> EncoderBuffer:
        """How its buffer is filled."""
        return EncoderBuffer(self.rows, OFFSETS, self.longest_padding)


def _require_one_of(name: str, record: object, known: Sequence[str]) -> None:
    value = getattr(record, name)
    require(value in known, name, type(record).__name__, value, " or ".join(map(repr, known)))


class _CheckedGrids(list[Grid]):
    """Grids that were read and checked: they are not read again."""


def frame_offsets(grids: Sequence[Grid]) -> torch.Tensor:
    """Return int32 [frames + 1] on the CPU: one sequence of h * w patches for each frame."""
    lengths = [h * w for t, h, w in grids for _ in range(t)]
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def positions_tail(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Write rows, and behind them the number of each row; a padding logic."""
    dst[: len(src)].copy_(src, non_blocking=True)
    tail = torch.arange(len(src), len(dst), dtype=dst.dtype, device=dst.device)
    dst[len(src) :].copy_(tail.view(-1, *[1] * (dst.dim() - 1)).expand_as(dst[len(src) :]))


def offset_buffer(
    total: int, most: int, longest: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return offsets of ``total`` rows, with room for ``most`` sequences and padding sequences."""
    entries = 1 + most + -(-total // (longest or total))
    even = [min(total, -(-total * index // most)) for index in range(entries)]
    return torch.tensor(even, dtype=dtype, device=device)


def _finish(name: str) -> Callable[[dict[str, Any], Any], Callable[["PatchEncoder"], None]]:
    """Return what sets an attribute that was an argument."""

    def move(_: dict[str, Any], value: Any) -> Callable[["PatchEncoder"], None]:
        argument, hint = name.lstrip("_"), PatchEncoder.__annotations__[name]
        require_arguments("PatchEncoder", {argument: value}, {argument: hint})
        return lambda encoder: setattr(encoder, name, value)

    return move


def _finish_padding_logics(
    _: dict[str, Any], logics: Mapping[str, EncoderCudaGraphPaddingLogic] | None
) -> Callable[["PatchEncoder"], None]:
    require_kind("padding_logics", "PatchEncoder", logics, Mapping, maybe=True)

    def finish(encoder: "PatchEncoder") -> None:
        config = encoder.get_encoder_cudagraph_config()
        rules = dict(config.buffers)
        for key, tail in (logics or {}).items():
            rule = rules.get(key, EncoderBuffer())
            if rule.tail == OFFSETS:
                raise two_tails(key)
            rules[key] = replace(rule, tail=tail)
        encoder._config = replace(config, padding_logics=rules)

    return finish


class PatchEncoder(SupportsEncoderCudaGraph):
    """Adapts a tower of flattened patches to :class:`EncoderCudaGraphManager`.

    A call is ``{"pixel_values": [rows, C], "image_grid_thw": [items, 3]}``, or with
    ``pixel_values_videos`` and ``video_grid_thw``. Grids may be lists; a tensor of them is read by
    the host, so keep it on the CPU. An item of (t, h, w) has t * h * w rows of input, t sequences,
    and t * (h // m) * (w // m) rows of output; m must divide h and w.

    Args:
        forward: ``forward(buffers)``, which graphs record. ``buffers`` has ``pixel_values`` and all
            of ``tables`` and ``offsets``, of one length each. Returns [tokens, H], or several such
            tensors in dicts or tuples.
        merge_size: m.
        in_features: C.
        out_hidden_size: H.
        tables: by name.
        offsets: by name; left out: ``cu_seqlens``, one sequence for each frame.
        tower: the modules whose weights ``forward`` reads; left out: those that it is, holds, or
            names as globals.
        max_frames_per_video: t of the longest video; 1: images alone.
        inputs: by modality the names of the patches and of their grids.

    Attributes:
        tower: as above.
        budget_range: (least, most) output tokens of generated budgets. May be set.
        odd_grids: accept grids that m does not divide; ``tables`` then make the tower leave out the
            patches that remain. False until it is set: they are refused, because a tower that
            merges consecutive rows would merge those of different blocks.

    Raises:
        EncoderError: ``forward`` does not take one dictionary.

    Example:
        >>> tower = nn.Linear(12, 32)
        >>> encoder = cgcompile.encoder.PatchEncoder(
        ...     lambda buffers: tower(buffers["pixel_values"]),
        ...     merge_size=1, in_features=12, out_hidden_size=32, offsets={}, tower=tower,
        ... )
        >>> cgcompile.encoder.supports_encoder_cudagraph(encoder)
        True
    """

    budget_range: tuple[int, int] = (64, 4096)
    odd_grids: bool = False
    _eager: Callable[[torch.Tensor, list[Grid]], Any] | None = None

    @takes_earlier(
        padding_logics=("use PatchTable(tail=function)", None, _finish_padding_logics),
        budget_range=("set that attribute afterwards", (64, 4096), _finish("budget_range")),
        eager=("override encoder_eager_forward", None, _finish("_eager")),
        odd_grids=("set that attribute afterwards", False, _finish("odd_grids")),
    )
    @checked
    def __init__(
        self,
        forward: Callable[[dict[str, torch.Tensor]], Any],
        *,
        merge_size: int,
        in_features: int,
        out_hidden_size: int,
        tables: Mapping[str, PatchTable] | None = None,
        offsets: Mapping[str, PatchOffsets] | None = None,
        tower: torch.nn.Module | None = None,
        max_frames_per_video: int = 1,
        inputs: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        _check_forward(forward)
        self.tower = forward if tower is None else tower
        self._forward, self._merge, self._columns = forward, merge_size, in_features
        self._tables = dict(tables or {})
        if offsets is None:
            offsets = {"cu_seqlens": PatchOffsets(frame_offsets)}
        self._offsets = dict(offsets)
        self._computed: dict[str, PatchTable | PatchOffsets] = {**self._tables, **self._offsets}
        names = {"image": (PIXELS, "image_grid_thw")}
        if max_frames_per_video > 1:
            names["video"] = ("pixel_values_videos", "video_grid_thw")
        self._inputs = dict(inputs or names)
        pixels = EncoderBuffer(PATCHES, rows_per_token=merge_size**2)
        self._config = EncoderCudaGraphConfig(
            modalities=list(self._inputs),
            buffer_keys=[PIXELS, *self._tables, *self._offsets],
            out_hidden_size=out_hidden_size,
            padding_logics={PIXELS: pixels, **{k: c.rule for k, c in self._computed.items()}},
            max_frames_per_video=max_frames_per_video,
        )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        return self.budget_range

    # -------------------------------------------------------------- items of a call

    def _inputs_of(self, mm_kwargs: Mapping[str, Any]) -> tuple[str, str]:
        """Return the names of the patches and the grids of a call."""
        if not isinstance(mm_kwargs, Mapping):
            raise EncoderError.not_a_call(found=type(mm_kwargs).__name__)
        return self._inputs[self.get_input_modality(mm_kwargs)]

    def grids(self, mm_kwargs: Mapping[str, Any]) -> list[Grid]:
        """Return (t, h, w) of each item; synchronises if the grids are on a device.

        Raises:
            EncoderError: there are no grids, or one has no whole blocks to merge.
        """
        name = self._inputs_of(mm_kwargs)[1]
        rows = _input(mm_kwargs, name)
        rows = _on_host(rows)
        if not isinstance(rows, Iterable):
            raise EncoderError.grid(name=name, item=0, found=rows, merge=self._merge)
        return [self._grid(name, item, grid) for item, grid in enumerate(rows)]

    def _grids_of(self, mm_kwargs: Mapping[str, Any]) -> list[Grid]:
        """Return the grids of a call, which are read unless that was done."""
        name = self._inputs_of(mm_kwargs)[1]
        known = mm_kwargs.get(name)
        return known if isinstance(known, _CheckedGrids) else self.grids(mm_kwargs)

    def _grid(self, name: str, item: int, grid: Any) -> Grid:
        numbers = _on_host(grid)
        items = numbers if isinstance(numbers, Iterable) else ()
        sizes = [size if type(size) is int else whole(size) for size in items]
        valid = [size for size in sizes if size is not None and size >= 0]
        if len(sizes) == len(valid) == 3:
            t, h, w = valid
            if self.odd_grids or h % self._merge == 0 == w % self._merge:
                return (t, h, w)
        raise EncoderError.grid(name=name, item=item, found=grid, merge=self._merge)

    def _patches(self, mm_kwargs: Mapping[str, Any]) -> tuple[torch.Tensor, list[Grid]]:
        """Return all patches of a call and the grids, which must agree."""
        pixels, grid = self._inputs_of(mm_kwargs)
        rows, grids = _input(mm_kwargs, pixels), self._grids_of(mm_kwargs)
        if not isinstance(rows, torch.Tensor) or rows.dim() == 0:
            raise EncoderError.rows(name=pixels, found=rows)
        expected = sum(t * h * w for t, h, w in grids)
        if len(rows) != expected:
            raise EncoderError.patches(name=pixels, found=len(rows), grid=grid, expected=expected)
        return rows, grids

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        m = self._merge
        return [
            EncoderItemSpec(t * h * w, t * (h // m) * (w // m), frames=t)
            for t, h, w in self._grids_of(mm_kwargs)
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        pixels, grid = self._inputs_of(mm_kwargs)
        rows, grids = self._patches(mm_kwargs)
        parts = torch.split(rows, [t * h * w for t, h, w in grids])
        chosen = torch.cat([parts[index] for index in indices]) if indices else rows[:0]
        return {**mm_kwargs, pixels: chosen, grid: [grids[index] for index in indices]}

    # -------------------------------------------------------------- buffers

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        **_: Any,
    ) -> EncoderCudaGraphCaptureInputs:
        self._try_functions()
        length = {PATCHES: token_budget * self._merge**2, TOKENS: token_budget}
        pixels = torch.zeros(length[PATCHES], self._columns, dtype=dtype, device=device)
        values = {PIXELS: pixels}
        for key, table in self._tables.items():
            size = (length[table.rows], *table.shape)
            values[key] = torch.zeros(size, dtype=table.dtype or dtype, device=device)
            if table.tail == POSITIONS:
                positions_tail(values[key], values[key][:0])
        frames = max_frames_per_batch or max_batch_size
        for key, offsets in self._offsets.items():
            most = frames
            if offsets.most is not None:
                most = offsets.most(token_budget, max_batch_size, frames)
            total, longest = length[offsets.rows], offsets.longest_padding
            values[key] = offset_buffer(total, most, longest, offsets.dtype, device)
        return EncoderCudaGraphCaptureInputs(values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, **_: Any
    ) -> EncoderCudaGraphReplayBuffers:
        rows, grids = self._patches(mm_kwargs)
        values = {
            key: _checked(key, spec, spec.make(grids), grids)
            for key, spec in self._computed.items()
        }
        return EncoderCudaGraphReplayBuffers({PIXELS: rows, **values})

    def _try_functions(self) -> None:
        """Compute all buffers of two small images, so that capture refuses wrong functions."""
        if inside_capture():  # contents of a device cannot be read
            return
        m = self._merge
        grids = [(1, m, m), (1, m, 2 * m)]
        counts: dict[str, int] = {}
        with suppress(Exception):  # overridden, it may read more of a call
            names = next(iter(self._inputs.values()))
            items = self.get_encoder_cudagraph_item_specs(
                dict.fromkeys(names, _CheckedGrids(grids))
            )
            counts = row_counts(items, DEFAULT)
        for key, spec in self._computed.items():
            try:
                value = spec.make(grids)
            except Exception:  # the function may refuse these sizes: each call checks it
                continue
            value = _checked(key, spec, value, grids)
            check_row_count(key, value, self._config, counts, len(grids), synchronises=True)
            if self._config.buffers[key].tail == ZEROS:
                _check_permutation(key, value)

    # -------------------------------------------------------------- running

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **_: Any) -> Any:
        return self._forward(inputs)

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], *, path: str = DEFAULT) -> Any:
        if self._eager is not None:
            return self._eager(*self._patches(mm_kwargs))
        grids = _CheckedGrids(self._grids_of(mm_kwargs))
        mm_kwargs = {**mm_kwargs, self._inputs_of(mm_kwargs)[1]: grids}
        specs, convert = (
            self.get_encoder_cudagraph_item_specs(mm_kwargs),
            self._converter(mm_kwargs),
        )
        return unpadded_forward(self, self._config, path, mm_kwargs, specs, convert)

    @cached_property
    def _modules(self) -> list[torch.nn.Module]:
        """The modules whose weights the forward reads."""
        return modules_of(self.tower)

    def _converter(self, mm_kwargs: Mapping[str, Any]) -> Callable[[str, Any], torch.Tensor]:
        """Return a function that moves values to the tower, as the dtype of their buffer."""
        pixels = _input(mm_kwargs, self._inputs_of(mm_kwargs)[0])
        weights = chain.from_iterable(module.parameters() for module in self._modules)
        like = next((tensor for tensor in weights if tensor.is_floating_point()), pixels)
        dtypes = {key: spec.dtype for key, spec in self._computed.items()}

        def converted(key: str, value: torch.Tensor) -> torch.Tensor:
            dtype = dtypes.get(key) or like.dtype
            check_cast(key, value, dtype)
            return value.to(like.device, dtype)

        return converted


def _check_forward(forward: Callable[..., Any]) -> None:
    """Raise unless a forward takes exactly one dictionary."""
    plain = forward.forward if isinstance(forward, torch.nn.Module) else forward
    try:
        signature = inspect.signature(plain)
    except (TypeError, ValueError):
        return
    try:
        signature.bind({})
    except TypeError:
        name = getattr(forward, "__name__", type(forward).__name__)
        raise EncoderError.not_buffers(forward=name, signature=signature) from None


def _check_permutation(key: str, value: torch.Tensor) -> None:
    """Raise if a table without a declared tail is a permutation of its rows."""
    integral = not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    numbers = value.tolist() if integral and value.dim() == 1 else []
    if len(numbers) > 1 and sorted(numbers) == list(range(len(numbers))):
        raise EncoderError.permutation(key=key, values=numbers)


def _checked(
    key: str, spec: PatchTable | PatchOffsets, value: Any, grids: Sequence[Grid]
) -> torch.Tensor:
    """Return the value of a buffer; raise unless its layout is the declared one."""
    if isinstance(value, (list, tuple)):
        raise EncoderError.buffer_list(key=key, found=type(value).__name__)
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        raise EncoderError.buffer_value(key=key, found=kind, expected="a tensor")
    shape = spec.shape if isinstance(spec, PatchTable) else ()
    dtype = spec.dtype or torch.get_default_dtype()  # any of floating point, as the encoder's
    alike = value.dim() == 1 + len(shape) and value.shape[1:] == shape
    if not alike or not torch.can_cast(value.dtype, dtype):
        sizes = ", ".join(map(str, (spec.rows, *shape)))
        expected = f"[{sizes}] of {str(dtype).removeprefix('torch.')}"
        raise EncoderError.buffer_layout(key=key, found=layout(value), expected=expected)
    if isinstance(spec, PatchOffsets):
        _check_entries(key, spec, len(value), grids)
    elif spec.dtype is not None:  # declared, so that integers may become floating point
        return value.to(dtype)
    check_cast(key, value, dtype)
    return value


def _check_entries(key: str, spec: PatchOffsets, entries: int, grids: Sequence[Grid]) -> None:
    """Raise unless there is one offset more than sequences."""
    frames = sum(t for t, _, _ in grids)
    if spec.most is None and entries != frames + 1:
        expected = f"{frames + 1}, one sequence for each frame"
    elif entries < 2 and any(t * h * w for t, h, w in grids):
        expected = "at least 2, of one sequence"
    else:
        return
    raise EncoderError.offset_count(key=key, found=entries, expected=expected)


def _on_host(value: Any) -> Any:
    """Return a tensor as nested lists; other values unchanged."""
    has_numbers = isinstance(value, torch.Tensor) and value.device.type != "meta"
    return value.tolist() if has_numbers else value


def _input(mm_kwargs: Mapping[str, Any], name: str) -> Any:
    if mm_kwargs.get(name) is None:
        raise EncoderError.no_input(name=name, known=list(mm_kwargs))
    return mm_kwargs[name]
