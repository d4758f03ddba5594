"""The model, in any of its forms, that a function of this package is called with.

:class:`Subject` is a model to compare with eager; :func:`recorders_of` returns what captures for a
target.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from cgcompile.backend import Backend, handle_of
from cgcompile.compile import CompiledModel, check_compilable, compile
from cgcompile.config import CompilationConfig, CompilationMode, kernel_switch
from cgcompile.debug.compare import Call, InputSets, Opened, Tolerance, named_values, uncompared
from cgcompile.debug.restore import State, copies, restored_after
from cgcompile.errors import ConfigError
from cgcompile.graphs.breakable import BreakableCUDAGraphCapture
from cgcompile.graphs.contract import layout_text
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.loops import Loop
from cgcompile.pieces.compilers import fusion_texts
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph, ReplayOverride
from cgcompile.serving.manager import CudaGraphManager
from cgcompile.torch_compat import dynamo, torch_ops
from cgcompile.tracing.dynamic_dims import bind_arguments


class Subject:
    """A model whose graphs are compared with the eager one; a plain model is compiled for it."""

    def __init__(self, model: Any, config: Any = None, function: str = "verify") -> None:
        is_loop = isinstance(model, Loop)
        self.handle = None if is_loop else handle_of(model)
        self.wrapper = model if isinstance(model, CUDAGraphWrapper) else None
        self.wrapper = model.wrapper if is_loop else self.wrapper
        self._owned: Backend | None = None  # compiled for this alone
        if self.handle is None and self.wrapper is None:
            check_compilable(model, function)
            model = compile(model, with_recorder(resolved(config, function)))
            self.handle = self._owned = model.backend
        elif config is not None:
            raise ConfigError.settings_are_fixed()
        self.call: Callable[..., Any] = model
        self.original: Callable[..., Any] = _round_of(model) if is_loop else original_of(model)
        if isinstance(model, CompiledModel):
            self.wrapper = model.wrapper
        recorder: Any = self.wrapper if self.handle is None else self.handle
        self._recorder: Backend | CUDAGraphWrapper = recorder
        self.config: CompilationConfig = recorder.config
        self._written: dict[str, torch.Tensor] | None = None

    @property
    def name(self) -> str:
        """The name of the eager model."""
        return name_of(self.original)

    @property
    def counters(self) -> Counters:
        """A copy of the counters of its graphs."""
        return self._recorder.counters

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the model, or of the module of a bound method."""
        module = getattr(self.original, "__self__", self.original)
        return list(module.buffers()) if isinstance(module, torch.nn.Module) else []

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The random generators of a loop, beside the default one."""
        return () if self.wrapper is None else self.wrapper.generators

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tensors to restore after each run, besides the inputs."""
        return [*self.buffers, *(self._written or {}).values()]

    def tolerance(self, call: Call, rtol: float | None, atol: float | None) -> Tolerance:
        """Return the user's tolerance; else bitwise where graphs hold eager's kernels."""
        config = self.config
        own = any(getattr(op, "impl", None) for op in config.splitting_ops)
        uncompiled = config.first_compiler == "eager" and config.mode is CompilationMode.PIECEWISE
        uncompiled |= config.mode is CompilationMode.NONE or self.wrapper is not None
        own |= kernel_switch(config, "decode_attention") is True  # on a CPU by ops of torch
        changed = bool(config.graph_passes or config.piece_passes or own)
        tensors = [*torch_ops.tree_tensors(call), *self.buffers]
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
        return Tolerance(uncompiled and not changed and on_cpu, rtol, atol)

    def kernel_notes(self) -> Iterator[str]:
        """Yield how much of each graph kernels of cgcompile compute."""
        for index, graph in enumerate(() if self.handle is None else self.handle.graphs):
            texts = fusion_texts(graph.split, self.config)
            fused = sum(text.partition(": ")[2].startswith("fused ") for text in texts)
            if fused:
                parts = f"{fused} parts of graph {index}"
                yield f"kernels of cgcompile compute {parts}; cgcompile.explain names them"

    def outcome(self, run: Callable[..., Any], call: Call) -> dict[str, Any]:
        """Return copies of what a call returns and writes; everything is restored after it."""
        args, kwargs = call
        self._find_written(call)
        tensors, generators = [*torch_ops.tree_tensors(call), *self.kept], self.generators
        with restored_after(tensors, generators=generators), torch.no_grad():
            result = named_values(run(*args, **kwargs), "result")
            return copies({**result, **self.memory(call)})

    def _find_written(self, call: Call) -> dict[str, torch.Tensor]:
        """Return the tensors of the model, without buffers, that an eager call writes, by path."""
        if self._written is None:
            args, kwargs = call
            state = State(self.original, call)
            with torch.no_grad(), restored_after(state=state) as snapshot:
                state.uncompile()
                self.original(*args, **kwargs)
                written = state.written(snapshot).items()
            known = {id(tensor) for tensor in (*self.buffers, *torch_ops.tree_tensors(call))}
            self._written = {path: tensor for path, tensor in written if id(tensor) not in known}
        return self._written

    def memory(self, call: Call) -> dict[str, torch.Tensor]:
        """Return the tensors that a call may write."""
        left = {f"input {path}": leaf for path, leaf in torch_ops.tree_paths(call)}
        left |= {f"buffer {index}": buffer for index, buffer in enumerate(self.buffers)}
        tensors = {name: v for name, v in left.items() if isinstance(v, torch.Tensor)}
        return tensors | self._find_written(call)

    def uncompared(
        self, call: Call, plain: dict[str, Any], value: dict[str, Any]
    ) -> tuple[tuple[str, ...], str]:
        """Return the results without a usable ``==``, or why no result was compared."""
        names, written = uncompared(plain, value), self.memory(call)
        results = {n for n in plain if n not in written and not isinstance(plain[n], Opened)}
        blind = bool(names) and results <= set(names)
        texts = tuple(f"{name} ({layout_text(plain[name])})" for name in names)
        return texts, "nothing that it returns can be compared" if blind else ""

    def until_replayed(self, call: Call) -> str:
        """Warm up and capture a call until it replays; return why it does not, or empty text."""
        for _ in range(self.config.num_warmups + 3):
            before = self.counters
            self.outcome(self.call, call)
            after = self.counters
            if after.replays > before.replays and not after.plain - before.plain:
                return ""
        why = "; ".join(after.why_plain(before)) or not_compiled(after)
        return why or "no graph of it was called"

    def observed(self, observer: Callable[[int], ReplayOverride]) -> AbstractContextManager[None]:
        """Let an observer run each recorded step; see :func:`observed`."""
        return observed(self.handle, observer)

    def close(self) -> None:
        """Free what was compiled and captured for this subject."""
        if self._owned is not None:
            self._owned.release()

    def recompiled(self, **settings: Any) -> "Subject":
        """Return a subject of the original model, compiled with other settings."""
        return Subject(self.original, replace(self.config, **settings))


