"""The shortest way where calls, results or callers are unusual: what it returns is what eager does."""

import threading
import time
from typing import Any

import pytest
import torch
from lib.entry import Hook, assert_same, operators
from lib.fast_paths import FULL, PIECEWISE, Deep, Engine, Linear, compiled, context
from torch import nn

import cgcompile
from cgcompile.errors import AddressChangedError, HostValueChangedError


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


class Empty(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x), (), [()]


def test_an_empty_tuple() -> None:
    runs, x = compiled(Empty()), torch.randn(3, 4)
    for _ in range(5):
        with context():
            assert runs(x)[1:] == ((), [()])
    assert runs.backend.graphs[0].fast_paths.replays == 2


class Attends(Linear):
    def forward(self, x: torch.Tensor, a: Any = None, b: Any = None) -> Any:
        made = self.inner(x)
        out = torch.empty_like(made)
        torch.ops.cgentry.attend(made, a, b, out)
        return self.inner(out), a


def test_keywords_in_another_order() -> None:
    operators()
    model = Attends()
    runs = compiled(model, splitting_ops=["cgentry::attend"])
    x, a, b = (torch.randn(3, 4) for _ in range(3))
    with context(PIECEWISE):
        runs(x, a=a, b=b)
    for _ in range(5):
        with context(PIECEWISE):
            made, same = runs(x, b=b, a=a)
        assert torch.allclose(made, model(x, a, b)[0])
        assert same is a
    assert runs.backend.graphs[0].fast_paths.call is not None


class NoInputs(Linear):
    def forward(self, factor: int) -> torch.Tensor:
        out = torch.empty_like(self.kept)
        torch.ops.cgentry.attend(self.kept, self.kept, self.kept, out)
        return self.inner(out) * factor


def test_a_graph_without_inputs() -> None:
    operators()
    model = NoInputs()
    runs = compiled(model, splitting_ops=["cgentry::attend"], dynamic_dims=None)
    for _ in range(5):
        with context(PIECEWISE):
            made = runs(2)
        assert torch.allclose(made, model(2))
    assert runs.backend.graphs[0].fast_paths.replays == 2


