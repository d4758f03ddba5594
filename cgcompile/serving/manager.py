"""Capture all graphs of a model, and run each batch on the graph that serves it.

:class:`CudaGraphManager` owns what graphs are bound to: input buffers, output buffers, the graphs
themselves. A step pads, stages its inputs, builds the metadata of the *padded* batch, sets the
forward context, calls the model and returns the real rows. The rule: what a step returned is valid
until the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from threading import get_ident
from typing import Any, cast

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.compile import CompiledModel
from cgcompile.compile import compile as compile_model
from cgcompile.config import CompilationConfig, CompilationMode, CUDAGraphMode, with_check
from cgcompile.context import set_forward_context
from cgcompile.descriptor import BatchDescriptor
from cgcompile.errors import BatchError, CaptureError, ConfigError, ManagerError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.capture import bulk_captures, postponed_capture
from cgcompile.graphs.capture_all import BulkCapture, capture_set
from cgcompile.graphs.device import capture_device, wait_for_inputs
from cgcompile.graphs.pool import GraphMemory, GraphPool, StepThread
from cgcompile.graphs.results import check_debug
from cgcompile.graphs.steps import refuse_strict
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.ladders import padding_table
from cgcompile.locks import new_lock, owns_lock
from cgcompile.modes import AttentionCGSupport
from cgcompile.reasons import EXPECTED, Counters, Fallback, Reason
from cgcompile.serving.batch import (
    NO_WORK,
    Batch,
    GraphHooks,
    Metadata,
    axes_of_optional,
    padding_batch,
)
from cgcompile.serving.buffers import TOKENS, InputBuffer, Outputs, StaticInputs
from cgcompile.serving.dispatcher import CudagraphDispatcher, Dispatched, check_numbers
from cgcompile.serving.errors import AgreementError, InputBufferError
from cgcompile.serving.full_graphs import REMEDY, Epilogue, FilledCall, FullCall, FullGraphs
from cgcompile.serving.memory_plan import (
    MemoryMeter,
    MemoryPlan,
    choose_graphs,
    plan_memory,
)
from cgcompile.serving.plan import FULL, NONE, PIECEWISE, Planned, is_decode, largest, sets_of
from cgcompile.serving.ranks import Agreement, together
from cgcompile.serving.sizes import capture_sizes
from cgcompile.serving.statistics import DispatchStatistics
from cgcompile.settings import (
    LARGEST_ROWS,
    NO_BUILTIN,
    checked,
    checked_but,
    require,
    require_callable,
    require_items,
    require_kind,
    require_whole,
    takes_earlier,
    whole,
)
from cgcompile.torch_compat import torch_ops

Prepare = Callable[[BatchDescriptor, str], Batch]
BuildMetadata = Callable[[Batch, BatchDescriptor, dict[str, Any]], Metadata]

_LARGEST_DEFAULT = 512  # tokens of the largest graph, where no sizes are given

_WARMING = Fallback(Reason.WARMING, "the first step of a graph; the next one captures it")
# Reasons that wrappers in a part of the model may have at each replay: the step is not theirs.
_OF_PARTS = EXPECTED - {Reason.WARMING}


_FROM_MODEL = "CudaGraphManager.from_model"


def _divided(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Divide arguments between dispatcher and manager, and ``only_captured``; raise for others."""
    only_captured = arguments.pop("only_captured", True)
    of_earlier_dispatchers = vars(CudagraphDispatcher.__init__)["earlier"]
    of_dispatcher = {*signature(CudagraphDispatcher).parameters} - {"mode"}
    of_manager = {*signature(CudaGraphManager).parameters} - {"dispatcher", "backend"}
    earlier = {*vars(CudaGraphManager.__init__)["earlier"]} - {"backend"}
    for name in arguments:
        if name not in of_dispatcher | of_manager | earlier | {*of_earlier_dispatchers}:
            names = sorted({*of_dispatcher, *of_manager, "only_captured"})
            raise ConfigError.unknown_setting(name=name, where=_FROM_MODEL, known=names, earlier={})
    mine = {name: value for name, value in arguments.items() if name in of_manager | earlier}
    return {name: arguments[name] for name in arguments if name not in mine}, mine, only_captured


def _declared(inputs: Iterable[InputBuffer]) -> list[InputBuffer]:
    """Return the declarations of input buffers, which may come from an iterator."""
    require_items("inputs", _FROM_MODEL, inputs)
    declared = list(inputs)
    require_items("inputs", _FROM_MODEL, declared, InputBuffer)
    return declared


def _arguments(model: Any, inputs: Iterable[InputBuffer]) -> list[str]:
    """Return the names of the buffers that a model gets; raise where it has no such parameter."""
    names = [spec.name for spec in inputs if spec.argument]
    original = torch_ops.original_of(model) or model
    while isinstance(original, CompiledModel | CUDAGraphWrapper):
        original = original.unwrap()
    try:
        parameters = signature(getattr(original, "forward", original)).parameters
    except (TypeError, ValueError):  # of a builtin
        return names
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return names
    for name in names:
        if name not in parameters:
            called = getattr(original, "__qualname__", None) or f"{type(original).__name__}.forward"
            raise InputBufferError.no_parameter(name=name, model=called, known=list(parameters))
    return names


