"""The graphs of one encoder: sizes, buffers, capture and replay (:class:`EncoderGraphs`).

A graph reads the addresses that it was captured with, padded rows included. So each replay writes
all rows of the buffers: the real ones, then zeros, or what a padding logic writes; offsets go on to
the end, so that padding is a sequence like others. The rule: everything is checked before anything
is written.

A pool gives nothing back for one graph, so a graph that took too much could not be undone. With a
budget of bytes graphs are therefore measured first, on memory that is dropped as a whole.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import set_forward_context
from cgcompile.descriptor import BatchDescriptor
from cgcompile.encoder.budgets import Budgets, generated_budgets, resolve_budgets, resolve_frames
from cgcompile.encoder.protocol import (
    DEFAULT,
    ZERO,
    CheckedModel,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    checked_rows,
    empty_rows,
    named_buffers,
    own_rows,
)
from cgcompile.errors import CaptureError, EncoderError
from cgcompile.graphs.capture import bulk_capture, inside_capture, why_not_here
from cgcompile.graphs.capture_all import BulkCapture, capture_set, warm_all
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.guards import WeightsGuard, modules_of
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper, Whole, holds_parameters_with_grad
from cgcompile.reasons import Counters, Reason
from cgcompile.serving.memory_plan import most_that_fit, ranked
from cgcompile.settings import require, require_arguments, require_kind, whole


class GraphKey(NamedTuple):
    """What one graph was captured for.

    Attributes:
        path: its set of graphs.
        budget: rows of its result.
        axes: one value for each capture axis.
    """

    path: str
    budget: int
    axes: tuple[int, ...] = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        """The key as the forward context has it."""
        return BatchDescriptor(self.budget, extra=(self.path, *self.axes))


Budgeted = Sequence[int] | Mapping[str, Sequence[int]]
Range = tuple[int, int]


class Limits(NamedTuple):
    """What all graphs of a manager hold."""

    budgets: Mapping[str, tuple[int, ...]]  # by path, output tokens, ascending
    max_items: int  # of one replay; at most the least budget
    max_frames: int  # of one replay; 0, if graphs are not for videos: one for each item


def resolved_limits(
    config: EncoderCudaGraphConfig,
    token_budgets: Budgeted | None,
    max_items: int | None,
    max_frames: int | None,
    budget_range: Range | None,
) -> Limits:
    """Resolve the budgets of each path, and the items and frames of all."""
    if token_budgets is None:
        assert budget_range is not None
        budgets, items = _inferred(config, max_items, budget_range)
    else:
        budgets, items = _checked_budgets(config, token_budgets, max_items, budget_range)
    frames = resolve_frames(items, config.most_frames_of_an_item, max_frames)
    return Limits(budgets, items, frames)


def _checked_budgets(
    config: EncoderCudaGraphConfig,
    token_budgets: Budgeted,
    max_items: int | None,
    budget_range: Range | None,
) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return the user's budgets of each path, and the items of all."""
    paths = list(config.graph_sets)
    if not isinstance(token_budgets, Mapping):
        token_budgets = dict.fromkeys(paths, tuple(token_budgets))
    expected = f"budgets for each of {', '.join(paths)}"
    same = set(token_budgets) == set(paths)
    require(same, "token_budgets", "encoder graphs", dict(token_budgets), expected)
    resolved: dict[str, Budgets] = {}
    for path in paths:
        budgets = tuple(token_budgets[path])
        # resolve_budgets names invalid numbers
        numbers = [number for budget in budgets if (number := whole(budget)) and number > 0]
        span = budget_range or (min(numbers, default=1), max(numbers, default=1))
        resolved[path] = resolve_budgets(budgets, max_items, budget_range=span)
    items = min(limits.max_items for limits in resolved.values())
    return {path: limits.budgets for path, limits in resolved.items()}, items


def _inferred(
    config: EncoderCudaGraphConfig, max_items: int | None, span: Range
) -> tuple[dict[str, tuple[int, ...]], int]:
    """Return generated budgets of each path, and the items of all."""
    base = resolve_budgets(None, max_items, budget_range=span)
    most = base.budgets[-1]
    sets = config.graph_sets.items()
    starts = {path: settings.min_token_budget or base.budgets[0] for path, settings in sets}
    for path, least in starts.items():
        if least > most:  # budgets below it would hold no item of this path
            raise EncoderError.path_above_range(path=path, least=least, most=most)
    items = base.max_items
    if max_items is None:
        items = min(items, *starts.values())
    return {
        path: generated_budgets(max(least, items), most) for path, least in starts.items()
    }, items