class Twice(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        made = [self.inner(x)]
        return made, made


def test_one_container_in_two_places() -> None:
    runs, x = compiled(Twice()), torch.randn(3, 4)
    for _ in range(5):
        with context():
            one, other = runs(x)
        assert one is other


def test_a_call_inside_of_a_step_that_runs_plain() -> None:
    engine = Engine(mode=PIECEWISE)
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
        with torch.no_grad(), engine.context:
            runs(engine.x)

    try:
        Hook.function = staticmethod(function)
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
    finally:
        Hook.function = plain
    assert inside[1].requires_grad


def test_a_trace_of_another_thread_delays_nothing() -> None:
    runs, x = compiled(Linear_()), torch.randn(3, 4)
    for _ in range(4):
        with context():
            runs(x)
    done = threading.Event()

    def call() -> None:
        with torch.no_grad(), context(PIECEWISE):  # not the remembered step: the longer way
            runs(x)
        done.set()

    with runs._traces._lock:
        threading.Thread(target=call, daemon=True).start()
        assert done.wait(20)


class Linear_(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_it_is_there_again_after_many_releases() -> None:
    engine = Engine()
    for _ in range(20):
        engine.backend.release()
        for _ in range(3):
            engine.step()
    assert engine.graph.fast_paths.call is not None


def test_steps_in_turn_are_not_made_anew() -> None:
    """Without the shortest way of a whole call, a compiled graph remembers its steps as well."""
    model = Linear_().requires_grad_(False)
    runs = cgcompile.compile(
        model, compiler="eager", capture_device="host", guards="keep", dynamic_dims={"x": 0}
    )
    x, known = torch.randn(4, 4), []
    for _ in range(5):
        for rows in (4, 3):
            with context(FULL, rows):
                assert torch.equal(runs(x[:rows]), model(x[:rows]))
            known.append(runs.backend.graphs[0].fast_paths.graph)
    assert known[-1] is known[-3] is not known[-2]


def test_quantized_and_nested_results_from_outside() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    config = cgcompile.CompilationConfig(capture_device="host")
    wrapper = cgcompile.CUDAGraphWrapper(lambda x: (x * 2, quantized, nested), config, FULL)
    x = torch.randn(3, 4)
    for _ in range(3):
        with context():
            made = wrapper(x)
        assert made[1].q_scale() == pytest.approx(0.1)
        assert made[2] is nested
    assert wrapper.counters.replays == 2


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1


def test_two_traces_in_turn_keep_their_ways() -> None:
    model = Sum()
    runs = compiled(model)
    given = [torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)]

    def round_of_calls() -> None:
        for x in given:
            x.copy_(torch.randn_like(x))
            with context():
                torch.testing.assert_close(runs(x), model(x))

    for _ in range(5):
        round_of_calls()
    both = [graph.fast_paths for graph in runs.backend.graphs]
    assert len(both) == 2
    known = [dict(fast_paths.calls) for fast_paths in both]
    assert all(known)
    before = [fast_paths.replays for fast_paths in both]
    for _ in range(20):
        round_of_calls()
    assert [fast_paths.calls for fast_paths in both] == known
    assert [fast_paths.replays for fast_paths in both] == [count + 20 for count in before]


def test_graphs_that_were_cleared_while_a_call_waited_are_not_replayed() -> None:
    engine = Engine()
    fast_paths, pool = engine.graph.fast_paths, engine.graph.pool
    assert fast_paths.call is not None
    before, found = fast_paths.replays, []

    def call() -> None:
        with torch.no_grad():
            found.append(engine.step().clone())

    with fast_paths.lock:  # as if another step ran
        thread = threading.Thread(target=call)
        thread.start()
        time.sleep(0.3)  # it waits for its turn
        pool.generation += 1  # as clear_graphs() of a wrapper
    thread.join(20)
    assert fast_paths.replays == before
    assert_same([*found], [engine.model(engine.x)])


class Tells(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = torch.cat([self.inner(x), y])
        return made * 2 if x is y else made


@pytest.mark.parametrize("apart", [True, False])
def test_what_follows_from_addresses_and_sizes_is_not_asked_again(apart: bool) -> None:
    model = Tells()
    dims = {"x": {0: "n"}, "y": {0: "n"}}
    runs, x = compiled(model, dynamic_dims=dims), torch.randn(3, 4)
    y = torch.randn(3, 4) if apart else x[:]
    for _ in range(5):
        with context():
            runs(x, y)
    fast_paths = runs.backend.graphs[0].fast_paths
    asked = fast_paths.call.__code__.co_names
    assert "shape" not in asked
    assert ("id" in asked) != apart
    assert fast_paths.replays == 2
    for other in [x, y, x, y, y]:
        x.copy_(torch.randn(3, 4))
        with context():
            assert_same([runs(x, other)], [model(x, other)])
    assert fast_paths.replays > 2, "the step is still remembered"
    with context(), pytest.raises(HostValueChangedError, match=r"y.size\(\)\[0\]' is 2, was 3"):
        runs(x, y[:2])
    if apart:
        with context(), pytest.raises(AddressChangedError):
            runs(y, x)


class Knows(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.cat([self.inner(x), self.kept])
        return made * 2 if x is self.kept else made


@pytest.mark.parametrize("apart", [True, False])
def test_a_frozen_tensor_where_an_argument_lies(apart: bool) -> None:
    model = Knows()
    runs, x = compiled(model), torch.randn(3, 4) if apart else model.kept[:]
    for _ in range(5):
        with context():
            runs(x)
    assert ("id" in runs.backend.graphs[0].fast_paths.call.__code__.co_names) != apart
    for given in [x, model.kept, x, x, model.kept]:
        given.copy_(torch.randn(3, 4))
        with context():
            assert_same([runs(given)], [model(given)])


class GivesBack(Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        kept = self.kept.add_(1)
        return self.inner(x) + kept, y.add_(x), kept, y.view(-1)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=str)
def test_inputs_and_buffers_in_the_result(mode: Any) -> None:
    model, eager = GivesBack(), GivesBack()
    eager.load_state_dict(model.state_dict())
    runs, x, y = compiled(model, dynamic_dims=None), torch.empty(3, 4), torch.zeros(3, 4)
    kept = model.kept
    for _ in range(6):
        x.copy_(torch.randn(3, 4))
        other, same = y.clone(), y[:]  # another object at the same place
        with context(mode):
            made = runs(x, same)
        assert_same(made, eager(x, other))
        assert made[1] is same
        assert made[2] is kept is model.kept
        assert made[3] is not same
    (graph,) = runs.backend.graphs
    assert graph.fast_paths.call is not None
    assert graph.fast_paths.replays == 3


class GivesBuffer(Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x) + self.kept, self.kept.mul_(2)


def test_a_buffer_in_a_result_that_is_the_same_at_each_step() -> None:
    model = GivesBuffer()
    runs, x, kept = compiled(model, dynamic_dims=None), torch.randn(3, 4), model.kept
    for _ in range(6):
        before = kept.clone()
        with context():
            made, same = runs(x)
        assert same is kept is model.kept
        assert torch.equal(same, before * 2)
        assert torch.allclose(made, model.inner(x) + before)
    (graph,) = runs.backend.graphs
    assert graph.fast_paths.call is not None
    assert graph.fast_paths.replays == 3