def not_compiled(counters: Counters, has_graphs: bool = False) -> str:
    """Return the functions of which Dynamo compiled nothing, with reasons."""
    if Reason.NOT_COMPILED in counters.degraded:
        return counters.details[Reason.NOT_COMPILED]
    # Code that Dynamo gave up for an earlier backend or handle.
    others = [] if counters.calls or has_graphs else dynamo.given_up()
    names = "; of ".join(dict.fromkeys(others))
    return names and f"in this process, for any model, Dynamo compiled nothing of {names}"


def name_of(model: Any) -> str:
    """Return the name of a function, or of the class of a module."""
    return getattr(model, "__qualname__", None) or type(model).__name__


@contextmanager
def comparing(model: Any, config: Any, function: str, inputs: InputSets) -> Iterator[Subject]:
    """Yield a subject and restore its inputs; refuse arguments that the model does not take."""
    with closing(Subject(model, config, function)) as subject, restored_after(inputs.tensors):
        try:
            yield subject
        except TypeError:
            check_arguments(subject.original, *inputs.first)
            raise


@contextmanager
def observed(handle: Backend | None, observer: Callable[[int], ReplayOverride]) -> Iterator[None]:
    """Let an observer, made from the number of a graph, run each recorded step of it."""
    graphs = () if handle is None else handle.graphs
    try:
        for number, graph in enumerate(graphs):
            graph.override_replay(observer(number))
        yield
    finally:
        for graph in graphs:
            graph.override_replay(None)


