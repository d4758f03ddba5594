"""What a model reads beside its arguments, what it writes, and how traces end."""

import threading
import weakref
from typing import Any

import pytest
import torch
from lib.entry import GUARDS, assert_same, check, compiled, rows, stale
from torch import nn

from cgcompile.errors import RecompileError, TraceError

pytestmark = pytest.mark.usefixtures("without_gradients")

KEPT = ("keep", "shape")
WEIGHT = torch.ones(4)
FACTOR = 2
BY_DTYPE = {torch.float32: 3}
CALLS: list[int] = []


def of_globals(x):
    return x * WEIGHT * FACTOR * BY_DTYPE[x.dtype]


class Scaling(nn.Module):
    """A linear layer and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.factor = 2

    def forward(self, x):
        return self.linear(x) * self.factor


# ------------------------------------------------------------------ weights


@pytest.mark.parametrize("guards", GUARDS)
def test_weights_that_change(guards: str) -> None:
    model = Scaling()
    one = compiled(model, guards=guards)
    check(one, model, rows(2))
    model.linear.weight.mul_(2)
    check(one, model, rows(2))
    model.load_state_dict(Scaling().state_dict())
    check(one, model, rows(2))
    assert len(one.traces) == 1
    for replace in (
        lambda: setattr(model.linear, "weight", nn.Parameter(rows(4))),
        lambda: model.load_state_dict(Scaling().state_dict(), assign=True),
    ):
        replace()
        assert stale(one, model, rows(2)) == (guards == "none")
        one.invalidate("weights were replaced")
        assert one.traces == ()
        check(one, model, rows(2))
        assert len(one.traces) == 1


def test_a_replaced_weight_is_named_by_the_debug_setting() -> None:
    model = Scaling()
    one = compiled(model, guards="none", check_guards=True)
    check(one, model, rows(2))
    check(one, model, rows(2))
    model.linear.weight = nn.Parameter(rows(4))
    with pytest.raises(RecompileError, match=r"weight'\] is another tensor now"):
        one(rows(2))


@pytest.mark.parametrize("guards", KEPT)
def test_tied_weights(guards: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    for chosen in (guards, "none"):
        one = compiled(model, guards=chosen)
        for _ in range(2):
            check(one, model, rows(2))
            model[0].weight.add_(1)
        assert len(one.traces) == 1


# ------------------------------------------------------------------ attributes, globals, closures


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("guards", GUARDS)
def test_an_attribute_that_changes(guards: str, debug: bool) -> None:
    model = Scaling()
    one = compiled(model, guards=guards, check_guards=debug)
    check(one, model, rows(2))
    model.factor = 3
    if guards == "keep":
        check(one, model, rows(2))
        assert len(one.traces) == 2
    elif debug:
        with pytest.raises(RecompileError, match=r"(?s)was dropped does not hold.*factor == 2"):
            one(rows(2))
        model.factor = 2
        check(one, model, rows(2))
    else:
        assert stale(one, model, rows(2))
        one.invalidate("factor is another one")
        check(one, model, rows(2))


@pytest.mark.parametrize("guards", GUARDS)
def test_globals_that_change(guards: str, monkeypatch: Any) -> None:
    one = compiled(of_globals, guards=guards)
    check(one, of_globals, rows(2))
    WEIGHT.add_(1)
    check(one, of_globals, rows(2))
    monkeypatch.setitem(globals(), "WEIGHT", rows(4)[0])
    assert stale(one, of_globals, rows(2)) == (guards == "none")
    assert len(one.traces) == 1
    monkeypatch.setitem(globals(), "FACTOR", 3)
    assert stale(one, of_globals, rows(2)) == (guards != "keep")
    one.invalidate("globals")
    check(one, of_globals, rows(2))


@pytest.mark.parametrize("guards", GUARDS)
def test_a_closure_that_changes(guards: str) -> None:
    weight, factor = rows(4)[0], 2

    def f(x):
        return x * weight * factor

    one = compiled(f, guards=guards)
    check(one, f, rows(2))
    weight = rows(4)[0]
    assert stale(one, f, rows(2)) == (guards == "none")
    factor = 3
    assert stale(one, f, rows(2)) == (guards != "keep")


def test_globals_that_are_written_are_refused(monkeypatch: Any) -> None:
    def writes(x):
        global FACTOR
        FACTOR = FACTOR + 1
        return x * FACTOR

    one = compiled(writes)
    with pytest.raises(TraceError, match="assigns to global names: FACTOR"):
        one(rows(2))
    assert FACTOR == 2
    assert one.traces == ()


def test_what_a_call_does_to_python_objects() -> None:
    count = 0

    def f(x):
        nonlocal count
        count += 1
        CALLS.append(count)
        return x * count

    CALLS.clear()
    one = compiled(f)
    for number in (1, 2, 3):
        x = rows(2)
        assert torch.equal(one(x), x * number)
    assert (count, CALLS) == (3, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("guards", GUARDS)
def test_hooks(guards: str, inner: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    module = model[0] if inner else model
    first = module.register_forward_hook(lambda _, args, out: out + args[0])
    one = compiled(model, guards=guards, dynamic_dims={"input": 0})
    for size in (1, 3, 5):
        check(one, model, rows(size))
    assert len(one.traces) == 1
    second = module.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    assert stale(one, model, rows(4)) == (inner and guards != "keep")
    first.remove()
    second.remove()
    one.invalidate("hooks")
    check(one, model, rows(3))


# ------------------------------------------------------------------ models that write


class Advancing(nn.Module):
    """Replaces or writes its own tensors."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("state", torch.zeros(4))
        self.plain = [torch.zeros(4)]

    def forward(self, x, update=True):
        if update and self.in_place:
            self.state.add_(x)
            self.plain[0].add_(self.state)
        elif update:
            self.state = self.state + x
            self.plain[0] = self.plain[0] + self.state
        return self.state * 2 + self.plain[0] + x


