"""Fast paths: how many calls they take, which steps they serve, and which they leave."""

import asyncio
import contextvars
import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lib.asserts import watched
from lib.entry import Hook, assert_same
from lib.fast_paths import FULL, NONE, PIECEWISE, ROWS, Deep, Engine, Linear, compiled, context
from lib.patience import PATIENCE
from lib.snapshots import assert_snapshot
from torch import nn

import cgcompile
from cgcompile.errors import AddressChangedError, CaptureError, DispatchError, HostValueChangedError
from cgcompile.graphs.sequence import observing
from cgcompile.reasons import Reason
from cgcompile.runtime.fast_path import NOT_SERVED

pytestmark = pytest.mark.usefixtures("without_gradients")


# ---------------------------------------------------------------- how many calls


def calls_of(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """Count the calls of each function of Python, and of C, outside of the host recorder."""
    python: Counter[str] = Counter()
    native: Counter[str] = Counter()
    depth = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal depth
        inside = depth > 0
        if event == "call" and (inside or frame.f_code.co_name in ("replay_steps", "attend")):
            depth += 1
        elif event == "return" and inside:
            depth -= 1
        if inside or depth > 1:
            return
        if event == "call":
            python[frame.f_code.co_name] += 1
        elif event == "c_call":
            native[argument.__name__] += 1

    watched(run, seen)
    del native["setprofile"]
    return python, native


def without_graphs(engine: Engine) -> None:
    """Replace graphs by functions of C that do nothing: what is left is cgcompile's own."""
    (recording,) = engine.graph.recordings
    sequence, nothing = recording.sequence, {}.clear
    kinds = [type(segment).__name__ for segment in sequence.segments]
    sequence.steps = sequence._padded_steps = tuple(
        nothing if kind == "GraphSegment" else step
        for kind, step in zip(kinds, sequence.steps, strict=True)
    )
    engine.paths.drop()  # they hold the graph's own replay
    for _ in range(2):
        engine.step()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, 6])
def test_calls_of_a_full_step(layers: int) -> None:
    engine = Engine(layers)
    without_graphs(engine)
    python, native = calls_of(engine.step)
    assert engine.paths.replays >= 2
    # Of them one of this test, two of the host device, and two that read settings of torch.
    assert python.total() <= 10, python
    assert native.total() <= 34, native  # of them 18 that read settings of kernels
    assert python["kernel_settings"] == python["trace_settings"] == 1, python
    assert python["replay"] == python["fits"] == python["forward"] == 0, python
    assert native["is_grad_enabled"] == native["check"] == 1, native


def test_calls_of_another_step_than_the_last() -> None:
    engine = Engine(1)
    contexts = engine.context, context(FULL, ROWS - 1)
    views = engine.x, engine.x[:-1]
    for _ in range(4):
        for x, own in zip(views, contexts, strict=True):
            engine.step(x, own)
    before = engine.paths.replays
    same, _ = calls_of(lambda: engine.step(views[1], contexts[1]))
    other, _ = calls_of(lambda: engine.step(views[0], contexts[0]))
    assert engine.paths.replays == before + 2
    assert other - same == {"step": 1, "call_requested": 1}
    engine.step(views[1], contexts[1])
    assert calls_of(lambda: engine.step(views[1], contexts[1]))[0] == same


@pytest.mark.slow
def test_calls_of_a_break() -> None:
    counts = []
    for layers in (1, 6):
        engine = Engine(layers, PIECEWISE, hooked=False)
        without_graphs(engine)
        counts.append(calls_of(engine.step))
    (few, few_native), (many, many_native) = counts
    assert many - few == {"attend": 5}, "no function of ours for any of them"
    assert many_native - few_native == {"clear": 5}, "nothing but the graphs"


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=lambda mode: mode.name.lower())
def test_text(mode: Any) -> None:
    engine = Engine(mode=mode)
    assert_snapshot(f"fast_path_{mode.name.lower()}", str(engine.paths.call.__doc__))


# ---------------------------------------------------------------- which steps


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_repeated_steps(mode: Any) -> None:
    engine = Engine(2, mode)
    assert engine.is_fast()
    assert engine.is_fast(lambda: engine.step(context=context(mode, ROWS)))  # equal descriptor
    assert engine.is_fast(lambda: engine.step(engine.x[:]))  # another object, the same address
    padded = context(mode, ROWS, num_unpadded_tokens=ROWS - 5)
    expected, before = engine.model(engine.x), engine.paths.replays
    assert_same([engine.step(context=padded)[: ROWS - 5]], [expected[: ROWS - 5]])
    assert engine.paths.replays == before + 1
    assert engine.is_fast(lambda: engine.step(context=context(mode, ROWS, inputs_ready=object())))
    (recording,) = engine.graph.recordings
    replays, counters = recording.sequence.replays, engine.backend.counters
    assert recording.sequence.padding == 5
    engine.model.cache_0.mul_(2)
    engine.model.layers[1].after.weight.mul_(2)
    assert engine.is_fast()
    assert recording.sequence.replays == replays + 1
    assert counters.calls == counters.replays + 2  # warming, capture


