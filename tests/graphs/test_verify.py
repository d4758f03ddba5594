"""Plain and replayed side by side: nothing is found in a good model, the right part in a bad one."""

import copy
import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.breakable import FULL, PIECEWISE, Asked, counted, rand, same, soft, step
from lib.cases import CASES, D
from lib.entry import (
    HOOKED,
    Hooked,
    assert_same,
    batch,
    by_context,
    compiled_case,
    compiled_model,
    made,
    marked,
)
from lib.entry import ByContext as ScaledByContext
from torch import nn

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphWrapper,
    set_forward_context,
    verify,
)
from cgcompile.debug.compare import Difference, Tolerance
from cgcompile.errors import AddressChangedError

pytestmark = pytest.mark.usefixtures("without_gradients")

TOLERANCE = {"cpu": {}, "cuda": {"rtol": 1e-3, "atol": 1e-4}}


def soften(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def captured(compiled: Any, model: Any, device: str) -> None:
    for k in range(3):
        x = batch(device)
        assert_same(compiled(marked(x) if k == 0 else x), model(x))


# ---------------------------------------------------------------- one comparison


def difference(plain: Any, replayed: Any, rtol: float = 0.0, atol: float = 0.0) -> Any:
    return Tolerance(False, rtol, atol).first("here", {"x": plain}, {"x": replayed})


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([1.0, math.nan, math.inf]),
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.tensor(2 + 1j),
        torch.ones(3, dtype=torch.bfloat16),
        3,
        math.nan,
        "text",
        None,
    ],
)
def test_equal_values(value: Any) -> None:
    assert difference(value, copy.deepcopy(value)) is None


def test_numbers_that_differ() -> None:
    plain = torch.zeros(12, 2)
    replayed = plain.clone()
    replayed[3:, 1] = torch.arange(1.0, 10.0)
    seen = difference(plain, replayed)
    assert (seen.piece, seen.value, seen.largest) == ("here", "x", 9.0)
    assert seen.rows == tuple(range(3, 11))
    assert "9 of 24 numbers differ, by up to 9" in seen.detail
    assert str(seen) == f"wrong by , inputs 0: here\n  value x: {seen.detail}"
    assert difference(plain, replayed, atol=9.0) is None
    assert difference(plain, replayed, atol=8.5).rows == (11,)
    assert difference(replayed, replayed * 1.01, rtol=0.1) is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float16, torch.complex64])
def test_numbers_of_any_dtype(dtype: torch.dtype) -> None:
    plain = torch.zeros(3, dtype=dtype)
    replayed = plain.clone()
    replayed[1] = 1
    seen = difference(plain, replayed)
    assert (seen.largest, seen.rows) == (1.0, (1,))
    assert difference(torch.zeros((), dtype=dtype), replayed[1]).rows == (0,)


def test_nan_against_a_number() -> None:
    seen = difference(torch.zeros(3), torch.tensor([0.0, 0.0, math.nan]))
    assert math.isnan(seen.largest)
    assert seen.rows == (2,)


@pytest.mark.parametrize(
    ("plain", "replayed"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3).double()),
        (torch.zeros(3), None),
        (1, 2),
        (1, 1.0),
        (0.0, -0.0),
        ("a", "b"),
        (None, 0),
    ],
)
def test_values_of_another_kind(plain: Any, replayed: Any) -> None:
    seen = difference(plain, replayed)
    assert math.isnan(seen.largest)
    assert seen.rows == ()
    assert "in the replay" in seen.detail


def test_the_first_of_several_is_told() -> None:
    seen = Tolerance(True).first("here", {"a": 1, "b": 2, "c": 3}, {"c": 4, "b": 5, "a": 1})
    assert seen == Difference(piece="here", value="b", largest=seen.largest, detail=seen.detail)
    assert math.isnan(seen.largest)


# ---------------------------------------------------------------- a compiled model


def differences(compiled: Any, x: Any, device: str) -> tuple[Any, ...]:
    verdict = verify(compiled, x, sets=1, **TOLERANCE[device])
    assert verdict.replays >= 1
    return verdict.differences


