"""Breakable capture: graphs from plain Python, cut at functions and operators that stay eager."""

import contextlib
import copy
import functools
import gc
import threading
import time
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import compiling_elsewhere
from lib.breakable import (
    FULL,
    NONE,
    PIECEWISE,
    TIMEOUT,
    Asked,
    Hook,
    Stack,
    assert_alternates,
    assert_calls,
    assert_counters,
    assert_replays,
    churn,
    counted,
    eager_segments,
    in_thread,
    layers,
    operators,
    outer_custom,
    rand,
    same,
    soft,
    step,
)
from lib.cases import library
from torch import nn
from torch.utils._python_dispatch import _len_torch_dispatch_stack, _pop_mode

from cgcompile import (
    BatchDescriptor,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphOptions,
    get_forward_context,
    set_forward_context,
)
from cgcompile.boundaries import AttentionCGSupport, Boundaries, SplittingOp
from cgcompile.errors import (
    AddressChangedError,
    CaptureBusyError,
    CaptureError,
    CGCompileError,
    DispatchError,
    GradientError,
    HostValueChangedError,
)
from cgcompile.graphs.breakable import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    eager_break_during_capture,
)
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.sequence import GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.reasons import Reason
from cgcompile.testing.host import HostDevice

SOFT = ("cgbreak::soft",)
ATTEND = ("cgtest::attend",)
operators(), library()


@pytest.fixture(autouse=True)
def no_mode_is_left():
    """What a capture puts on torch's stack of modes is gone after it, whatever happened."""
    yield
    left = []
    while _len_torch_dispatch_stack():
        left.append(type(_pop_mode()).__name__)
    assert not left


@pytest.fixture
def new_capture(device, pool):
    """Makes raw captures on either device, into one pool unless told otherwise."""

    def make(**settings):
        pool_of_test = settings.pop("pool", pool)
        return BreakableCUDAGraphCapture(pool_of_test, device=device, **settings)

    return make


@pytest.fixture
def host_pool():
    """For what only the host recorder shows: numbers of its pool."""
    return GraphPool(HostDevice())


@pytest.fixture
def wrap():
    """Makes a breakable wrapper that captures on either device."""

    def make(runnable, mode=None, options=None, *, on_fallback="warn", splitting_ops=(), **more):
        config = CompilationConfig(
            capture_device="host", on_fallback=on_fallback, splitting_ops=splitting_ops
        )
        return BreakableCUDAGraphWrapper(runnable, config, mode, options, **more)

    return make


def assert_capture_works(new_capture, device, **settings):
    """Nothing of what happened before is left: a new capture records, breaks and replays."""
    assert BreakableCUDAGraphCapture.current() is None
    assert not BreakableCUDAGraphCapture.is_active()
    cut, calls = counted(soft)
    x, cap = rand(device=device), new_capture(**settings)
    with cap:
        out = layers(2, x, cut)
    assert_alternates(cap, 2)
    assert_replays(cap, out, [x], lambda x: layers(2, x, soft))
    assert len(calls) == 2 + 3 * 2


def assert_fails(cap, body, kind, match=None):
    """The block raises and keeps nothing; returns what it raised."""

    def block():
        with cap:
            body()

    with pytest.raises(kind, match=match) as caught:
        block()
    assert cap.segments == ()
    assert (cap.num_graphs, cap.num_eager_breaks) == (0, 0)
    assert BreakableCUDAGraphCapture.current() is None
    with pytest.raises(CaptureError):
        cap.replay()
    return caught.value


# ---------------------------------------------------------------- what is recorded


def shared(y):
    whole = y.cos()
    return whole, whole[1:]


def reads_shared(x, cut):
    whole, part = cut(x * 2)
    whole.mul_(5)
    return part + 1, whole - 1


def keeps_results(x, cut):
    kept = []
    for _ in range(5):
        x = cut(x * 2) + 1
        kept.append(cut(x.sin()))
    return kept, x


def two(y, z):
    return [y @ z.t(), {"k": z.cos()}]


def reads_two(x, cut):
    for _ in range(4):
        first, more = cut(x.sin(), x + 1)
        x = first @ more["k"] - x
    return x


CHAINS = {
    "no break": (0, soft, lambda x, cut: (x.sin() + x * 2).relu()),
    **{f"{n} breaks": (n, soft, lambda x, cut, n=n: layers(n, x, cut)) for n in (1, 2, 5)},
    "at both ends and twice in a row": (3, soft, lambda x, cut: cut(cut(cut(x)).sin())),
    "results that share memory": (1, shared, reads_shared),
    "results that the caller keeps": (10, soft, keeps_results),
    "several arguments and results": (4, two, reads_two),
}


@pytest.mark.parametrize("kind", CHAINS)
def test_graphs_and_breaks_alternate_and_replays_equal_eager(device, new_capture, kind) -> None:
    breaks, function, model = CHAINS[kind]
    cut, calls = counted(function)
    x, cap = rand(device=device), new_capture(name="model")
    with cap as entered:
        out = model(x, cut)
    assert entered is cap
    assert len(calls) == breaks
    assert_alternates(cap, breaks)
    assert isinstance(cap.segments, tuple)
    assert all(function.__name__ in segment.name for segment in eager_segments(cap))
    plain = functools.partial(model, cut=function)
    assert_replays(cap, out, [x], plain, times=10, between=lambda: churn(device))
    assert len(calls) == breaks * 11


def test_capture_runs_eager_functions_once_and_graphs_not_at_all(device, new_capture) -> None:
    x, cap = rand(device=device), new_capture()
    in_graph, in_break = (torch.zeros((), device=device) for _ in range(2))
    with cap:
        in_graph.add_(1)
        y = x * 2
        cap.add_eager(lambda: in_break.add_(1) and None)
        in_graph.add_(1)
        out = y + 1
    assert (in_graph.item(), in_break.item()) == (0, 1)
    for replays in (1, 2, 3):
        x.uniform_()
        cap.replay()
        assert same(out, x * 2 + 1)
        assert (in_graph.item(), in_break.item()) == (2 * replays, 1 + replays)
    assert_alternates(cap, 1)


def test_side_effects_keep_their_order(device, new_capture) -> None:
    x, log, cap = rand(device=device), torch.ones((), device=device), new_capture()

    def plain(x, run=lambda function: function()):
        log.fill_(1)
        log.mul_(3)
        run(lambda: log.add_(1) and None)
        log.mul_(3)
        run(lambda: log.add_(2) and None)
        return x * log

    with cap:
        out = plain(x, cap.add_eager)
    assert_alternates(cap, 2)
    assert_replays(cap, out, [x], plain)
    assert log.item() == (3 + 1) * 3 + 2


# ---------------------------------------------------------------- what a break returns


@dataclass
class Pair:
    """A value with fields."""

    first: Any
    rest: Any = None