def _round_of(loop: Loop) -> Callable[..., Any]:
    """Return a function that runs a round of eager steps, with the name of the step."""
    steps: Any = copy(loop.wrapper.runnable)
    steps.runnable = original_of(loop.unwrap())
    eager_round: Any = partial(steps, count=loop.steps)
    eager_round.__qualname__ = loop.wrapper.name
    return eager_round  # type: ignore[no-any-return]


def original_of(model: Any) -> Any:
    """Return the eager model behind what was compiled or wrapped."""
    while True:
        inner = torch_ops.original_of(model)
        if inner is None:
            inner = torch_ops.compiled_from(model)
        if inner is None and isinstance(model, (CompiledModel, CUDAGraphWrapper, Loop)):
            inner = model.unwrap()
        if inner is None:
            return model
        model = inner


def check_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ArgumentsError if a model does not take these arguments."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    with suppress(ValueError):  # it is not written in Python
        bind_arguments(name_of(model), inspect.signature(called), args, kwargs)


# ---------------------------------------------------------------- targets of a call


def resolved(settings: Any, function: str) -> CompilationConfig:
    """Return settings from a config, a backend or a mapping; of None the defaults."""
    if isinstance(settings, Mapping):
        return CompilationConfig.resolve(options=settings)
    result = settings.config if isinstance(settings, Backend) else settings
    if result is not None and not isinstance(result, CompilationConfig):
        expected = "a CompilationConfig, a Backend, or a mapping of settings"
        raise ConfigError.bad_value(name="config", where=function, value=result, expected=expected)
    return CompilationConfig.resolve(result)


def with_recorder(config: CompilationConfig) -> CompilationConfig:
    """Return settings that record CPU tensors, unless ``capture_device`` is set."""
    if config.cudagraph_mode and config.origins["capture_device"] == "default":
        return CompilationConfig.resolve(config, options={"capture_device": "host"})
    return config


def of_loop(target: Any) -> Any:
    """Return the wrapper of a loop; any other target as it is."""
    return target.wrapper if isinstance(target, Loop) else target


def recorders_of(target: Any, function: str) -> list[CompiledGraph | CUDAGraphWrapper]:
    """Return what captures for a compiled model, a handle, a wrapper, a loop or a manager."""
    target = of_loop(target)
    if isinstance(target, CompiledGraph | CUDAGraphWrapper):
        return [target]
    if isinstance(target, CudaGraphManager):
        compiled = [] if target.backend is None else recorders_of(target.backend, function)
        return [*target.wrappers, *compiled]
    handle = target if isinstance(target, Backend) else handle_of(target)
    if handle is not None:
        return [*handle.graphs, *handle.untraced]
    wrapper = getattr(target, "wrapper", None)
    if isinstance(wrapper, CUDAGraphWrapper):
        return [wrapper]
    raise ConfigError.captures_nothing(function=function, found=type(target).__name__)


def counters_of(target: Any, function: str) -> Counters:
    """Return the counters of a target; see :func:`recorders_of`."""
    target = of_loop(target)
    if not isinstance(target, CompiledGraph | CUDAGraphWrapper | CudaGraphManager):
        handle = target if isinstance(target, Backend) else handle_of(target)
        if handle is not None:
            return handle.counters
    return sum([each.counters for each in recorders_of(target, function)], Counters())


def sequences_of(target: Any, function: str) -> Iterator[GraphSequence]:
    """Yield the recorded steps of a target, see :func:`recorders_of`, or of a raw capture."""
    if isinstance(target, BreakableCUDAGraphCapture):
        target = target.sequence
    if target is None or isinstance(target, GraphSequence):
        yield from () if target is None else (target,)
        return
    for recorder in recorders_of(target, function):
        if isinstance(recorder, CompiledGraph):
            yield from (recording.sequence for recording in recorder.recordings)
        else:
            yield from (entry.sequence for entry in recorder.entries)
