"""What a graph has recorded and a later call gives differently: inputs, numbers, weights, rows.

Never a silent wrong answer: a call is right, by a replay or without graphs, or it is an error that
names what has changed, and then nothing has run.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from lib.breakable import assert_counters
from lib.cases import D
from lib.entry import (
    HOOKED,
    WARMING,
    Hooked,
    Times,
    assert_counts,
    assert_same,
    backend_for,
    batch,
    compiled_model,
    made,
    marked,
)
from torch import nn

from cgcompile import (
    AttentionCGSupport,
    BatchDescriptor,
    CompilationConfig,
    CUDAGraphMode,
    SplittingOp,
    set_forward_context,
)
from cgcompile.context import current_forward_context
from cgcompile.errors import AddressChangedError, DispatchError, HostValueChangedError
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSegment
from cgcompile.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgcompile.reasons import Reason

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
SETTINGS = ("raise", "copy", "recapture", "eager")
ROWS = 6
RUN: Counter[str] = Counter()  # how often the ops and functions of this file have run

pytestmark = pytest.mark.usefixtures("without_gradients")
both_modes = pytest.mark.parametrize("mode", [FULL, PIECEWISE], ids=["full", "piecewise"])


@cache
def operators() -> torch.library.Library:
    """Attention that counts its calls, and ops that fill the real rows of a batch alone."""
    lib = torch.library.Library("cgchange", "FRAGMENT")
    lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    lib.define("fill(Tensor x, Tensor(a!) out) -> ()")
    lib.define("fresh(Tensor x) -> Tensor")
    lib.define("halves(Tensor x) -> (Tensor, Tensor)")

    def attend(q, k, v, out):
        RUN["attend"] += 1
        out.copy_(torch.softmax(q @ k.mT, -1) @ v)

    def fill(x, out):
        context = current_forward_context()
        real = None if context is None else context.num_unpadded_tokens
        out[:real].copy_(torch.softmax(x[:real], -1))

    def fresh(x):
        filled = torch.full_like(x, 1e6)
        fill(x, filled)
        return filled

    def halves(x):
        RUN["halves"] += 1
        return x * 0.5, x * -0.5

    for function in (attend, fill, fresh, halves):
        for key in ("CPU", "CUDA"):
            lib.impl(function.__name__, function, key)
    torch.library.register_fake("cgchange::attend", lambda *_: None, lib=lib)
    torch.library.register_fake("cgchange::fill", lambda *_: None, lib=lib)
    torch.library.register_fake("cgchange::fresh", torch.empty_like, lib=lib)
    pair = lambda x: (torch.empty_like(x), torch.empty_like(x))  # noqa: E731
    torch.library.register_fake("cgchange::halves", pair, lib=lib)
    return lib


@pytest.fixture(autouse=True)
def with_operators() -> None:
    operators()
    RUN.clear()


ATTEND = SplittingOp("cgchange::attend", support=AttentionCGSupport.ALWAYS)


def context(mode: CUDAGraphMode, rows: int = ROWS, **more: Any) -> set_forward_context:
    descriptor = BatchDescriptor(rows)
    return set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=descriptor, **more)


def attended(x):
    out = torch.empty_like(x)
    torch.ops.cgchange.attend(x, x, x, out)
    return out


# ------------------------------------------------------------------ a model with nested arguments


class Given(NamedTuple):
    """The arguments of :class:`Nested`."""

    x: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    inner: torch.Tensor

    @classmethod
    def on(cls, device: str) -> "Given":
        return cls(*(batch(device, ROWS) for _ in cls._fields))

    def call(self, run: Callable[..., Any]) -> Any:
        return run(self.x, (self.first, self.second), more={"bias": {"inner": self.inner}})

    def renew(self) -> "Given":
        for tensor in self:
            tensor.normal_()
        return self

    def moved(self, field: str) -> "Given":
        return self._replace(**{field: torch.randn_like(getattr(self, field))})


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x, pair, *, more):
        y = attended(self.before(x + pair[0]))
        return self.after(y * pair[1]) + more["bias"]["inner"]


class Runs:
    """A model and what runs it, in one mode; each call is compared with eager."""

    def __init__(self, model: Any, run: Any, mode: CUDAGraphMode) -> None:
        self.model, self.run, self.mode = model, run, mode

    def check(self, inputs: Given, steps: int = 1) -> None:
        previous = None
        for _ in range(steps):
            expected = inputs.renew().call(self.model)
            with context(self.mode):
                result = inputs.call(self.run)
            assert_same(result, expected)
            assert previous is None or bool((result != previous).any())
            previous = result.clone()

    def refused(self, inputs: Given, error: type[Exception], match: str) -> None:
        """It is an error that names the cause, and nothing has run."""
        RUN.clear()
        with context(self.mode), pytest.raises(error, match=match):
            inputs.call(self.run)
        assert not RUN


def compiled_nested(device: str, mode: CUDAGraphMode, **settings: Any) -> tuple[Runs, Any]:
    settings = {"splitting_ops": (ATTEND,), **settings}
    model, compiled, backend = compiled_model(Nested, device, **settings)
    return Runs(model, compiled, mode), backend


COMPILED_PATHS = {
    "x": "'x'",
    "first": "'pair.0'",
    "second": "'pair.1'",
    "inner": "'more.bias.inner'",
}


# ------------------------------------------------------------------ compiled: inputs elsewhere


@both_modes
def test_raise_names_the_path_and_replays_nothing(device: str, mode: Any) -> None:
    runs, backend = compiled_nested(device, mode)
    inputs = Given.on(device)
    runs.check(inputs, 3)
    for field, path in COMPILED_PATHS.items():
        match = rf"num_tokens=6: input \d+ {path} is at 0x"
        runs.refused(inputs.moved(field), AddressChangedError, match)
        runs.check(inputs, 2)
    assert_counts(backend, 1, 1 + 2 * 4, {WARMING: 1}, failures=4)


@both_modes
def test_recapture_serves_each_set_of_addresses(device: str, mode: Any) -> None:
    runs, backend = compiled_nested(device, mode, on_input_change="recapture")
    first = Given.on(device)
    second = first.moved("second")  # three of four lie where they lay
    runs.check(first, 4)
    assert_counts(backend, 1, 2, {WARMING: 1})
    runs.check(second, 3)
    assert_counts(backend, 2, 3, {WARMING: 2})
    for _ in range(3):
        runs.check(first)
        runs.check(second, 2)
    assert_counts(backend, 2, 12, {WARMING: 2})
    (graph,) = backend.graphs
    sequences = [each.sequence for each in graph.recordings]
    assert len({id(segment) for each in sequences for segment in each.segments}) == 2 * len(
        sequences[0].segments
    )


@both_modes
def test_recapture_is_bounded(device: str, mode: Any) -> None:
    settings = {"on_input_change": "recapture", "max_captured_shapes": 2}
    runs, backend = compiled_nested(device, mode, **settings)
    first, second, third = (Given.on(device) for _ in range(3))
    for inputs in (first, second, third):
        runs.check(inputs, 3)
    assert_counts(backend, 2, 2, {WARMING: 2, Reason.TOO_MANY_SHAPES: 3})
    assert "on_input_change" in backend.counters.details[Reason.TOO_MANY_SHAPES]
    for inputs in (first, third, second):
        runs.check(inputs)
    assert_counts(backend, 2, 4, {WARMING: 2, Reason.TOO_MANY_SHAPES: 4})


def test_recapture_of_addresses_that_never_repeat(device: str) -> None:
    runs, backend = compiled_nested(device, PIECEWISE, on_input_change="recapture")
    inputs = [Given.on(device) for _ in range(12)]  # held, so that all addresses differ
    for moved in inputs:
        runs.check(moved)
    assert_counts(backend, 0, 0, {WARMING: 12})


def test_a_recapture_that_fails_spares_what_was_captured(device: str, hook: Any) -> None:
    settings = {**HOOKED, "on_input_change": "recapture"}
    model, compiled, backend = compiled_model(Hooked, device, **settings)
    first, second = batch(device, ROWS), batch(device, ROWS)

    def check(x: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            x.normal_()
            with context(PIECEWISE):
                assert_same(compiled(x), model(x))

    def raises(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("not now")

    check(first, 3)
    check(second, 1)
    hook(raises)
    with context(PIECEWISE), pytest.raises(ValueError, match="not now"):
        compiled(second)
    hook(lambda x: torch.softmax(x, -1))
    check(first, 2)
    assert_counts(backend, 1, 3, {WARMING: 2}, failures=1)
    (graph,), (binding,) = backend.graphs, backend.graphs[0].weight_sets
    (recording,) = graph.recordings
    entries = [each.concrete_cudagraph_entries for each in binding.wrappers.values()]
    kept = [each[BatchDescriptor(ROWS)].graph for each in entries if each]
    graphs = [each.graph for each in recording.sequence.segments if isinstance(each, GraphSegment)]
    assert [id(each) for each in kept] == [id(each) for each in graphs]
    check(second, 3)
    check(first, 1)
    assert_counts(backend, 2, 6, {WARMING: 2}, failures=1)


@both_modes
def test_eager_runs_plain_and_says_what_moved(device: str, mode: Any) -> None:
    runs, backend = compiled_nested(device, mode, on_input_change="eager")
    inputs = Given.on(device)
    runs.check(inputs, 3)
    for calls, (field, path) in enumerate(COMPILED_PATHS.items(), 1):
        runs.check(inputs.moved(field))
        assert backend.counters.plain == {WARMING: 1, Reason.INPUT_CHANGED: calls}
        assert f"{path} is at 0x" in backend.counters.details[Reason.INPUT_CHANGED]
        runs.check(inputs)
    assert_counts(backend, 1, 5, {WARMING: 1, Reason.INPUT_CHANGED: 4})


@both_modes
def test_eager_and_strict_is_an_error(device: str, mode: Any) -> None:
    runs, _ = compiled_nested(device, mode, on_input_change="eager", on_fallback="raise")
    inputs = Given.on(device)
    runs.check(inputs, 3)
    runs.refused(inputs.moved("first"), DispatchError, "input_changed.*'pair.0'")
    runs.check(inputs, 2)


@both_modes
def test_copied_inputs_may_lie_anywhere(device: str, mode: Any) -> None:
    runs, backend = compiled_nested(device, mode, on_input_change="copy")
    held = [Given.on(device) for _ in range(6)]  # held, so that all addresses differ
    for inputs in held:
        runs.check(inputs)
    for field in Given._fields:
        runs.check(held[0].moved(field))
        runs.check(held[-1])
    assert_counts(backend, 1, 4 + 8, {WARMING: 1})


class WritesCache(nn.Module):
    """Reads one argument and writes another one, before and after a boundary."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(D, D)

    def forward(self, x, cache):
        cache.mul_(0.5)
        y = attended(self.before(x) + cache)
        cache.add_(y.mean())
        return y * 2 + cache