@pytest.mark.parametrize("updates", [(True,) * 4, (False, True, False, True, False, False)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("guards", GUARDS)
def test_state_of_a_model(guards: str, in_place: bool, updates: Any) -> None:
    model, eager = Advancing(in_place), Advancing(in_place)
    one = compiled(model, guards=guards)
    for update in updates:
        x = torch.randn(4)
        assert_same(one(x, update), eager(x, update))
        assert_same([model.state, *model.plain], [eager.state, *eager.plain])


class WritesState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4))

    def forward(self, x):
        self.state.add_(1)
        return x + self.state


@pytest.mark.parametrize("own", [(True, False), (False, True)])
@pytest.mark.parametrize("guards", GUARDS)
def test_a_tensor_of_the_model_as_an_argument(guards: str, own: Any) -> None:
    model, eager = WritesState(), WritesState()
    one = compiled(model, guards=guards)
    for mine in (*own, *own):
        x = torch.randn(4)
        assert_same(one(model.state if mine else x), eager(eager.state if mine else x))
        assert_same(model.state, eager.state)


def writes_global(x):
    WEIGHT.add_(1)
    return x + WEIGHT


@pytest.mark.parametrize("guards", GUARDS)
def test_a_global_tensor_as_an_argument(guards: str) -> None:
    one = compiled(writes_global, guards=guards)
    for mine in (True, False, True, False):
        x, before = torch.randn(4), WEIGHT.clone()
        result = one(WEIGHT if mine else x).clone()
        WEIGHT.copy_(before)
        assert_same(result, writes_global(WEIGHT if mine else x))


# ------------------------------------------------------------------ data, breaks, exceptions


@pytest.mark.parametrize("guards", GUARDS)
def test_sizes_and_numbers_that_data_tells(guards: str) -> None:
    for f in (lambda x: x * x.sum().item(), lambda x: x[x > 0] * 2, lambda x: x.nonzero() + 1):
        one = compiled(f, guards=guards)
        for _ in range(3):
            check(one, f, rows(5))
        assert len(one.traces) == 1


def test_a_graph_break_leaves_nothing_behind() -> None:
    def f(x, breaks):
        if breaks:
            torch._dynamo.graph_break()
        return x * 2

    one = compiled(f)
    for _ in range(2):
        with pytest.raises(
            TraceError, match=r'(?s)graph_break.*test_variants\.py", line \d+, in f'
        ):
            one(rows(2), True)
    assert one.traces == ()
    check(one, f, rows(2), False)
    assert len(one.traces) == 1


