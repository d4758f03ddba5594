"""One function for a whole call that replays: what it says, which calls it takes, which it leaves."""

import asyncio
from typing import Any

import pytest
import torch
from expecttest import TestCase
from lib.entry import Hook, assert_same
from lib.fast_paths import FULL, PIECEWISE, ROWS, Engine
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor
from cgcompile.runtime.fast_path import ANOTHER


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def way(engine: Engine) -> Any:
    """The shortest way of the last step."""
    return engine.graph.fast_paths.call


def text_of(engine: Engine) -> str:
    return str(engine.graph.fast_paths.call.__doc__)


class TestText(TestCase):
    maxDiff = None

    def test_full(self) -> None:
        self.assertExpectedInline(
            text_of(Engine()),
            """\
def step(args, kwargs):
    entry = last_entered()
    if entry is None:
        return another
    _, context, thread, task, _ = entry
    if context is None or thread != get_ident():
        return another
    loop = running_loop()
    if task is not (None if loop is None else current_task(loop)):
        return another
    wanted = context.batch_descriptor
    if context.cudagraph_runtime_mode is not mode or wanted is not descriptor and wanted != descriptor:
        return paths.switched(context, args, kwargs)
    if paths.owner == thread or grad_is_on() or capturing() or forward_ad._current_level >= 0:
        return another
    if hooks_0 or hooks_1:
        return another
    if len(args) != 1 or kwargs:
        return another
    (v2,) = args
    if a12():
        return another
    (out_0,) = lent.tensors
    if not alike(v2, out_0) or v2.data_ptr() != at_1 or out_0.data_ptr() != at_out_0:
        (out_0,) = lent.get()
        if not alike(v2, out_0) or v2.data_ptr() != at_1 or out_0.data_ptr() != at_out_0:
            return another
    with lock:
        if paths.epoch is not epoch or pool.generation != generation:
            return another
        paths.owner = thread
        try:
            if context.inputs_ready is not None:
                wait(context.inputs_ready, device)
            if stream_key() != pool.stream_key:
                pool.follow_stream()
            if profiler._is_profiler_enabled or observers():
                run_observed(sequence, sequence.steps)
            else:
                replay()
            stats.replays += 1
            real = context.num_unpadded_tokens
            if real is not None and real < rows:
                stats.padding += rows - real
        except BaseException:
            failed()
            raise
        finally:
            paths.owner = 0
        paths.replays += 1
        return out_0
""",
        )

    def test_piecewise_after_the_questions(self) -> None:
        _, found = text_of(Engine(mode=PIECEWISE)).split("    if hooks_0 or hooks_1:\n")
        self.assertExpectedInline(
            found,
            """\
        return another
    if len(args) != 1 or kwargs:
        return another
    (v2,) = args
    if a12():
        return another
    if not alike(v2) or v2.data_ptr() != at_1:
        return another
    with lock:
        if paths.epoch is not epoch or pool.generation != generation:
            return another
        paths.owner = thread
        try:
            if context.inputs_ready is not None:
                wait(context.inputs_ready, device)
            outputs = replay((n_0, v2,), context.num_unpadded_tokens)
        except BaseException:
            failed()
            raise
        finally:
            paths.owner = 0
        paths.replays += 1
        return outputs[0]
""",
        )


def test_sizes_in_turn() -> None:
    """The steps that were replayed before are all remembered."""
    engine = Engine()
    sizes = [ROWS, ROWS - 1, ROWS - 100]
    contexts = {n: engine.context_of(FULL, n) for n in sizes}
    for _ in range(4):
        for n in sizes:
            engine.step(engine.x[:n], contexts[n])
    fast_paths = engine.graph.fast_paths
    assert len(fast_paths.calls) == 3
    ways = set()
    for n in [*sizes, *sizes[::-1]]:
        engine.x.copy_(torch.randn_like(engine.x))
        before = fast_paths.replays
        assert_same([engine.step(engine.x[:n], contexts[n])], [engine.model(engine.x[:n])])
        assert fast_paths.replays == before + 1
        assert fast_paths.call in fast_paths.calls.values()
        ways.add(fast_paths.call)
    assert len(ways) == 3


def test_a_result_that_is_changed_at_each_step() -> None:
    engine = Engine()
    made = way(engine)
    for _ in range(3):
        engine.x.copy_(torch.randn_like(engine.x))
        with engine.context:
            result = made((engine.x,), {})
        assert result is not ANOTHER
        assert_same([result], [engine.model(engine.x)])
        result.unsqueeze_(0)
    assert way(engine) is made