def test_calls_that_are_left() -> None:
    engine = Engine()
    step, x = engine.paths.call, engine.x
    wide = torch.empty(ROWS, 2 * x.shape[1])
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "another address": ((x.clone(),), {}),
        "fewer rows": ((x[:-1],), {}),
        "other strides": ((wide[:, ::2],), {}),
        "another type": ((nn.Parameter(x, requires_grad=False),), {}),
        "another dtype": ((x.double(),), {}),
        "a keyword": ((), {"x": x}),
        "nothing": ((), {}),
        "too much": ((x, x), {}),
        "no tensor": ((3,), {}),
    }
    with engine.context:
        assert all(step(*call) is NOT_SERVED for call in calls.values()), calls.keys()
        assert step((x,), {}) is not NOT_SERVED
    for around in (torch.inference_mode, torch.enable_grad):
        with around(), engine.context:
            assert step((x,), {}) is NOT_SERVED
    assert step((x,), {}) is NOT_SERVED, "no context"
    for other in (context(NONE, ROWS), context(PIECEWISE, ROWS), context(FULL, ROWS - 1)):
        with other:
            assert step((x,), {}) is NOT_SERVED
    with engine.context, torch.autocast("cpu", torch.bfloat16):
        assert step((x,), {}) is NOT_SERVED
    engine.paths.drop()
    with engine.context:
        assert step((x,), {}) is NOT_SERVED


def observed(engine: Engine) -> None:
    def observer(program: Any, recording: Any, inputs: tuple[Any, ...], real: Any) -> Any:
        assert len(inputs) == len(program.split.inputs)  # the frozen ones are among them
        return recording.replay(inputs, real)

    engine.graph.override_replay(observer)


@pytest.mark.parametrize(
    "forget",
    [lambda e: e.backend.release(), lambda e: e.graph.pool.release(), observed],
    ids=["release", "pool", "observer"],
)
def test_graphs_that_are_gone_or_observed(forget: Any) -> None:
    engine = Engine()
    forget(engine)
    assert not engine.is_fast()


def test_weights_that_die() -> None:
    """The fast path goes with them, and does not hold their graphs."""
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    models = [Linear().requires_grad_(False) for _ in range(2)]
    runs, x = [torch.compile(model, backend=backend) for model in models], torch.randn(3, 4)

    def step(index: int) -> int:
        x.normal_()
        before = graph.fast_paths.replays
        with context():
            assert_same([runs[index](x)], [models[index](x)])
        return graph.fast_paths.replays - before

    for index in (0, 0, 0, 1, 1, 1):
        with context():
            runs[index](x)
    (graph,) = backend.graphs
    assert step(1) == 1
    recording = weakref.ref(graph.recordings[-1])
    del models[1], runs[1]
    gc.collect()
    assert graph.fast_paths.graph is None
    assert len(graph.recordings) == 1
    assert (step(0), step(0)) == (0, 1)
    models.append(Linear().requires_grad_(False))
    runs.append(torch.compile(models[1], backend=backend))
    assert [step(1) for _ in range(4)] == [0, 0, 0, 1]
    gc.collect()
    assert recording() is None


def test_a_result_of_other_weights_that_moves() -> None:
    """Layers of one class: an input that is a result of another layer has no fast path."""
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    layers = [Linear().requires_grad_(False) for _ in range(2)]
    runs, x = [torch.compile(layer, backend=backend) for layer in layers], torch.randn(3, 4)
    old = list(layers[0].parameters())  # stay alive
    for step in range(12):
        if step == 6:
            layers[0].load_state_dict(Linear().state_dict(), assign=True)
            layers[0].requires_grad_(False)
        x.normal_()
        with context():
            assert_same([runs[1](runs[0](x))], [layers[1](layers[0](x))])
    (graph,) = backend.graphs
    assert len(graph.recordings) == 3, old
    assert graph.counters.plain[Reason.INPUT_CHANGED] == 1


@pytest.mark.slow
def test_gradients() -> None:
    engine = Engine()
    with torch.enable_grad():
        assert not engine.is_fast()
        engine.x.requires_grad_()
        assert engine.step().requires_grad
        engine.x.requires_grad_(False)
    assert engine.is_fast()


