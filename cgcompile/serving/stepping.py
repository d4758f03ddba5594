"""One step of a model in a given mode: :class:`StepRunner`.

The order is what matters: pad, stage, build metadata of the *padded* batch, set the forward
context, call, cut the real rows. It never begins a capture itself: a compiled model's entry
records PIECEWISE graphs, a wrapper around the whole step FULL ones, and a model that was never
compiled gets breakable capture. Which mode a batch gets is decided elsewhere.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from cgcompile import compat
from cgcompile.backend import Backend
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptors import BatchDescriptor
from cgcompile.errors import ManagerError
from cgcompile.forward_context import eager_region_is_open, set_forward_context
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.entries import CUDAGraphEntry, Whole, gradients_due
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.stale import StaleResults, check_debug
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import EXPECTED, Counters, Reason, Why
from cgcompile.serving.baked import MetadataGuard
from cgcompile.serving.buffers import StaticInputs
from cgcompile.serving.outputs import OutputBuffers, Outputs
from cgcompile.serving.steps import AllHooks, Batch, GraphHooks, Metadata
from cgcompile.settings import require, require_items, require_kind

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
        self._poison = config.poison
        self._spoils = config.debug or config.poison
        self._stale = StaleResults()
        check_debug(config.debug)
        self._checks_metadata = check_metadata
        self._baked: dict[BatchDescriptor, MetadataGuard] = {}
        self._sizes = (0, 0)  # of the step that runs, padded
        self.across: torch.Tensor | None = None
        self.ran_plain: Why | None = None
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
            result = self._rows.replayed(self._replay(entry), padded, real)
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
        if not self._raises_if_changed or self._judged_by_the_wrapper():
            return None
        return self.full.entry_of(FULL, descriptor)

    def _judged_by_the_wrapper(self) -> bool:
        if inside_capture() or eager_region_is_open():
            return True
        return not self._inference_mode and torch.is_grad_enabled()

    def _replay(self, entry: CUDAGraphEntry) -> Any:
        assert self.pool is not None
        assert entry.guard is not None
        entry.guard.check_autocast("step", entry.batch_descriptor)
        self.pool.follow_stream()
        if self._poison:
            self.pool.poison_free()
        entry.sequence.replay()
        self.full.counters.calls += 1
        self.full.counters.replays += 1
        entry.tally.replays += 1
        return entry.output

    def replay(self, descriptor: BatchDescriptor) -> Any:
        """Replay a FULL graph on what the buffers hold: all padded rows.

        Raises:
            ManagerError: gradients are asked for, or a capture runs.
        """
        with self.mode():
            entry = self.full.entry_of(FULL, descriptor)
            if entry is None or self._judged_by_the_wrapper():
                raise ManagerError.no_replay(batch=str(descriptor))
            self._inputs.follow_stream()
            self._inputs.written_by_others()
            if self._spoils:
                self._spoil(FULL)
            result = self.hooks.around(lambda: self._replay(entry))
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
