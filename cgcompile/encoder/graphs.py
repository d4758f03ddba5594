"""The graphs of one encoder: sizes, buffers, capture and replay (:class:`EncoderGraphs`).

A graph reads the addresses that it was captured with, padded rows included. So each replay writes
all rows of the buffers: the real ones, then zeros, or what a padding logic writes; offsets go on to
the end, so that padding is a sequence like others. The rule: everything is checked before anything
is written.

A pool gives no memory back for one graph. With a limit of bytes graphs are therefore captured for
trial first, on memory that is dropped as a whole, and measured there.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import set_forward_context
from cgcompile.descriptor import BatchDescriptor
from cgcompile.encoder.budgets import Limits
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.packing import Capacity
from cgcompile.encoder.protocol import (
    DEFAULT,
    ZERO,
    CheckedModel,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPaddingLogic,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    check_cast,
    check_keys,
    check_rows,
    check_values,
    layout,
    named_buffers,
    path_arguments,
    unpadded_forward,
)
from cgcompile.encoder.statistics import on_path
from cgcompile.errors import CaptureError
from cgcompile.graphs.capture import bulk_capture, capture_postponed, inside_capture
from cgcompile.graphs.capture_all import BulkCapture, capture_set, warm_all
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool, measure_captures, most_that_fit
from cgcompile.graphs.reads import modules_of
from cgcompile.graphs.steps import check_here
from cgcompile.graphs.wrapper import (
    CUDAGraphEntry,
    CUDAGraphWrapper,
    ManagedCall,
    ManagedStep,
    holds_parameters_with_grad,
)
from cgcompile.ladders import rank_sizes
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.settings import require_arguments, require_kind
from cgcompile.source_lines import raised_at
from cgcompile.torch_compat import torch_ops

log = logging.getLogger(__name__)

FULL = CUDAGraphMode.FULL
_DROPOUT = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout
_MANY = 64  # graphs; each costs start-up time and memory


class GraphKey(NamedTuple):
    """What one graph was captured for.

    Attributes:
        path: its set of graphs.
        budget: rows of its result.
        axes: one value for each capture axis.

    Example:
        >>> cgcompile.encoder.GraphKey("default", 64)
        GraphKey(path='default', budget=64, axes=())
    """

    path: str
    budget: int
    axes: tuple[int, ...] = ()

    @property
    def descriptor(self) -> BatchDescriptor:
        """The key in the form of the forward context."""
        path = () if self.path == DEFAULT else (self.path,)
        return BatchDescriptor(self.budget, extra=(*path, *self.axes))


# ---------------------------------------------------------------- buffers

Around = Callable[[], AbstractContextManager[Any]]

_CAPTURE = "prepare_encoder_cudagraph_capture_inputs"
_REPLAY = "prepare_encoder_cudagraph_replay_buffers()"
_POISON = 0x7F  # an index that no buffer has, in an integer of any width


class GraphInputs:
    """The buffers that one graph reads. Not for several threads at a time."""

    def __init__(
        self,
        config: EncoderCudaGraphConfig,
        inputs: EncoderCudaGraphCaptureInputs,
        budget: int | None = None,
    ) -> None:
        self._where = "" if budget is None else f" of budget {budget}"
        values = getattr(inputs, "values", None)
        if not isinstance(values, dict):
            expected = "EncoderCudaGraphCaptureInputs(values={key: tensor})"
            kind = type(inputs).__name__
            raise EncoderError.returned(call=f"{_CAPTURE}()", found=kind, expected=expected)
        check_keys(values, config, _CAPTURE + "()")
        for key, value in values.items():
            if not isinstance(value, torch.Tensor):
                returned = f"{type(value).__name__} for {key!r}"
                expected = "a tensor for each key"
                raise EncoderError.returned(call=f"{_CAPTURE}()", found=returned, expected=expected)
        self._config = config
        self.values: dict[str, torch.Tensor] = dict(values)
        # Last offsets. A copy on the device, so that nothing synchronises: buffers are overwritten.
        offsets = config.longest_padding
        self._ends = {key: values[key][-1:].clone() for key in offsets}
        self._steps = {
            key: torch.arange(1, len(values[key]) + 1, device=values[key].device) * longest
            for key, longest in offsets.items()
            if longest is not None
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers and of the constants that fill them."""
        tensors = [*self.values.values(), *self._ends.values(), *self._steps.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def check_offsets(self) -> None:
        """Raise unless offsets end with their largest. Synchronises: for captures alone."""
        for key in self._ends:
            offsets = self.values[key].reshape(-1).tolist()
            if not offsets or offsets[-1] < 1 or offsets[-1] < max(offsets):
                raise EncoderError.no_offset_end(key=key, last=offsets[-1] if offsets else None)

    def write(self, buffers: EncoderCudaGraphReplayBuffers, poison: bool = False) -> list[str]:
        """Fill the buffers for a replay; return the keys that were left as they are."""
        values = buffers.values
        check_keys(values, self._config, _REPLAY)
        for key, dst in self.values.items():
            if values[key] is not None:
                self._check(key, dst, values[key])
        kept = []
        for key, dst in self.values.items():
            value, rule = values[key], self._config.buffers[key]
            if value is None and rule.on_none != ZERO:
                kept.append(key)
                continue
            if poison:
                floating = dst.is_floating_point() or dst.is_complex()
                dst.fill_(float("nan") if floating else _POISON)
            if value is None:
                dst.zero_()
                self._fill(key, dst, dst[:1] if dst.dim() else dst)
            elif callable(rule.tail):
                self._pad(key, dst, value, rule.tail)
            else:
                self._fill(key, dst, value)
        return kept

    def _check(self, key: str, dst: torch.Tensor, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise EncoderError.buffer_value(key=key, found=kind, expected="a tensor, or None")
        if callable(self._config.buffers[key].tail):
            return
        alike = _alike(value, dst.shape, dst.dtype)
        if alike and key in self._ends and len(value) >= len(dst):
            entries, room = len(value), max(len(dst) - 2, 0)
            raise EncoderError.no_offset_room(
                key=key, budget=self._where, entries=entries, room=room
            )
        if not alike or (dst.dim() and len(value) > len(dst)):
            rows = f"at most the rows of {layout(dst)}" if dst.dim() else layout(dst)
            if alike:
                raise EncoderError.buffer_value(key=key, found=layout(value), expected=rows)
            raise EncoderError.buffer_layout(key=key, found=layout(value), expected=rows)
        check_cast(key, value, dst.dtype)

    def _fill(self, key: str, dst: torch.Tensor, value: torch.Tensor) -> None:
        """Copy the real rows; zero the others, or let offsets go on to the end."""
        if not dst.dim():
            dst.copy_(value)
            return
        real = len(value)
        dst[:real].copy_(value, non_blocking=True)
        if key not in self._ends:
            dst[real:].zero_()
            return
        if not real:
            dst[:1].zero_()
            real = 1
        tail, end = dst[real:], self._ends[key]
        if key not in self._steps:  # padded rows are one sequence
            tail.copy_(end.expand_as(tail))
            return
        rising = dst[real - 1 : real] + self._steps[key][: len(tail)]
        tail.copy_(torch.minimum(rising, end))
        dst[-1:].copy_(end)

    def _pad(
        self,
        key: str,
        dst: torch.Tensor,
        value: torch.Tensor,
        logic: EncoderCudaGraphPaddingLogic,
    ) -> None:
        """Let a padding logic write a buffer; restore one that it moved, and raise."""
        address, room = dst.data_ptr(), layout(dst)
        memory = dst.untyped_storage(), dst.storage_offset(), dst.size(), dst.stride()
        try:
            logic(dst, value)
        except Exception as error:
            dst.set_(*memory)
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EncoderError.padding_failed(
                key=key, found=layout(value), room=room, error=text
            ) from error
        if dst.data_ptr() != address or layout(dst) != room:
            current = layout(dst)
            dst.set_(*memory)
            raise EncoderError.buffer_moved(key=key, found=current, room=room)


_Layout = tuple[torch.Size, torch.dtype]


def _alike(value: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> bool:
    """Return whether rows of a buffer can hold those of a value."""
    same = value.dim() == len(shape) and value.shape[1:] == shape[1:]
    return same and torch.can_cast(value.dtype, dtype)


# ---------------------------------------------------------------- which graphs

_NOTE = (
    "In the warm-up of encoder budget {budget}{path}, without a graph: the forward cannot run on "
    "its buffers: {buffers}.\n  They hold a whole budget: offsets end in empty sequences, and "
    "where all images have one size, budgets must be multiples of its tokens. Check in_features= "
    "and the shapes of tables. A graph is 'missing' only where the forward runs and cannot be "
    "captured."
)
_FAILED = f"{Reason.CAPTURE_FAILED.value}: "
_REMEDY = "clear(), capture()"  # where a weight was replaced


def _fails(why: str) -> bool:
    """Return whether a graph is missing for an error, and not for another reason."""
    first = why.partition(":")[0]
    return why.startswith(_FAILED) or first not in [reason.value for reason in Reason]


Size = tuple[str, int]
"""Path and budget. Graphs of all values of capture axes are captured together."""


def choose_sizes(
    missing: Sequence[GraphKey],
    captured: Sequence[GraphKey],
    fits: Callable[[Sequence[Size]], bool],
) -> Sequence[Size]:
    """Choose which missing graphs to capture: all that fit, the largest of each path first."""
    # Then as many budgets as fit, those first that save the most padding for equal frequencies.
    have = {key[:2] for key in captured}
    ladders: dict[str, set[int]] = {}
    for path, budget, _ in (*missing, *captured):
        ladders.setdefault(path, set()).add(budget)
    order = [size for size in rank_sizes(ladders) if size not in have]
    if fits(order):
        return order
    tops = [size for size in order if size[1] == max(ladders[size[0]])]
    first: list[Size] = []
    for size in tops:
        if fits([*first, size]):
            first.append(size)
    refused = {path for path, _ in tops} - {path for path, _ in first}
    rest = [size for size in order if size not in tops and size[0] not in refused]
    return most_that_fit([*first, *rest], len(first), fits)


@dataclass(frozen=True)
class EncoderSetup:
    """What a manager and its graphs are made of."""

    model: CheckedModel
    limits: Limits
    device: torch.device
    dtype: torch.dtype
    settings: CompilationConfig

    @property
    def config(self) -> EncoderCudaGraphConfig:
        """The encoder, as the model describes it."""
        return self.model.config

    @property
    def paths(self) -> list[str]:
        """The sets of graphs."""
        return list(self.limits.budgets)

    def all_keys(self) -> list[GraphKey]:
        """Return all graphs to capture, the largest first."""
        keys = [
            GraphKey(path, budget, values)
            for path, budgets in self.limits.budgets.items()
            for budget in budgets
            for values in product(*self.config.graph_sets[path].axes.values())
        ]
        return sorted(keys, key=lambda key: (key.budget, key.axes), reverse=True)


class ItemsCall(ManagedCall):
    """A group of items on the graph of a key, whose buffers hold them; or eager."""

    __slots__ = ("_graphs", "_group")

    def __init__(
        self,
        graphs: "EncoderGraphs",
        key: GraphKey,
        mm_kwargs: dict[str, Any],
        specs: Sequence[EncoderItemSpec],
    ) -> None:
        descriptor, arguments = graphs._descriptors[key], graphs.inputs(key).values
        super().__init__(graphs.wrapper, descriptor, arguments)
        self._graphs, self._group = graphs, (key.path, mm_kwargs, specs)

    def replay(self, step: CUDAGraphEntry) -> Any:
        path, _, specs = self._group
        rows = sum(spec.tokens(path) for spec in specs)
        return torch_ops.tree_map(lambda leaf: leaf[:rows].clone(), super().replay(step))

    def plain(self, why: Fallback) -> Any:
        return self._graphs.eager(*self._group)


class EncoderGraphs:
    """Captures and replays the graphs of one encoder. Not for several threads at a time."""

    def __init__(self, setup: EncoderSetup, pool: GraphPool | None) -> None:
        self._setup, self._model, self._config = setup, setup.model, setup.config
        self._columns = None if setup.model.splits_results else setup.config.out_hidden_size
        self._owns_pool = pool is None  # a shared pool may be in use
        if pool is None:
            device = capture_device(setup.device, setup.settings.capture_device)
            pool = None if device is None else GraphPool(device)
        self.pool = pool  # None where nothing can be captured
        self._modules = modules_of(setup.model.model)
        self._whole = ManagedStep(setup.model.model, self._recorded, self._modules)
        self.wrapper = CUDAGraphWrapper(
            self._whole, setup.settings, FULL, pool=pool, name="encoder"
        )
        self.wrapper.closed = True  # except in capture()
        self.wrapper.remedy = _REMEDY
        self.wrapper.returns_views = False  # results are copied under the lock of the pool
        if pool is not None:
            pool.add_owner(self)
        self._inputs: dict[GraphKey, GraphInputs] = {}
        self._descriptors = {key: key.descriptor for key in setup.all_keys()}
        self._running: GraphKey | None = None
        self._capacity: tuple[tuple[int, int], Capacity] | None = None  # with its version
        self._empty: dict[str, Any] = {}  # by path, a result without rows
        self._layouts: dict[str, dict[str, _Layout]] = {}  # of buffers, by path
        self.kept_keys: dict[str, int] = {}  # how often a replay left a buffer as it was, by key
        self.without_room: dict[GraphKey, str] = {}
        self.failed: dict[GraphKey, str] = {}  # with the first line of the error
        self._raised: dict[GraphKey, str] = {}  # the line of the forward that raised it
        if len(self._descriptors) > _MANY:
            log.warning("%d encoder graphs are planned", len(self._descriptors))

    # -------------------------------------------------------------- which graphs

    def captured(self) -> list[GraphKey]:
        """Return the keys that have a graph now, the largest first."""
        return [key for key in self._descriptors if self.has(key)]

    def has(self, key: GraphKey) -> bool:
        """Return whether a key has a graph."""
        return self.wrapper.entry_of(FULL, self._descriptors[key]) is not None

    def capacity(self) -> Capacity:
        """Return what the captured graphs hold; without budgets while none may be replayed."""
        limits = self._setup.limits
        if self.blocked():
            return Capacity(((),) * len(limits.budgets), *limits[1:])
        captures = self.wrapper.timeline.live.captures
        version = (0 if self.pool is None else self.pool.generation, captures)
        if self._capacity is None or self._capacity[0] != version:
            captured = {(key.path, key.budget) for key in self.captured()}
            budgets = tuple(
                tuple(budget for budget in budgets if (path, budget) in captured)
                for path, budgets in limits.budgets.items()
            )
            self._capacity = version, Capacity(budgets, *limits[1:])
        return self._capacity[1]

    @property
    def input_bytes(self) -> int:
        """Bytes of the buffers of all graphs."""
        return sum(inputs.nbytes for inputs in self._inputs.values())

    def inputs(self, key: GraphKey) -> GraphInputs:
        """Return the buffers of one graph, which are made at first use."""
        if type(key) is not GraphKey:
            require_kind("key", "graph_inputs", key, GraphKey)
        inputs = self._inputs.get(key)
        if inputs is None:
            require_arguments("graph_inputs", {"key": key}, {"key": GraphKey})
            inputs = self._inputs[key] = self._new_inputs(key)
        return inputs

    def _new_inputs(self, key: GraphKey) -> GraphInputs:
        setup = self._setup
        with torch.inference_mode(False), torch.no_grad():  # they are written in any mode
            inputs = self._model.prepare_encoder_cudagraph_capture_inputs(
                key.budget,
                setup.limits.max_items,
                setup.limits.max_frames,
                setup.device,
                setup.dtype,
                **path_arguments(self._config, key.path, key.axes),
            )
        return GraphInputs(self._config, inputs, key.budget)

    def _sample(self, path: str) -> tuple[GraphKey, GraphInputs]:
        """Return the smallest graph of a path and its buffers."""
        # New ones are not kept: inside another capture they would have memory of its pool.
        key = min(key for key in self._descriptors if key.path == path)
        return key, self._inputs.get(key) or self._new_inputs(key)

    # -------------------------------------------------------------- capture

    def capture(self, max_graph_bytes: int | None, around: Around) -> BulkCapture:
        """Capture the graphs that are missing, inside of a context."""
        if inside_capture():  # buffers would have memory of that capture, without contents
            raise CaptureError.nested(what="capture of encoder graphs")
        missing = {batch: key for key, batch in self._descriptors.items() if not self.has(key)}
        self.failed, self._raised = {}, {}
        if missing:
            self._warn_of_dropout()
        self.without_room = self._left_out(list(missing.values()), max_graph_bytes, around)
        for key in self.without_room:
            del missing[self._descriptors[key]]
        for key in missing.values():  # memory of the caller's stream, whatever the context changes
            self.inputs(key).check_offsets()
        self.wrapper.closed = False
        try:
            with around(), self._uncompiled():
                result = capture_set(
                    "Capturing encoder CUDA graphs",
                    FULL,
                    list(missing),
                    lambda batch, phase: self._first_run(missing[batch]),
                    self.wrapper,
                    lambda: 0,
                    self._setup.settings,
                )
        finally:
            self.wrapper.closed = True
        lacking = [(missing[batch], why) for batch, why in result.missing]
        lacking = [(key, why + self._raised.get(key, "")) for key, why in lacking]
        self.failed = {key: why.removeprefix(_FAILED) for key, why in lacking if _fails(why)}
        result = replace(result, missing=tuple((key.descriptor, why) for key, why in lacking))
        left_out = tuple((self._descriptors[key], why) for key, why in self.without_room.items())
        return replace(result, missing=result.missing + left_out)

    def _left_out(
        self, missing: Sequence[GraphKey], max_graph_bytes: int | None, around: Around
    ) -> dict[GraphKey, str]:
        """Return the graphs that have no room, with the reason."""
        if max_graph_bytes is None or self.pool is None or not missing:
            return {}
        left = max_graph_bytes - self.pool.nbytes
        needs: dict[Size, int] = {}  # of a size that has no room alone

        def fits(sizes: Sequence[Size]) -> bool:
            nbytes = self._measured([key for key in missing if key[:2] in sizes], left)
            if nbytes > left and len(sizes) == 1:
                needs[sizes[0]] = nbytes
            return nbytes <= left

        with around(), self._uncompiled():
            chosen = choose_sizes(missing, self.captured(), fits)
        why = (
            f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={max_graph_bytes}, of which "
            f"{max(left, 0)} were left"
        )
        for (path, budget), nbytes in needs.items():
            why += f"; budget {budget}{on_path(path)} alone needs {nbytes} or more"
        return {key: why for key in missing if key[:2] not in chosen}

    def _measured(self, keys: Sequence[GraphKey], left: int) -> int:
        """Capture graphs for trial; return their bytes and their buffers', up to above ``left``."""
        assert self.pool is not None
        pool, settings = GraphPool(self.pool.device), self._setup.settings
        wrapper = CUDAGraphWrapper(self._whole, settings, FULL, pool=pool, name="encoder, measured")
        buffers: list[int] = []

        def capture(key: GraphKey) -> None:
            inputs = self._inputs.get(key) or self._new_inputs(key)
            inputs.check_offsets()
            buffers.append(0 if key in self._inputs else inputs.nbytes)

            def step(key: GraphKey) -> None:
                with self._noted(key, inputs):
                    self._run(key, wrapper, inputs)

            warm_all(step, [key], tuple, settings.num_warmups)
            with bulk_capture(), suppress(Exception):  # the real capture reports what fails
                step(key)

        def drop() -> None:
            wrapper.clear_all_graphs()
            pool.device.give_back()

        captures = [partial(capture, key) for key in keys]
        taken, exceeds = lambda: pool.nbytes + sum(buffers), lambda nbytes: nbytes > left
        return measure_captures(captures, taken, exceeds, drop)

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """Return the device's context around compiled code, which the host recorder cannot see."""
        if self.pool is None or not any(map(torch_ops.holds_compiled_code, self._modules)):
            return nullcontext()
        return self.pool.device.around()

    @contextmanager
    def _noted(self, key: GraphKey, inputs: GraphInputs) -> Iterator[None]:
        """Add the budget and the buffers to an error of a warm-up; keep the line of others."""
        try:
            yield
        except Exception as error:
            line = raised_at(error)
            self._raised[key] = "" if line is None else f" ({line})"
            if capture_postponed():
                buffers = ", ".join(f"{k} {layout(value)}" for k, value in inputs.values.items())
                path = on_path(key.path)
                text = _NOTE.format(budget=key.budget, path=path, buffers=buffers)
                text += self._other_dtypes()
                torch_ops.add_note(error, text)
            raise

    def _other_dtypes(self) -> str:
        """Return a hint where floating point weights are not of the dtype of the buffers."""
        weights = [tensor for module in self._modules for tensor in module.parameters()]
        dtypes = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
        if not dtypes or self._setup.dtype in dtypes:
            return ""
        names = ", ".join(sorted(map(str, dtypes)))
        return f" The manager has dtype={self._setup.dtype}, and weights are of {names}."

    def _warn_of_dropout(self) -> None:
        """Log that a tower drops numbers at random, in each replay too."""
        for module in self._modules:
            for name, layer in module.named_modules():
                if isinstance(layer, _DROPOUT) and layer.training and layer.p > 0:
                    text = "dropout is on in %s%s: results are random. Remedy: tower.eval()"
                    where = f", {name}" if name else ""
                    log.warning(text, type(module).__name__, where)
                    return

    def _first_run(self, key: GraphKey) -> None:
        with self._noted(key, self.inputs(key)):
            result = self.run(key)
        check_rows(result, key.budget, self._columns, "encoder_cudagraph_forward")
        self._keep_empty(key.path, result)

    def release(self) -> None:
        """Drop graphs, buffers and memory, but nothing of others that share the pool."""
        if inside_capture():
            raise CaptureError.release_inside(what="a capture")
        if self.pool is not None:
            self.pool.device.synchronize()  # a replay may still read the buffers
        if self._owns_pool:
            self.wrapper.clear_all_graphs()
        self.wrapper.clear_graphs()
        self._inputs.clear()
        self.without_room, self.failed = {}, {}

    # -------------------------------------------------------------- replay

    def blocked(self) -> Reason | None:
        """Return why nothing may be replayed now, whatever is captured."""
        due = torch.is_grad_enabled() and any(map(holds_parameters_with_grad, self._modules))
        try:
            check_here(gradients=due)
        except RunPlain as refusal:
            return refusal.why.reason
        return None

    def fill(
        self, key: GraphKey, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]
    ) -> ItemsCall:
        """Fill the buffers of a graph with items; return the call that replays it."""
        limits, settings = self._setup.limits, self._setup.settings
        buffers = self._model.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs,
            limits.max_items,
            limits.max_frames,
            **path_arguments(self._config, key.path, key.axes),
        )
        check_values(buffers.values, self._config, specs, key.path, "stale" in settings.debug)
        assert self.pool is not None
        self.pool.follow_stream()  # a replay on another stream may still read the buffers
        if "poison" in settings.debug and self._owns_pool:
            self.pool.poison()
        for name in self.inputs(key).write(buffers, poison="poison" in settings.debug):
            self.kept_keys[name] = self.kept_keys.get(name, 0) + 1
        return ItemsCall(self, key, mm_kwargs, specs)

    def eager(self, path: str, mm_kwargs: dict[str, Any], specs: Sequence[EncoderItemSpec]) -> Any:
        """Run items without a graph: [output tokens, ...]."""
        named = path_arguments(self._config, path)
        if self._model.has_own("encoder_eager_forward"):
            result = self._model.encoder_eager_forward(mm_kwargs, **named)
        else:
            result = unpadded_forward(
                self._model, self._config, path, mm_kwargs, specs, self._converter(path)
            )
        rows = sum(spec.tokens(path) for spec in specs)
        check_rows(result, rows, self._columns, "encoder_eager_forward", exactly=True)
        self._keep_empty(path, result)
        return result

    def _converter(self, path: str) -> Callable[[str, torch.Tensor], torch.Tensor]:
        """Return a function that moves values where the buffers of a path are, as their dtype."""
        if path not in self._layouts:
            _, sample = self._sample(path)
            values = sample.values.items()
            self._layouts[path] = {key: (value.shape, value.dtype) for key, value in values}
        layouts = self._layouts[path]

        def converted(key: str, value: torch.Tensor) -> torch.Tensor:
            shape, dtype = layouts[key]
            if callable(self._config.buffers[key].tail):  # it may cast as it likes
                return value.to(self._setup.device, dtype)
            if not _alike(value, shape, dtype):
                expected = f"rows of {list(shape)} of {str(dtype).removeprefix('torch.')}"
                raise EncoderError.buffer_layout(key=key, found=layout(value), expected=expected)
            check_cast(key, value, dtype)
            return value.to(self._setup.device, dtype)

        return converted

    def empty(self, path: str) -> Any:
        """Return a result without rows, of the structure of others."""
        if path not in self._empty:  # nothing has run yet
            key, sample = self._sample(path)
            self._keep_empty(path, self._forward(key, sample.values))
        return torch_ops.tree_map(torch.clone, self._empty[path])

    def _keep_empty(self, path: str, result: Any) -> None:
        if path not in self._empty:
            self._empty[path] = torch_ops.tree_map(
                lambda leaf: leaf.new_empty((0, *leaf.shape[1:])), result
            )

    def run(self, key: GraphKey) -> Any:
        """Replay a graph, or capture it if that is allowed, on its buffers as they are."""
        return self._run(key, self.wrapper, self.inputs(key))

    def plain(self, key: GraphKey) -> Any:
        """Run what a graph records on its buffers, without the graph."""
        return self._forward(key, self.inputs(key).values)

    def _run(self, key: GraphKey, wrapper: CUDAGraphWrapper, inputs: GraphInputs) -> Any:
        self._running = key
        with set_forward_context(
            None,
            cudagraph_runtime_mode=FULL,
            batch_descriptor=self._descriptors[key],
            num_tokens=key.budget,
        ):
            return wrapper(**inputs.values)

    def _recorded(self, **values: torch.Tensor) -> Any:
        """Run what a graph records. Its key is no argument: flat arguments compare faster."""
        assert self._running is not None
        return self._forward(self._running, values)

    def _forward(self, key: GraphKey, values: dict[str, torch.Tensor]) -> Any:
        named = path_arguments(self._config, key.path, key.axes)
        with named_buffers(values):  # a copy: the forward may take from its dictionary
            return self._model.encoder_cudagraph_forward(dict(values), **named)
