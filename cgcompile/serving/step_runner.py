"""What a FULL graph has read of a step's metadata: :class:`MetadataGuard`.

Attention inside of a graph goes on reading the tensors of the capture, whatever later steps build.
An engine that makes a new tensor for each step would get the results of old ones, without a word.

One step of a model in a given mode: :class:`StepRunner`.

The order is what matters: pad, stage, build metadata of the *padded* batch, set the forward
context, call, cut the real rows. It never begins a capture itself: a compiled model's entry
records PIECEWISE graphs, a wrapper around the whole step FULL ones, and a model that was never
compiled gets breakable capture. Which mode a batch gets is decided elsewhere.

What a manager has captured: the FULL graph of each size, what is warm, which weights it read.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import MemberDescriptorType
from typing import Any

import torch

from cgcompile import torch_compat as compat
from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import set_forward_context
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import AddressChangedError, CaptureError, ManagerError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.capture import postponed_capture, why_not_here
from cgcompile.graphs.capture_all import BulkCapture
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.guards import WeightsGuard
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.stale import StaleResults, check_debug
from cgcompile.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper, Whole, gradients_due
from cgcompile.reasons import EXPECTED, Counters, Fallback, Reason
from cgcompile.serving.batch import AllHooks, Batch, GraphHooks, Metadata
from cgcompile.serving.buffers import OutputBuffers, Outputs, StaticInputs
from cgcompile.serving.dispatcher import CudagraphDispatcher, check_numbers
from cgcompile.serving.plan import Planned
from cgcompile.settings import require, require_items, require_kind

_DEPTH = 3  # of objects in objects: deeper ones are not looked into
# Modules: their weights are compared elsewhere, and are many.
_NOT_LOOKED_INTO = (int, float, str, bytes, type, torch.nn.Module)


class MetadataGuard:
    """The addresses of the device's tensors in the metadata of one capture.

    Found in tuples, lists, mappings and objects with attributes, in slots too, three deep, at each
    step anew; that synchronises nothing. Tensors of the host are not looked at, where the device is
    another: a graph cannot read them.

    Args:
        metadata: of the capture.
        device: of the graph.
    """

    def __init__(self, metadata: Metadata, device: torch.device) -> None:
        self._type = device.type
        self._addresses = self._now(metadata)

    def _now(self, metadata: Metadata) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in ("attn_metadata", "slot_mapping", "additional"):
            value = getattr(metadata, name)
            if value is not None:
                found.update(_addresses(value, name, self._type, _DEPTH))
        return found

    def check(self, metadata: Metadata, descriptor: BatchDescriptor) -> None:
        """Compare with the metadata of a step that is about to be replayed.

        Raises:
            AddressChangedError: a tensor lies elsewhere, or is gone.
        """
        now = self._now(metadata)
        if now == self._addresses:
            return
        for path, before in self._addresses.items():
            if now.get(path) != before:
                found = now.get(path)
                raise AddressChangedError.metadata(
                    batch=str(descriptor), path=path, now=found, before=before
                )


def _addresses(value: Any, path: str, kind: str, depth: int) -> Iterator[tuple[str, int]]:
    if isinstance(value, torch.Tensor):
        if value.device.type == kind:
            yield path, value.data_ptr()
        return
    if not depth or value is None or isinstance(value, _NOT_LOOKED_INTO):
        return
    for name, part in _parts(value):
        yield from _addresses(part, f"{path}{name}", kind, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"[{place}]", part) for place, part in enumerate(value))
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    else:
        attributes = getattr(value, "__dict__", {})
        kind: Any = type(value)  # which mypy takes for unhashable
        yield from ((f".{name}", part) for name, part in attributes.items())
        for name in _declared(kind):
            if name not in attributes and hasattr(value, name):
                yield f".{name}", getattr(value, name)


@lru_cache(maxsize=256)
def _declared(kind: Any) -> tuple[str, ...]:
    """Attributes that may be in no ``__dict__``: those in slots, and fields with a default."""
    slots = (
        name
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, member in vars(each).items()
        if isinstance(member, MemberDescriptorType)
    )
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return tuple(dict.fromkeys([*(each.name for each in fields), *slots]))


FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

# What wrappers in a part of the model may say at each replay, as the step is not theirs.
_OF_PARTS = EXPECTED - {Reason.WARMING}

BuildMetadata = Callable[[Batch, BatchDescriptor, dict[str, Any]], Metadata]


class StepRunner:
    """A model and what of its steps stays: buffers, wrappers, memory. Not for several threads.

    Args:
        model: as the manager was given it.
        backend: the handle of a compiled model; None: it is not compiled.
        inputs: the buffers.
        device: where they are.
        metadata: builds what the forward context holds; None: nothing.
        outputs: what rows of results count.
        most: (tokens, requests) of the largest FULL graph.
        graphs: whether any graph is planned; else there is no pool.
        config: of the wrappers.
        hooks: what others do around graphs.
        inference_mode: run in inference mode; else in the caller's.
        check_metadata: compare where metadata of the device lies with where it was at capture.

    Attributes:
        pool: memory of FULL graphs, and of pieces of a model that is not compiled; None without
            graphs.
        full: records and replays whole steps.
        outputs: buffers of what whole steps return.
        hooks: all of them, as one.
        across: int32 [R] on the CPU, the tokens that each of R ranks runs in the next step; None
            without ranks.
        ran_plain: why the last step ran without the graph that it was to replay; None if it did.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        backend: Backend | None,
        inputs: StaticInputs,
        *,
        device: torch.device,
        metadata: BuildMetadata | None,
        outputs: str | Sequence[str],
        most: tuple[int, int],
        graphs: bool,
        config: CompilationConfig,
        hooks: Sequence[GraphHooks],
        inference_mode: bool,
        check_metadata: bool,
    ) -> None:
        where = "CudaGraphManager"
        require_kind("backend", where, backend, Backend, maybe=True)
        require_items("hooks", where, hooks, GraphHooks)
        require(isinstance(outputs, (str, Sequence)), "outputs", where, outputs, "names of rows")
        self._model = model
        self._backend = backend
        self._inputs = inputs
        self._arguments = [spec.name for spec in inputs.specs if spec.argument]
        self._metadata = metadata
        self._rows = Outputs(outputs)
        self.outputs = OutputBuffers(self._rows, most)
        self.hooks = AllHooks(hooks)
        self._inference_mode = inference_mode
        self._raises_if_changed = config.on_input_change == "raise"
        self._config = config
        self._spoils = config.debug or config.poison
        self._stale = StaleResults()
        check_debug(config.debug)
        self._checks_metadata = check_metadata
        self._baked: dict[BatchDescriptor, MetadataGuard] = {}
        self._sizes = (0, 0)  # of the step that runs, padded
        self.across: torch.Tensor | None = None
        self.ran_plain: Fallback | None = None
        found = capture_device(device, config.capture_device) if graphs else None
        self.pool = None if found is None else GraphPool(found)
        whole = Whole(model, self._whole)
        self.full = BreakableCUDAGraphWrapper(whole, config, FULL, pool=self.pool, name="step")
        self.full.before_capture = self.hooks.before_full_capture
        self._pieces: Any = model
        if backend is None:
            self._pieces = BreakableCUDAGraphWrapper(
                model, config, PIECEWISE, pool=self.pool, name="model"
            )

    @property
    def counters(self) -> Counters:
        """What steps with graphs did: FULL steps, and those of the model or of its pieces."""
        return self.full.counters + (self._backend or self._pieces).counters

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """What records FULL steps, and the steps of a model that is not compiled."""
        pieces = (self._pieces,) if self._backend is None else ()
        return (self.full, *pieces)

    def mode(self) -> AbstractContextManager[Any]:
        """The autograd mode of all steps."""
        return torch.inference_mode() if self._inference_mode else nullcontext()

    def step(self, batch: Batch, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """Pad, stage, build metadata, call; in the mode of :meth:`mode`, which the caller sets.

        Returns:
            What the model returns, real rows only.

        Raises:
            ManagerError: FULL without metadata; or results with other rows than declared.
            AddressChangedError: metadata of a FULL graph lies elsewhere than at its capture.
            HostValueChangedError: another autocast mode than at the capture of a FULL graph.
        """
        self.ran_plain = None
        real = (batch.num_tokens, batch.num_reqs)
        padded = (descriptor.num_tokens, descriptor.num_reqs or batch.num_reqs)
        buffers = self._inputs.stage(batch.inputs, real, padded)
        metadata = Metadata()
        if self._metadata is not None:
            metadata = self._metadata(batch, descriptor, buffers)
            if mode is FULL and metadata.attn_metadata is None:
                raise ManagerError.no_metadata(batch=str(descriptor))
        entry = self._entry(descriptor) if mode is FULL else None
        guard = None if entry is None else self._baked.get(descriptor)
        if guard is not None:
            guard.check(metadata, descriptor)
        if self._spoils and mode is not NONE:
            self._spoil(mode)
        if entry is not None and "inputs_ready" not in metadata.additional:
            result = self._rows.replayed(self.full.replay_entry(entry), padded, real)
            return self._tracked(result, descriptor) if self._config.debug else result
        run = self._model if mode is NONE else self.full if mode is FULL else self._pieces
        across = metadata.num_tokens_across_dp
        with set_forward_context(
            metadata.attn_metadata,
            cudagraph_runtime_mode=mode,
            batch_descriptor=None if mode is NONE else descriptor,
            num_tokens=padded[0],
            num_unpadded_tokens=real[0],
            num_tokens_across_dp=self.across if across is None else across,
            slot_mapping=metadata.slot_mapping,
            **metadata.additional,
        ) as context:
            self._sizes = padded
            result = run(**{name: buffers[name] for name in self._arguments})
        why = None if context is None else context.ran_plain
        if why is not None and why.reason not in _OF_PARTS:
            self.ran_plain = why
        if mode is FULL and self._checks_metadata and descriptor not in self._baked:
            self._remember(metadata, descriptor)
        result = self._rows.real(result, padded, real)
        return self._tracked(result, descriptor) if self._config.debug else result

    def _spoil(self, mode: CUDAGraphMode) -> None:
        """Show what is read of earlier results from now on: as NaN, or as an error."""
        if self._config.debug:
            self._stale.expire(None)
        if self._config.poison and mode is FULL:
            self.outputs.poison()

    def _tracked(self, result: Any, descriptor: BatchDescriptor) -> Any:
        """A result in the output buffers that raises once it is stale."""
        leaves, spec = compat.tree_leaves(result), compat.tree_spec(result)
        what = f"the manager's step, {descriptor}"
        made = self._stale.hand_out(leaves, self.outputs.owns, None, what)
        return compat.tree_unflatten(made, spec)

    def _remember(self, metadata: Metadata, descriptor: BatchDescriptor) -> None:
        """Just after a capture: where its metadata lies."""
        if self.pool is not None and self.full.entry_of(FULL, descriptor) is not None:
            self._baked[descriptor] = MetadataGuard(metadata, self.pool.where)

    def _entry(self, descriptor: BatchDescriptor) -> CUDAGraphEntry | None:
        """The graph of a whole step, if a replay of it is all that is to be done.

        Its arguments are views of our own buffers, and nothing in it reads a context: both need no
        look. In grad mode the wrapper judges whether gradients are asked for.
        """
        if not self._raises_if_changed or self._why_not_here() is not None:
            return None
        return self.full.entry_of(FULL, descriptor)

    def _why_not_here(self) -> Fallback | None:
        """As of a wrapper; whether gradients are due in grad mode depends on the call."""
        return why_not_here(gradients=not self._inference_mode and torch.is_grad_enabled())

    def replay(self, descriptor: BatchDescriptor) -> Any:
        """Replay a FULL graph on what the buffers hold: all padded rows.

        Raises:
            ManagerError: gradients are asked for, or a capture runs.
        """
        with self.mode():
            entry = self.full.entry_of(FULL, descriptor)
            if entry is None or self._why_not_here() is not None:
                raise ManagerError.no_replay(batch=str(descriptor))
            self._inputs.follow_stream()
            self._inputs.written_by_others()
            if self._spoils:
                self._spoil(FULL)
            result = self.hooks.around(lambda: self.full.replay_entry(entry))
        sizes = (descriptor.num_tokens, descriptor.num_reqs or descriptor.num_tokens)
        result = self._rows.replayed(result, sizes, sizes)
        return self._tracked(result, descriptor) if self._config.debug else result

    def _whole(self, **given: Any) -> Any:
        """What a FULL graph records: the model, the joins of others, the copy of the results."""
        result = self._model(**given)
        self.hooks.end_of_capture()
        if gradients_due(False, (result,), {}):  # runs plain then, and must stay differentiable
            return result
        return self.outputs.keep(result, self._sizes)

    def drop_graphs(self) -> None:
        """Drop graphs and output buffers, and their memory; those of a compiled model stay."""
        self.full.clear_all_graphs()
        if self._backend is None:
            self._pieces.clear_all_graphs()
        self.outputs.release()
        self._stale.clear()
        self._rows.forget()
        self._baked.clear()


_FLAGS = (bool, type(None))
_WARMING = Fallback(Reason.WARMING, "the first step of a graph; the next one captures it")


class CapturedGraphs:
    """The bookkeeping of one manager. The dispatcher stays the judge of what may run.

    Args:
        dispatcher: told of each capture.
        model: whose weights FULL graphs read; None: not looked at.
        tensor_type: the device type of its tensors.

    Attributes:
        bulk: how each set of captures went, by its title.
        warmed: what has run plain once, and is captured the next time.
    """

    def __init__(
        self,
        dispatcher: CudagraphDispatcher,
        model: Callable[..., Any] | None,
        tensor_type: str,
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._tensor_type = tensor_type
        self._weights: WeightsGuard | None = None
        self._full: dict[int, list[BatchDescriptor]] = {}
        self.bulk: dict[str, BulkCapture] = {}
        self.warmed: set[Planned] = set()

    def add(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """A planned graph exists now.

        Raises:
            GuardError: a FULL graph, and a weight is not as it was at the first one.
        """
        if mode is FULL:
            self.check_weights(descriptor)
        self._dispatcher.captured(mode, descriptor)
        self.warmed.discard((mode, descriptor))
        if mode is not FULL:
            return
        same_size = self._full.setdefault(descriptor.num_tokens, [])
        if descriptor not in same_size:
            same_size.append(descriptor)
            same_size.sort(key=lambda each: not each.uniform)
        if self._weights is None:
            model = self._model
            unwrapped = getattr(model, "unwrap", lambda: model)()
            self._weights = WeightsGuard(unwrapped, self._tensor_type)

    def due(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> str:
        """``"warmup"`` or ``"capture"``: what a step of this graph would be; "" for neither."""
        if mode is CUDAGraphMode.NONE or self._dispatcher.is_captured(mode, descriptor):
            return ""
        return "capture" if (mode, descriptor) in self.warmed else "warmup"

    def leave_out(self, chosen: Collection[Planned], why: str) -> None:
        """Planned graphs that were not chosen will not exist."""
        for mode, descriptor in self._dispatcher.plan():
            if (mode, descriptor) not in chosen:
                self._dispatcher.refused(mode, descriptor, why)

    def refuse_twice(self, planned: Iterable[Planned]) -> None:
        """Raise if any of these exists already.

        Raises:
            ManagerError: it does.
        """
        for mode, descriptor in planned:
            if self._dispatcher.is_captured(mode, descriptor):
                raise ManagerError.twice(mode=mode.name, batch=str(descriptor))

    def check_weights(self, descriptor: BatchDescriptor) -> None:
        """Raise if a weight is not as it was at the first FULL capture.

        Raises:
            AddressChangedError: one was replaced or moved.
            HostValueChangedError: a 0-dim CPU tensor has another value.
        """
        if self._weights is not None:  # pieces look at their own
            self._weights.check("the captured step", descriptor)

    def step(
        self,
        steps: StepRunner,
        batch: Batch,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        *,
        agreed: bool,
        strict: bool,
    ) -> tuple[Any, Fallback | None]:
        """Run a step on its graph; or capture that, after one warming step.

        Args:
            steps: runs it.
            batch: real rows.
            mode: PIECEWISE or FULL.
            descriptor: of the graph.
            agreed: ranks have agreed on it.
            strict: raise what a capture raises. Else what cannot be captured as a whole runs plain
                from now on; ranks that have to agree cannot do so one by one.

        Returns:
            (what the step returned, why it ran without a graph or None).
        """
        if self._dispatcher.is_captured(mode, descriptor):
            if mode is FULL and not agreed:  # else they were, before ranks agreed
                self.check_weights(descriptor)
            return steps.step(batch, mode, descriptor), steps.ran_plain
        if (mode, descriptor) not in self.warmed:
            self.warmed.add((mode, descriptor))
            with postponed_capture():
                return steps.step(batch, mode, descriptor), _WARMING
        before = steps.counters + Counters()  # a wrapper goes on counting in its own
        try:
            result = steps.step(batch, mode, descriptor)
        except CaptureError as error:
            if mode is not FULL or strict or agreed:
                raise
            # Of a whole step nothing has run yet.
            self._dispatcher.refused(mode, descriptor, str(error).splitlines()[0])
            why = Fallback(Reason.CAPTURE_FAILED, str(error).splitlines()[0])
            plain = BatchDescriptor(batch.num_tokens)
            return steps.step(batch, CUDAGraphMode.NONE, plain), why
        after = steps.counters
        if after.captures > before.captures:
            self.add(mode, descriptor)
        reasons = after.plain - before.plain
        return result, next((Fallback(each, after.details[each]) for each in reasons), None)

    def full(
        self, num_tokens: int, uniform: bool | None, loras: int, extra: tuple[Any, ...]
    ) -> BatchDescriptor:
        """The FULL graph of a padded size and variant; of several the one for uniform decode.

        Raises:
            ManagerError: there is none.
        """
        if not (type(num_tokens) is type(loras) is int and type(uniform) in _FLAGS):
            check_numbers(num_tokens, None, None, loras, uniform is not None and uniform)
        for each in self._full.get(num_tokens, ()):
            same = (each.num_active_loras, each.extra) == (loras, extra)
            same &= uniform in (None, each.uniform)
            if same and self._dispatcher.is_captured(FULL, each):
                return each
        usable = [
            size
            for size, same_size in self._full.items()
            if any(self._dispatcher.is_captured(FULL, each) for each in same_size)
        ]
        raise ManagerError.no_graph(num_tokens=num_tokens, captured=sorted(usable))

    def forget(self) -> None:
        """No graph exists any more."""
        self._weights = None
        self._full.clear()
        self.warmed.clear()
        self.bulk.clear()
        self._dispatcher.forget()