@pytest.mark.parametrize("name", ["sdpa", "op_packet", "no_boundary", "eager_region"])
@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE"])
def test_nothing_in_a_good_model(device: str, name: str, mode: str) -> None:
    model, compiled, backend = compiled_case(name, device, cudagraph_mode=mode, debug="poison")
    captured(compiled, model, device)
    before = backend.counters
    for _ in range(2):
        assert differences(compiled, batch(device), device) == ()
    after = backend.counters
    # of each: one until it replays, one that is compared; the other runs are the eager model's
    assert (after.calls, after.replays) == (before.calls + 4, before.replays + 4)
    assert (after.captures, after.plain) == (before.captures, before.plain)
    x = batch(device)
    assert_same(compiled(x), model(x))


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_nothing_under_a_forward_context(device: str, mode: Any) -> None:
    model, compiled, backend = compiled_model(
        ScaledByContext, device, **by_context(), cudagraph_mode="FULL_AND_PIECEWISE"
    )
    x = marked(batch(device))
    for k in range(5):
        x.normal_()
        with step(6, mode, metadata=1.0 + k):
            if k > 2:
                assert differences(compiled, x, device) == ()
            else:
                assert_same(compiled(x), model(x))
    assert (backend.counters.calls, backend.counters.replays) == (3 + 2 * 2, 1 + 2 * 2)


class InPlace(nn.Module):
    """An op that writes in place; its arguments are dense."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        q = self.before(x)
        out = torch.empty_like(q)
        torch.ops.cgentry.attend(q, q, q, out)
        return self.after(out)


@pytest.mark.parametrize("kind", ["fresh", "in place"])
def test_nothing_where_rows_are_padded(device: str, kind: str) -> None:
    """A replay zeroes the rows that are not real; that is no difference."""
    chosen, settings = (Hooked, HOOKED) if kind == "fresh" else (InPlace, by_context())
    model, compiled, backend = compiled_model(chosen, device, **settings)
    x = marked(batch(device))
    for real in (6, 6, 6, 4, 1):
        x.normal_()
        context = set_forward_context(
            1.0,
            cudagraph_runtime_mode=PIECEWISE,
            batch_descriptor=BatchDescriptor(6),
            num_unpadded_tokens=real,
        )
        with context:
            assert_same(compiled(x)[:real], model(x)[:real])
            if backend.counters.captures:
                assert differences(compiled, x, device) == ()


def test_an_eager_op_that_varies_is_named(device: str, hook) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    captured(compiled, model, device)
    calls: list[int] = []

    def varies(x):
        calls.append(1)
        softened = soften(x)
        softened[2] += len(calls) - 1
        return softened

    hook(varies)
    (differing,) = differences(compiled, batch(device), device)
    (graph,) = backend.graphs
    (piece,) = [each for each in graph.split.pieces if not each.capture]
    assert differing.piece == piece.name
    assert differing.value in piece.outputs
    # what is written is looked for, until it replays, eager, replayed; then piece by piece: 3 ways
    assert (differing.rows, len(calls)) == ((2,), 4 + 3)
    assert differing.largest == pytest.approx(1.0, abs=1e-3)
    del calls[:]
    assert verify(compiled, batch(device), sets=1, atol=10.0).ok
    assert len(calls) == 4
    hook(soften)
    assert differences(compiled, batch(device), device) == ()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_what_a_graph_has_frozen_is_named(device: str, hook, mode: str) -> None:
    """The kernel of a captured op asks Python, and Python changes its mind."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, x):
            x = self.first(x)
            x = F.scaled_dot_product_attention(x, x, x)
            x = torch.ops.cgentry.hooked(self.second(x))
            return F.scaled_dot_product_attention(x, x, x) + 1

    factor = 1.0
    hook(lambda x: soften(x) * factor)
    model, compiled, backend = compiled_model(Model, device, cudagraph_mode=mode)
    captured(compiled, model, device)
    assert differences(compiled, batch(device), device) == ()
    factor = 3.0
    (differing,) = differences(compiled, batch(device), device)
    (graph,) = backend.graphs
    pieces = graph.split.pieces
    assert [piece.capture for piece in pieces] == [True, False, True, False, True]
    assert differing.piece == (pieces[2].name if mode == "PIECEWISE" else "the whole step")
    assert differing.op == ("cgentry::hooked" if mode == "PIECEWISE" else "")
    assert differing.rows == tuple(range(6))
    assert 0 < differing.largest <= 2.1