def test_another_grad_mode_gets_its_own() -> None:
    engine = Engine()
    first = engine.paths.call
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
        assert engine.paths.call not in (None, first)
        assert engine.is_fast()


def test_inside_of_a_capture() -> None:
    engine = Engine()
    device = engine.graph.pool.device
    outer, pool = device.new_graph(), device.new_pool(None)
    outer.begin(pool)
    try:
        before = engine.paths.replays
        engine.step()
        assert engine.paths.replays == before
    finally:
        outer.end()


def test_an_input_that_moved_or_of_another_size() -> None:
    engine = Engine()
    with pytest.raises(AddressChangedError, match="'x'"):
        engine.step(engine.x.clone())
    with pytest.raises(HostValueChangedError):
        engine.step(engine.x[: ROWS - 1])
    assert engine.is_fast()


@pytest.mark.slow
def test_a_hook_that_is_added() -> None:
    engine = Engine()
    handle = engine.model.register_forward_hook(lambda module, args, result: result + 1)
    before = engine.model(engine.x)
    assert_same([engine.step()], [before])
    handle.remove()
    assert_same([engine.step()], [engine.model(engine.x)])


@pytest.mark.slow
def test_invalidated_and_released_steps_come_back() -> None:
    engine = Engine()
    engine.model.layers[0].after = nn.Linear(*engine.model.layers[0].after.weight.shape)
    engine.compiled.invalidate("another layer")
    assert engine.paths.call is None
    for _ in range(5):
        assert_same([engine.step()], [engine.model(engine.x)])
    graph = engine.backend.graphs[-1]
    assert graph.fast_paths.call is not None
    for _ in range(20):
        engine.backend.release()
        for _ in range(3):
            engine.step()
    assert graph.fast_paths.call is not None


def test_profiler_ranges() -> None:
    engine, seen = Engine(), []

    def around(sequence: Any, index: int | None) -> Any:
        seen.append(index)
        return torch.no_grad()

    with observing(around):
        assert engine.is_fast()
    assert seen == [None, 0]


def test_poisoned_memory() -> None:
    engine = Engine(debug="poison")
    result = engine.step()
    without_graphs(engine)
    assert not engine.step().isfinite().any()
    assert result.data_ptr() == engine.step().data_ptr()


def test_a_result_whose_layout_the_caller_changes() -> None:
    engine = Engine()
    step = engine.paths.call
    for _ in range(3):
        engine.x.copy_(torch.randn_like(engine.x))
        with engine.context:
            result = step((engine.x,), {})
        assert result is not NOT_SERVED
        assert_same([result], [engine.model(engine.x)])
        result.unsqueeze_(0)
    assert engine.paths.call is step


# ---------------------------------------------------------------- several steps, several traces


def test_several_sizes() -> None:
    engine = Engine()
    sizes = [ROWS, ROWS - 1, ROWS - 100]
    contexts = {n: context(FULL, n) for n in sizes}
    for _ in range(4):
        for n in sizes:
            engine.step(engine.x[:n], contexts[n])
    paths = engine.paths
    assert len(paths.calls) == 3
    used = set()
    for n in [*sizes, *sizes[::-1]]:
        engine.x.copy_(torch.randn_like(engine.x))
        before = paths.replays
        assert_same([engine.step(engine.x[:n], contexts[n])], [engine.model(engine.x[:n])])
        assert paths.replays == before + 1
        assert paths.call in paths.calls.values()
        used.add(paths.call)
    assert len(used) == 3


def test_several_sizes_of_a_graph_with_guards() -> None:
    model = Linear().requires_grad_(False)
    runs, x, known = compiled(model, guards="keep"), torch.randn(4, 4), []
    for _ in range(5):
        for rows in (4, 3):
            with context(FULL, rows):
                assert torch.equal(runs(x[:rows]), model(x[:rows]))
            known.append(runs.backend.graphs[0].fast_paths.graph)
    assert known[-1] is known[-3] is not known[-2]


def test_two_traces() -> None:
    runs = compiled(nn.Sequential(nn.ReLU(), nn.Sigmoid()), dynamic_dims={"input": 0})
    both = [torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)]

    def call_both() -> None:
        for x in both:
            x.copy_(torch.randn_like(x))
            with context():
                torch.testing.assert_close(runs(x), runs.runnable(x))

    for _ in range(5):
        call_both()
    paths = [graph.fast_paths for graph in runs.backend.graphs]
    assert len(paths) == 2
    known, before = [dict(each.calls) for each in paths], [each.replays for each in paths]
    assert all(known)
    for _ in range(20):
        call_both()
    assert [each.calls for each in paths] == known
    assert [each.replays for each in paths] == [count + 20 for count in before]