_CAPTURE = "prepare_encoder_cudagraph_capture_inputs()"
_REPLAY = "prepare_encoder_cudagraph_replay_buffers()"
_POISON = 0x7F  # an index that no buffer has, in an integer of any width


class GraphInputs:
    """What one graph reads. Not for several threads at a time."""

    def __init__(
        self, config: EncoderCudaGraphConfig, inputs: EncoderCudaGraphCaptureInputs
    ) -> None:
        values = getattr(inputs, "values", None)
        if not isinstance(values, dict):
            expected = "EncoderCudaGraphCaptureInputs(values={key: tensor})"
            raise EncoderError.returned(
                method=_CAPTURE[:-2], found=type(inputs).__name__, expected=expected
            )
        check_keys(values, config, _CAPTURE)
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                kind = f"{type(value).__name__} for {key!r}"
                raise EncoderError.returned(
                    method=_CAPTURE[:-2], found=kind, expected="a tensor for each key"
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
        return sum(tensor.nbytes for tensor in kept)

    def check_offsets(self) -> None:
        """Raise unless offsets end where their buffer does. Synchronises, so for captures alone."""
        for key in self._config.offset_keys:
            offsets = self.values[key].reshape(-1).tolist()
            if not offsets or offsets[-1] < 1 or offsets[-1] < max(offsets):
                raise EncoderError.no_offset_end(key=key, last=offsets[-1] if offsets else None)

    def write(self, rows: EncoderCudaGraphReplayBuffers, poison: bool = False) -> list[str]:
        """Fill the buffers for a replay. Nothing synchronises, but copies from pageable memory."""
        values = rows.values
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
        memory = dst.untyped_storage(), dst.storage_offset(), dst.size(), dst.stride()
        try:
            self._config.padding_logics[key](dst, value)
        except Exception as error:
            dst.set_(*memory)
            found = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EncoderError.padding_failed(
                key=key, found=_layout(value), room=room, error=found
            ) from error
        if dst.data_ptr() != before or _layout(dst) != room:
            found = _layout(dst)
            dst.set_(*memory)  # so that the next good call works
            raise EncoderError.buffer_moved(key=key, found=found, room=room)


def check_keys(values: Mapping[str, object], config: EncoderCudaGraphConfig, where: str) -> None:
    """Raise unless exactly the configured keys are there."""
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


Sizes = tuple[str, int]
"""Path and budget; the graphs of all values of capture axes go together."""


def choose_budgets(
    missing: Sequence[GraphKey],
    captured: Sequence[GraphKey],
    fits: Callable[[Sequence[Sizes]], bool],
) -> Sequence[Sizes]:
    """Choose which of the missing graphs to capture: all if all fit.

    Else the largest budget of each path comes first; a path for which it has no room gets no graph.
    Then as many budgets as fit, those first that save the most padding if all numbers of tokens are
    equally frequent.
    """
    have = {key[:2] for key in captured}
    ladders: dict[str, set[int]] = {}
    for path, budget, _ in (*missing, *captured):
        ladders.setdefault(path, set()).add(budget)
    order = [sizes for sizes in ranked(ladders) if sizes not in have]
    if fits(order):
        return order
    tops = [sizes for sizes in order if sizes[1] == max(ladders[sizes[0]])]
    first: list[Sizes] = []
    for sizes in tops:
        if fits([*first, sizes]):
            first.append(sizes)
    refused = {path for path, _ in tops} - {path for path, _ in first}
    rest = [sizes for sizes in order if sizes not in tops and sizes[0] not in refused]
    return most_that_fit([*first, *rest], len(first), fits)


log = logging.getLogger(__name__)

FULL = CUDAGraphMode.FULL

_MANY = 64  # graphs; each costs start-up time and memory


class EncoderGraphs:
    """Captures and replays the graphs of one encoder. Not for several threads at a time."""

    def __init__(
        self,
        model: CheckedModel,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
        settings: CompilationConfig,
        pool: GraphPool | None,
        check_weights: bool,
    ) -> None:
        self._model, self._config, self._limits = model, model.config, limits
        self._device, self._dtype = device, dtype
        self._columns = None if model.splits_results else self._config.out_hidden_size
        self._settings = settings
        self._owns_pool = pool is None  # what is shared may be in use
        if pool is None:
            capturing = capture_device(device, settings.capture_device)
            pool = None if capturing is None else GraphPool(capturing)
        self.pool = pool  # the memory of the graphs; None where nothing can be captured
        self._whole = Whole(model.model, self._recorded)
        self._wrapper = CUDAGraphWrapper(self._whole, settings, FULL, pool=pool, name="encoder")
        self._wrapper.closed = True  # but in capture()
        if pool is not None:
            pool.add_owner(self)
        self._runs: GraphKey | None = None
        self._modules = modules_of(model.model)
        self._check_weights = check_weights
        self._weights: list[WeightsGuard] = []
        self._inputs: dict[GraphKey, GraphInputs] = {}
        self._descriptors = {key: key.descriptor for key in self.planned()}
        self._empty: dict[str, Any] = {}
        self._dtypes: dict[str, dict[str, torch.dtype]] = {}
        self.kept_keys: dict[str, int] = {}  # how often a replay left a buffer as it was, by key
        self.without_room: dict[GraphKey, str] = {}
        if len(self._descriptors) > _MANY:
            log.warning("%d encoder graphs are planned", len(self._descriptors))

    # -------------------------------------------------------------- which graphs

    def planned(self) -> list[GraphKey]:
        """All that :meth:`capture` is to make, the largest first."""
        axes = [axis.values for axis in self._config.capture_axes]
        keys = [
            GraphKey(path, budget, values)
            for path, budgets in self._limits.budgets.items()
            for budget in budgets
            for values in product(*axes)
        ]
        return sorted(keys, key=lambda key: (key.budget, key.axes), reverse=True)

    def captured(self) -> list[GraphKey]:
        """What has a graph now, the largest first."""
        return [key for key in self._descriptors if self.has(key)]

    def has(self, key: GraphKey) -> bool:
        """Whether there is a graph."""
        return self._wrapper.entry_of(FULL, self._descriptors[key]) is not None

    @property
    def version(self) -> tuple[int, int]:
        """Equal as long as no graph comes or goes."""
        return (0 if self.pool is None else self.pool.generation, self.counters.captures)

    @property
    def wrapper(self) -> CUDAGraphWrapper:
        """What captures and replays."""
        return self._wrapper

    @property
    def counters(self) -> Counters:
        """What the graphs did."""
        return self._wrapper.counters

    @property
    def input_bytes(self) -> int:
        """Memory of the buffers of all graphs."""
        return sum(inputs.nbytes for inputs in self._inputs.values())

    def inputs(self, key: GraphKey) -> GraphInputs:
        """The buffers of one graph; made when they are first asked for."""
        if type(key) is not GraphKey:
            require_kind("key", "graph_inputs", key, GraphKey)
        inputs = self._inputs.get(key)
        if inputs is None:
            require_arguments("graph_inputs", {"key": key}, {"key": GraphKey})
            inputs = self._inputs[key] = self._new_inputs(key)
        return inputs

    def _new_inputs(self, key: GraphKey) -> GraphInputs:
        with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
            inputs = self._model.prepare_encoder_cudagraph_capture_inputs(
                key.budget,
                self._limits.max_items,
                self._limits.max_frames,
                self._device,
                self._dtype,
                **self.named(key.path, key.axes),
            )
        return GraphInputs(self._config, inputs)

    def _sample_inputs(self, path: str) -> dict[str, torch.Tensor]:
        """Return the buffers of the smallest graph of a path.

        New ones are not kept: they may be made after :meth:`forget`, or inside of another capture,
        in whose pool they would be without contents.
        """
        key = min(key for key in self._descriptors if key.path == path)
        return (self._inputs.get(key) or self._new_inputs(key)).values

    def named(self, path: str, axes: Sequence[int] | None = None) -> dict[str, Any]:
        """Return the keyword arguments of a method of the model: path and axes, if any."""
        named: dict[str, Any] = {}
        if list(self._limits.budgets) != [DEFAULT]:
            named["path"] = path
        if self._config.capture_axes and axes is not None:
            names = [axis.name for axis in self._config.capture_axes]
            named["axes"] = dict(zip(names, axes, strict=True))
        return named

    # -------------------------------------------------------------- capture

    def capture(
        self,
        around: Callable[[], AbstractContextManager[Any]],
        timed: Callable[[GraphKey, Callable[[], Any]], None],
        max_graph_bytes: int | None = None,
    ) -> BulkCapture:
        """Capture what is planned and has no graph yet."""
        if inside_capture():  # buffers would lie in its memory, without contents
            raise CaptureError.nested(what="capture of encoder graphs")
        missing = {batch: key for key, batch in self._descriptors.items() if not self.has(key)}
        if len(missing) == len(self._descriptors):
            self._weights = []  # the graphs that read them are gone
        self.without_room = self._left_out(list(missing.values()), around, max_graph_bytes)
        for key in self.without_room:
            del missing[self._descriptors[key]]
        for key in missing.values():
            self.inputs(key).check_offsets()
        self._wrapper.closed = False
        try:
            with around(), self._uncompiled():
                result = capture_set(
                    "Capturing encoder CUDA graphs",
                    FULL,
                    list(missing),
                    lambda descriptor, phase: self._first_run(missing[descriptor]),
                    self,
                    lambda: 0,
                    self._settings,
                )
        finally:
            self._wrapper.closed = True
        if self._check_weights and not self._weights:
            kind = self._device.type
            self._weights = [WeightsGuard(module, kind) for module in self._modules]
        for key in self.captured():
            timed(key, lambda key=key: self._run(key))  # type: ignore[misc]
        left_out = tuple((self._descriptors[key], why) for key, why in self.without_room.items())
        return replace(result, missing=result.missing + left_out)

    def _left_out(
        self,
        missing: list[GraphKey],
        around: Callable[[], AbstractContextManager[Any]],
        max_graph_bytes: int | None,
    ) -> dict[GraphKey, str]:
        """Return the graphs without room and the reason. They have no buffers afterwards."""
        if max_graph_bytes is None or self.pool is None or not missing:
            return {}
        left = max_graph_bytes - self.pool.nbytes

        def fits(some: Sequence[Sizes]) -> bool:
            return self._fit([key for key in missing if key[:2] in some], left)

        with around(), self._uncompiled():
            kept = choose_budgets(missing, self.captured(), fits)
        why = (
            f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={max_graph_bytes}, of which "
            f"{max(left, 0)} were left"
        )
        return {key: why for key in missing if key[:2] not in kept}

    def _fit(self, keys: Sequence[GraphKey], left: int) -> bool:
        """Capture graphs on memory that is dropped; return whether they fit in ``left`` bytes."""
        assert self.pool is not None
        pool, buffers = GraphPool(self.pool.device), 0
        wrapper = CUDAGraphWrapper(
            self._whole, self._settings, FULL, pool=pool, name="encoder, measured"
        )
        try:
            for key in keys:
                buffers += self._rehearse(key, wrapper)
                if pool.nbytes + buffers > left:
                    return False
            return True
        finally:
            wrapper.clear_all_graphs()
            pool.device.give_back()

    def _rehearse(self, key: GraphKey, wrapper: CUDAGraphWrapper) -> int:
        """Warm up and capture a graph to measure it; return the bytes that its buffers will add."""
        inputs = self._inputs.get(key) or self._new_inputs(key)
        inputs.check_offsets()

        def step(_: object = None) -> None:
            self._run(key, wrapper, inputs)

        warm_all(step, [key], tuple, self._settings.num_warmups)
        # The capture that counts reports what fails here.
        with bulk_capture(), suppress(Exception):
            step()
        return 0 if key in self._inputs else inputs.nbytes

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Return the device's context around compiled code, which the host recorder cannot see."""
        if self.pool is None or not any(map(compat.holds_compiled_code, self._modules)):
            return nullcontext()
        return self.pool.device.around()

    def _first_run(self, key: GraphKey) -> None:
        result = self._run(key)
        checked_rows(result, key.budget, self._columns, "encoder_cudagraph_forward")
        self._learn(key.path, result)

    def forget(self) -> None:
        """Drop graphs, buffers and memory; those of others that share the pool stay."""
        if inside_capture():
            raise CaptureError.release_inside()
        if self.pool is not None:
            self.pool.device.synchronize()  # a replay may still read the buffers
        if self._owns_pool:
            self._wrapper.clear_all_graphs()
        self._wrapper.clear_graphs()
        self._inputs.clear()
        self.without_room = {}
        self._weights = []

    # -------------------------------------------------------------- replay

    def blocked(self) -> Reason | None:
        """Why nothing may be replayed now, whatever is captured."""
        due = torch.is_grad_enabled() and any(map(holds_parameters_with_grad, self._modules))
        why = why_not_here(gradients=due)
        return None if why is None else why.reason

    def check_weights(self) -> None:
        """Raise if a weight is not what and where it was."""
        for guard in self._weights:
            guard.check("encoder", "its graphs")

    def replay(self, key: GraphKey, mm_kwargs: dict[str, Any], rows: int) -> Any:
        """Run items on a graph."""
        buffers = self._model.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs,
            self._limits.max_items,
            self._limits.max_frames,
            **self.named(key.path, key.axes),
        )
        assert self.pool is not None
        self.pool.follow_stream()  # a replay on another stream may read the buffers still
        if self._settings.poison and self._owns_pool:
            self.pool.poison()
        for name in self.inputs(key).write(buffers, poison=self._settings.poison):
            self.kept_keys[name] = self.kept_keys.get(name, 0) + 1
        return own_rows(self._run(key), rows)

    def eager(self, path: str, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> Any:
        """Run items without a graph: [output tokens, ...]."""
        if self._model.has_own("encoder_eager_forward"):
            result = self._model.encoder_eager_forward(mm_kwargs, **self.named(path))
        else:
            result = self._unpadded(path, mm_kwargs, specs)
        rows = sum(spec.tokens(path) for spec in specs)
        checked_rows(result, rows, self._columns, "encoder_eager_forward", exactly=True)
        self._learn(path, result)
        return result

    def _unpadded(
        self, path: str, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]
    ) -> Any:
        """The forward that graphs record, on what buffers would hold, without padding."""
        frames = sum(spec.frames for spec in specs)
        needed = [
            max((spec.axes.get(axis.name, 0) for spec in specs), default=0)
            for axis in self._config.capture_axes
        ]
        named = self.named(path, needed)
        buffers = self._model.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, len(specs), frames, **named
        )
        check_keys(buffers.values, self._config, "prepare_encoder_cudagraph_replay_buffers()")
        if path not in self._dtypes:
            sample = self._sample_inputs(path)
            self._dtypes[path] = {key: buffer.dtype for key, buffer in sample.items()}
        dtypes = self._dtypes[path]
        values: dict[str, torch.Tensor] = {}
        for key in self._config.buffer_keys:
            if buffers.values[key] is None:
                raise EncoderError.nothing_to_run_on(key=key)
            values[key] = buffers.values[key].to(self._device, dtypes[key])
        return self._forward(values, **named)

    def plain(self, key: GraphKey) -> Any:
        """What a graph records, without it."""
        return self._forward(self.inputs(key).values, **self.named(key.path, key.axes))

    def empty(self, path: str) -> Any:
        """A result without rows, of the structure that others have."""
        if path not in self._empty:  # nothing has run yet that could tell
            key = min(key for key in self._descriptors if key.path == path)
            self._learn(
                path, self._forward(self._sample_inputs(path), **self.named(path, key.axes))
            )
        return compat.tree_map(torch.clone, self._empty[path])

    def _learn(self, path: str, result: Any) -> None:
        if path not in self._empty:
            self._empty[path] = empty_rows(result)

    def _run(
        self,
        key: GraphKey,
        wrapper: CUDAGraphWrapper | None = None,
        inputs: GraphInputs | None = None,
    ) -> Any:
        self._runs = key
        with set_forward_context(
            None,
            cudagraph_runtime_mode=FULL,
            batch_descriptor=self._descriptors[key],
            num_tokens=key.budget,
        ):
            return (wrapper or self._wrapper)(**(inputs or self.inputs(key)).values)

    def _recorded(self, **values: torch.Tensor) -> Any:
        """What a graph records. Its key is no argument: flat ones are compared sooner."""
        assert self._runs is not None
        return self._forward(values, **self.named(self._runs.path, self._runs.axes))

    def _forward(self, values: dict[str, torch.Tensor], **named: Any) -> Any:
        """Run the forward that graphs record; the model may take from its dictionary."""
        with named_buffers(values):
            return self._model.encoder_cudagraph_forward(dict(values), **named)