@pytest.mark.slow
def test_only_the_graph_that_differs_is_named(device: str, hook) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = CASES["sdpa"].build(), Hooked()

        def forward(self, x):
            x = self.one(x)
            torch._dynamo.graph_break()
            return self.other(x)

    model, compiled, backend = compiled_model(Two, device, **HOOKED)
    captured(compiled, model, device)
    assert len(backend.graphs) == 2
    assert differences(compiled, batch(device), device) == ()
    values = itertools.count()
    hook(lambda x: soften(x) + next(values))
    (differing,) = differences(compiled, batch(device), device)
    assert next(values) == 4 + 3  # runs of the op
    assert differing.piece == next(p.name for p in backend.graphs[1].split.pieces if not p.capture)


def test_what_is_warming_is_captured_first(device: str) -> None:
    _model, compiled, backend = compiled_case("sdpa", device, num_warmups=2)
    verdict = verify(compiled, marked(batch(device)), sets=1, **TOLERANCE[device])
    assert (verdict.ok, verdict.replays) == (True, 1)
    counters = backend.counters
    assert (counters.captures, counters.plain.total()) == (1, 2)
    assert (counters.calls, counters.replays) == (5, 2)


class Writes(nn.Module):
    """Writes an argument and a buffer, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x, cache):
        cache.mul_(0.5).add_(x.mean())
        self.count.add_(1)
        y = F.scaled_dot_product_attention(x, x, x)
        cache.add_(y.sum() * 0.01)
        return F.dropout(y, 0.5, training=True) + cache + self.count[0]


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_verified_call_is_no_step(device: str, mode: str) -> None:
    """What it writes and the random numbers that it draws are restored."""
    model, compiled, backend = compiled_model(Writes, device, cudagraph_mode=mode)
    eager = made(Writes, device)
    cache = torch.zeros(4, D, device=device)
    own = cache.clone()
    for k in range(7):
        x = marked(batch(device)) if k == 0 else batch(device)
        torch.manual_seed(k)
        expected = eager(x, own), torch.rand(3, device=device)
        torch.manual_seed(k)
        if k >= 3:
            verdict = verify(compiled, x, cache, sets=1, **TOLERANCE[device])
            assert (verdict.ok, verdict.replays) == (True, 1), verdict
        assert_same(compiled(x, cache), expected[0])
        assert_same(torch.rand(3, device=device), expected[1])
        assert_same([cache, model.count], [own, eager.count])
    assert (backend.counters.captures, backend.counters.replays) == (1, 5 + 4 * 2)
    assert backend.counters.calls == 7 + 4 * 2


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_an_error_of_the_model_ends_the_verifying(device: str, hook, at: int) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    captured(compiled, model, device)
    calls: list[int] = []

    def fails(x):
        calls.append(1)
        if len(calls) > at:
            raise Asked
        return soften(x)

    hook(fails)
    with pytest.raises(Asked):
        differences(compiled, batch(device), device)
    assert len(calls) == at + 1
    (graph,) = backend.graphs
    assert all(set(each.sequence.slots) <= {None} for each in graph.recordings)
    del calls[:]

    def count(x):
        calls.append(1)
        return soften(x)

    hook(count)
    x = batch(device)
    assert_same(compiled(x), Hooked.forward(model, x))
    assert len(calls) == 2  # one of them is the eager model's: nothing is verified any more
    assert backend.counters.failures == at % 2  # the other runs are the eager model's


# ---------------------------------------------------------------- a wrapper


class Scaled(nn.Module):
    """Breaks that take a number of the module, which Python reads at each step."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scale, self.factor, self.before, self.after = scale, 2, 1.0, 0.0
        self.twice = False
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, state):
        self.count.add_(1)
        state.add_(torch.rand_like(state))
        x = self.scale(x * self.before, 1)
        x = self.scale(x.sin(), factor=self.factor)
        if self.twice:
            x = self.scale(x, 1)
        return x + self.count + state + self.after