# ---------------------------------------------------------------- failures, threads and tasks


def test_a_failing_step_is_counted_once(hook: Any) -> None:
    engine = Engine(mode=PIECEWISE)
    before = engine.backend.counters
    plain = Hook.function

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")

    hook(broken)
    with pytest.raises(ValueError, match="broken"):
        engine.step()
    hook(lambda x: engine.step())
    with pytest.raises(CaptureError, match="inside"):
        engine.step()
    hook(plain)
    after = engine.backend.counters
    assert (after.calls, after.failures) == (before.calls + 3, before.failures + 3)
    assert engine.paths.owner == 0
    assert engine.is_fast()


def run_in_thread(function: Callable[[], Any]) -> threading.Thread:
    def run() -> None:
        with torch.no_grad():
            function()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("cleared", [False, True])
def test_one_step_at_a_time(cleared: bool) -> None:
    engine, results = Engine(), []
    engine.backend.allow_threads()
    before = engine.paths.replays
    with engine.paths.lock:  # as if another step ran
        thread = run_in_thread(lambda: results.append(engine.step().clone()))
        time.sleep(0.2)
        assert thread.is_alive()
        assert not results
        engine.graph.pool.generation += cleared  # as clear_graphs() of a wrapper
    thread.join(PATIENCE)
    assert engine.paths.replays == before + (not cleared)
    assert_same(results, [engine.model(engine.x)])


def test_threads_take_the_fast_path_where_they_lock() -> None:
    engine, errors, results = Engine(), [], []

    def step() -> None:
        try:
            results.append(engine.step().clone())
        except DispatchError as error:
            errors.append(error)

    run_in_thread(step).join(PATIENCE)
    assert (len(errors), results) == (1, [])
    engine.backend.allow_threads()
    for _ in range(2):
        before = engine.paths.replays
        run_in_thread(step).join(PATIENCE)
        step()
        assert engine.paths.replays == before + 2
    assert_same(results, [engine.model(engine.x)] * 4)


def test_a_trace_of_another_thread_delays_nothing() -> None:
    begun, done = threading.Event(), threading.Event()

    def compiler(gm: Any, inputs: Any) -> Any:
        if inputs[-1].dtype is torch.float64:
            begun.set()
            assert done.wait(PATIENCE)
        return gm.forward

    runs = cgcompile.compile(nn.ReLU(), compiler=compiler, guards="none", capture_device="host")
    x = torch.randn(3, 4)
    for _ in range(4):
        with context():
            runs(x)
    tracing = run_in_thread(lambda: runs(x.double()))
    assert begun.wait(PATIENCE)
    with context(PIECEWISE):  # the full path
        thread = run_in_thread(lambda: runs(x))
        thread.join(PATIENCE)
    assert not thread.is_alive()
    done.set()
    tracing.join(PATIENCE)
    assert len(runs.traces) == 2


@pytest.mark.slow
def test_a_call_inside_of_a_step_that_runs_plain(hook: Any) -> None:
    engine = Engine(mode=PIECEWISE)
    engine.backend.allow_threads()
    model = Deep(1, True).eval()  # its weights require grad
    runs = cgcompile.compile(model, engine.backend, dynamic_dims={"x": 0}, guards="none")
    for _ in range(4):
        with engine.context:
            runs(engine.x)
    plain, inside = Hook.function, []

    def function(x: torch.Tensor) -> torch.Tensor:
        if not inside:
            with torch.enable_grad():
                inside.append(None)
                inside.append(runs(engine.x))
        return plain(x)

    def call() -> None:
        with engine.context:
            runs(engine.x)

    hook(function)
    thread = run_in_thread(call)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert inside[1].requires_grad


def test_a_context_copied_to_another_thread() -> None:
    engine = Engine()
    before = engine.paths.replays
    with engine.context:
        run = contextvars.copy_context().run
        run_in_thread(lambda: run(engine.compiled, engine.x)).join(PATIENCE)
        assert engine.paths.replays == before
        engine.compiled(engine.x)
    assert engine.paths.replays == before + 1


def test_a_task_has_its_own_context() -> None:
    engine = Engine()

    async def inner() -> int:
        before = engine.paths.replays
        engine.compiled(engine.x)
        return engine.paths.replays - before

    async def outer() -> tuple[int, int]:
        with engine.context:
            inside = asyncio.create_task(inner())
            own = await inner()
            return own, await inside

    assert asyncio.run(outer()) == (1, 0)
    with engine.context:
        assert asyncio.run(inner()) == 0