def _compiled(
    model: Any, inputs: Iterable[InputBuffer], config: CompilationConfig | None
) -> tuple[Any, CompilationConfig]:
    """Return the compiled model, or one that is captured without a trace, and its settings."""
    _arguments(model, inputs)
    backend = handle_of(model)
    if backend is not None:
        if config is not None:
            raise ConfigError.impossible(
                what="config given with a compiled model",
                because="the model was compiled with settings of its own",
                instead="Leave config out, or give the model before it is compiled.",
            )
        return model, backend.config
    config = CompilationConfig.resolve(config)
    if config.mode is CompilationMode.NONE or config.splitting == "breakable":
        return model, config
    dims = {spec.name: {spec.dim: spec.counts} for spec in inputs if spec.argument}
    sizes = (config.cudagraph_capture_sizes, config.compile_sizes)
    tokens = [spec for spec in inputs if spec.argument and spec.counts == TOKENS]
    if config.capture_dim is None and tokens and sizes != (None, None):
        config = replace(config, capture_dim=f"{tokens[0].name}.size()[{tokens[0].dim}]")
    return compile_model(model, config, dynamic_dims=dims, guards="none"), config


def _default_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Return the usual sizes; larger batches are bound by compute and gain nothing from graphs."""
    require_whole("max_num_tokens", _FROM_MODEL, max_num_tokens, 1, LARGEST_ROWS)
    return capture_sizes(min(max_num_tokens, _LARGEST_DEFAULT))


def _least_support(config: CompilationConfig) -> AttentionCGSupport:
    """Return how far the declared boundaries can go into a FULL graph."""
    return min(
        (
            getattr(op, "support", AttentionCGSupport.NEVER)
            for op in config.splitting_ops
            if not (isinstance(op, str) and op == NO_BUILTIN)
        ),
        default=AttentionCGSupport.ALWAYS,
    )


def _device_of(model: Any) -> torch.device:
    """Return the device of the parameters or buffers of a module."""
    module = getattr(model, "runnable", model)
    if isinstance(module, torch.nn.Module):
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    expected = "a device, as the model is no module with parameters"
    raise ConfigError.bad_value(name="device", where=_FROM_MODEL, value=None, expected=expected)


def _move_check(part: str) -> Callable[[dict[str, Any], bool | None], None]:
    """Return what moves a former argument into ``checks`` of ``config``."""

    def move(arguments: dict[str, Any], on: bool | None) -> None:
        config = arguments.get("config")
        if on is None:
            return
        if isinstance(config, Backend):
            _require_on_model(config, arguments)
            config = config.config
        config = CompilationConfig.resolve(config)
        arguments["config"] = with_check(part, config, on)

    return move


def _agreed(agreement: Any, dispatcher: CudagraphDispatcher) -> CudagraphDispatcher | Agreement:
    """Return the agreement of ranks about a dispatcher, or the dispatcher without one."""
    if agreement is None:
        return dispatcher
    if not isinstance(agreement, Agreement):
        require_callable("agreement", "CudaGraphManager", agreement)
        agreement = agreement(dispatcher)
    require_kind("agreement", "CudaGraphManager", agreement, Agreement)
    if agreement.dispatcher is not dispatcher:
        raise AgreementError.other_dispatcher()
    return cast(Agreement, agreement)


def _move_agreement(arguments: dict[str, Any], agreement: Any) -> None:
    if "dispatcher" in arguments:
        arguments["dispatcher"] = _agreed(agreement, arguments["dispatcher"])


def _require_on_model(backend: Backend, arguments: dict[str, Any]) -> None:
    """Raise where a handle given beside settings is not found on the model."""
    if handle_of(arguments.get("model")) is not backend:
        raise ConfigError.impossible(
            what="a handle beside settings of its own for a CudaGraphManager",
            because="config is one of both, and the handle is not found on the model",
            instead="Give the settings to the handle: config=cgcompile.Backend(...).",
        )


def _move_backend(arguments: dict[str, Any], backend: Backend | None) -> None:
    require_kind("backend", "CudaGraphManager", backend, Backend, maybe=True)
    if backend is None:
        return
    if arguments.get("config") is None:
        arguments["config"] = backend
    else:
        _require_on_model(backend, arguments)


def _move_context(arguments: dict[str, Any], context: Any) -> None:
    require_callable("graph_capture", "CudaGraphManager", context)
    hook = GraphHooks()
    vars(hook)["around_captures"] = context
    arguments["hooks"] = (*arguments.get("hooks", ()), hook)


def _finish_lazily(_: dict[str, Any], lazily: bool) -> Callable[["CudaGraphManager"], None]:
    require_kind("lazily", "CudaGraphManager", lazily, bool)
    return lambda manager: setattr(manager.dispatcher, "only_captured", not lazily)


def _finish_inference_mode(
    _: dict[str, Any], inference_mode: bool
) -> Callable[["CudaGraphManager"], None] | None:
    require_kind("inference_mode", "CudaGraphManager", inference_mode, bool)
    return None if inference_mode else CudaGraphManager.allow_gradients


class CudaGraphManager:
    """Run the batches of one model on CUDA graphs, which it captures and whose buffers it owns.

    :meth:`capture` captures the graphs that the dispatcher plans. Each :meth:`run` then

    1. dispatches the batch to the smallest graph that serves it (ranks agree on it first);
    2. copies the real rows into the input buffers, and fills the padding rows;
    3. builds the metadata of the padded batch;
    4. replays the graph, or runs the model and the epilogue unpadded where no graph serves the
       batch, and counts it;
    5. returns the results of the real rows.

    One thread runs steps: the first step of another one is a :class:`DispatchError`, unless the
    program locks them, see :meth:`allow_threads`. Two models (a draft and a target) need two
    managers.

    Args:
        model: called with the input buffers as keyword arguments. Compiled with the backend
            ``cgcompile`` or :func:`cgcompile.compile`, or not compiled.
        dispatcher: lists the graphs, and chooses the one that serves a batch. Or the
            :class:`Agreement` of ranks about one: they run the same graphs, and make the same
            calls, :meth:`capture`, and :meth:`run` at each step. ``only_captured`` of the
            dispatcher is set: only :meth:`capture` captures. Set it to False afterwards to
            capture a planned graph when a batch first needs it, after one warming call.
        inputs: the declarations of the input buffers.
        device: of the buffers.
        prepare: ``prepare(descriptor, phase)``: returns a batch of this padded size to warm up or
            to capture with; ``phase`` is ``"warmup"`` or ``"capture"``. Called afresh for each.
            Left out: :meth:`dummy_batch`.
        metadata: ``metadata(batch, descriptor, buffers)``: returns what the forward context holds,
            built after padding; ``descriptor`` has the padded sizes, ``buffers`` are the padded
            views. FULL graphs read its tensors at their addresses of the capture: return views of
            buffers. Left out: no metadata.
        epilogue: ``epilogue(result, buffers)``: runs after the model in each step and in its
            forward context, and returns what the step returns: it samples, say, and writes tokens
            and positions of the next step. Captured with the model in FULL graphs; run after the
            graphs of a PIECEWISE step. ``result`` is what the model returned, with padding rows;
            ``buffers`` are the padded views of all inputs, which it may write: the next ``run``
            writes their padding rows again. It may call the model again, whose results of the call
            before are overwritten then. It runs on dummy batches too. Left out: the step returns
            what the model returned.
        outputs: what rows of the results of a step count: ``"tokens"`` or ``"reqs"``; one for all,
            or one for each tensor of the flattened result.
        config: the handle of the compiled model, where it cannot be found on ``model``; or settings
            of the wrappers: splitting ops, ``capture_device``, ``num_warmups``;
            ``on_fallback="raise"``: a batch that no graph serves is an error, raised before ranks
            agree; and ``checks``, whose ``weights`` are compared before each FULL replay, and those
            that a model with ``guards="none"`` has bound before each other step. Of a model that is
            no module they are those of the modules that it holds, or that its functions name as
            globals.
        hooks: called around captures and replays.

    Attributes:
        model: as given.
        backend: the handle of the model; None if it is not compiled.
        dispatcher: as given; it records what has been captured.
        agreement: of the ranks; None without one.
        epilogue: as given.
        inputs: the input buffers.
        statistics: what was dispatched; ``print`` it.
        meter: measures the memory of graphs.
        pool: the memory of FULL graphs, and of pieces of a model that is not compiled. None where
            nothing can be captured: in mode NONE, and without a device that has graphs.

    Raises:
        ConfigError: impossible settings.
        InputBufferError: two buffers with one name.
        ManagerError: an optional input without an axis of the dispatcher, or bad ``outputs``.

    Example:
        >>> from cgcompile.serving import Batch, CudagraphDispatcher, InputBuffer
        >>> support = cgcompile.AttentionCGSupport.ALWAYS
        >>> dispatcher = CudagraphDispatcher("FULL", [4, 8], max_num_reqs=8, support=support)
        >>> rows = InputBuffer("input", ("tokens", 8), torch.float32)
        >>> manager = cgcompile.CudaGraphManager(nn.Linear(8, 2), dispatcher, [rows], device="cpu")
        >>> report = manager.capture()
        >>> manager.run(Batch(3, 1, {"input": torch.randn(3, 8)})).shape  # padded to 4 inside
        torch.Size([3, 2])
    """

    @takes_earlier(
        check_weights=("use config=, with checks='-weights'", True, _move_check("weights")),
        check_metadata=("use checks of config=", None, _move_check("metadata")),
        agreement=("give the Agreement as dispatcher", None, _move_agreement),
        backend=("give the handle as config", None, _move_backend),
        graph_capture=(
            "use hooks=, with GraphHooks.around_captures()",
            nullcontext,
            _move_context,
        ),
        lazily=(
            "set dispatcher.only_captured = False afterwards, or give from_model that argument",
            False,
            _finish_lazily,
        ),
        inference_mode=("call allow_gradients() afterwards", True, _finish_inference_mode),
    )
    @checked_but("device", "inputs", "hooks", "model", "dispatcher", "config")
    def __init__(
        self,
        model: Callable[..., Any],
        dispatcher: CudagraphDispatcher | Agreement,
        inputs: Iterable[InputBuffer],
        *,
        device: torch.device | str,
        prepare: Prepare | None = None,
        metadata: BuildMetadata | None = None,
        epilogue: Epilogue | None = None,
        outputs: str | Sequence[str] = "tokens",
        config: CompilationConfig | Backend | None = None,
        hooks: Sequence[GraphHooks] = (),
    ) -> None:
        where, agreement = "CudaGraphManager", None
        if isinstance(dispatcher, Agreement):
            agreement, dispatcher = dispatcher, dispatcher.dispatcher
        require_kind("dispatcher", where, dispatcher, CudagraphDispatcher)
        expected = "a CompilationConfig, the Backend of the model, or None"
        known = config is None or isinstance(config, (CompilationConfig, Backend))
        require(known, "config", where, config, expected)
        limits, plan = dispatcher.limits, dispatcher.plan()
        require_callable("model", where, model)
        require_items("inputs", where, inputs)
        self.model, self.dispatcher, self.agreement = model, dispatcher, agreement
        self.epilogue = epilogue
        self.inputs = StaticInputs(inputs, limits.max_num_tokens, limits.max_num_reqs, device)
        self.backend = config if isinstance(config, Backend) else handle_of(model)
        self._arguments = _arguments(model, self.inputs.specs)
        self._optional = axes_of_optional(self.inputs.specs, dispatcher.axes)
        self._metadata, self._prepare = metadata, prepare
        self._inference_mode, self._device = True, torch.device(device)
        require_items("hooks", where, hooks, GraphHooks)
        self._hooks = tuple(hooks)
        config = config.config if isinstance(config, Backend) else config
        self._config = config = CompilationConfig.resolve(config)
        exists, warns = dispatcher.is_ready, config.warn_fallbacks
        self.statistics = DispatchStatistics(plan, warn_fallbacks=warns, exists=exists)
        self._expires_results = bool(config.debug)
        check_debug("stale" in config.debug)
        recorder = capture_device(self._device, config.capture_device) if plan else None
        self.pool = None if recorder is None else GraphPool(recorder)
        self._thread = StepThread() if self.pool is None else self.pool.thread
        require(isinstance(outputs, (str, Sequence)), "outputs", where, outputs, "names of rows")
        rows = Outputs(outputs, largest(plan, FULL))
        weights_on = self._device.type if "weights" in config.checks else None
        of_step = model, epilogue, dispatcher, rows, self._hooks
        self._full = FullGraphs(*of_step, self.pool, config, weights_on)
        self._pieces = self._piecewise()
        self._plain, self._in_pieces = map(self._full.finished, (model, self._pieces))
        self._bulk: dict[str, BulkCapture] = {}
        self._guarded = -1  # how many compilations there were when traces were guarded
        self._warmed: set[Planned] = set()  # ran plain once, and are captured at the next step
        self._across: torch.Tensor | None = None  # int32 [R]: tokens of each rank in the next step
        self._ran_plain: Fallback | None = None  # why the last step did not replay its graph
        self._lock = new_lock()
        self.meter = MemoryMeter(self.pool, self.backend, rows, self.wrappers)
        if self.backend is not None:
            self.backend.attach(self)
        dispatcher.only_captured = True  # last: nothing has failed

    @classmethod
    def from_model(
        cls,
        model: Callable[..., Any],
        inputs: Iterable[InputBuffer],
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        config: CompilationConfig | None = None,
        device: torch.device | str | None = None,
        **arguments: Any,
    ) -> "CudaGraphManager":
        """Compile a model, and construct the dispatcher and the manager of its graphs.

        Modes, sizes and attention support are those of the settings: ``cudagraph_mode``,
        ``cudagraph_capture_sizes`` (left out: :func:`capture_sizes`, up to 512 tokens) and the
        least ``support`` of ``splitting_ops``. A FULL capture that meets an unfit built-in boundary
        is refused with a warning.

        Args:
            model: a module or a function. It is compiled with ``guards="none"`` and dynamic
                dimensions as in ``inputs``; not traced in mode NONE and with
                ``splitting="breakable"``. One that cgcompile has compiled is taken as it is.
            inputs: the declarations of the input buffers.
            max_num_tokens: the most tokens in a batch; the input buffers have as many rows.
            max_num_reqs: the most requests in a batch.
            config: the settings, unless the model is compiled; left out: environment and defaults.
            device: of the buffers; left out: that of the parameters.
            **arguments: those of :class:`CudagraphDispatcher`, such as ``query_lens``, ``axes``; of
                :class:`CudaGraphManager`, such as ``metadata``; ``only_captured=False`` (steps
                capture what they need); and ``agreement=Agreement``.

        Returns:
            The manager, before :meth:`capture`.

        Raises:
            ConfigError: unknown or impossible settings and arguments.

        Example:
            >>> from cgcompile.serving import Batch, InputBuffer
            >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 50))
            >>> ids = InputBuffer("input", ("tokens",), torch.int64)
            >>> engine = CudaGraphManager.from_model(model, [ids], max_num_tokens=8, max_num_reqs=8)
            >>> engine.run(Batch(3, 3, {"input": torch.tensor([4, 2, 7])})).shape
            torch.Size([3, 50])
        """
        require_callable("model", _FROM_MODEL, model)
        inputs, (of_dispatcher, own, captured) = _declared(inputs), _divided(arguments)
        device = _device_of(model) if device is None else device
        model, config = _compiled(model, inputs, config)
        mode = config.cudagraph_mode or CUDAGraphMode.NONE
        settings = {
            "sizes": config.cudagraph_capture_sizes or _default_sizes(max_num_tokens),
            "support": _least_support(config),
            "piecewise": config.mode is CompilationMode.PIECEWISE,
        }
        limits = {"max_num_tokens": max_num_tokens, "max_num_reqs": max_num_reqs}
        dispatcher = CudagraphDispatcher(mode, **{**settings, **limits, **of_dispatcher})
        agreed = _agreed(own.pop("agreement", None), dispatcher)
        manager = cls(model, agreed, inputs, device=device, config=config, **own)
        dispatcher.only_captured = dispatcher.only_captured and captured
        return manager

    def _piecewise(self) -> Any:
        """Return what runs PIECEWISE steps: the compiled model, or a wrapper."""
        if self.backend is not None:
            return self.model
        wrapper = BreakableCUDAGraphWrapper(
            self.model, self._config, PIECEWISE, pool=self.pool, name="model"
        )
        wrapper.remedy = REMEDY
        return wrapper

    def __repr__(self) -> str:
        model = type(getattr(self.model, "runnable", self.model)).__name__
        return f"<CudaGraphManager of {model}: {self.dispatcher.summary()}>"

    # -------------------------------------------------------------- look-ups

    @property
    def bulk(self) -> dict[str, BulkCapture]:
        """The result of each set of captures, by its title."""
        return dict(self._bulk)

    @property
    def counters(self) -> Counters:
        """Captures, replays and fallbacks of all steps with graphs."""
        return self._full.wrapper.counters + (self.backend or self._pieces).counters

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrappers that capture what the handle of a compiled model does not."""
        pieces = (self._pieces,) if self.backend is None else ()
        return (self._full.wrapper, *pieces)

    @property
    def cudagraph_sizes(self) -> dict[int, int]:
        """Number of tokens -> planned size of the graph for any batch; empty if only decode has."""
        mode = self.dispatcher.mode.mixed_mode()
        plan = [key for planned, key in self.dispatcher.plan() if planned is mode]
        return padding_table(sorted({key.num_tokens for key in plan if not is_decode(key)}))

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
        return self._full.outputs.whole

    def memory(self) -> GraphMemory:
        """Return what the graphs take of the device now, in bytes, measured; ``print`` it.

        As :meth:`cgcompile.Backend.memory`, with the graphs of the compiled model.
        """
        return self.meter.memory()

    def needs_capture(self) -> bool:
        """Return whether any graph is planned."""
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
        """Return the padded size of the graph for a number of tokens, captured or planned; or None.

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
        """Return (runtime mode, padded size) of a batch; (NONE, None) where no graph serves it.

        A batch counts as uniform decode if each request has ``max_query_len`` tokens and the
        dispatcher has that length. Prompts of equal length look the same: :meth:`dispatched` takes
        a :class:`Batch`, which tells them apart. Adapters and axes are given as to the dispatcher.
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
        """Return what a batch would run as; arguments are those of :meth:`run`.

        Raises:
            BatchError: numbers of the batch, or its query starts, contradict each other.
            InputBufferError: more tokens or requests than the input buffers have.
        """
        if type(batch) is not Batch:
            require_kind("batch", "dispatched", batch, Batch)
        chosen = self.dispatcher.dispatch(
            batch.num_tokens,
            batch.num_reqs,
            batch.max_query_len,
            batch.uniform_decode,
            batch.has_lora,
            batch.num_active_loras,
            batch.extra,
            **restrictions,
        )
        self.inputs.check_sizes((batch.num_tokens, batch.num_reqs))
        if batch.uniform_decode and batch.max_query_len is None:
            self.inputs.check_uniform(batch.inputs, batch.num_tokens, batch.num_reqs)
        return chosen

    # -------------------------------------------------------------- capture

    def plan(self) -> MemoryPlan:
        """Measure what the planned graphs take of the device, in bytes, before any exists.

        All are captured and dropped again, so that the manager is as before. Synchronises.

        Raises:
            ManagerError: a graph exists already.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        self._refuse_captured(self.dispatcher.plan())
        with self._capturing_alone("plan"), together(self.agreement):
            self._drop_weights()
            return plan_memory(self)

    @checked
    def capture(
        self, max_graph_bytes: int | None = None, histogram: Mapping[int, int] | None = None
    ) -> dict[str, BulkCapture]:
        """Warm up and capture what the dispatcher plans: PIECEWISE, then FULL, the largest first.

        What could not be captured is not dispatched; its reason is in the result. Where graphs
        exist already, those that are missing are captured.

        Args:
            max_graph_bytes: what all graphs may take of the device. If given, graphs are captured
                and dropped to measure them first, and where not all fit, those worth the most are
                captured. Batches of the other sizes are padded to the next larger graph.
            histogram: batch size in tokens -> number of steps: what graphs are worth; left out, all
                sizes are equally frequent.

        Returns:
            How each set went, by its title; the last time, if it was captured several times.

        Raises:
            ManagerError: ``max_graph_bytes``, and a graph exists already, or the budget is too
                small for the largest graphs; or FULL has no metadata.
            DispatchError: ``on_fallback="raise"``, and a graph could not be captured.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        planned = self.dispatcher.plan()
        if max_graph_bytes is not None:
            self._refuse_captured(planned)
        missing = [entry for entry in planned if not self.dispatcher.is_captured(*entry)]
        chosen: Sequence[Planned] = missing
        with self._capturing_alone("capture"), together(self.agreement):
            if len(missing) == len(planned):
                self._drop_weights()
            if max_graph_bytes is not None and self.pool is not None and planned:
                chosen = choose_graphs(self, max_graph_bytes, histogram)
            with bulk_captures():  # warm-ups in between leave garbage with large tensors
                for title, mode, descriptors in sets_of(chosen):
                    self._capture_set(title, mode, descriptors)
        for mode, descriptor in missing:
            if (mode, descriptor) not in chosen:
                reason = f"max_graph_bytes={max_graph_bytes} has no room for it"
                self.dispatcher.refused(mode, descriptor, reason)
        return self.bulk

    def capture_graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Warm up and capture one planned graph.

        Raises:
            ManagerError: a mode without graphs, a graph that exists, FULL without metadata.
            BatchError: it is not planned; nothing is captured.
            AgreementError: another rank stays away, or raised an exception.
            BaseException: what the model, ``prepare`` or ``metadata`` raised.
        """
        if mode not in (PIECEWISE, FULL):
            raise ManagerError.capture_mode(mode=getattr(mode, "name", str(mode)))
        if (mode, descriptor) not in self.dispatcher.plan():
            raise BatchError.not_planned(mode=mode.name, descriptor=str(descriptor))
        self._refuse_captured([(mode, descriptor)])
        with self._capturing_alone("capture_graph"), together(self.agreement):
            self._capture_set(f"Capturing {mode.name}, {descriptor}", mode, [descriptor])

    def _refuse_captured(self, planned: Iterable[Planned]) -> None:
        for mode, descriptor in planned:
            if self.dispatcher.is_captured(mode, descriptor):
                raise ManagerError.twice(mode=mode.name, batch=str(descriptor))

    def _capture_set(
        self, title: str, mode: CUDAGraphMode, descriptors: list[BatchDescriptor]
    ) -> None:
        result = self.record(title, mode, descriptors, lambda _: self.meter.begin())
        self.meter.end()
        self._bulk[title] = result
        for descriptor in result.captured:
            self._add(mode, descriptor)
        for descriptor, why in result.missing:
            self.dispatcher.refused(mode, descriptor, why)

    def _add(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Note that a planned graph exists now."""
        if mode is FULL:
            self._full.add(descriptor)
        self.dispatcher.captured(mode, descriptor)
        self._warmed.discard((mode, descriptor))

    def record(
        self,
        title: str,
        mode: CUDAGraphMode,
        descriptors: list[BatchDescriptor],
        before: Callable[[BatchDescriptor], None],
    ) -> BulkCapture:
        """Warm up and capture graphs, unknown to the dispatcher; ``before`` each capture."""
        for hook in self._hooks:
            hook.before_capture(self.pool)

        def step(descriptor: BatchDescriptor, phase: str) -> None:
            if phase == "capture":
                before(descriptor)
            self.run_dummy(mode, descriptor, phase)

        settled, config = self.num_compilations, self._config
        with self.capturing():
            return capture_set(
                title, mode, descriptors, step, self, settled, config, self.agreement
            )

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Enter the autograd mode of steps and the contexts around a set of captures."""
        with self._autograd_mode(), ExitStack() as contexts:
            for hook in self._hooks:
                contexts.enter_context(hook.around_captures())
            yield

    def run_dummy(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, phase: str) -> None:
        """Run the step of a planned graph on a batch from ``prepare``."""
        if self.agreement is not None:
            self._across = self.agreement.across(descriptor.num_tokens)
        self._check_weights(mode, descriptor)
        self._step((self._prepare or self.dummy_batch)(descriptor, phase), mode, descriptor)
        if self.backend is not None:
            self._guard_traces(self.backend)

    def num_compilations(self) -> int:
        """Return how often the model was compiled so far, the largest number of all ranks."""
        own = 0 if self.backend is None else self.backend.num_compilations
        return own if self.agreement is None else self.agreement.largest(own)

    @checked
    def dummy_batch(self, descriptor: BatchDescriptor, phase: str) -> Batch:
        """Return a batch of a padded size that any model can run; see :meth:`InputBuffer.dummy`.

        A graph for mixed batches is captured with one query of all tokens as the longest.
        """
        tokens = descriptor.num_tokens
        reqs = descriptor.num_reqs or min(tokens, self.dispatcher.limits.max_num_reqs)
        values = {spec.name: spec.dummy(tokens, reqs) for spec in self.inputs.specs}
        return padding_batch(descriptor, tokens, reqs, values, self._optional)

    def allow_threads(self) -> None:
        """Let several threads run steps: the program locks them.

        The manager has one set of buffers, and results are views of it. So the first step of a
        second thread is an error, unless the program holds one lock around each step *and* the
        reading of its results, and declares so by this call. It holds for the handle of the
        compiled model, too.
        """
        self._thread.allow()
        for wrapper in self.wrappers:
            wrapper.allow_threads()
        if self.backend is not None:
            self.backend.allow_threads()

    def allow_gradients(self) -> None:
        """Capture and run steps in the mode of the caller, and not in inference mode.

        Call it before :meth:`capture`. A step that needs gradients runs without a graph then.
        """
        self._inference_mode = False

    def release(self) -> None:
        """Drop all graphs and their memory, and the output buffers; :meth:`capture` works again.

        Also where weights were replaced: what traces have bound is compared at their next call.
        Statistics and counters stay. Results of earlier steps are views of that memory: drop them
        first. The handle of a compiled model does the same in its ``release`` and ``invalidate``.

        Raises:
            CaptureError: called inside of a step or of a capture.
        """
        self.refuse_inside()
        self.drop()
        self._thread.release()
        if self.backend is not None:  # tells other managers too, whose locks must not be nested
            self.backend.release()  # and what its traces have bound is compared again

    def drop(self) -> None:
        """Drop all graphs of the manager; the handle drops those of the compiled model."""
        with self._lock:  # after the step of another thread
            self.release_own()
            self._drop_weights()
            self._warmed.clear()
            self._bulk.clear()
            self.dispatcher.forget()

    def refuse_inside(self) -> None:
        """Raise where this thread runs a step: its hooks and metadata must not drop the graphs."""
        if owns_lock(self._lock):
            raise CaptureError.release_inside(what="a step of a manager")

    def _drop_weights(self) -> None:
        """Guard the weights of the next capture: no graph exists."""
        self._full.drop()
        self._guarded = -1

    def _check_weights(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Raise GuardError for a replaced weight; traces before the first step may be older."""
        if self._guarded < 0 and self.backend is not None:
            self.backend.compare_bound()
        if mode is not FULL:  # which compares weights at a replay
            self._full.check_bound(descriptor)

    def release_own(self) -> None:
        """Drop the manager's own graphs and output buffers; a compiled model's stay."""
        self._full.release()
        if self.backend is None:
            self._pieces.clear_all_graphs()

    # -------------------------------------------------------------- a step

    def run(self, batch: Batch | None, **restrictions: Any) -> Any:
        """Run one batch on the graph that serves it, or without one.

        With an agreement every rank calls it at each step, one without work with None, or with no
        tokens and a ``state`` for its metadata, which is built for one request without tokens. Such
        a rank runs padding of the agreed size, so that collectives find it. In mode NONE each rank
        runs its own tokens unpadded, one without work the smallest planned size. A batch that is
        refused, or a moved weight of FULL graphs, raises before other ranks count on this one: it
        has not taken part in the step, and may still do so with another batch or None.

        Args:
            batch: real rows. Without ranks None and a batch with neither tokens nor inputs are no
                work; one without tokens but with inputs, of no rows, runs plain.
            **restrictions: ``valid_modes`` or ``invalid_modes`` of the dispatcher.

        Returns:
            What the model returns, real rows only; views, valid until the next step, where graphs
            ran; None without work. Does not synchronise the device; an agreement waits for ranks.

        Raises:
            InputBufferError: inputs that do not fit the declarations, or more tokens or requests
                than the buffers have; nothing ran.
            BatchError: numbers of the batch that contradict each other.
            DispatchError: another thread has run steps; or ``on_fallback="raise"``, and no graph
                serves the batch.
            AddressChangedError: a weight was replaced, or one or a tensor of metadata moved, since
                the capture.
            AgreementError: a rank stays away, ends in the middle of a step or, checked, runs
                something else.
            BaseException: what the model or ``metadata`` raised.
        """
        if batch is not None and type(batch) is not Batch:
            require_kind("batch", "run", batch, Batch, maybe=True)
        if self._thread.ident != get_ident():
            self._thread.admit("CudaGraphManager.run")
        with self._lock:
            if self.agreement is not None:
                return self._run_agreed(self.agreement, batch or NO_WORK, restrictions)
            if batch is None:
                return None
            number = batch.num_tokens
            tokens = number if type(number) is int else whole(number)
            if tokens == 0 and not batch.inputs:
                return None
            return self._run(batch, self._allowed(batch, restrictions))

    @contextmanager
    def _capturing_alone(self, method: str) -> Iterator[None]:
        """Raise if another thread has run steps, whose results a capture would overwrite."""
        self._thread.admit(f"CudaGraphManager.{method}", claim=False)
        with self._lock:
            yield

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the steps inside out of the statistics: they are no serving."""
        kept, self.statistics = self.statistics, DispatchStatistics()
        try:
            yield
        finally:
            self.statistics = kept

    def _autograd_mode(self) -> AbstractContextManager[Any]:
        return torch.inference_mode() if self._inference_mode else nullcontext()

    def _allowed(self, batch: Batch, restrictions: dict[str, Any]) -> Dispatched:
        """Dispatch a batch; raise if ``strict`` or its optional inputs forbid it."""
        chosen = self.dispatched(batch, **restrictions)
        why = chosen.why
        if chosen.mode is NONE and why is not None:
            refuse_strict(self._config.strict, f"a batch of {batch.num_tokens} tokens", why)
        if batch.num_tokens:  # else there is no graph, and `extra` does not matter
            for name, index in self._optional.items():
                if batch.extra[index] is not (batch.inputs.get(name) is not None):
                    raise ManagerError.presence(name=name, found=batch.extra[index])
        return chosen

    def _run_agreed(self, agreement: Agreement, batch: Batch, restrictions: dict[str, Any]) -> Any:
        # Errors of this rank are raised before other ranks count on it.
        own = self._allowed(batch, restrictions)
        if batch.num_tokens:
            self.inputs.check(batch.inputs, (batch.num_tokens, batch.num_reqs))
        mode = own.mode if batch.num_tokens else FULL  # of a FULL graph only if all ranks have one
        self._check_weights(mode, own.descriptor)
        if mode is FULL:
            self._full.check_before(own.descriptor)
        agreed = agreement.dispatch(**batch.numbers(), **restrictions)
        if not agreed.has_work:
            return None
        self._across = agreed.num_tokens_across_dp
        try:
            if batch.num_tokens:
                return self._run(batch, agreed.dispatched)
            self._run_idle(batch, agreed.dispatched)
        except RuntimeError as error:
            agreement.check_lost(error)
            raise
        return None

    def _run_idle(self, batch: Batch, chosen: Dispatched) -> None:
        """Run padding, for the collectives of the ranks that have tokens."""
        mode, descriptor, _ = chosen
        if mode is NONE or self.dispatcher.is_captured(mode, descriptor):
            idle = self.inputs.idle()
            dummy = padding_batch(descriptor, 0, 1, idle, self._optional, batch.state)
        else:  # a graph is never captured with the batch of an idle rank
            phase = "capture" if (mode, descriptor) in self._warmed else "warmup"
            dummy = (self._prepare or self.dummy_batch)(descriptor, phase)
        self._run(dummy, chosen)

    def _run(self, batch: Batch, chosen: Dispatched) -> Any:
        if self.agreement is None:  # else checked before ranks agreed
            self._check_weights(chosen.mode, chosen.descriptor)
        with self._autograd_mode():
            if chosen.mode is NONE:
                result = self._step(batch, NONE, chosen.descriptor)
            elif self._hooks:
                result, chosen = self._around_replay(self._run_graph, batch, chosen)
            else:
                result, chosen = self._run_graph(batch, chosen)
        if self.backend is not None:
            self._guard_traces(self.backend)
        self.statistics.record(batch.num_tokens, chosen)
        return result

    def _guard_traces(self, backend: Backend) -> None:
        """Guard the weights of traces that are new since the last step."""
        if self._guarded != backend.num_compilations:
            self._guarded = backend.num_compilations
            self._full.guard_bound()

    def _around_replay(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step that may replay, and ``after_replay`` of each hook that began, always."""
        begun = 0
        try:
            for hook in self._hooks:
                hook.before_replay()
                begun += 1
            return step(*args)
        finally:
            for hook in self._hooks[:begun]:
                hook.after_replay()

    def _run_graph(self, batch: Batch, chosen: Dispatched) -> tuple[Any, Dispatched]:
        """Run a step on its graph, or capture that after one warming step; return how it ran."""
        mode, descriptor, _ = chosen
        if self.dispatcher.only_captured or self.dispatcher.is_captured(mode, descriptor):
            result, why = self._step(batch, mode, descriptor), self._ran_plain
        elif (mode, descriptor) in self._warmed:
            result, why = self._capture_step(batch, mode, descriptor)
        else:
            self._warmed.add((mode, descriptor))
            with postponed_capture():
                result, why = self._step(batch, mode, descriptor), _WARMING
        if why is None:
            return result, chosen
        return result, Dispatched(NONE, BatchDescriptor(batch.num_tokens), why)

    def _capture_step(
        self, batch: Batch, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> tuple[Any, Fallback | None]:
        """Capture the graph of a step; return its result, and why there is no graph."""
        before = self.counters
        try:
            result = self._step(batch, mode, descriptor)
        except CaptureError as error:
            if mode is not FULL or self._config.strict or self.agreement is not None:
                raise  # ranks that have agreed cannot fall back one by one
            # Of a whole step nothing has run yet.
            detail = str(error).splitlines()[0]
            self.dispatcher.refused(mode, descriptor, detail)
            result = self._step(batch, NONE, BatchDescriptor(batch.num_tokens))
            return result, Fallback(Reason.CAPTURE_FAILED, detail)
        after = self.counters
        if after.captures > before.captures:
            self._add(mode, descriptor)
        reasons = after.plain - before.plain
        return result, next((Fallback(why, after.details[why]) for why in reasons), None)

    def _step(self, batch: Batch, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """Pad, stage, build metadata, call; return the real rows."""
        full = self._full
        self._ran_plain = None
        real = (batch.num_tokens, batch.num_reqs)
        padded = (descriptor.num_tokens, descriptor.num_reqs or batch.num_reqs)
        buffers = full.buffers = self.inputs.stage(batch.inputs, real, padded)
        metadata = Metadata()
        if self._metadata is not None:
            metadata = self._metadata(batch, descriptor, buffers)
            if not isinstance(metadata, Metadata):
                raise ManagerError.not_metadata(found=metadata)
            if mode is FULL and metadata.attn_metadata is None:
                raise ManagerError.no_metadata(batch=str(descriptor))
        if self._expires_results and mode is not NONE:
            full.expire_results(mode)
        arguments = {name: buffers[name] for name in self._arguments}
        additional = metadata.additional
        if mode is not PIECEWISE and ("inputs_ready" in additional or type(additional) is not dict):
            metadata = self._waited(metadata)
        call = FullCall(full.wrapper, descriptor, arguments, metadata)
        call.padded, call.real, call.in_context = padded, real, self._in_context
        if mode is FULL:
            result, why = full.run(call), call.ran_plain
        else:
            run = self._plain if mode is NONE else self._in_pieces
            with self._in_context(call, mode) as context:
                result = full.outputs.real(run(**arguments), padded, real)
            why = None if context is None else context.ran_plain
        if why is not None and why.reason not in _OF_PARTS:
            self._ran_plain = why
        return full.track(result, descriptor) if "stale" in self._config.debug else result

    def _waited(self, metadata: Metadata) -> Metadata:
        """Wait for inputs, as neither a replay nor a plain model does; return all other metadata.

        The rest is in a dict, as in the forward context of the capture, with which it is compared.
        """
        additional = dict(metadata.additional)
        ready = additional.pop("inputs_ready", None)
        if ready is not None:
            wait_for_inputs(ready, self._device)
        return replace(metadata, additional=additional)

    def _in_context(self, call: FullCall, mode: CUDAGraphMode = FULL) -> set_forward_context:
        """Return the forward context of a step, to be entered."""
        metadata = call.metadata
        assert metadata is not None  # only calls that raise have none
        across = metadata.num_tokens_across_dp
        return set_forward_context(
            metadata.attn_metadata,
            cudagraph_runtime_mode=mode,
            batch_descriptor=None if mode is NONE else call.descriptor,
            num_tokens=call.padded[0],
            num_unpadded_tokens=call.real[0],
            num_tokens_across_dp=self._across if across is None else across,
            slot_mapping=metadata.slot_mapping,
            **metadata.additional,
        )

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
            uniform: that for uniform decode, or that for any batch; None: the first that exists.
            num_active_loras: of the graph, as captured.
            extra: the values of all axes, as captured.

        Returns:
            What the model returns, all padded rows; views, valid until the next step.

        Raises:
            ManagerError: there is no such graph, or gradients are due.
            DispatchError: another thread has run steps; or what the capture read has changed, and
                ``on_input_change`` lets such a step run without a graph, with
                ``on_fallback="raise"``.
            AddressChangedError: a weight was replaced or moved since the capture.
            AgreementError: checked, and another rank runs something else.
        """
        if self._thread.ident != get_ident():
            self._thread.admit("CudaGraphManager.run_fullgraph")
        with self._lock:
            full = self._full
            descriptor = full.find(num_tokens, uniform, num_active_loras, extra)
            if self.agreement is not None:
                full.check_before(descriptor)
                self.agreement.check_alone(FULL, descriptor)
                self._across = self.agreement.across(num_tokens)
            with self._autograd_mode():
                self.inputs.follow_stream()
                self.inputs.written_by_others()
                if self._expires_results:
                    full.expire_results(FULL)
                call = FilledCall(full.wrapper, descriptor, {})
                call.padded = call.real = (
                    descriptor.num_tokens,
                    descriptor.num_reqs or descriptor.num_tokens,
                )
                result = self._around_replay(full.run, call)
            return full.track(result, descriptor) if "stale" in self._config.debug else result