def test_what_it_leaves_to_the_longer_way() -> None:
    engine = Engine()
    made, x = way(engine), engine.x
    wide = torch.empty(ROWS, 2 * x.shape[1])
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "another place": ((x.clone(),), {}),
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
        assert all(made(*given) is ANOTHER for given in calls.values()), calls.keys()
        assert made((x,), {}) is not ANOTHER
    for around in (torch.inference_mode, torch.enable_grad):
        with around(), engine.context:
            assert made((x,), {}) is ANOTHER
    assert made((x,), {}) is ANOTHER, "no context"
    engine.graph.fast_paths.forget()
    with engine.context:
        assert made((x,), {}) is ANOTHER


def test_another_mode_of_grad_gets_a_way_of_its_own() -> None:
    engine = Engine()
    first = way(engine)
    with torch.inference_mode():
        for _ in range(3):
            engine.step()
        assert way(engine) not in (None, first)
        assert engine.short(engine.step)


def test_a_hook_that_is_added() -> None:
    engine = Engine()
    handle = engine.model.register_forward_hook(lambda module, args, result: result + 1)
    before = engine.model(engine.x)
    assert_same([engine.step()], [before])
    handle.remove()
    assert_same([engine.step()], [engine.model(engine.x)])


def test_what_was_invalidated_is_forgotten() -> None:
    engine = Engine()
    engine.model.layers[0].after = nn.Linear(*engine.model.layers[0].after.weight.shape)
    engine.compiled.invalidate("another layer")
    assert way(engine) is None
    for _ in range(5):
        assert_same([engine.step()], [engine.model(engine.x)])
    assert engine.compiled._traces.fast_paths.call is not None


def test_a_failing_step_is_counted_once() -> None:
    engine = Engine(mode=PIECEWISE)
    plain, before = Hook.function, engine.backend.counters

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken")

    try:
        Hook.function = broken
        with pytest.raises(ValueError, match="broken"):
            engine.step()
    finally:
        Hook.function = plain
    after = engine.backend.counters
    assert (after.calls, after.failures) == (before.calls + 1, before.failures + 1)
    assert engine.short(engine.step)


def test_tasks() -> None:
    """A task has the context that it sets, not that of who began it."""
    engine = Engine()
    fast_paths = engine.graph.fast_paths

    async def inner() -> int:
        before = fast_paths.replays
        engine.compiled(engine.x)
        return fast_paths.replays - before

    async def outer() -> tuple[int, int]:
        with engine.context:
            inside = asyncio.create_task(inner())
            own = await inner()
            return own, await inside

    assert asyncio.run(outer()) == (1, 0)
    with engine.context:
        assert asyncio.run(inner()) == 0


def test_inputs_that_another_stream_writes() -> None:
    engine = Engine()
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(ROWS), inputs_ready=object()
    )
    with context:
        assert way(engine)((engine.x,), {}) is not ANOTHER


class Several(nn.Module):
    """Returns containers, an argument, and what no graph makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: int, y: torch.Tensor | None = None) -> Any:
        made = self.inner(x) * scale
        return {"made": made, "more": (made + 1, [x, None]), "y": y}


@pytest.mark.parametrize("given", [{}, {"y": 1}])
def test_containers_arguments_and_constants(given: dict[str, int]) -> None:
    model = Several().requires_grad_(False)
    compiled = cgcompile.compile(
        model, compiler="eager", capture_device="host", guards="none", dynamic_dims={"x": 0}
    )
    x = torch.randn(3, 4)
    more = {name: torch.randn(2) for name in given}
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(3)
    )
    for _ in range(5):
        x.copy_(torch.randn(3, 4))
        with context:
            found = compiled(x, scale=2, **more)
        wanted = model(x, scale=2, **more)
        assert list(found) == list(wanted)
        assert_same([found["made"], *found["more"][:1]], [wanted["made"], *wanted["more"][:1]])
        assert found["more"][1][0] is x
        assert found["more"][1][1] is None
        assert found["y"] is wanted["y"]
    (graph,) = compiled.backend.graphs
    assert graph.fast_paths.call is not None
    assert graph.fast_paths.replays >= 2
    with context:
        assert graph.fast_paths.call((x,), {"scale": 3, **more}) is ANOTHER


class Writes(nn.Module):
    """Python around its graph writes an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = self.inner(x)
        return self.last + 1


def test_python_that_does_more() -> None:
    model = Writes().requires_grad_(False)
    compiled = cgcompile.compile(
        model, compiler="eager", capture_device="host", guards="none", dynamic_dims={"x": 0}
    )
    x = torch.randn(3, 4)
    context = cgcompile.set_forward_context(
        cudagraph_runtime_mode=FULL, batch_descriptor=BatchDescriptor(3)
    )
    for _ in range(4):
        x.copy_(torch.randn(3, 4))
        model.last = None
        with context:
            found = compiled(x)
        assert torch.equal(found, model.inner(x) + 1)
        assert torch.equal(model.last, model.inner(x))
    assert all(each.fast_paths is None for each in compiled.traces)