class Captured:
    """A wrapper of either class that has captured a step, and its buffers."""

    def __init__(self, kind: Any, device: str, checks: Any = True) -> None:
        self.device, self.raising = device, False
        scale, self.calls = counted(self.run)
        self.module = Scaled(scale).to(device)
        self.mode = FULL if kind is CUDAGraphWrapper else PIECEWISE
        config = CompilationConfig(capture_device="host", checks=checks)
        self.wrapper = kind(self.module, config, self.mode, name="block")
        self.x, self.state = rand(device=device), rand(device=device)
        with step(4, self.mode):
            self.wrapper(self.x, self.state)

    def run(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        if self.raising:
            raise Asked
        return soft(x) * factor

    def verify(self, **settings: Any) -> Any:
        with step(4, self.mode):
            call = (self.x, self.state)
            return verify(self.wrapper, *call, sets=1, **{**TOLERANCE[self.device], **settings})


@pytest.fixture(params=[CUDAGraphWrapper, BreakableCUDAGraphWrapper], ids=["plain", "breakable"])
def captured_wrapper(device: str, request: pytest.FixtureRequest) -> Captured:
    return Captured(request.param, device)


def test_a_verified_wrapper_steps_never(captured_wrapper: Captured) -> None:
    """What the module, the arguments and the random generators held is restored."""
    it = captured_wrapper
    for seed in range(3):
        it.x.uniform_()
        before = it.module.count.clone(), it.state.clone()
        torch.manual_seed(seed)
        random = torch.rand(3, device=it.device)
        torch.manual_seed(seed)
        verdict = it.verify()
        assert (verdict.ok, verdict.replays) == (True, 1), verdict
        assert same(torch.rand(3, device=it.device), random)
        assert same((it.module.count, it.state), before)
    with step(4, it.mode):
        torch.manual_seed(3)
        verdict = it.wrapper(it.x, it.state).clone()
    it.module.count.sub_(1), it.state.copy_(before[1])
    torch.manual_seed(3)
    assert same(verdict, it.module(it.x, it.state))


@pytest.mark.parametrize(
    ("name", "value", "piece", "detail"),
    [
        ("factor", 3, "break 1 (", "['factor']: 2 in the replay, 3 in the plain step"),
        ("before", 2.0, "break 0 (", "numbers differ"),
        ("after", 1.0, "the result", "numbers differ"),
        ("twice", True, "", "block: the plain step breaks at"),
    ],
)
def test_what_a_wrapper_has_frozen_is_named(
    device: str, name: str, value: Any, piece: str, detail: str
) -> None:
    it = Captured(BreakableCUDAGraphWrapper, device, checks="-state")
    before = getattr(it.module, name)
    setattr(it.module, name, value)
    (differing,) = it.verify().differences
    assert differing.piece.startswith(piece), differing
    assert detail in differing.detail
    setattr(it.module, name, before)
    assert it.verify().ok


def test_an_error_while_verifying_leaves_the_wrapper_usable(captured_wrapper: Captured) -> None:
    it = captured_wrapper
    it.raising = True
    with pytest.raises(Asked):
        it.verify()
    it.raising = False
    it.x.uniform_()
    assert it.verify().ok
    y = rand(5, 8, device=it.device)
    with step(5, it.mode):
        it.wrapper(y, torch.zeros_like(y))  # a capture may begin
    assert it.wrapper.counters.captures == 2


def test_a_step_without_a_graph_is_not_verified(captured_wrapper: Captured) -> None:
    it = captured_wrapper
    contexts = {"no_forward_context": nullcontext(), "mode_none": set_forward_context(None)}
    for reason, context in contexts.items():
        with context:
            verdict = verify(it.wrapper, it.x, it.state, sets=1)
        assert (verdict.ok, verdict.replays) == (False, 0)
        assert verdict.checks[0].missing.startswith(reason)


def test_inputs_of_another_call_are_refused(captured_wrapper: Captured) -> None:
    it = captured_wrapper
    it.x = it.x.clone()
    before = it.module.count.clone()
    with pytest.raises(AddressChangedError):
        it.verify()
    assert same(it.module.count, before)