class OwnError(Exception):
    pass


@pytest.mark.slow
def test_what_the_model_raises_keeps_its_type() -> None:
    def f(x, n):
        if n > 3:
            raise OwnError(f"{n} is too large")
        return x.view(n, -1) * {1: 2, 2: 3}[n]

    one = compiled(f)
    check(one, f, rows(2), 1)
    for _ in range(2):
        with pytest.raises(OwnError, match="5 is too large"):
            one(rows(2), 5)
        with pytest.raises(RuntimeError, match="invalid for input of size 8"):
            one(rows(2), 3)
    check(one, f, rows(2), 2)
    check(one, f, rows(2), 1)
    assert len(one.traces) == 2


# ------------------------------------------------------------------ an end to tracing


@pytest.mark.parametrize("guards", GUARDS)
def test_frozen(guards: str) -> None:
    model = Scaling()
    one = compiled(model, guards=guards, dynamic_dims={"x": 0})
    check(one, model, rows(2))
    check(one, model, rows(2).double().float())
    check(one, model, rows(0))  # a trace of its own
    one.freeze()
    for size in (1, 5, 0):
        check(one, model, rows(size))
    with pytest.raises(RecompileError, match=r"forward is frozen.*x: float64\[2, 4\] on cpu"):
        one(rows(2).double())
    if guards == "keep":
        model.factor = 3
        with pytest.raises(RecompileError, match=r"forward is frozen.*\.factor == 2"):
            one(rows(2))
        model.factor = 2
    check(one, model, rows(3))
    assert len(one.traces) == 2


def test_a_size_that_a_frozen_model_would_trace_again() -> None:
    def f(x):
        return x * 2 if x.shape[0] > 4 else x * 3

    one = compiled(f, dynamic_dims={"x": 0})
    check(one, f, rows(6))
    one.freeze()
    with pytest.raises(RecompileError, match="is frozen"):
        one(rows(3))
    check(one, f, rows(33))


# ------------------------------------------------------------------ threads and lives


@pytest.mark.parametrize("guards", GUARDS)
def test_first_calls_of_several_threads_at_once(guards: str) -> None:
    model = Scaling()
    one = compiled(model, guards=guards, dynamic_dims={"x": 0})
    barrier, equal = threading.Barrier(4), []

    def run(size: int) -> None:
        with torch.no_grad():
            barrier.wait()
            for step in range(5):
                x = rows(size + step % 2)
                equal.append(torch.equal(one(x), model(x)))

    threads = [threading.Thread(target=run, args=(size,)) for size in (1, 2, 5, 33)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 20
    assert len(one.traces) == 1


def test_traces_of_dead_objects_go() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def plain(self, x):
            return self.linear(x) * 2

        forward = compiled(plain, guards="none")

    layers = [Layer() for _ in range(3)]
    for layer in (*layers, *layers):
        check(layer, layer.plain, rows(2))
    assert len(Layer.forward.traces) == 3
    weight = weakref.ref(layers[0].linear.weight)
    del layers, layer
    last = Layer()
    check(last, last.plain, rows(2))
    assert len(Layer.forward.traces) == 1
    assert weight() is None


class Things:
    factor = 3


def test_objects_as_arguments(monkeypatch: Any, caplog: Any) -> None:
    """Each has a trace of its own while it lives; many of them are said, once."""
    monkeypatch.setattr("cgcompile.tracing.trace_cache._MANY", 3)

    def f(x, thing):
        return x * thing.factor

    one = compiled(f, guards="none")
    things = [Things() for _ in range(5)]
    for thing in (*things, *things):
        check(one, f, rows(2), thing)
    assert len(one.traces) == 5
    log = "cgcompile.tracing.trace_cache"
    said = [r.getMessage() for r in caplog.records if (r.levelname, r.name) == ("WARNING", log)]
    assert [text.split(",")[0] for text in said] == [f"{f.__qualname__} has been traced 3 times"]
    one.freeze()
    with pytest.raises(RecompileError, match="thing: Things"):
        one(rows(2), Things())
    for thing in things:
        check(one, f, rows(2), thing)
