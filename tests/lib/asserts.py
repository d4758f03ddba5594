"""What several test files share: run a case against eager, look at what was really compiled."""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn

import cgcompile
from cgcompile.reasons import Counters, Reason
from cgcompile.runtime.compiled_graph import CompiledGraph
from cgcompile.torch_compat import dynamo
from lib.cases import CASES, Case, library
from lib.patience import PATIENCE


def build(case: Case, device: str = "cpu") -> nn.Module:
    library()
    torch.manual_seed(0)
    return case.build().eval().to(device)


def clone(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(each.clone() for each in inputs)


def mark(case: Case, inputs: tuple[torch.Tensor, ...]) -> None:
    """Make the batch dimension dynamic, or whatever the case wants instead."""
    if case.prepare is not None:
        case.prepare(inputs)
    if case.prepare is not None or case.dynamic is not None:
        return
    for value in inputs:
        torch._dynamo.mark_dynamic(value, 0)


def backend_for(case: Case, compiler: Any, **more: Any) -> cgcompile.Backend:
    settings = {**case.settings, **more}
    if compiler == "inductor":
        settings["inductor_options"] = case.inductor
    return cgcompile.Backend(compiler=compiler, **settings)


def split_texts(case: Case, device: str = "cpu", **settings: Any) -> str:
    """The printed splits of the graphs that the first batch makes, without line numbers."""
    torch._dynamo.reset()
    model, backend = build(case, device), backend_for(case, "eager", **settings)
    inputs = tuple(each.to(device) if each.dim() else each for each in case.inputs(case.sizes[0]))
    mark(case, inputs)
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        torch.compile(model, backend=backend, dynamic=case.dynamic)(*inputs)
    return "\n\n".join(graph.split.text(lines=False) for graph in backend.graphs)


def compiled_graph(name: str, **settings: Any) -> CompiledGraph:
    """The first graph of a case, compiled with uncompiled pieces; it keeps its model alive."""
    case = CASES[name]
    backend = backend_for(case, "eager", **settings)
    inputs = case.inputs(case.sizes[0])
    mark(case, inputs)
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        model = torch.compile(build(case), backend=backend, dynamic=case.dynamic)
        model(*inputs)
    graph = backend.graphs[0]
    graph.keep_alive = model  # Dynamo's cache goes with the model
    return graph


class Several:
    """Compiles what Dynamo traces with several backends, and runs what one of them made.

    Attributes:
        chosen: which one.
    """

    def __init__(self, backends: list[cgcompile.Backend]) -> None:
        self.backends, self.chosen = backends, 0

    def __call__(self, gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled = [backend(dynamo.copied(gm), inputs) for backend in self.backends]
        return lambda *args: compiled[self.chosen](*args)


def check_against_eager(
    case: Case, compiler: Any, device: str = "cpu", **settings: Any
) -> cgcompile.Backend:
    """Compare each batch size with eager, plain, capturing, and replayed from two addresses.

    Inputs are random at every call; results and inputs that the model writes are compared. Random
    models draw the same numbers on both sides.
    """
    (backend,) = check_each_against_eager(case, compiler, [settings], device)
    return backend


def check_each_against_eager(
    case: Case, compiler: Any, settings: list[dict[str, Any]], device: str = "cpu"
) -> list[cgcompile.Backend]:
    """As :func:`check_against_eager`, for backends with each of some settings, from one trace."""
    complete = [{"capture_device": "host", **each} for each in settings]
    backends = [backend_for(case, compiler, **each) for each in complete]
    model, several = build(case, device), Several(backends)
    backend = several if len(backends) > 1 else backends[0]
    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        compiled = torch.compile(model, backend=backend, dynamic=case.dynamic)
        for position, size in enumerate(case.sizes):
            for several.chosen in range(len(backends)):
                marked = position == several.chosen == 0
                _check_size(case, compiler, device, model, compiled, size, marked)
        for checked in backends:  # while the model lives, and with it its graphs
            _check_counters(case, checked)
            _check_modes(checked)
    return backends


def _check_size(case, compiler, device, model, compiled, size, marked) -> None:
    tolerance = _tolerance(case, compiler, device)
    previous, buffers = None, None
    for call in range(CALLS):
        with torch.device(device):
            inputs = case.inputs(size)
        if buffers is None or (call == CALLS - 1 and not case.writes_inputs):
            buffers = clone(inputs)  # the last call passes tensors at other addresses
        else:
            for buffer, value in zip(buffers, inputs, strict=True):
                buffer.copy_(value)
        if call == 0 and marked:
            mark(case, buffers)
        expected = _seeded(model, inputs)
        result = _seeded(compiled, buffers)
        torch.testing.assert_close(result, expected, **tolerance)
        torch.testing.assert_close(buffers, inputs, **tolerance)
        first = _first_tensor(result)
        assert first.abs().sum() > 0
        assert previous is None or first.shape != previous.shape or (first != previous).any()
        previous = first.clone()


CALLS = 4  # of each size: warming, capture, two replays


def _check_counters(case: Case, backend: cgcompile.Backend) -> None:
    """That what should have been captured and replayed really was, and nothing else."""
    counters = sum((graph.counters for graph in backend.graphs), Counters())
    assert len(backend.graphs) >= case.graphs
    assert counters.calls == counters.captures + counters.replays + sum(counters.plain.values())
    piecewise = {graph._config.cudagraph_mode.name for graph in backend.graphs} == {"PIECEWISE"}
    if piecewise and not case.has_captured_pieces:
        assert set(counters.plain) == {Reason.ATTENTION_SUPPORT}
    elif case.replays is None:
        expected = len(case.sizes) * case.graphs
        counted = (counters.plain[Reason.WARMING], counters.captures, counters.replays)
        assert counted == (expected, expected, expected * (CALLS - 2)), counters
        assert set(counters.plain) == {Reason.WARMING}, counters
    else:
        assert counters.replays >= case.replays, counters
        assert case.replays or counters.captures == 0


def _check_modes(backend: cgcompile.Backend) -> None:
    """That each graph captured in a mode which its settings ask for."""
    for graph in backend.graphs:
        modes = {recording.batch.mode for recording in graph.recordings}
        assert bool(modes) == bool(graph.counters.captures)
        assert all(map(graph._config.cudagraph_mode.has_mode, modes))


def _seeded(function: Any, inputs: tuple[torch.Tensor, ...]) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return function(*inputs)


def _first_tensor(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _tolerance(case: Case, compiler: Any, device: str) -> dict[str, float]:
    if compiler == "eager" and device == "cpu" and case.same_kernels:
        return {"rtol": 0.0, "atol": 0.0}  # bitwise
    return dict(zip(("rtol", "atol"), case.tolerance, strict=True))


def watched(function: Callable[[], Any], see: Callable[[Any, str, Any], None]) -> None:
    """Call a function while ``see`` gets what Python enters and leaves, but for finalizers."""
    collects = gc.isenabled()
    gc.disable()  # a collection may begin anywhere, and calls what waits for the dead
    sys.setprofile(see)
    try:
        function()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()


def calls_of(function: Callable[[], Any]) -> list[str]:
    """The Python functions that a call enters, itself included."""
    names: list[str] = []

    def see(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    watched(function, see)
    return names


@contextmanager
def compiling_elsewhere() -> Iterator[None]:
    """Inside, another thread is in the midst of a compilation of its own."""
    begun, finish = threading.Event(), threading.Event()

    def slow(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        begun.set()
        assert finish.wait(PATIENCE)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=slow)
    thread = threading.Thread(target=compiled, args=(torch.ones(2),))
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        yield
    finally:
        finish.set()
        thread.join()