def total(value: Any) -> Any:
    """Adds all tensors of a value, however nested."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Pair):
        return total((value.first, value.rest))
    if isinstance(value, dict):
        return total(tuple(value.values()))
    if isinstance(value, tuple | list):
        return sum(total(each) for each in value)
    return 0


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a value, in order."""
    if isinstance(value, Pair):
        return tensors((value.first, value.rest))
    if isinstance(value, dict):
        return tensors(tuple(value.values()))
    if isinstance(value, tuple | list):
        return [leaf for each in value for leaf in tensors(each)]
    return [value] if isinstance(value, torch.Tensor) else []


VALUES = {
    "none": lambda x: None,
    "tensor": lambda x: x.sin(),
    "strided": lambda x: x.sin().t().contiguous().t(),
    "tuple": lambda x: (x.sin(), x.cos()),
    "list": lambda x: [x.sin(), None],
    "nested": lambda x: {"a": x.sin(), "b": (x.cos(), [x.exp(), None])},
    "dataclass": lambda x: Pair(x.sin(), {"k": x.cos()}),
    "dataclass inside": lambda x: [Pair((x.sin(),)), x.exp()],
}


@pytest.mark.parametrize("kind", VALUES)
def test_add_eager_returns_the_value_in_bridges(device, new_capture, kind) -> None:
    x, cap, values = rand(device=device), new_capture(), []

    def function():
        values.append(VALUES[kind](x))
        return values[-1]

    with cap:
        y = x * 2
        value = cap.add_eager(function)
        assert type(value) is type(values[0])
        out = y + total(value)
    assert len(values) == 1
    bridges, expected = tensors(value), tensors(values[0])
    assert len(bridges) == len(expected)
    for mine, its in zip(bridges, expected, strict=True):
        assert torch.equal(mine, its)
        assert mine.stride() == its.stride()
        assert mine.data_ptr() != its.data_ptr()
    assert_alternates(cap, 1)
    (segment,) = eager_segments(cap)
    assert segment.function is function
    assert_replays(cap, out, [x], lambda x: x * 2 + total(VALUES[kind](x)), between=values.clear)
    assert len(values) == 1
    for mine, its in zip(tensors(value), tensors(values[0]), strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (lambda x: x.sin(), lambda x: x.sin()[:2]),
        (lambda x: x.sin(), lambda x: x.sin().t()),
        (lambda x: x.sin(), lambda x: x.sin().double()),
        (lambda x: x.sin(), lambda x: None),
        (lambda x: None, lambda x: x.sin()),
        (lambda x: x.sin(), lambda x: (x.sin(),)),
        (lambda x: (x.sin(), x.cos()), lambda x: (x.sin(),)),
        (lambda x: {"a": x.sin()}, lambda x: {"b": x.sin()}),
        (lambda x: {"a": x.sin()}, lambda x: [x.sin()]),
        (lambda x: Pair(x.sin()), lambda x: (x.sin(), None)),
        (lambda x: Pair(x.sin()), lambda x: Pair(None, x.sin())),
        (lambda x: (x.sin(), 3), lambda x: (x.sin(), 4)),
    ],
)
def test_changed_result_is_an_error(device, new_capture, before, now) -> None:
    x, cap, kind = rand(device=device), new_capture(), [before]
    with cap:
        y = x * 2
        value = cap.add_eager(lambda: kind[0](x))
        out = y + total(value)
    assert_replays(cap, out, [x], lambda x: x * 2 + total(before(x)), times=1)
    kind[0] = now
    with pytest.raises(HostValueChangedError):
        cap.replay()
    kind[0] = before
    assert_alternates(cap, 1)
    assert_replays(cap, out, [x], lambda x: x * 2 + total(before(x)))


class Opaque:
    """Nothing that could be replayed."""

    def __init__(self, tensor):
        self.tensor = tensor


@pytest.mark.parametrize("wrapped", [False, True])
def test_result_of_an_unknown_kind_is_an_error(device, new_capture, wrapped) -> None:
    x, cap = rand(device=device), new_capture()

    def odd():
        return (x, [Opaque(x.sin())]) if wrapped else Opaque(x.sin())

    def body():
        y = x * 2
        cap.add_eager(odd)
        y + 1

    assert_fails(cap, body, CaptureError, "Opaque")
    assert_capture_works(new_capture, device)


@pytest.mark.parametrize(
    "part", [lambda y: y, lambda y: y[1:], lambda y: y.t(), lambda y: y[:, ::2]]
)
def test_view_of_an_argument_is_not_copied(device, new_capture, part) -> None:
    def write(y):
        y.mul_(3)
        return part(y)

    cut, calls = counted(write)
    x, cap = rand(device=device), new_capture()
    with cap:
        y = x + 1
        seen = cut(y)
        assert seen.data_ptr() == part(y).data_ptr()
        assert seen.stride() == part(y).stride()
        out = seen * 2
        y.add_(1)
        after = seen + 0
    assert_alternates(cap, 1)
    assert_replays(
        cap,
        (out, after),
        [x],
        lambda x: (part((x + 1) * 3) * 2, part((x + 1) * 3 + 1)),
    )
    assert len(calls) == 4


@pytest.mark.parametrize("other", [lambda a, b: b, lambda a, b: a.clone()], ids=["b", "fresh"])
def test_argument_that_is_returned_must_be_the_same_one(device, new_capture, other) -> None:
    first, second, x = (rand(device=device) for _ in range(3))
    changed = []

    @eager_break_during_capture
    def pick(a, b):
        return other(a, b) if changed else a

    cap = new_capture()
    with cap:
        y = x * 2
        picked = pick(first, second)
        out = y + picked
    assert picked.data_ptr() == first.data_ptr()
    assert_alternates(cap, 1)
    assert_replays(cap, out, [x, first, second], lambda x, a, b: x * 2 + a)
    changed.append(True)
    with pytest.raises(AddressChangedError, match="pick"):
        cap.replay()
    changed.clear()
    assert_replays(cap, out, [x, first, second], lambda x, a, b: x * 2 + a)


# ---------------------------------------------------------------- which capture is current


def test_current_inside_and_outside(device, new_capture) -> None:
    x, cap = rand(device=device), new_capture()
    assert BreakableCUDAGraphCapture.current() is None
    assert not BreakableCUDAGraphCapture.is_active()
    with cap:
        assert BreakableCUDAGraphCapture.current() is cap
        assert BreakableCUDAGraphCapture.is_active()
        y = x * 2
        cap.add_eager(lambda: None)
        assert BreakableCUDAGraphCapture.current() is cap
        out = y + 1
    assert BreakableCUDAGraphCapture.current() is None
    assert not BreakableCUDAGraphCapture.is_active()
    assert_alternates(cap, 1)
    assert_replays(cap, out, [x], lambda x: x * 2 + 1)


def test_current_is_per_thread(device, new_capture) -> None:
    x, cap = rand(device=device), new_capture()
    with cap:
        y = x * 2
        result, error = in_thread(
            lambda: (BreakableCUDAGraphCapture.current(), BreakableCUDAGraphCapture.is_active())
        )
        assert BreakableCUDAGraphCapture.current() is cap
    assert (result, error) == ((None, False), None)
    assert_replays(cap, y, [x], lambda x: x * 2)


