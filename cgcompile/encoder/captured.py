"""The graphs of one encoder, their keys, buffers, capture and replay: :class:`EncoderGraphs`."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from cgcompile import compat
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.encoder.defs import DEFAULT, EncoderCudaGraphConfig, EncoderItemSpec
from cgcompile.encoder.keys import GraphKey
from cgcompile.encoder.limits import Limits
from cgcompile.encoder.protocol import CheckedModel, named_buffers
from cgcompile.encoder.results import checked_rows, empty_rows, own_rows
from cgcompile.encoder.room import Rehearsal, left_out
from cgcompile.encoder.staging import GraphInputs, check_keys
from cgcompile.errors import CaptureError, EncoderError
from cgcompile.forward_context import eager_region_is_open, set_forward_context
from cgcompile.graphs.bulk import BulkCapture
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.entries import Whole, holds_parameters_with_grad
from cgcompile.graphs.guards import WeightsGuard
from cgcompile.graphs.modules import modules_of
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sets import capture_set
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Counters, Reason
from cgcompile.settings import require_arguments, require_kind

log = logging.getLogger(__name__)

FULL = CUDAGraphMode.FULL

_MANY = 64  # graphs; each costs start-up time and memory


class EncoderGraphs:
    """Captures and replays. Not for several threads at a time.

    Args:
        model: what speaks the protocol.
        config: of the encoder.
        limits: what is captured.
        device: where the buffers are.
        dtype: of floating point buffers.
        settings: ``capture_device``, ``num_warmups``, ``strict``, ``poison``.
        pool: memory shared with others; None: one of its own.
        check_weights: compare the weights of modules before replays.

    Attributes:
        pool: the memory of the graphs; None where nothing can be captured.
        kept_keys: how often a replay left a buffer as it was, by key.
        without_room: what the last capture left out for its bytes, with the reason as text.
    """

    def __init__(
        self,
        model: CheckedModel,
        config: EncoderCudaGraphConfig,
        limits: Limits,
        device: torch.device,
        dtype: torch.dtype,
        settings: CompilationConfig,
        pool: GraphPool | None,
        check_weights: bool,
    ) -> None:
        self._model, self._config, self._limits = model, config, limits
        self._device, self._dtype = device, dtype
        # A model that splits results itself decides there how many columns items have.
        splits = model.has_own("postprocess_encoder_output")
        self._columns = None if splits else config.out_hidden_size
        self._settings = settings
        self._owns_pool = pool is None  # what is shared may be in use
        if pool is None:
            found = capture_device(device, settings.capture_device)
            pool = None if found is None else GraphPool(found)
        self.pool = pool
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
        self.kept_keys: dict[str, int] = {}
        self.without_room: dict[GraphKey, str] = {}
        if len(self._descriptors) > _MANY:
            log.warning("%d encoder graphs are planned", len(self._descriptors))

    # -------------------------------------------------------------- which graphs

    def planned(self) -> list[GraphKey]:
        """All that :meth:`capture` is to make, the largest first."""
        axes = [axis.values for axis in self._config.capture_axes]
        found = [
            GraphKey(path, budget, values)
            for path, budgets in self._limits.budgets.items()
            for budget in budgets
            for values in product(*axes)
        ]
        return sorted(found, key=lambda key: (key.budget, key.axes), reverse=True)

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
        return sum(each.nbytes for each in self._inputs.values())

    def inputs(self, key: GraphKey) -> GraphInputs:
        """The buffers of one graph; made when they are first asked for."""
        if type(key) is not GraphKey:
            require_kind("key", "graph_inputs", key, GraphKey)
        found = self._inputs.get(key)
        if found is None:
            require_arguments("graph_inputs", {"key": key}, {"key": GraphKey})
            found = self._inputs[key] = self._made(key)
        return found

    def _made(self, key: GraphKey) -> GraphInputs:
        with torch.inference_mode(False), torch.no_grad():  # written in whatever mode
            made = self._model.prepare_encoder_cudagraph_capture_inputs(
                key.budget,
                self._limits.max_items,
                self._limits.max_frames,
                self._device,
                self._dtype,
                **self.named(key.path, key.axes),
            )
        return GraphInputs(self._config, made)

    def _looked_at(self, path: str) -> dict[str, torch.Tensor]:
        """The buffers of the smallest graph of a path, for a look.

        What is made for it alone is not kept: it may be made after :meth:`forget`, or inside of the
        capture of others, whose memory it would lie in, without contents.
        """
        key = min(key for key in self._descriptors if key.path == path)
        return (self._inputs.get(key) or self._made(key)).values

    def named(self, path: str, axes: Sequence[int] | None = None) -> dict[str, Any]:
        """What a method of the model is told by name: the path and the axes, if there are any."""
        found: dict[str, Any] = {}
        if list(self._limits.budgets) != [DEFAULT]:
            found["path"] = path
        if self._config.capture_axes and axes is not None:
            names = [axis.name for axis in self._config.capture_axes]
            found["axes"] = dict(zip(names, axes, strict=True))
        return found

    # -------------------------------------------------------------- capture

    def capture(
        self,
        around: Callable[[], AbstractContextManager[Any]],
        timed: Callable[[GraphKey, Callable[[], Any]], None],
        max_graph_bytes: int | None = None,
    ) -> BulkCapture:
        """Capture what is planned and has no graph yet.

        Args:
            around: entered around all captures, and before around what is measured.
            timed: called with each captured key and what replays it, in no capture.
            max_graph_bytes: what ``pool.nbytes`` may come to.

        Raises:
            CaptureError: called inside of a capture.
        """
        if inside_capture():  # buffers would lie in its memory, without contents
            raise CaptureError.nested(what="capture of encoder graphs")
        missing = {each: key for key, each in self._descriptors.items() if not self.has(key)}
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
                found = capture_set(
                    "Capturing encoder CUDA graphs",
                    CUDAGraphMode.FULL,
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
            self._weights = [WeightsGuard(each, kind) for each in self._modules]
        for key in self.captured():
            timed(key, lambda key=key: self._run(key))  # type: ignore[misc]
        left_out = tuple((self._descriptors[key], why) for key, why in self.without_room.items())
        return replace(found, missing=found.missing + left_out)

    def _left_out(
        self,
        missing: list[GraphKey],
        around: Callable[[], AbstractContextManager[Any]],
        max_graph_bytes: int | None,
    ) -> dict[GraphKey, str]:
        """What has no room, and why. Nothing of it has buffers afterwards."""
        if max_graph_bytes is None or self.pool is None or not missing:
            return {}
        pool = self.pool
        with around(), self._uncompiled():
            return left_out(
                missing,
                self.captured(),
                max_graph_bytes,
                max_graph_bytes - pool.nbytes,
                lambda: Rehearsal(pool, self._settings, self._whole),
                self._rehearse,
            )

    def _rehearse(self, key: GraphKey, rehearsal: Rehearsal) -> int:
        """Capture on other memory what is to be measured; the bytes that its buffers will add."""
        inputs = self._inputs.get(key) or self._made(key)
        inputs.check_offsets()
        rehearsal.run(key.descriptor, lambda: self._run(key, rehearsal.wrapper, inputs))
        return 0 if key in self._inputs else inputs.nbytes

    def _uncompiled(self) -> AbstractContextManager[Any]:
        """What a device asks for around compiled code: the host recorder cannot look into it."""
        if self.pool is None or not any(map(compat.holds_compiled_code, self._modules)):
            return nullcontext()
        return self.pool.device.around()

    def _first_run(self, key: GraphKey) -> None:
        result = self._run(key)
        checked_rows(result, key.budget, self._columns, "encoder_cudagraph_forward")
        self._learn(key.path, result)

    def forget(self) -> None:
        """Drop graphs, buffers and memory; those of others that share the pool stay.

        Raises:
            CaptureError: called inside of a capture; nothing is dropped then.
        """
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
        if inside_capture():
            return Reason.INSIDE_CAPTURE
        if eager_region_is_open():
            return Reason.EAGER_REGION
        if torch.is_grad_enabled() and any(map(holds_parameters_with_grad, self._modules)):
            return Reason.GRADIENTS
        return None

    def check_weights(self) -> None:
        """Raise if a weight is not what and where it was.

        Raises:
            AddressChangedError: it was replaced or moved.
            HostValueChangedError: a 0-dim CPU tensor has another value.
        """
        for guard in self._weights:
            guard.check("encoder", "its graphs")

    def replay(self, key: GraphKey, mm_kwargs: dict[str, Any], rows: int) -> Any:
        """Run items on a graph.

        Args:
            key: what is captured.
            mm_kwargs: the items.
            rows: output tokens of them all.

        Returns:
            [rows, ...] in memory of its own, on the current stream.
        """
        given = self._model.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs,
            self._limits.max_items,
            self._limits.max_frames,
            **self.named(key.path, key.axes),
        )
        assert self.pool is not None
        self.pool.follow_stream()  # a replay on another stream may read the buffers still
        if self._settings.poison and self._owns_pool:
            self.pool.poison()
        for name in self.inputs(key).write(given, poison=self._settings.poison):
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
        made = self._model.prepare_encoder_cudagraph_replay_buffers(
            mm_kwargs, len(specs), frames, **named
        )
        check_keys(made.values, self._config, "prepare_encoder_cudagraph_replay_buffers()")
        if path not in self._dtypes:
            looked_at = self._looked_at(path)
            self._dtypes[path] = {key: each.dtype for key, each in looked_at.items()}
        dtypes = self._dtypes[path]
        values: dict[str, torch.Tensor] = {}
        for key in self._config.buffer_keys:
            if made.values[key] is None:
                raise EncoderError.nothing_to_run_on(key=key)
            values[key] = made.values[key].to(self._device, dtypes[key])
        return self._forward(values, **named)

    def plain(self, key: GraphKey) -> Any:
        """What a graph records, without it."""
        return self._forward(self.inputs(key).values, **self.named(key.path, key.axes))

    def empty(self, path: str) -> Any:
        """A result without rows, of the structure that others have."""
        if path not in self._empty:  # nothing has run yet that could tell
            key = min(key for key in self._descriptors if key.path == path)
            self._learn(path, self._forward(self._looked_at(path), **self.named(path, key.axes)))
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
