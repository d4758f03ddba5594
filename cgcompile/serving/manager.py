"""Capture all graphs of a model, and run each batch on the graph that serves it.

:class:`CudaGraphManager` owns what graphs are bound to: input buffers, output buffers, the graphs
themselves. The dispatcher chooses the graph of a batch, ``step_runner.py`` runs the step. The rule:
what a step returned is valid until the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import AgreementError, BatchError, DispatchError, ManagerError
from cgcompile.graphs.capture_all import BulkCapture, capture_set
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.locks import new_lock
from cgcompile.reasons import EXPECTED, Counters
from cgcompile.serving.batch import NO_WORK, Batch, GraphHooks, PaddingBatches
from cgcompile.serving.buffers import InputBuffer, StaticInputs
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched, check_numbers
from cgcompile.serving.memory_plan import (
    GraphMemory,
    MemoryMeter,
    MemoryPlan,
    choose_graphs,
    plan_memory,
)
from cgcompile.serving.plan import FULL, NONE, PIECEWISE, is_decode, largest, sets_of
from cgcompile.serving.ranks import Agreement, together
from cgcompile.serving.sizes import padding_table
from cgcompile.serving.statistics import DispatchStatistics
from cgcompile.serving.step_runner import BuildMetadata, CapturedGraphs, StepRunner
from cgcompile.settings import (
    checked,
    checked_but,
    require_callable,
    require_items,
    require_kind,
    require_whole,
)

Prepare = Callable[[BatchDescriptor, str], Batch]


class CudaGraphManager:
    """The graphs of one model, and the buffers that they read and write.

    One thread at a time: a call while another thread is inside of one is a :class:`ManagerError`.
    Two models (a draft and a target) are two managers.

    Args:
        model: called with the input buffers as keyword arguments. Compiled with the backend
            ``cgcompile`` or :func:`cgcompile.compile`, or not compiled.
        dispatcher: which graphs there are to be, and which of them serves a batch.
        inputs: the buffers.
        device: where they are.
        prepare: ``prepare(descriptor, phase)``: a batch of this padded size to warm up or to
            capture with; ``phase`` is ``"warmup"`` or ``"capture"``. Called afresh for each. Left
            out: :meth:`dummy_batch`.
        metadata: ``metadata(batch, descriptor, buffers)``: what the forward context holds, built
            after padding; ``descriptor`` tells the padded sizes, ``buffers`` are the padded views.
            FULL graphs read its tensors where they lay at capture: return views of buffers. Left
            out: no metadata.
        outputs: what rows of the model's results count: ``"tokens"`` or ``"reqs"``; one for all, or
            one for each tensor of the flattened result.
        backend: the handle of a compiled model; left out: found on the model.
        config: of the wrappers: splitting ops, ``capture_device``, ``num_warmups``; ``strict``:
            a batch that no graph serves is an error, and said before ranks agree.
        hooks: what others do around graphs.
        graph_capture: a context around each set of captures, such as a communicator's.
        lazily: capture a planned graph when a batch first needs it, after one warming call; else
            only :meth:`capture` does.
        inference_mode: capture and run in inference mode; else in the caller's mode.
        check_weights: compare objects and addresses of all weights before each FULL replay, about
            0.2 us a weight; else call :meth:`release` where one is replaced. Of a model that is no
            module those of the modules that it holds, but in globals.
        check_metadata: compare where tensors of ``metadata`` lie with where they lay at capture.
        agreement: ranks that run the same graphs, made with this dispatcher. All ranks make the
            same calls then: :meth:`capture`, and :meth:`run` at each step.

    Attributes:
        model: as given.
        backend: the handle of the model; None of one that is not compiled.
        dispatcher: as given; it records what has been captured.
        agreement: as given.
        inputs: the input buffers.
        statistics: what was dispatched; ``print(manager.statistics.coverage())``.
        meter: measures what graphs take.

    Raises:
        AgreementError: an agreement about another dispatcher.
        ConfigError: settings that cannot be.
        InputBufferError: two buffers of one name.
        ManagerError: an optional input without an axis of the dispatcher, or bad ``outputs``.
    """

    @checked_but("device", "inputs", "hooks", "model")
    def __init__(
        self,
        model: Callable[..., Any],
        dispatcher: CudagraphDispatcher,
        inputs: Iterable[InputBuffer],
        *,
        device: torch.device | str,
        prepare: Prepare | None = None,
        metadata: BuildMetadata | None = None,
        outputs: str | Sequence[str] = "tokens",
        backend: Backend | None = None,
        config: CompilationConfig | None = None,
        hooks: Sequence[GraphHooks] = (),
        graph_capture: Callable[[], AbstractContextManager[Any]] = nullcontext,
        lazily: bool = False,
        inference_mode: bool = True,
        check_weights: bool = True,
        check_metadata: bool = True,
        agreement: Agreement | None = None,
    ) -> None:
        require_callable("model", "CudaGraphManager", model)
        require_items("inputs", "CudaGraphManager", inputs)
        if agreement is not None and agreement.dispatcher is not dispatcher:
            raise AgreementError.other_dispatcher()
        self.model = model
        self.dispatcher = dispatcher
        self.agreement = agreement
        limits = dispatcher.limits
        self.inputs = StaticInputs(inputs, limits.max_num_tokens, limits.max_num_reqs, device)
        self.statistics = DispatchStatistics(dispatcher.plan())
        watched = model if check_weights else None
        self._graphs = CapturedGraphs(dispatcher, watched, torch.device(device).type)
        self._prepare = prepare or self.dummy_batch
        self._graph_capture = graph_capture
        self._padding_batches = PaddingBatches(self.inputs, dispatcher)
        self._config = CompilationConfig.resolve(config)
        self.backend = handle_of(model) if backend is None else backend
        self._steps = StepRunner(
            model,
            self.backend,
            self.inputs,
            device=torch.device(device),
            metadata=metadata,
            outputs=outputs,
            most=largest(dispatcher.plan(), FULL),
            graphs=self.needs_capture(),
            config=self._config,
            hooks=hooks,
            inference_mode=inference_mode,
            check_metadata=check_metadata,
        )
        self._lock = new_lock()
        self.meter = MemoryMeter(self._steps.pool, self.backend, self._steps.outputs)
        dispatcher.only_captured = not lazily  # last: nothing has failed

    # -------------------------------------------------------------- look-ups

    @property
    def bulk(self) -> dict[str, BulkCapture]:
        """The result of each set of captures, by its title."""
        return dict(self._graphs.bulk)

    @property
    def counters(self) -> Counters:
        """Captures, replays and fallbacks of all steps with graphs."""
        return self._steps.counters

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrappers that capture what the handle of a compiled model does not."""
        return self._steps.wrappers

    @property
    def pool(self) -> GraphPool | None:
        """The memory of FULL graphs, and of pieces of a model that is not compiled.

        None where nothing can be captured: in mode NONE, and without a device that has graphs.
        """
        return self._steps.pool

    @property
    def cudagraph_sizes(self) -> dict[int, int]:
        """Number of tokens -> planned size of the graph for any batch; empty if only decode has."""
        plan = self.dispatcher.plan()
        mode = self.dispatcher.mode.mixed_mode()
        sizes = {
            descriptor.num_tokens
            for planned_mode, descriptor in plan
            if planned_mode is mode and not is_decode(descriptor)
        }
        return padding_table(sorted(sizes))

    @property
    def uniform_decode_cudagraph_sizes(self) -> dict[int, int]:
        """Number of tokens -> planned size of the graph for uniform decode; empty without any.

        Of several query lengths it is the map of the longest, which is ``1 + draft tokens``.
        """
        uniform = [descriptor for _, descriptor in self.dispatcher.plan() if descriptor.uniform]
        longest = max((shape.query_len or 0 for shape in uniform), default=0)
        sizes = {shape.num_tokens for shape in uniform if shape.query_len == longest}
        table = padding_table(sorted(sizes))
        return {tokens: size for tokens, size in table.items() if tokens >= longest}

    @property
    def output_buffers(self) -> Any:
        """The whole buffers that FULL graphs write, structured as results; None before any."""
        return self._steps.outputs.whole

    def graph_memory(self) -> GraphMemory:
        """What the graphs take of the device now, in bytes, measured."""
        return self.meter.memory()

    def needs_capture(self) -> bool:
        """Whether any graph is planned."""
        return bool(self.dispatcher.plan())

    def get_cudagraph_size(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        *,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> int | None:
        """The padded size of the graph for so many tokens, captured or planned; None if none is.

        Adapters and axes are given as to the dispatcher.
        """
        return self.dispatcher.planned_size(
            num_tokens, uniform_decode, has_lora, num_active_loras, extra
        )

    def get_cudagraph_runtime_mode(
        self,
        num_reqs: int,
        num_tokens: int,
        max_query_len: int,
        *,
        has_lora: bool = False,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> tuple[CUDAGraphMode, int | None]:
        """(runtime mode, padded size) of a batch; (NONE, None) where no graph serves it.

        A batch counts as uniform decode if each request has ``max_query_len`` tokens and the
        dispatcher has that length. Prompts of equal length look the same: :meth:`dispatched` takes
        a :class:`Batch`, which tells them apart.
        Adapters and axes are given as to the dispatcher.
        """
        if not (type(num_tokens) is type(num_reqs) is type(max_query_len) is int):
            for name, value in (("num_reqs", num_reqs), ("max_query_len", max_query_len)):
                require_whole(name, "get_cudagraph_runtime_mode", value, 0, 2**63 - 1)
            check_numbers(num_tokens, num_reqs, max_query_len)
        uniform = num_tokens == max_query_len * num_reqs
        uniform &= max_query_len in self.dispatcher.query_lens
        variant = has_lora, num_active_loras, extra
        mode, descriptor, _ = self.dispatcher.dispatch(
            num_tokens, num_reqs, max_query_len, uniform, *variant
        )
        return (NONE, None) if mode is NONE else (mode, descriptor.num_tokens)

    def dispatched(self, batch: Batch, **restrictions: Any) -> Dispatched:
        """Return what a batch would run as; arguments are those of :meth:`run`."""
        if type(batch) is not Batch:
            require_kind("batch", "dispatched", batch, Batch)
        return self.dispatcher.dispatch(**batch.numbers(), **restrictions)

    def _allowed(self, batch: Batch, restrictions: dict[str, Any]) -> Dispatched:
        """Dispatch a batch; with ``strict`` raise if no graph serves it."""
        chosen = self.dispatched(batch, **restrictions)
        why = chosen.why
        if self._config.strict and chosen.mode is NONE and why and why.reason not in EXPECTED:
            what = f"a batch of {batch.num_tokens} tokens"
            raise DispatchError.strict(what=what, reason=why.reason.value, detail=why.detail)
        return chosen

    # -------------------------------------------------------------- capture

    def plan(self) -> MemoryPlan:
        """Measure what the planned graphs take of the device, in bytes, before any is there.

        All are captured and dropped again; see :func:`~cgcompile.serving.memory_plan.plan_memory`.

        Raises:
            ManagerError: a graph is there already.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        self._graphs.refuse_twice(self.dispatcher.plan())
        with self._alone("plan"), together(self.agreement):
            return plan_memory(self)

    @checked
    def capture(
        self, max_graph_bytes: int | None = None, histogram: Mapping[int, int] | None = None
    ) -> dict[str, BulkCapture]:
        """Warm up and capture what the dispatcher plans: PIECEWISE, then FULL, the largest first.

        What could not be captured is not dispatched; its reason is in the result.

        Args:
            max_graph_bytes: what all graphs may take of the device. If given, graphs are captured
                and dropped to measure them first, and where not all fit, those worth the most are
                captured. Batches of the other sizes are padded to the next larger graph.
            histogram: batch size in tokens -> number of steps: what graphs are worth; left out, all
                sizes are equally frequent.

        Returns:
            How each set went, by its title.

        Raises:
            ManagerError: a graph is there already, FULL has no metadata, or the budget is too small
                for the largest graphs.
            DispatchError: ``strict``, and a graph could not be captured.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        planned = chosen = self.dispatcher.plan()
        self._graphs.refuse_twice(planned)
        with self._alone("capture"), together(self.agreement):
            if max_graph_bytes is not None and self.pool is not None and planned:
                chosen = choose_graphs(self, max_graph_bytes, histogram)
            for title, mode, descriptors in sets_of(chosen):
                self._capture_set(title, mode, descriptors)
        self._graphs.leave_out(chosen, f"max_graph_bytes={max_graph_bytes} has no room for it")
        return self.bulk

    def capture_graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Warm up and capture one planned graph.

        Raises:
            ManagerError: a mode without graphs, a graph that is there, FULL without metadata.
            BatchError: it is not planned; nothing is captured.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        if mode not in (PIECEWISE, FULL):
            raise ManagerError.capture_mode(mode=getattr(mode, "name", str(mode)))
        if (mode, descriptor) not in self.dispatcher.plan():
            raise BatchError.not_planned(mode=mode.name, descriptor=str(descriptor))
        self._graphs.refuse_twice([(mode, descriptor)])
        with self._alone("capture_graph"), together(self.agreement):
            self._capture_set(f"Capturing {mode.name}, {descriptor}", mode, [descriptor])

    def _capture_set(
        self, title: str, mode: CUDAGraphMode, descriptors: list[BatchDescriptor]
    ) -> None:
        result = self.record(title, mode, descriptors, lambda _: self.meter.begin())
        self.meter.end()
        self._graphs.bulk[title] = result
        for descriptor in result.captured:
            self._graphs.add(mode, descriptor)
        for descriptor, why in result.missing:
            self.dispatcher.refused(mode, descriptor, why)

    def record(
        self,
        title: str,
        mode: CUDAGraphMode,
        descriptors: list[BatchDescriptor],
        before: Callable[[BatchDescriptor], None],
    ) -> BulkCapture:
        """Warm up and capture graphs without telling the dispatcher."""
        self._steps.hooks.before_capture(self.pool)

        def step(descriptor: BatchDescriptor, phase: str) -> None:
            if phase == "capture":
                before(descriptor)
            self.run_dummy(mode, descriptor, phase)

        with self.capturing():
            return capture_set(
                title,
                mode,
                descriptors,
                step,
                self,
                self.num_compilations,
                self._config,
                self.agreement,
            )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Enter the autograd mode of steps and the contexts around a set of captures."""
        with self._steps.mode(), self._graph_capture():
            yield

    def run_dummy(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, phase: str) -> None:
        """Run the step of a planned graph on a batch from ``prepare``."""
        if self.agreement is not None:
            self._steps.across = self.agreement.across(descriptor.num_tokens)
        self._steps.step(self._prepare(descriptor, phase), mode, descriptor)

    def num_compilations(self) -> int:
        """Return how often the model was compiled so far, the largest number of all ranks."""
        own = 0 if self.backend is None else self.backend.num_compilations
        return own if self.agreement is None else self.agreement.largest(own)

    @checked
    def dummy_batch(self, descriptor: BatchDescriptor, phase: str) -> Batch:
        """Return a batch of a padded size that any model can run; see :meth:`InputBuffer.dummy`.

        A graph for mixed batches is captured with one query of all tokens as the longest.
        """
        return self._padding_batches.dummy(descriptor)

    def release(self) -> None:
        """Drop all graphs and their memory, and the output buffers; :meth:`capture` works again.

        Results of earlier steps lie in that memory: drop them first.

        Raises:
            CaptureError: called inside of a step or of a capture.
        """
        with self._alone("release"):
            self._steps.drop_graphs()
            if self.backend is not None:
                self.backend.release()
            self._graphs.forget()

    def drop_graphs(self) -> None:
        """Drop the manager's own graphs and output buffers; a compiled model's stay."""
        self._steps.drop_graphs()

    # -------------------------------------------------------------- a step

    def run(self, batch: Batch | None, **restrictions: Any) -> Any:
        """Run one batch on the graph that serves it, or without one.

        With ``agreement`` every rank calls it at each step, one without work with None, or with no
        tokens and a ``state`` for its metadata, which is built for one request without tokens. Such
        a rank runs padding of the agreed size, so that collectives find it. In mode NONE each rank
        runs its own tokens unpadded, one without work the smallest planned size. A batch that is
        refused, or a moved weight of FULL graphs, is so before other ranks count on this one: it
        has not taken part in the step, and may still do so with another batch or None.

        Args:
            batch: real rows. Without ranks None and a batch with neither tokens nor inputs are no
                work; one without tokens but with inputs, of no rows, runs plain.
            **restrictions: ``valid_modes`` or ``invalid_modes`` of the dispatcher.

        Returns:
            What the model returns, real rows only; views, valid until the next step, where graphs
            ran; None without work. Nothing synchronises the device; an agreement waits for ranks.

        Raises:
            InputBufferError: inputs that do not fit the declarations; nothing ran.
            BatchError: numbers of the batch that contradict each other.
            ManagerError: another thread is inside of a call of this manager.
            DispatchError: ``strict``, and no graph serves the batch.
            AddressChangedError: a weight, or a tensor of metadata, moved since the capture.
            AgreementError: a rank stays away or, checked, runs something else.
            BaseException: what the model or ``metadata`` raised.
        """
        if batch is not None and type(batch) is not Batch:
            require_kind("batch", "run", batch, Batch, maybe=True)
        if not self._lock.acquire(False):
            raise ManagerError.other_thread(method="run")
        try:
            if self.agreement is not None:
                return self._run_agreed(batch or NO_WORK, restrictions)
            if batch is None or not (batch.num_tokens or batch.inputs):
                return None
            chosen = self._allowed(batch, restrictions)
            self._padding_batches.check(batch)
            return self._run(batch, chosen)
        finally:
            self._lock.release()

    @contextmanager
    def _alone(self, method: str) -> Iterator[None]:
        """Raise if another thread is inside of a call of this manager."""
        if not self._lock.acquire(False):
            raise ManagerError.other_thread(method=method)
        try:
            yield
        finally:
            self._lock.release()

    def _run_agreed(self, batch: Batch, restrictions: dict[str, Any]) -> Any:
        assert self.agreement is not None
        # Errors of this rank are raised before other ranks count on it.
        own = self._allowed(batch, restrictions)
        if batch.num_tokens:
            self._padding_batches.check(batch)
            self.inputs.check(batch.inputs, (batch.num_tokens, batch.num_reqs))
        if own.mode is FULL or not batch.num_tokens:  # else no rank takes a FULL graph
            self._graphs.check_weights(own.descriptor)
        agreed = self.agreement.dispatch(**batch.numbers(), **restrictions)
        if not agreed.has_work:
            return None
        chosen, self._steps.across = agreed.dispatched, agreed.num_tokens_across_dp
        if batch.num_tokens:
            return self._run(batch, chosen)
        phase = self._graphs.due(chosen.mode, chosen.descriptor)
        idle = self._padding_batches.idle(chosen.descriptor, batch.state)
        # A graph is never captured with the batch of an idle rank.
        self._run(self._prepare(chosen.descriptor, phase) if phase else idle, chosen)
        return None

    def _run(self, batch: Batch, chosen: Dispatched) -> Any:
        mode, descriptor = chosen.mode, chosen.descriptor
        steps = self._steps
        with steps.mode():
            if mode is NONE:
                result = steps.step(batch, mode, descriptor)
            else:
                result, chosen = steps.hooks.around(lambda: self._on_graph(batch, chosen))
        self.statistics.record(batch.num_tokens, chosen)
        return result

    def run_fullgraph(
        self,
        num_tokens: int,
        *,
        uniform: bool | None = None,
        num_active_loras: int = 0,
        extra: tuple[Any, ...] = (),
    ) -> Any:
        """Replay the FULL graph of a size on what the input buffers hold.

        For engines that write into ``inputs.buffers`` themselves, tails included. Ranks do not
        agree on it; with ``check`` of the agreement they compare it.

        Args:
            num_tokens: a padded size that was captured.
            uniform: that for uniform decode, or that for any batch; None: the first there is.
            num_active_loras: of the graph, as captured.
            extra: the values of all axes, as captured.

        Returns:
            What the model returns, all padded rows; views, valid until the next step.

        Raises:
            ManagerError: there is no such graph, gradients are asked for, or another thread is
                inside of a call of this manager.
            AddressChangedError: a weight moved since the capture.
            AgreementError: checked, and another rank runs something else.
        """
        if not self._lock.acquire(False):
            raise ManagerError.other_thread(method="run_fullgraph")
        try:
            descriptor = self._graphs.full(num_tokens, uniform, num_active_loras, extra)
            self._graphs.check_weights(descriptor)
            if self.agreement is not None:
                self.agreement.check_alone(FULL, descriptor)
                self._steps.across = self.agreement.across(num_tokens)
            return self._steps.replay(descriptor)
        finally:
            self._lock.release()

    def _on_graph(self, batch: Batch, chosen: Dispatched) -> tuple[Any, Dispatched]:
        """Return the result and how the step ran: without a graph if that is not captured yet."""
        agreed, strict, graphs = self.agreement is not None, self._config.strict, self._graphs
        result, why = graphs.step(self._steps, batch, *chosen[:2], agreed=agreed, strict=strict)
        plain = BatchDescriptor(batch.num_tokens)
        return result, chosen if why is None else Dispatched(NONE, plain, why)