# ---------------------------------------------------------------- the decorator


def test_decorated_function_outside_of_a_capture(device) -> None:
    @eager_break_during_capture
    def attention(x, *, scale=2):
        """Scales."""
        return x * scale

    x = rand(device=device)
    assert attention.__name__ == "attention"
    assert attention.__doc__ == "Scales."
    assert torch.equal(attention(x), x * 2)
    assert torch.equal(attention(x, scale=3), x * 3)
    marker = object()
    assert eager_break_during_capture(lambda given: given)(marker) is marker


def test_break_binds_arguments_and_keywords(device, new_capture) -> None:
    class Attention:
        def __init__(self):
            self.scale = 1.5

        @eager_break_during_capture
        def attend(self, x, y, *, power, options):
            return (x * self.scale + y) ** power - options["bias"][0]

    x, bias, module, cap = rand(device=device), rand(device=device), Attention(), new_capture()

    def model(x, bias):
        return module.attend(x.sin(), x.cos(), power=2, options={"bias": (bias,)}) + 1

    with cap:
        out = model(x, bias)
    assert_alternates(cap, 1)
    assert "attend" in eager_segments(cap)[0].name
    assert_replays(cap, out, [x, bias], model)
    module.scale = -3.0
    assert_replays(cap, out, [x, bias], model)


inner, inner_calls = counted(soft)
INSIDE = {
    "decorated": lambda y: inner(inner(y * 3)) + 1,
    "splitting op": lambda y: torch.ops.cgtest.unsafe(y) + 1,
}


@pytest.mark.parametrize("kind", INSIDE)
def test_a_break_inside_a_break_runs_inline(device, new_capture, kind) -> None:
    cut, calls = counted(INSIDE[kind])
    x, cap = rand(device=device), new_capture()
    inner_calls.clear()
    with cap:
        out = cut(x * 2) - 1
    assert_alternates(cap, 1)
    assert_replays(cap, out, [x], lambda x: INSIDE[kind](x * 2) - 1)
    assert len(calls) == 4
    assert kind != "decorated" or len(inner_calls) == 2 * (4 + 3)


@pytest.mark.parametrize(("mode", "breaks"), [(FULL, 0), (PIECEWISE, 3), (NONE, 3)])
def test_only_full_mode_captures_breaks_inline(device, new_capture, mode, breaks) -> None:
    cut, calls = counted(soft)
    x, cap = rand(device=device), new_capture()
    with step(4, mode), cap:
        out = layers(3, x, cut)
    assert_alternates(cap, breaks)
    assert_replays(cap, out, [x], lambda x: layers(3, x, soft))
    assert len(calls) == 3 + 3 * breaks


def test_decorator_over_one_with_side_effects(device, new_capture) -> None:
    """As in a transfer of caches: wait, attend, save; each once a replay and in this order."""
    log = []

    def transfers(function):
        @functools.wraps(function)
        def around(*args):
            log.append("wait")
            result = function(*args)
            log.append("save")
            return result

        return around

    @eager_break_during_capture
    @transfers
    def attend(y, out):
        log.append("attend")
        out.copy_(soft(y))

    def model(x):
        y = x * 2
        out = torch.empty_like(y)
        attend(y, out)
        return out + y

    x, cap = rand(device=device), new_capture()
    with cap:
        out = model(x)
    assert log == ["wait", "attend", "save"]
    assert_alternates(cap, 1)
    for _ in range(3):
        log.clear()
        x.uniform_()
        cap.replay()
        assert log == ["wait", "attend", "save"]
        assert same(out, soft(x * 2) + x * 2)


def test_arguments_from_outside_are_held(device, new_capture) -> None:
    class Metadata:
        def __init__(self):
            self.scale = 2.0

    arguments = [rand(device=device), Metadata()]
    scale, metadata = arguments[0].clone(), weakref.ref(arguments[1])

    @eager_break_during_capture
    def scaled(y, tensor, metadata):
        return y * tensor * metadata.scale

    x, cap = rand(device=device), new_capture()
    with cap:
        out = scaled(x + 1, *arguments) - 1
    arguments.clear()
    gc.collect()
    assert metadata() is not None
    assert_alternates(cap, 1)
    plain = lambda x: (x + 1) * scale * metadata().scale - 1  # noqa: E731
    assert_replays(cap, out, [x], plain, between=lambda: churn(device))
    metadata().scale = -0.5
    assert_replays(cap, out, [x], plain, between=lambda: churn(device))
    del cap
    gc.collect()
    assert metadata() is None


# ---------------------------------------------------------------- registered operators


def attended(x):
    """An attention that writes its result in place."""
    q, k, v = x.sin(), x.cos(), x * 2
    out = torch.empty_like(q)
    torch.ops.cgtest.attend(q, k, v, out)
    return out + x


def softened(x):
    return torch.ops.cgbreak.soft(x * 2) + 1


def attention(x, causal=False):
    x = x.expand(2, 3, *x.shape)
    return F.scaled_dot_product_attention(x.sin(), x.cos(), x * 2, is_causal=causal) + x


def soft_and_hooked(x):
    return torch.ops.cgbreak.hooked(softened(x)) + 1


ENTRIES = (SplittingOp("cgbreak::soft"), torch.ops.cgbreak.hooked.default)
OPS = {
    "in place": (attended, ATTEND, ["cgtest::attend"]),
    "pattern": (attended, ("cgtest::*",), ["cgtest::attend"]),
    "functional": (softened, SOFT, ["cgbreak::soft"]),
    "dotted": (softened, ("cgbreak.soft",), ["cgbreak::soft"]),
    "in impl": (lambda x: torch.ops.cgbreak.outer(x) * 2, SOFT, ["cgbreak::soft"]),
    "in custom op": (lambda x: outer_custom(x) * 2, SOFT, ["cgbreak::soft"]),
    "outer": (lambda x: torch.ops.cgbreak.outer(x) * 2, ("cgbreak::outer",), ["cgbreak::outer"]),
    "tag": (lambda x: torch.ops.cgtest.unsafe(x * 2) + 1, None, ["cgtest::unsafe"]),
    "entry and overload": (soft_and_hooked, ENTRIES, ["cgbreak::soft", "cgbreak::hooked"]),
    "unregistered": (softened, None, []),
    "attention": (attention, None, ["scaled_dot_product"]),
    "causal attention": (lambda x: attention(x, True), None, ["scaled_dot_product"]),
    "attention left in the graph": (attention, Boundaries(builtin=False), []),
}


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("inference", [False, True])
def test_registered_op_breaks_by_itself(device, new_capture, kind, inference) -> None:
    model, ops, names = OPS[kind]
    if "attention" in kind and not inference:
        pytest.skip("composite outside of inference mode; wrappers let it skip autograd")
    boundaries = Boundaries(ops) if isinstance(ops, tuple) else ops
    x, cap = rand(device=device), new_capture(boundaries=boundaries)
    with torch.inference_mode() if inference else contextlib.nullcontext():
        with cap:
            out = model(x)
        assert_alternates(cap, len(names))
        for name, segment in zip(names, eager_segments(cap), strict=True):
            assert name in segment.name
        assert_replays(cap, out, [x], model)