@both_modes
def test_a_written_input_is_bound_where_others_are_copied(device: str, mode: Any) -> None:
    settings = {"splitting_ops": (ATTEND,), "on_input_change": "copy"}
    model, compiled, backend = compiled_model(WritesCache, device, **settings)
    cache, expected_cache = torch.zeros(2, ROWS, 4, D, device=device).unbind()
    held = [batch(device, ROWS) for _ in range(5)]
    for x in held:
        expected = model(x, expected_cache)
        with context(mode):
            assert_same(compiled(x, cache), expected)
        assert_same(cache, expected_cache)
    elsewhere = cache.clone()
    RUN.clear()
    with context(mode), pytest.raises(AddressChangedError, match="'cache' is at 0x"):
        compiled(held[0], elsewhere)
    assert not RUN
    assert_same(cache, expected_cache)
    assert_same(elsewhere, expected_cache)
    expected = model(held[0], expected_cache)
    with context(mode):
        assert_same(compiled(held[0], cache), expected)
    assert_counts(backend, 1, 4, {WARMING: 1}, failures=1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_another_object_at_the_same_address_is_the_same_input(device: str, setting: str) -> None:
    runs, backend = compiled_nested(device, PIECEWISE, on_input_change=setting)
    inputs = Given.on(device)
    for make in (lambda x: x, lambda x: x.detach(), lambda x: x[:], lambda x: x.view(x.shape)):
        runs.check(Given(*map(make, inputs)), 2)
    assert_counts(backend, 1, 6, {WARMING: 1})


# ------------------------------------------------------------------ compiled: other numbers


class Scales(nn.Module):
    def forward(self, x, n):
        return attended(x.sin()) * n


class Bends(nn.Module):
    """Calls an op that takes a number, and no tensor in its place."""

    def forward(self, x, n):
        return nn.functional.elu(attended(x.sin()), n)


@both_modes
@pytest.mark.parametrize("setting", SETTINGS)
def test_another_number_of_a_graph(device: str, setting: str, mode: Any) -> None:
    settings = {"splitting_ops": (ATTEND,), "on_input_change": setting}
    model, compiled, backend = compiled_model(Bends, device, dynamic=True, **settings)
    x = batch(device, ROWS)

    def check(n: int) -> None:
        x.normal_()
        with context(mode):
            assert_same(compiled(x, n), model(x, n))

    for _ in range(3):
        check(3)
    RUN.clear()
    if setting in ("raise", "copy"):
        with context(mode), pytest.raises(HostValueChangedError, match="'n' is 4, was 3"):
            compiled(x, 4)
        assert not RUN
        check(3)
        assert_counts(backend, 1, 2, {WARMING: 1}, failures=1)
        return
    for n in (4, 3, 4, 4):
        check(n)
    if setting == "eager":
        assert_counts(backend, 1, 2, {WARMING: 1, Reason.INPUT_CHANGED: 3})
    else:
        assert_counts(backend, 2, 3, {WARMING: 2})


@both_modes
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_number_that_ops_compute_with_is_live(device: str, setting: str, mode: Any) -> None:
    settings = {"splitting_ops": (ATTEND,), "on_input_change": setting}
    model, compiled, backend = compiled_model(Scales, device, dynamic=True, **settings)
    x = batch(device, ROWS)
    for n in (3, 4, 5, 3, 7, 7):
        x.normal_()
        with context(mode):
            assert_same(compiled(x, n), model(x, n))
    assert_counts(backend, 1, 4, {WARMING: 1})


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_number_that_an_eager_op_alone_reads_is_live(device: str, setting: str) -> None:
    made(Times, device)  # defines the operators
    settings = {"splitting_ops": ("cgentry::times",), "on_input_change": setting}
    model, compiled, backend = compiled_model(Times, device, dynamic=True, **settings)
    x = batch(device, ROWS)
    for n in (2, 3, 4, 100, 2):
        x.normal_()
        with context(PIECEWISE):
            assert_same(compiled(x, n), model(x, n))
    assert_counts(backend, 1, 3, {WARMING: 1})


# ------------------------------------------------------------------ wrappers


QUICK = CUDAGraphOptions(gc_disable=True)


class Kind(NamedTuple):
    """A kind of wrapper and the mode that it is tried in."""

    wrapper: type[CUDAGraphWrapper]
    mode: CUDAGraphMode


KINDS = {
    "full": Kind(CUDAGraphWrapper, FULL),
    "piecewise": Kind(CUDAGraphWrapper, PIECEWISE),
    "breakable": Kind(BreakableCUDAGraphWrapper, PIECEWISE),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


def wrapped(
    kind: Kind, runnable: Any, setting: str = "raise", options: Any = None, **more: Any
) -> CUDAGraphWrapper:
    pool = more.pop("pool", None)
    breaks = (ATTEND,) if kind.wrapper is BreakableCUDAGraphWrapper else ()
    config = CompilationConfig(
        capture_device="host", on_input_change=setting, splitting_ops=breaks, **more
    )
    options = QUICK if options is None else options
    return kind.wrapper(runnable, config, kind.mode, options, pool=pool)


def wrapped_nested(
    kind: Kind, device: str, setting: str = "raise", **more: Any
) -> tuple[Runs, CUDAGraphWrapper]:
    model = made(Nested, device).requires_grad_(False)
    wrapper = wrapped(kind, model, setting, **more)
    return Runs(model, wrapper, kind.mode), wrapper


WRAPPED_PATHS = {
    "x": r"input 0 ",
    "first": r"input 1\[0\] ",
    "second": r"input 1\[1\] ",
    "inner": r"input 'more'\['bias'\]\['inner'\] ",
}


def test_a_wrapper_names_the_path_and_replays_nothing(device: str, kind: Kind) -> None:
    runs, wrapper = wrapped_nested(kind, device)
    inputs = Given.on(device)
    runs.check(inputs, 2)
    for field, path in WRAPPED_PATHS.items():
        match = rf"Nested, num_tokens=6: {path}is at 0x"
        runs.refused(inputs.moved(field), AddressChangedError, match)
        runs.check(inputs, 2)
    short = inputs._replace(inner=inputs.inner[:3])
    runs.refused(short, HostValueChangedError, rf"{WRAPPED_PATHS['inner']}is a tensor \(3, 4, 16\)")
    runs.check(inputs)
    assert_counters(wrapper, captures=1, replays=1 + 2 * 4 + 1, failures=5)


def test_a_wrapper_recaptures_for_each_set_of_addresses(device: str, kind: Kind) -> None:
    runs, wrapper = wrapped_nested(kind, device, "recapture")
    first = Given.on(device)
    second = first.moved("inner")
    runs.check(first, 3)
    runs.check(second, 3)
    assert_counters(wrapper, captures=2, replays=4)
    for _ in range(3):
        runs.check(second)
        runs.check(first, 2)
    assert_counters(wrapper, captures=2, replays=13)
    last = []
    for inputs in (second, second, first, first, second):
        runs.check(inputs)
        last += wrapper.concrete_cudagraph_entries.values()
    assert last[0] is last[1] is last[4] is not last[2]
    assert last[2] is last[3] is not last[0]
    assert set(wrapper.entries_of(kind.mode, BatchDescriptor(ROWS))) == {last[0], last[2]}


def test_a_wrapper_recaptures_no_more_than_allowed(device: str, kind: Kind) -> None:
    runs, wrapper = wrapped_nested(kind, device, "recapture", max_captured_shapes=2)
    first, second, third = (Given.on(device) for _ in range(3))
    for inputs in (first, second, third, second, first, third):
        runs.check(inputs, 2)
    plain = {Reason.TOO_MANY_SHAPES: 4}
    assert_counters(wrapper, captures=2, replays=2 + 4, plain=plain)


def test_a_wrapper_runs_plain_where_it_may(device: str, kind: Kind) -> None:
    runs, wrapper = wrapped_nested(kind, device, "eager")
    inputs = Given.on(device)
    runs.check(inputs, 2)
    for field in Given._fields:
        runs.check(inputs.moved(field))
        runs.check(inputs)
    assert_counters(wrapper, captures=1, replays=5, plain={Reason.INPUT_CHANGED: 4})
    assert "'more'['bias']['inner'] is at 0x" in wrapper.counters.details[Reason.INPUT_CHANGED]


def test_a_wrapper_cannot_copy(device: str, kind: Kind) -> None:
    runs, wrapper = wrapped_nested(kind, device, "copy")
    runs.refused(Given.on(device), DispatchError, "Nested: on_input_change='copy'")
    inputs = Given.on(device)
    assert_same(inputs.call(wrapper), inputs.call(runs.model))  # no context, so no graph
    assert_counters(wrapper, failures=1, plain={Reason.NO_CONTEXT: 1})


@pytest.mark.parametrize("setting", ["raise", "recapture", "eager"])
def test_a_wrapper_takes_another_object_at_the_same_address(
    device: str, kind: Kind, setting: str
) -> None:
    runs, wrapper = wrapped_nested(kind, device, setting)
    inputs = Given.on(device)
    for make in (lambda x: x, lambda x: x.detach(), lambda x: x[:], lambda x: x.view(x.shape)):
        runs.check(Given(*map(make, inputs)), 2)
    assert_counters(wrapper, captures=1, replays=7)


@pytest.mark.parametrize("setting", ["raise", "recapture", "eager"])
def test_another_number_that_a_wrapper_is_given(device: str, kind: Kind, setting: str) -> None:
    """Python does not run again, so a number is guarded, whoever reads it."""
    model = Scales()
    wrapper, x = wrapped(kind, model, setting), batch(device, ROWS)
    numbers = (3, 3, 4, 3, 4, 4)
    for n in numbers:
        x.normal_()
        expected = model(x, n)
        RUN.clear()
        with context(kind.mode):
            if setting == "raise" and n == 4:
                with pytest.raises(HostValueChangedError, match="input 1 is 4, was 3"):
                    wrapper(x, n)
                assert not RUN
                continue
            assert_same(wrapper(x, n), expected)
    if setting == "raise":
        assert_counters(wrapper, captures=1, replays=2, failures=3)
    elif setting == "recapture":
        assert_counters(wrapper, captures=2, replays=4)
    else:
        assert_counters(wrapper, captures=1, replays=2, plain={Reason.INPUT_CHANGED: 3})


def test_a_number_that_a_break_alone_reads_is_guarded(device: str) -> None:
    """Its arguments are frozen: without the guard it would be given the number of the capture."""
    model = made(Times, device).requires_grad_(False)
    config = CompilationConfig(capture_device="host", splitting_ops=("cgentry::times",))
    wrapper = BreakableCUDAGraphWrapper(model, config, PIECEWISE, QUICK)
    x = batch(device, ROWS)
    for n in (2, 2, 3, 2):
        with context(PIECEWISE):
            if n == 2:
                assert_same(wrapper(x, n), model(x, n))
                continue
            with pytest.raises(HostValueChangedError, match="input 1 is 3, was 2"):
                wrapper(x, n)
    assert_counters(wrapper, captures=1, replays=2, failures=1)


# ------------------------------------------------------------------ weights


class Weights(nn.Module):
    """Six tensors in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x):
        x = self.second(self.first(x).sin())
        return self.third(attended(x))


def compiled_weights(device: str, mode: CUDAGraphMode) -> tuple[Any, Any, Callable[[int], None]]:
    """(model, backend, what checks that many steps)."""
    model, compiled, backend = compiled_model(Weights, device, splitting_ops=(ATTEND,))
    x = batch(device, ROWS)

    def check(steps: int = 1) -> None:
        for _ in range(steps):
            x.normal_()
            with context(mode):
                assert_same(compiled(x), model(x))

    return model, backend, check


def other_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(each) for name, each in model.state_dict().items()}


@both_modes
def test_invalidated_graphs_are_captured_again(device: str, mode: Any) -> None:
    _, backend, check = compiled_weights(device, mode)
    check(4)
    (graph,) = backend.graphs
    graph.invalidate("a test says so")
    assert graph.recordings == ()
    check(4)
    assert_counts(backend, 2, 4, {WARMING: 2})


# ------------------------------------------------------------------ results as inputs


@pytest.mark.parametrize("setting", ["FULL", "PIECEWISE"])
def test_a_compiled_model_applied_to_its_own_result(device: str, setting: str) -> None:
    settings = {"splitting_ops": (ATTEND,), "cudagraph_mode": setting}
    model, compiled, backend = compiled_model(Weights, device, **settings)
    for _ in range(5):
        x = batch(device, ROWS)
        assert_same(compiled(compiled(compiled(x))), model(model(model(x))))
    assert_counts(backend, 1, 13, {WARMING: 1})


@pytest.mark.parametrize("times", [2, 3])
def test_a_wrapper_applied_to_its_own_result(device: str, kind: Kind, times: int) -> None:
    model = made(Weights, device).requires_grad_(False)
    wrapper, x = wrapped(kind, model, "recapture"), batch(device, ROWS)
    for _ in range(5):
        x.normal_()
        expected, result = x.clone(), x
        with context(kind.mode):
            for _ in range(times):
                expected, result = model(expected), wrapper(result)
        assert_same(result, expected)
    assert_counters(wrapper, captures=times, replays=4 * times)


def new_pool(device: str) -> GraphPool:
    capturer = capture_device(torch.device(device), "host")
    assert capturer is not None
    return GraphPool(capturer)


@pytest.mark.parametrize("weak", [True, False])
def test_equal_blocks_that_share_a_pool(device: str, kind: Kind, weak: bool) -> None:
    blocks = [made(Weights, device).requires_grad_(False) for _ in range(4)]
    for block in blocks:
        block.load_state_dict(other_state(block))
    pool, options = new_pool(device), CUDAGraphOptions(gc_disable=True, weak_ref_output=weak)
    wrappers = [wrapped(kind, block, options=options, pool=pool) for block in blocks]
    buffers = {rows: batch(device, rows) for rows in (ROWS, 3)}
    for _ in range(4):
        for rows, x in buffers.items():
            x.normal_()
            expected, result = x.clone(), x
            for block, wrapper in zip(blocks, wrappers, strict=True):
                expected = block(expected)
                with context(kind.mode, rows):
                    result = wrapper(result)
            assert_same(result, expected)
    for wrapper in wrappers:
        assert_counters(wrapper, captures=2, replays=6)


@pytest.mark.parametrize("weak", [True, False])
def test_a_replayed_result_is_the_input_of_a_later_capture(
    device: str, kind: Kind, weak: bool
) -> None:
    """Nobody holds the memory of a weak result, so a capture might use it for something else."""
    first, second = (made(Weights, device).requires_grad_(False) for _ in range(2))
    pool, options = new_pool(device), CUDAGraphOptions(gc_disable=True, weak_ref_output=weak)
    one, other = (wrapped(kind, each, options=options, pool=pool) for each in (first, second))
    x = batch(device, ROWS)
    with context(kind.mode):
        for _ in range(3):
            assert_same(one(x), first(x))
        for _ in range(4):
            x.normal_()
            assert_same(other(one(x)), second(first(x)))
    assert_counters(one, captures=1, replays=6)
    if weak:
        assert_counters(other, plain={Reason.UNSUPPORTED_INPUT: 4})
        assert "weak_ref_output=False" in other.counters.details[Reason.UNSUPPORTED_INPUT]
    else:
        assert_counters(other, captures=1, replays=3)


# ------------------------------------------------------------------ padded rows


class FillsRows(nn.Module):
    """An op that writes the real rows of a buffer alone, between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(D, D)

    def rows(self, x):
        out = torch.empty_like(x)
        torch.ops.cgchange.fill(x, out)
        return out

    def forward(self, x):
        y = self.rows(self.before(x))
        return y * 2, y.sum(0)  # each row on its own, and all rows in one


class MakesRows(FillsRows):
    """The same by an op whose result is fresh, and wrong where no row is real."""

    def rows(self, x):
        return torch.ops.cgchange.fresh(x)


BY_ROWS = {"splitting_ops": ("cgchange::fill", "cgchange::fresh")}
PADDED = 8


def check_rows(model: FillsRows, run: Any, x: torch.Tensor, real: int | None) -> None:
    """The real rows are those of eager, the others zero, for whatever comes after the op."""
    x.normal_()
    count = PADDED if real is None else real
    expected = torch.softmax(model.before(x), -1)
    expected[count:] = 0
    more = {"num_tokens": PADDED, "num_unpadded_tokens": real}
    with context(PIECEWISE, PADDED, **more):
        rows, total = run(x)
    assert_same(rows, expected * 2)
    assert_same(total, expected.sum(0))


@pytest.mark.parametrize("poison", [False, True], ids=["", "poison"])
@pytest.mark.parametrize("build", [FillsRows, MakesRows])
def test_rows_that_are_not_real_are_zero_after_an_eager_op(
    device: str, build: Any, poison: bool
) -> None:
    settings = {**BY_ROWS, "debug": "poison" if poison else False}
    model, compiled, backend = compiled_model(build, device, **settings)
    x = marked(batch(device, PADDED))
    for _ in range(3):
        check_rows(model, compiled, x, None)
    for real in (5, 8, 3, None, 0, 5):  # fewer after more: what was there must go
        check_rows(model, compiled, x, real)
    assert_counts(backend, 1, 7, {WARMING: 1})


@pytest.mark.parametrize("build", [FillsRows, MakesRows])
def test_rows_that_are_not_real_are_zero_in_a_capturing_call(device: str, build: Any) -> None:
    model, compiled, backend = compiled_model(build, device, **BY_ROWS)
    x = marked(batch(device, PADDED))
    check_rows(model, compiled, x, None)
    check_rows(model, compiled, x, 5)
    assert_counts(backend, 1, 0, {WARMING: 1})
    check_rows(model, compiled, x, 5)
    assert_counts(backend, 1, 1, {WARMING: 1})


# ------------------------------------------------------------------ a function in place of an op


def own_attention(q, k, v, out):
    RUN["own"] += 1
    out.copy_(torch.softmax(q @ k.mT, -1) @ v)


def own_halves(x):
    RUN["own"] += 1
    return x * 0.5, x * -0.5


def own_softmax(x):
    RUN["own"] += 1
    return torch.softmax(x, -1)


ANY_DEVICE, PER_DEVICE, NO_DEVICE = "any", "per device", "another device"


def assert_ran(op: str, way: str) -> None:
    """Once, and the function where it is for this device."""
    ran = {op: 1} if way == NO_DEVICE else {"own": 1}
    assert dict(RUN) == ran


def impl_of(own: Callable[..., Any], way: str) -> Any:
    ways = {ANY_DEVICE: own, PER_DEVICE: {"cpu": own, "cuda": own}, NO_DEVICE: {"xpu": own}}
    return ways[way]


def attending(way: str) -> SplittingOp:
    return SplittingOp("cgchange::attend", impl=impl_of(own_attention, way))


def of_front_end(front_end: str, model: Any, *entries: SplittingOp) -> tuple[Any, Any]:
    """Return (what runs the model, its counters)."""
    if front_end == "pieces":
        backend = backend_for(splitting_ops=entries)
        return torch.compile(model, backend=backend), backend
    config = CompilationConfig(capture_device="host", splitting_ops=entries)
    wrapper = BreakableCUDAGraphWrapper(model, config, PIECEWISE, QUICK)
    return wrapper, wrapper


FRONT_ENDS = pytest.mark.parametrize("front_end", ["pieces", "breakable"])


@FRONT_ENDS
@pytest.mark.parametrize("way", [ANY_DEVICE, PER_DEVICE, NO_DEVICE])
def test_a_replay_calls_the_function_of_an_op(device: str, way: str, front_end: str) -> None:
    model = made(Weights, device).requires_grad_(False)
    run, counted = of_front_end(front_end, model, attending(way))
    x, before = batch(device, ROWS), {"pieces": 2, "breakable": 1}[front_end]
    for calls in range(before + 3):
        x.normal_()
        expected = model(x)
        RUN.clear()
        with context(PIECEWISE):
            assert_same(run(x), expected)
        if calls >= before:  # warming and capture may take either
            assert_ran("attend", way)
        assert RUN.total() == 1
    assert (counted.counters.captures, counted.counters.replays) == (1, 3)


@pytest.mark.parametrize("way", [ANY_DEVICE, NO_DEVICE])
def test_a_function_with_a_fresh_result_crosses_a_bridge(device: str, way: str, hook: Any) -> None:
    made(Hooked, device)  # defines the operators

    def counted(x):
        RUN["op"] += 1
        return torch.softmax(x, -1)

    hook(counted)
    entry = SplittingOp(*HOOKED["splitting_ops"], impl=impl_of(own_softmax, way))
    model, x = made(Hooked, device), batch(device, ROWS)
    compiled, backend = of_front_end("pieces", model, entry)
    wrapper, _ = of_front_end("breakable", model, entry)
    for calls in range(5):
        x.normal_()
        expected = model(x)
        for run in (compiled, wrapper):
            RUN.clear()
            with context(PIECEWISE):
                assert_same(run(x), expected)
            if calls > 1:
                assert_ran("op", way)
    assert_counts(backend, 1, 3, {WARMING: 1})
    assert_counters(wrapper, captures=1, replays=4)


class ByKeyword(nn.Module):
    def forward(self, x):
        x, out = x.sin(), torch.empty_like(x)
        torch.ops.cgchange.attend(q=x, k=x, v=x, out=out)
        return out * 2


class Neighbours(nn.Module):
    def forward(self, x):
        x = x.sin()
        return attended(attended(x)) * 2


class TwoResults(nn.Module):
    def forward(self, x):
        first, second = torch.ops.cgchange.halves(x.sin())
        return first * 2 + second


@pytest.mark.parametrize("build", [ByKeyword, Neighbours, TwoResults])
@FRONT_ENDS
def test_the_function_of_an_op_serves_each_form_of_call(
    device: str, front_end: str, build: Any
) -> None:
    entries = (attending(ANY_DEVICE), SplittingOp("cgchange::halves", impl=own_halves))
    model = build()
    run, _ = of_front_end(front_end, model, *entries)
    x = batch(device, ROWS)
    for _ in range(4):
        x.normal_()
        expected = model(x)
        RUN.clear()
        with context(PIECEWISE):
            assert_same(run(x), expected)
    assert dict(RUN) == {"own": 2 if build is Neighbours else 1}