def test_registered_op_runs_its_kernel_at_each_replay(device, new_capture, monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(Hook, "function", lambda x: calls.append(1) or x.cos())
    x, cap = rand(device=device), new_capture(boundaries=Boundaries(("cgbreak::hooked",)))
    with cap:
        out = torch.ops.cgbreak.hooked(x * 2) + 1
    assert len(calls) == 1
    assert_alternates(cap, 1)
    assert_replays(cap, out, [x], lambda x: (x * 2).cos() + 1)
    assert len(calls) == 4


def test_boundaries_that_never_ran_are_an_error(device, new_capture) -> None:
    x, cap = rand(device=device), new_capture(boundaries=Boundaries(SOFT))
    assert_fails(cap, lambda: x * 2, CaptureError, "cgbreak::soft")
    assert_capture_works(new_capture, device)


# ---------------------------------------------------------------- nesting and reuse


def test_captures_do_not_nest(device, new_capture, new_pool) -> None:
    x, cap = rand(device=device), new_capture(name="outside")
    other = new_capture(pool=new_pool(), name="inside")
    with contextlib.suppress(CaptureError), cap:
        y = x * 2
        with pytest.raises(CaptureError), other:
            y + 1
        assert BreakableCUDAGraphCapture.current() is cap
    assert other.segments == ()
    assert_capture_works(new_capture, device)


@pytest.mark.usefixtures("impatient")
def test_second_capture_in_another_thread_is_busy(device, new_capture, new_pool) -> None:
    x, cap = rand(device=device), new_capture(name="first")
    other = new_capture(pool=new_pool(), name="second")

    def target():
        with other:
            rand(device=device)

    with cap:
        y = x * 2
        _, error = in_thread(target)
        out = y + 1
    assert isinstance(error, CaptureBusyError)
    assert other.segments == ()
    assert_alternates(cap, 0)
    assert_replays(cap, out, [x], lambda x: x * 2 + 1)
    assert_capture_works(new_capture, device)


def test_finished_capture_is_not_used_again(device, new_capture) -> None:
    cut, _ = counted(soft)
    x, cap = rand(device=device), new_capture()
    with cap:
        out = layers(1, x, cut)
    segments = cap.segments
    with pytest.raises(CaptureError, match="holds a recording already"), cap:
        x * 2
    assert cap.segments == segments
    assert_replays(cap, out, [x], lambda x: layers(1, x, soft))
    assert_capture_works(new_capture, device)


def test_replay_without_a_recording(device, new_capture) -> None:
    cap = new_capture()
    assert cap.segments == ()
    with pytest.raises(CaptureError):
        cap.replay()


def test_replay_inside_of_a_capture(device, new_capture) -> None:
    x, y, cap, other = *(rand(device=device) for _ in range(2)), new_capture(), new_capture()
    with cap:
        out = x * 2
    x.uniform_()
    cap.replay()
    before = out.clone()
    x.uniform_()
    with contextlib.suppress(CaptureError), other:
        z = y + 1
        with pytest.raises(CaptureError):
            cap.replay()
        z + 1
    assert torch.equal(out, before)
    assert_replays(cap, out, [x], lambda x: x * 2)
    assert_capture_works(new_capture, device)


def test_captures_of_one_pool_replay_in_any_order(device, new_capture) -> None:
    cut, _ = counted(soft)
    captured = []
    for size in (6, 4, 2):
        x, cap = rand(size, 8, device=device), new_capture()
        with cap:
            out = layers(3, x, cut)
        assert_alternates(cap, 3)
        captured.append((cap, out, x))
    for index in (2, 0, 1, 0, 2, 1):
        cap, out, x = captured[index]
        assert_replays(cap, out, [x], lambda x: layers(3, x, soft), times=2)


# ---------------------------------------------------------------- what fails


def raise_asked(*_):
    raise Asked("on purpose")


@eager_break_during_capture
def decorated_failure(y):
    raise_asked()


BREAKS = {
    "add_eager": lambda y: BreakableCUDAGraphCapture.current().add_eager(raise_asked),
    "decorated": decorated_failure,
    "op": lambda y: torch.ops.cgbreak.hooked(y),
}


@pytest.fixture
def failing(monkeypatch):
    """Lets every way to break fail with the same error object."""
    error = Asked("on purpose")

    def fail(*_):
        raise error

    monkeypatch.setattr(Hook, "function", fail)
    monkeypatch.setitem(globals(), "raise_asked", fail)
    return error


@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("first", [True, False])
def test_error_in_a_break_is_raised_as_it_is(device, new_capture, failing, kind, first) -> None:
    cut, _ = counted(soft)
    x, cap = rand(device=device), new_capture(boundaries=Boundaries(("cgbreak::hooked",)))

    def body():
        BREAKS[kind](x * 2 if first else cut(x * 2) + 1)
        raise AssertionError("the break has raised")

    assert assert_fails(cap, body, Asked) is failing
    assert_capture_works(new_capture, device)


@pytest.mark.parametrize("kind", BREAKS)
def test_swallowed_error_of_a_break_is_a_capture_error(device, new_capture, failing, kind) -> None:
    x, cap = rand(device=device), new_capture(boundaries=Boundaries(("cgbreak::hooked",)))

    def body():
        y = x * 2
        with contextlib.suppress(Asked):
            BREAKS[kind](y)
        y + 1

    assert assert_fails(cap, body, CaptureError).__cause__ is failing
    assert_capture_works(new_capture, device)


@pytest.mark.parametrize("kind", [Asked, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("breaks", [0, 2])
def test_error_in_the_body_is_raised_as_it_is(device, new_capture, kind, breaks) -> None:
    cut, _ = counted(soft)
    x, cap, error = rand(device=device), new_capture(), kind("on purpose")

    def body():
        layers(breaks, x * 2, cut)
        raise error

    assert assert_fails(cap, body, kind) is error
    assert_capture_works(new_capture, device)


def test_earlier_captures_survive_a_failure(device, new_capture) -> None:
    cut, _ = counted(soft)
    x, cap = rand(device=device), new_capture()
    with cap:
        out = layers(2, x, cut)
    assert_fails(new_capture(), lambda: raise_asked(layers(2, x, cut)), Asked)
    assert_alternates(cap, 2)
    assert_replays(cap, out, [x], lambda x: layers(2, x, soft))


@pytest.mark.parametrize("wrapped", [False, True])
def test_error_of_a_break_at_replay(device, new_capture, wrap, wrapped) -> None:
    error, failing_now = Asked("at replay"), []

    @eager_break_during_capture
    def sometimes(y):
        if failing_now:
            raise error
        return soft(y)

    def check():
        if wrapped:
            assert_calls(wrapper, lambda x: layers(2, x, soft), x)
        else:
            assert_replays(cap, out, [x], lambda x: layers(2, x, soft))

    x, cap = rand(device=device), new_capture()
    wrapper = wrap(lambda x: layers(2, x, sometimes))
    if not wrapped:
        with cap:
            out = layers(2, x, sometimes)
    check()
    failing_now.append(True)
    with step(4), pytest.raises(Asked) as caught:
        wrapper(x) if wrapped else cap.replay()
    assert caught.value is error
    assert BreakableCUDAGraphCapture.current() is None
    failing_now.clear()
    check()
    if wrapped:
        assert_counters(wrapper, captures=1, replays=5, failures=1)


@pytest.mark.parametrize("breaks", [0, 1])
def test_host_read_in_the_body_is_refused(device, new_capture, breaks) -> None:
    cut, _ = counted(soft)
    x, cap = rand(device=device), new_capture()
    kind = CaptureError if device == "cpu" else RuntimeError
    assert_fails(cap, lambda: layers(breaks, x, cut).sum().item(), kind)
    assert_capture_works(new_capture, device)


def test_host_read_in_a_break_follows_the_data(device, new_capture) -> None:
    def by_value(y):
        return y * 2 if y.sum().item() > 16 else y - 1

    cut, calls = counted(by_value)
    x, cap = rand(device=device), new_capture()
    with cap:
        out = cut(x + 0.0) + 1
    assert_alternates(cap, 1)
    for shift in (0.0, 5.0, -5.0, 1.0):
        x.copy_(torch.rand_like(x) + shift)
        cap.replay()
        assert same(out, by_value(x) + 1)
    assert len(calls) == 5


class NoBegin:
    """A graph that cannot begin; it does the rest."""

    def __init__(self, graph):
        self._graph = graph

    def __getattr__(self, name):
        return getattr(self._graph, name)

    def begin(self, pool):
        raise RuntimeError("no capture")


@pytest.mark.parametrize("good", [0, 1, 2])
def test_stream_capture_that_cannot_begin(device, new_capture, pool, monkeypatch, good) -> None:
    cut, _ = counted(soft)
    x, cap, graphs = rand(device=device), new_capture(), []
    new_graph = pool.device.new_graph

    def sometimes():
        graphs.append(new_graph())
        return graphs[-1] if len(graphs) <= good else NoBegin(graphs[-1])

    with monkeypatch.context() as patched:
        patched.setattr(pool.device, "new_graph", sometimes)
        assert_fails(cap, lambda: layers(2, x, cut), RuntimeError, "no capture")
    assert len(graphs) > good
    assert_capture_works(new_capture, device)


# ---------------------------------------------------------------- other threads


@pytest.mark.parametrize("own", [True, False])
def test_break_in_another_thread(device, new_capture, own) -> None:
    """On memory of the capture it is an error; on other memory it runs plain."""
    cut, calls = counted(soft)
    x, other, cap = rand(device=device), rand(device=device), new_capture()
    outcome = []

    def body():
        y = x * 2
        outcome.append(in_thread(lambda: cut(y if own else other)))
        return (y if own else cut(y)) + 1

    if own:
        assert_fails(cap, body, CaptureError)
        assert isinstance(outcome[0][1], CaptureError)
        assert not calls
    else:
        with cap:
            out = body()
        result, error = outcome[0]
        assert error is None
        assert same(result, soft(other))
        assert_alternates(cap, 1)
        assert_replays(cap, out, [x], lambda x: soft(x * 2) + 1)
        assert len(calls) == 5
    assert_capture_works(new_capture, device)


def test_replay_in_another_thread(device, new_capture) -> None:
    cut, calls = counted(soft)
    x, cap = rand(device=device), new_capture()
    with cap:
        out = layers(2, x, cut)
    assert_alternates(cap, 2)
    for _ in range(3):
        x.uniform_()
        result, error = in_thread(lambda: (cap.replay(), out.clone())[1])
        assert error is None
        assert same(result, layers(2, x, soft))
    assert len(calls) == 8


# ---------------------------------------------------------------- debug


class Shelf:
    """Where a break leaves a tensor that it does not return."""

    kept = None


def hides(y):
    Shelf.kept = y.cos()


def hides_inside(y):
    Shelf.kept = {"deep": [y.cos()]}


@pytest.mark.parametrize(
    ("function", "take"),
    [(hides, lambda: Shelf.kept), (hides_inside, lambda: Shelf.kept["deep"][0])],
)
@pytest.mark.parametrize("debug", [True, False])
def test_debug_finds_a_tensor_that_was_not_returned(
    device, new_capture, function, take, debug
) -> None:
    """Without ``debug`` captured code reads what it held at the capture."""
    cut, _ = counted(function)
    x, cap, held = rand(device=device), new_capture(debug=debug), []

    def body():
        y = x * 2
        cut(y)
        held.append(take())  # a graph must not read freed memory
        assert (held[0] + y).shape == x.shape
        return y + 1

    if debug:
        assert_fails(cap, body, CaptureError, function.__name__)
    else:
        with cap:
            out = body()
        assert_alternates(cap, 1)
        assert_replays(cap, out, [x], lambda x: x * 2 + 1)
    assert_capture_works(new_capture, device, debug=debug)


@pytest.mark.parametrize("debug", [False, True])
def test_debug_passes_what_is_right(device, new_capture, debug) -> None:
    """In-place results, returned ones, parameters, and what only another break reads."""
    weight = rand(device=device)

    @eager_break_during_capture
    def writes(y, out):
        torch.mul(y, weight, out=out)

    @eager_break_during_capture
    def leaves(y):
        Shelf.kept = y.cos()
        return y.sin(), [y.exp()]

    @eager_break_during_capture
    def takes():
        return Shelf.kept * 2

    def model(x, weight):
        y = x * 2
        out = torch.empty_like(y)
        writes(y, out)
        first, (second,) = leaves(out + weight)
        return first - second + takes() * weight

    x, cap = rand(device=device), new_capture(debug=debug)
    with cap:
        out = model(x, weight)
    assert_alternates(cap, 3)

    def plain(x, weight):
        y = x * 2 * weight + weight
        return y.sin() - y.exp() + y.cos() * 2 * weight

    assert_replays(cap, out, [x, weight], plain)


# ---------------------------------------------------------------- memory


def chain_in_place(count, x, cut):
    """A chain in which each cut writes into memory that a graph made."""
    for k in range(count):
        y = x.sin() + k
        out = torch.empty_like(y)
        cut(y, out)
        x = out * 2 - x
    return x


def write_soft(y, out):
    out.copy_(soft(y))


@pytest.mark.parametrize(
    ("chain", "function"), [(layers, soft), (chain_in_place, write_soft)], ids=["fresh", "in place"]
)
def test_memory_does_not_grow_with_the_layers(chain, function) -> None:
    """What a break was given is free for later layers, as if there were no break."""
    x, reserved = torch.rand(16, 8), {}
    for count in (4, 24):
        pool = GraphPool(HostDevice())
        cut, calls = counted(function)
        cap = BreakableCUDAGraphCapture(pool, device="cpu")
        with cap:
            out = chain(count, x, cut)
        reserved[count] = pool.memory.reserved
        assert_alternates(cap, count)
        assert pool.memory.live <= 2 * out.nbytes
        assert_replays(cap, out, [x], lambda x, count=count: chain(count, x, function), times=4)
        assert len(calls) == count * 5
    assert 0 < reserved[24] == reserved[4] <= 8 * x.nbytes, reserved


def test_nothing_of_a_finished_capture_is_live(host_pool) -> None:
    """The graphs and the bound arguments do not keep the memory that they use."""
    x, target = torch.rand(4, 8), torch.zeros(4, 8)
    cut, _ = counted(soft)
    captures = []
    for count in (3, 2):
        cap = BreakableCUDAGraphCapture(host_pool, device="cpu")
        with cap:
            target.copy_(layers(count, x, cut))
        assert host_pool.memory.live == 0
        assert_alternates(cap, count)
        captures.append((cap, count))
    for cap, count in captures * 3:
        x.uniform_()
        churn("cpu")
        cap.replay()
        assert torch.equal(target, layers(count, x, soft))


@pytest.mark.parametrize(
    ("chain", "function", "bridges"), [(layers, soft, 3), (chain_in_place, write_soft, 0)]
)
def test_memory_of_bridges(device, new_capture, pool, chain, function, bridges) -> None:
    """Those of a chain use the same memory; what is written in place needs none."""
    cut, calls = counted(function)
    x, cap = rand(8, 8, device=device), new_capture()
    assert x.nbytes == 256
    with cap:
        out = chain(12, x, cut)
    assert_alternates(cap, 12)
    assert bool(bridges) <= pool.arena.nbytes <= bridges * 256
    plain = functools.partial(chain, 12, cut=function)
    assert_replays(cap, out, [x], plain, between=lambda: churn(device))
    assert len(calls) == 12 * 4


# ---------------------------------------------------------------- the wrapper: when it captures


def broken_model(cut):
    return lambda x: cut(x * 2) + cut(x.sin())


PLAIN_MODEL = broken_model(soft)


SOFT_ALWAYS = (SplittingOp("cgbreak::soft", support=AttentionCGSupport.ALWAYS),)
WRAPPED = {
    "decorated": (PLAIN_MODEL, (), PIECEWISE, ["soft", "soft"]),
    "decorated in FULL": (PLAIN_MODEL, (), FULL, []),
    "splitting op": (attended, ATTEND, PIECEWISE, ["cgtest::attend"]),
    "splitting op in FULL": (softened, SOFT_ALWAYS, FULL, []),
    "attention": (attention, (), PIECEWISE, ["scaled_dot_product"]),
    "attention in FULL": (attention, (), FULL, []),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_wrapper_of_both_modes_captures_and_replays(device, wrap, kind) -> None:
    plain, ops, mode, names = WRAPPED[kind]
    cut, calls = counted(soft)
    wrapper = wrap(broken_model(cut) if plain is PLAIN_MODEL else plain, splitting_ops=ops)
    x, y = rand(device=device), rand(6, 8, device=device)
    with torch.inference_mode():
        assert_calls(wrapper, plain, x, mode, times=5)
        assert_calls(wrapper, plain, y, mode, tokens=6)
        assert_calls(wrapper, plain, x, mode)
    entries = wrapper.concrete_cudagraph_entries
    assert set(entries) == {BatchDescriptor(4), BatchDescriptor(6)}
    for entry in entries.values():
        assert isinstance(entry.sequence, GraphSequence)
        assert_alternates(entry.sequence, len(names))
        for name, segment in zip(names, eager_segments(entry.sequence), strict=True):
            assert name in segment.name
    assert_counters(wrapper, captures=2, replays=9)
    if plain is PLAIN_MODEL:
        assert len(calls) == (2 * 11 if mode is PIECEWISE else 2 * 2)


def test_wrapper_keeps_both_modes_apart(device, wrap) -> None:
    cut, calls = counted(soft)
    wrapper, x = wrap(broken_model(cut)), rand(device=device)
    for mode, ran in ((FULL, 2), (PIECEWISE, 2 + 6), (FULL, 2 + 6), (PIECEWISE, 2 + 12)):
        assert_calls(wrapper, PLAIN_MODEL, x, mode)
        assert len(calls) == ran
    assert_counters(wrapper, captures=2, replays=10)


@pytest.mark.parametrize("mode", [NONE, CUDAGraphMode.FULL_AND_PIECEWISE, "FULL", 2, 0, "", False])
def test_wrapper_refuses_modes_without_graphs(mode) -> None:
    with pytest.raises(DispatchError, match=r"BreakableCUDAGraphWrapper\(runtime_mode="):
        BreakableCUDAGraphWrapper(soft, runtime_mode=mode)
    assert "PIECEWISE or FULL" in repr(BreakableCUDAGraphWrapper(soft, runtime_mode=None))


def test_wrapper_inside_of_a_capture_runs_plain(device, wrap, new_capture) -> None:
    cut, calls = counted(soft)
    wrapper, x, cap = wrap(broken_model(cut)), rand(device=device), new_capture()
    with step(4), cap:
        out = wrapper(x) + 1
    assert_counters(wrapper, plain={Reason.INSIDE_CAPTURE: 1})
    assert not wrapper.concrete_cudagraph_entries
    assert_alternates(cap, 2)
    assert_replays(cap, out, [x], lambda x: PLAIN_MODEL(x) + 1)
    assert len(calls) == 8


# ---------------------------------------------------------------- the wrapper: a capturing call


class Cached(nn.Module):
    """Counts its executions in graphs and in the break, and writes a cache."""

    def __init__(self, cut):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(16, 8))
        self.cut = cut

    def forward(self, x, slots):
        self.count += 1
        self.cache.index_copy_(0, slots, x)
        y = self.cut(self.cache, x)
        self.count += 1
        return y + self.cache.sum(0)


def read_cache(cache, x):
    cache.add_(1)
    return cache.sum(0) + x


def test_capturing_call_is_one_execution(device, wrap) -> None:
    cut, calls = counted(read_cache)
    module, plain = Cached(cut).to(device), Cached(read_cache).to(device)
    wrapper = wrap(module)
    x, slots = rand(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    for call in range(1, 6):
        x.uniform_()
        slots.copy_(torch.tensor([2 * call, 2 * call + 1]))
        with step(2):
            result = wrapper(x, slots)
        assert same(result, plain(x, slots))
        assert module.count.item() == plain.count.item() == 2 * call
        assert same(module.cache, plain.cache)
        assert len(calls) == call
    assert_counters(wrapper, captures=1, replays=4)


def test_break_of_a_capturing_call_sees_computed_data(device, wrap) -> None:
    seen = []

    def look(y):
        seen.append(y.clone())
        return y.cos()

    cut, _ = counted(look)
    wrapper, x = wrap(lambda x: cut(cut(x * 2) + 1)), rand(device=device)
    for _ in range(3):
        seen.clear()
        x.uniform_()
        with step(4):
            result = wrapper(x)
        assert same(seen, [x * 2, (x * 2).cos() + 1])
        assert same(result, ((x * 2).cos() + 1).cos())
    assert_counters(wrapper, captures=1, replays=2)


def test_break_that_fails_in_a_capturing_call_leaves_nothing(device, wrap) -> None:
    error, failing_now = Asked("on purpose"), [True]

    def sometimes(y):
        if failing_now and len(calls) % 2 == 0:
            raise error
        return soft(y)

    cut, calls = counted(sometimes)
    wrapper, x = wrap(broken_model(cut), name="block"), rand(device=device)
    for failures in (1, 2):
        with step(4), pytest.raises(Asked) as caught:
            wrapper(x)
        assert caught.value is error
        assert "block: in a breakable capture, after break 1 (" in error.__notes__[-1]
        assert len(calls) == 2 * failures
        assert not wrapper.concrete_cudagraph_entries
        assert BreakableCUDAGraphCapture.current() is None
    failing_now.clear()
    assert_calls(wrapper, PLAIN_MODEL, x)
    assert_counters(wrapper, captures=1, replays=2, failures=2)


# ---------------------------------------------------------------- the wrapper: operators


def test_splitting_ops_that_never_ran_are_an_error(device, wrap) -> None:
    wrapper, x = wrap(torch.sin, splitting_ops=SOFT, name="block"), rand(device=device)
    for _ in range(2):
        with step(4), pytest.raises(CaptureError, match="cgbreak::soft"):
            wrapper(x)
    assert not wrapper.concrete_cudagraph_entries
    assert_counters(wrapper, failures=2)
    assert_calls(wrapper, torch.sin, x, FULL)
    assert_counters(wrapper, failures=2, captures=1, replays=2)


@pytest.mark.parametrize(
    ("model", "splitting_ops"),
    [(softened, SOFT), (lambda x: torch.ops.cgbreak.outer(x), SOFT), (attended, ATTEND)],
    ids=["plain", "in impl", "in place"],
)
def test_op_that_must_not_be_captured_is_an_error_in_full(
    device, wrap, model, splitting_ops
) -> None:
    wrapper, x = wrap(model, splitting_ops=splitting_ops), rand(device=device)
    with step(4, FULL), pytest.raises(CaptureError, match=splitting_ops[0]):
        wrapper(x)
    assert not wrapper.concrete_cudagraph_entries
    assert_counters(wrapper, failures=1)
    assert_calls(wrapper, model, x)
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    assert_alternates(entry.sequence, 1)
    assert_counters(wrapper, failures=1, captures=1, replays=2)


def test_break_that_returns_nothing_and_later_something(device, wrap) -> None:
    returned: list[Any] = [None]

    @eager_break_during_capture
    def cut(x):
        x.add_(1)
        return returned[0]

    def model(x):
        y = x * 2
        cut(y)
        return y * 3

    wrapper, x = wrap(model), rand(device=device)
    assert_calls(wrapper, model, x)
    returned[0] = 5
    with step(4), pytest.raises(HostValueChangedError, match="is 5, was None when"):
        wrapper(x)


@pytest.mark.parametrize("direct", [True, False])
def test_what_an_op_runs_that_returns_nothing(device, wrap, direct) -> None:
    """Nothing is around it at a replay: neither the dispatcher nor a look at a result."""
    calls: list[int] = []

    def own(*args):
        calls.append(len(args))
        torch.ops.cgtest.attend(*args)
        return "ignored, as an op's would be"

    entry = SplittingOp(ATTEND[0], impl=own if direct else None)
    wrapper, x = wrap(attended, splitting_ops=(entry,)), rand(device=device)
    assert_calls(wrapper, attended, x)
    (recorded,) = wrapper.concrete_cudagraph_entries.values()
    bare = recorded.sequence.steps[1]
    assert bare.func is (own if direct else torch.ops.cgtest.attend.default)
    assert_counters(wrapper, captures=1, replays=2)
    assert calls == [4] * 3 * direct


@pytest.mark.parametrize("kind", ["op", "decorated"])
def test_break_sees_the_context_of_the_present_step(device, wrap, kind) -> None:
    cut, calls = counted(torch.ops.cgbreak.by_context)
    scale = torch.ops.cgbreak.by_context if kind == "op" else cut
    wrapper = wrap(lambda x: scale(x + 1) - x, splitting_ops=("cgbreak::by_context",))
    x = rand(device=device)
    for metadata in (2.0, -1.0, 0.25, 7.0):
        x.uniform_()
        with step(4, metadata=metadata) as context:
            result = wrapper(x)
        assert same(result, (x + 1) * metadata - x)
        assert kind == "op" or calls[-1] is context
    assert_counters(wrapper, captures=1, replays=3)


# ---------------------------------------------------------------- the wrapper: guards, the rest


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_serve_the_modes_of_the_original(device, wrap, copied) -> None:
    model = Stack(1, 8).eval().to(device)
    ops = (SplittingOp("cgtest::attend", support=AttentionCGSupport.ALWAYS),)
    other, x = copied(wrap(model, splitting_ops=ops)), rand(device=device)
    y = rand(6, 8, device=device)
    assert_calls(other, model, x, FULL)
    assert_calls(other, model, y, PIECEWISE, tokens=6)
    entries = other.concrete_cudagraph_entries
    assert_alternates(entries[BatchDescriptor(4)].sequence, 0)
    assert_alternates(entries[BatchDescriptor(6)].sequence, 1)
    assert_counters(other, captures=2, replays=4)


def test_full_wrapper_outside_of_a_breakable_one(device, wrap) -> None:
    """The same step in both modes: one graph of all, or the pieces between breaks."""
    cut, calls = counted(soft)
    inner = wrap(lambda x: broken_model(cut)(x), PIECEWISE)
    config = CompilationConfig(capture_device="host")
    outer, x = CUDAGraphWrapper(lambda x: inner(x) + 1, config, FULL), rand(device=device)
    for _ in range(2):
        assert_calls(outer, lambda x: PLAIN_MODEL(x) + 1, x, PIECEWISE)
        assert_calls(outer, lambda x: PLAIN_MODEL(x) + 1, x, FULL)
    assert_counters(outer, captures=1, replays=5, plain={Reason.OTHER_MODE: 6})
    assert_counters(inner, captures=1, replays=5, plain={Reason.OTHER_MODE: 1})
    assert len(calls) == 2 * 6 + 2


def test_a_break_breaks_while_another_thread_compiles(device, wrap) -> None:
    scale = eager_break_during_capture(lambda x: x * get_forward_context().attn_metadata)
    wrapper = wrap(lambda x: scale(x + 1) + 1)
    x = rand(device=device)
    with compiling_elsewhere():
        for metadata in (2.0, 3.0, -4.0):
            x.uniform_()
            with step(4, metadata=metadata):
                assert same(wrapper(x), (x + 1) * metadata + 1)
    assert_counters(wrapper, captures=1, replays=2)


def test_threads_take_turns_with_one_wrapper(device, wrap) -> None:
    """Each replays another size, under a forward context of its own, which breaks read."""

    def scaled(x):
        time.sleep(0.001)  # other threads may run in the middle of a replay
        return x * get_forward_context().attn_metadata

    scale, calls = counted(scaled)
    options = CUDAGraphOptions(weak_ref_output=False)  # results outlive replays of other sizes
    wrapper = wrap(lambda x: scale(x + 1).sin(), options=options)
    wrapper.allow_threads()  # each thread reads results of its own size, which no other replays
    checked = []

    def replay(x, times=20):
        for k in range(times):
            with step(len(x), metadata=k + len(x)):
                assert same(wrapper(x.uniform_()), ((x + 1) * (k + len(x))).sin())
                checked.append(len(x))

    buffers = [rand(tokens, 8, device=device) for tokens in (2, 3, 4)]
    for x in buffers:
        replay(x, times=1)
    threads = [threading.Thread(target=replay, args=(x,)) for x in buffers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(checked) == sorted([2, 3, 4] * 21)
    assert_counters(wrapper, captures=3, replays=60)
    assert len(calls) == 63


def test_a_result_that_requires_grad_is_an_error(device, wrap) -> None:
    """Ops of the capture skip autograd, and a part of the step has run: it cannot run plain."""
    cut, calls = counted(soft)
    wrapper, x = wrap(lambda x: cut(x + 1).requires_grad_(), name="block"), rand(device=device)
    with step(4), pytest.raises(GradientError, match="block"):
        wrapper(x)
    assert not wrapper.entries
    assert_counters(wrapper, failures=1)
    assert len(calls) == 1


def test_plain_module_of_eight_layers(device, wrap) -> None:
    """Two sizes interleaved, the largest captured first, random numbers at each of 20 replays."""
    torch.manual_seed(0)
    model = Stack(8, 16).eval().to(device)
    wrapper = wrap(model, splitting_ops=ATTEND, on_fallback="raise")
    buffers = {tokens: rand(tokens, 16, device=device) for tokens in (12, 5)}
    previous = {}
    for round_ in range(21):
        for tokens in (12, 5) if round_ % 3 else (5, 12) if round_ else (12, 5):
            buffer = buffers[tokens]
            buffer.copy_(torch.randn_like(buffer))
            expected = model(buffer.clone())
            churn(device)
            with step(tokens):
                result = wrapper(buffer)
            assert same(result, expected)
            assert tokens not in previous or not same(result, previous[tokens])
            previous[tokens] = result.clone()
    assert_counters(wrapper, captures=2, replays=40)
    for tokens in buffers:
        entry = wrapper.concrete_cudagraph_entries[BatchDescriptor(tokens)]
        assert_alternates(entry.sequence, 8)


# ---------------------------------------------------------------- streams


@pytest.mark.gpu
def test_capture_without_a_pool() -> None:
    cut, calls = counted(soft)
    x, cap = rand(device="cuda"), BreakableCUDAGraphCapture()
    with cap:
        out = layers(2, x, cut)
    assert_alternates(cap, 2)
    assert_replays(cap, out, [x], lambda x: layers(2, x, soft))
    assert len(calls) == 8


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_breaks_run_on_the_stream_of_capture_then_of_the_caller(new_capture, pool) -> None:
    seen = []

    @eager_break_during_capture
    def look(y):
        seen.append(torch.cuda.current_stream())
        return y.sin()

    x, cap, stream = rand(device="cuda"), new_capture(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with cap:
        out = look(x * 2) + 1
    assert seen == [pool.stream]
    with torch.cuda.stream(stream):
        assert_replays(cap, out, [x], lambda x: (x * 2).sin() + 1)
    assert seen[1:] == [stream] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
def test_wrapper_breaks_run_on_the_stream_of_the_caller(wrap, device) -> None:
    seen = []

    @eager_break_during_capture
    def look(y):
        seen.append(torch.cuda.current_stream())
        return y.sin()

    stream = torch.cuda.Stream()
    wrapper = wrap(lambda x: look(x * 2) + 1)
    with torch.cuda.stream(stream):
        x = rand(device=device)
        assert_calls(wrapper, lambda x: (x * 2).sin() + 1, x)
    assert seen == [stream] * 3
    assert_counters(wrapper, captures=1, replays=2)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("joined", [False, True])
def test_side_stream_must_be_joined_at_a_break(new_capture, device, joined) -> None:
    x, side, cap = rand(device=device), torch.cuda.Stream(), new_capture()
    cut, _ = counted(soft)

    def body():
        y = x + 1
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = y * 2
        if joined:
            main.wait_stream(side)
        return cut(y) + (z if joined else y)

    if not joined:
        assert_fails(cap, body, RuntimeError)
    else:
        with cap:
            out = body()
        assert_alternates(cap, 1)
        assert_replays(cap, out, [x], lambda x: soft(x + 1) + (x + 1) * 2)
    torch.cuda.synchronize()
    assert_capture_works(new_capture, device)


# Which device


def test_the_environment_chooses_the_host_where_there_is_no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for front in (BreakableCUDAGraphCapture, GraphPool):
        with pytest.raises(CaptureError, match="device 'cuda' has no graphs here"):
            front()
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    x = rand(4, 4, device="cpu")
    shared = GraphPool()
    assert shared.where == torch.device("cpu")
    for capture in (BreakableCUDAGraphCapture(), BreakableCUDAGraphCapture(shared)):
        with torch.no_grad(), capture:
            out = capture.add_eager(lambda: x * 2) + 1
        for _ in range(2):
            x.normal_()
            capture.replay()
            torch.testing.assert_close(out, x * 2 + 1)


def test_a_pool_is_made_of_the_name_of_a_device(device: str) -> None:
    pool = GraphPool(device)
    first, second = (CUDAGraphWrapper(op, pool=pool) for op in (torch.sin, torch.cos))
    x = rand(8, device=device)
    outer = BatchDescriptor(8)
    for _ in range(3):
        x.normal_()
        with set_forward_context(cudagraph_runtime_mode=FULL, batch_descriptor=outer):
            torch.testing.assert_close(first(x).clone(), x.sin())
            torch.testing.assert_close(second(x).clone(), x.cos())
    assert (first.counters.captures, second.counters.replays) == (1, 2)
    for bad in ("meta", 3.5):
        with pytest.raises(CGCompileError, match=r"device"):
            GraphPool(bad)


def test_results_that_a_break_keeps_outlive_their_bridges(device) -> None:
    """A bridge that the program dropped serves a later break: no write to the earlier result."""
    kept = []

    def keeping(y):
        kept.append(soft(y))
        return kept[-1]

    def model(x):
        for _ in range(4):
            x = cut(x + 1) * 3
        return x

    cut, _ = counted(keeping)
    wrapper = BreakableCUDAGraphWrapper(model, CompilationConfig(capture_device="host"))
    x = rand(device=device)
    with step(4):
        for _ in range(4):
            x.uniform_()
            assert same(wrapper(x), model(x))
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 3)
