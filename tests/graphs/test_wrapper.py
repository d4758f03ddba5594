"""Both wrappers: when they run, capture and replay, what they refuse, and what they pass on."""

import copy
import pickle
import sys
import threading

import pytest
import torch
from lib.breakable import FULL, NONE, PIECEWISE, assert_calls, assert_counters, in_thread, same
from lib.breakable import step as step_in_mode
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    set_forward_context,
)
from cgcompile.errors import AddressChangedError, DispatchError, HostValueChangedError
from cgcompile.graphs.steps import allow_capture
from cgcompile.graphs.timeline import Timeline
from cgcompile.reasons import Counters, Fallback, Reason


@pytest.fixture
def wrap(wrap_either):
    return wrap_either


def step(tokens, mode=FULL):
    return step_in_mode(tokens, mode)


def check(wrapper, plain, buffer, tokens=4, mode=FULL, calls=3):
    assert_calls(wrapper, plain, buffer, mode, tokens, calls)


def wave(x):
    return (x.sin() + x * 2).relu()


# ---------------------------------------------------------------- when nothing is captured


def test_without_context_runs_plain(device, wrap) -> None:
    wrapper = wrap(wave)
    for _ in range(2):
        x = torch.rand(4, 8, device=device)
        assert torch.equal(wrapper(x), wave(x))
    assert_counters(wrapper, plain={Reason.NO_CONTEXT: 2})
    assert not wrapper.concrete_cudagraph_entries


@pytest.mark.parametrize(
    ("own", "asked", "reason"),
    [
        (FULL, NONE, Reason.MODE_NONE),
        (PIECEWISE, NONE, Reason.MODE_NONE),
        (FULL, PIECEWISE, Reason.OTHER_MODE),
        (PIECEWISE, FULL, Reason.OTHER_MODE),
    ],
)
def test_another_mode_runs_plain(device, wrap, own, asked, reason) -> None:
    wrapper, x = wrap(wave, own), torch.rand(4, 8, device=device)
    check(wrapper, wave, x, mode=asked)
    assert_counters(wrapper, plain={reason: 3})
    check(wrapper, wave, x, mode=own)
    assert_counters(wrapper, captures=1, replays=2, plain={reason: 3})


def test_another_mode_is_no_error_when_strict(device, wrap) -> None:
    wrapper, x = wrap(wave, on_fallback="raise"), torch.rand(4, 8, device=device)
    check(wrapper, wave, x, mode=PIECEWISE)
    assert_counters(wrapper, plain={Reason.OTHER_MODE: 3})


def test_mode_without_descriptor_is_an_error(device, wrap) -> None:
    wrapper, x = wrap(wave, name="block"), torch.rand(4, 8, device=device)
    with (
        set_forward_context(cudagraph_runtime_mode=FULL),
        pytest.raises(DispatchError, match=r"block: .* mode FULL and no batch descriptor"),
    ):
        wrapper(x)
    assert_counters(wrapper, failures=1)
    with set_forward_context(cudagraph_runtime_mode=PIECEWISE):
        assert torch.equal(wrapper(x), wave(x))
    assert_counters(wrapper, failures=1, plain={Reason.OTHER_MODE: 1})


@pytest.mark.parametrize("mode", [NONE, CUDAGraphMode.FULL_AND_PIECEWISE, None, "FULL", 2])
def test_wrapper_serves_one_mode_with_graphs(mode) -> None:
    with pytest.raises(DispatchError, match=r"PIECEWISE or CUDAGraphMode.FULL"):
        CUDAGraphWrapper(wave, runtime_mode=mode)
    assert CUDAGraphWrapper(wave).runtime_mode is FULL


def test_cpu_has_no_graphs_unless_asked_for() -> None:
    x = torch.rand(4, 8)
    wrapper = CUDAGraphWrapper(wave, CompilationConfig())
    check(wrapper, wave, x)
    assert_counters(wrapper, plain={Reason.NO_DEVICE: 3})
    strict = CUDAGraphWrapper(wave, CompilationConfig(on_fallback="raise"), name="block")
    with step(4), pytest.raises(DispatchError, match=r"block .* no_capture_device"):
        strict(x)


def test_other_thread_has_no_context(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    check(wrapper, wave, x)
    with step(4):
        result, error = in_thread(lambda: wrapper(x + 1))
    assert error is None
    assert torch.equal(result, wave(x + 1))
    assert_counters(wrapper, captures=1, replays=2, plain={Reason.NO_CONTEXT: 1})


def test_other_thread_replays_in_its_own_context(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    wrapper.allow_threads()
    check(wrapper, wave, x)
    x.uniform_()

    def replay():
        with step(4):
            return wrapper(x).clone()

    result, error = in_thread(replay)
    assert error is None
    assert torch.equal(result, wave(x))
    assert_counters(wrapper, captures=1, replays=3)


# ---------------------------------------------------------------- capture and replay


@pytest.mark.parametrize("mode", [PIECEWISE, FULL])
def test_capture_and_replay_equal_eager(device, wrap, mode) -> None:
    wrapper = wrap(wave, mode)
    check(wrapper, wave, torch.rand(4, 8, device=device), mode=mode, calls=5)
    assert_counters(wrapper, captures=1, replays=4)
    assert set(wrapper.concrete_cudagraph_entries) == {BatchDescriptor(4)}


def test_replays_return_the_same_memory(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    with step(4):
        addresses = {wrapper(x).data_ptr() for _ in range(4)}
    assert len(addresses) == 1
    assert_counters(wrapper, captures=1, replays=3)


class Cached(nn.Module):
    """Counts its executions and writes a cache in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(16, 8))

    def forward(self, x, slots):
        self.count += 1
        self.cache.index_copy_(0, slots, x)
        return self.cache.sum(0) + x


def test_each_call_is_one_execution(device, wrap) -> None:
    module, plain = Cached().to(device), Cached().to(device)
    wrapper = wrap(module)
    x, slots = torch.rand(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    caches = []
    for call in range(1, 6):
        x.uniform_()
        slots.copy_(torch.tensor([2 * call, 2 * call + 1]))
        with step(2):
            result = wrapper(x, slots)
        assert torch.equal(result, plain(x, slots))
        assert module.count.item() == plain.count.item() == call
        assert torch.equal(module.cache, plain.cache)
        assert (module.cache != 0).any(1).sum().item() == 2 * call
        caches.append(module.cache.clone())
    assert not torch.equal(caches[-1], caches[-2])
    assert_counters(wrapper, captures=1, replays=4)


def test_sizes_are_captured_one_by_one(device, wrap) -> None:
    wrapper = wrap(wave)
    small, large = torch.rand(2, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, wave, small, tokens=2)
    check(wrapper, wave, large, tokens=6)
    assert_counters(wrapper, captures=2, replays=4)
    for _ in range(2):
        check(wrapper, wave, small, tokens=2)
        check(wrapper, wave, large, tokens=6)
    assert_counters(wrapper, captures=2, replays=16)
    assert set(wrapper.concrete_cudagraph_entries) == {BatchDescriptor(2), BatchDescriptor(6)}


def test_descriptors_of_one_size_are_different_keys(device, wrap) -> None:
    wrapper, x = wrap(lambda x, k: x * k), torch.rand(4, 8, device=device)
    for _ in range(3):
        for k in (2, 3):
            x.uniform_()
            descriptor = BatchDescriptor(4, extra=(k,))
            with set_forward_context(cudagraph_runtime_mode=FULL, batch_descriptor=descriptor):
                assert torch.equal(wrapper(x, k), x * k)
    assert_counters(wrapper, captures=2, replays=4)


def test_capture_forbidden(device, wrap) -> None:
    wrapper = wrap(wave)
    x, other = torch.rand(4, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, wave, x)
    with allow_capture(False):
        check(wrapper, wave, other, tokens=6)
        check(wrapper, wave, x)
    assert_counters(wrapper, captures=1, replays=5, plain={Reason.CAPTURE_FORBIDDEN: 3})
    assert "num_tokens=6" in wrapper.counters.details[Reason.CAPTURE_FORBIDDEN]
    check(wrapper, wave, other, tokens=6)
    assert_counters(wrapper, captures=2, replays=7, plain={Reason.CAPTURE_FORBIDDEN: 3})


def test_capture_forbidden_and_strict(device, wrap) -> None:
    wrapper = wrap(wave, on_fallback="raise", name="block")
    x, other = torch.rand(4, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, wave, x)
    with allow_capture(False):
        with step(6), pytest.raises(DispatchError, match=r"block .*capture_forbidden.*tokens=6"):
            wrapper(other)
        check(wrapper, wave, x)
    assert_counters(wrapper, captures=1, replays=5, failures=1)


@pytest.mark.parametrize("mode", [FULL, PIECEWISE, NONE])
def test_full_outside_piecewise_inside(device, wrap, mode) -> None:
    inner = wrap(wave, PIECEWISE)
    outer = wrap(lambda x: inner(x) + 1, FULL)
    check(outer, lambda x: wave(x) + 1, torch.rand(4, 8, device=device), mode=mode)
    if mode is FULL:
        assert_counters(outer, captures=1, replays=2)
        assert_counters(inner, plain={Reason.OTHER_MODE: 1})
    elif mode is PIECEWISE:
        assert_counters(outer, plain={Reason.OTHER_MODE: 3})
    else:
        assert_counters(outer, plain={Reason.MODE_NONE: 3})
        assert_counters(inner, plain={Reason.MODE_NONE: 3})


def test_nested_wrappers_keep_both_kinds_of_graphs(device, wrap) -> None:
    inner = wrap(lambda x, out: torch.mul(x, 2, out=out), PIECEWISE)
    x, out = torch.rand(4, 8, device=device), torch.empty(4, 8, device=device)
    outer = wrap(lambda x: inner(x, out) + 1, FULL)
    for _ in range(2):
        for mode in (PIECEWISE, FULL):
            check(outer, lambda x: x * 2 + 1, x, mode=mode)
    assert_counters(outer, captures=1, replays=5, plain={Reason.OTHER_MODE: 6})
    assert_counters(inner, captures=1, replays=5, plain={Reason.OTHER_MODE: 1})


# ---------------------------------------------------------------- what must not change


def optional(x, y, z):
    summed = x * 2
    if y is not None:
        summed = summed + y
    return summed if z is None else summed - z


def test_which_argument_is_none(device, wrap) -> None:
    wrapper = wrap(optional)
    x, y = torch.rand(4, 8, device=device), torch.rand(4, 8, device=device)
    for _ in range(3):
        x.uniform_()
        with step(4):
            assert torch.equal(wrapper(x, None, y), x * 2 - y)
        with step(5):
            assert torch.equal(wrapper(x, y, None), x * 2 + y)
    assert_counters(wrapper, captures=2, replays=4)
    with step(4), pytest.raises(HostValueChangedError, match=r"input 1 is a tensor.* was None"):
        wrapper(x, y, None)
    with step(5), pytest.raises(HostValueChangedError, match=r"input 1 is None.* was a tensor"):
        wrapper(x, None, y)
    with step(4):
        assert torch.equal(wrapper(x, None, y), x * 2 - y)
    assert_counters(wrapper, captures=2, replays=5, failures=2)


def total(value):
    """Adds all tensors of a value, however nested."""
    return sum(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def model(first, more=None, **named):
    return total(first) * 2 + total((more, named))


def call(*args, **kwargs):
    return args, kwargs


VALUES = [
    (2, 3),
    (2, 2.0),
    (1, True),
    (0.5, 0.25),
    (0.0, -0.0),
    (complex(1, 0.0), complex(1, -0.0)),
    ("a", "b"),
    (None, 0),
    (torch.float32, torch.float64),
    (torch.Size([1]), torch.Size([2])),
]
PLACES = {
    "input 0 is": lambda x, y: call(y),
    "input 'more' is": lambda x, y: call(x, more=y),
    r"input 0\[1\] is": lambda x, y: call((x, y)),
    r"input 0\[1\]\[1\] is": lambda x, y: call([x, (x, y)]),
    r"input 0\['b'\] is": lambda x, y: call({"a": x, "b": y}),
    r"input 'more'\['a'\]\[1\] is": lambda x, y: call(x, more={"a": (x, y)}),
}
LAYOUTS = [
    lambda x: x[:2],
    lambda x: x.t(),
    lambda x: x.view(1, 64),
    lambda x: x.view(torch.int32),
    lambda x: x.as_strided((8, 8), (0, 1)),
    lambda x: 1,
    lambda x: None,
    lambda x: [x],
]
ARGUMENTS = [
    lambda x: call(x, x),
    lambda x: call(x, more=x),
    lambda x: call((x,)),
]
# A call that is captured, one that is refused, the error and a part of its text.
REFUSED = [
    *[
        (lambda x, y, v=v: call(x, v), lambda x, y, w=w: call(x, w), "input 1.* is .*, was")
        for v, w in VALUES
    ],
    (
        lambda x, y: call(x, sizes={"k": (2, 0)}),
        lambda x, y: call(x, sizes={"k": (3, 0)}),
        r"input 'sizes'\['k'\]\[0\] is 3, was 2",
    ),
    *[
        (lambda x, y, p=nest: p(x, y), lambda x, y, p=nest: p(x, y.clone()), f"{path} at 0x")
        for path, nest in PLACES.items()
    ],
    *[
        (lambda x, y: call(x), lambda x, y, c=change: call(c(x)), "input 0 is .*, was a tensor")
        for change in LAYOUTS
    ],
    *[(lambda x, y: call(x), lambda x, y, o=other: o(x), "when captured") for other in ARGUMENTS],
    # address, shape, strides and dtype are equal; what the kernels read is not
    *[
        (lambda x, y, v=v: call(v(complex_of(x))), lambda x, y, o=o: call(o(complex_of(x))), "0")
        for v, o in ((lambda z: z, torch.conj), (lambda z: z.imag, lambda z: z.conj().imag))
    ],
]


def complex_of(x):
    return x.view(torch.complex64)


@pytest.mark.parametrize(("captured", "refused", "text"), REFUSED)
def test_another_input_is_an_error_that_names_it(device, wrap, captured, refused, text) -> None:
    wrapper = wrap(model, name="block")
    x, y = (torch.rand(8, 8, device=device) for _ in range(2))
    moved = "at 0x" in text
    previous = None
    with step(4):
        for _ in range(3):
            x.uniform_(), y.uniform_()
            args, kwargs = captured(x, y)
            result = wrapper(*args, **kwargs)
            assert torch.equal(result, model(*args, **kwargs))
            assert previous is None or not torch.equal(result, previous)
            previous = result.clone()
            args, kwargs = refused(x, y)
            kind = AddressChangedError if moved else HostValueChangedError
            with pytest.raises(kind, match=f"block, num_tokens=4: .*{text}"):
                wrapper(*args, **kwargs)
    assert_counters(wrapper, captures=1, replays=2, failures=3)


def test_memory_that_a_caller_let_grow_is_not_written(wrap) -> None:
    total = torch.zeros(4)
    wrapper, x = wrap(total.copy_), torch.rand(4)
    with torch.no_grad(), step(4):
        for _ in range(3):
            result = wrapper(x)
        result.resize_(4000)
        with pytest.raises(AddressChangedError, match="resized"):
            wrapper(x)
    (entry,) = wrapper.entries
    assert entry.sequence.replays == 2
    assert_counters(wrapper, captures=1, replays=2, failures=1)


@pytest.mark.slow
def test_counters_are_summed_while_another_thread_counts() -> None:
    timelines, sums = [Timeline(warns=False)], 0

    def count() -> None:
        for _ in range(2000):
            timelines.append(Timeline(warns=False))
            for reason in Reason:
                timelines[-1].plain(Fallback(reason, "why"))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    try:
        thread.start()
        while thread.is_alive():
            counters = timelines[-1].counters
            counters.why_plain(Counters())
            sums += 1
    finally:
        thread.join()
        sys.setswitchinterval(interval)
    assert sums > 100
    assert timelines[-1].counters.plain == dict.fromkeys(Reason, 1)
    assert timelines[-1].counters.calls == len(Reason)


def test_keywords_in_another_order_are_the_same_call(device, wrap) -> None:
    wrapper = wrap(lambda *, a, b: a - b)
    a, b = torch.rand(4, device=device), torch.rand(4, device=device)
    with step(4):
        wrapper(a=a, b=b)
        a.uniform_()
        assert torch.equal(wrapper(b=b, a=a), a - b)
    assert_counters(wrapper, captures=1, replays=1)


# ---------------------------------------------------------------- gradients


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.slow
@pytest.mark.parametrize("weak", [True, False])
@pytest.mark.parametrize("calling", MODES)
@pytest.mark.parametrize("capturing", MODES)
def test_grad_modes_of_capture_and_call(device, wrap, capturing, calling, weak) -> None:
    module = nn.Linear(8, 8, device=device).requires_grad_(False)
    wrapper = wrap(module, options=CUDAGraphOptions(weak_ref_output=weak))
    x = torch.rand(4, 8, device=device)
    module(x)
    with capturing():
        check(wrapper, module, x, calls=1)
    with calling():
        check(wrapper, module, x)
        x.uniform_()
        with step(4):
            result = wrapper(x)
        expected = module(x)
        assert result.requires_grad is expected.requires_grad is False
        result += 1  # eager's result may be written in this mode too
        assert same(result, expected + 1)
    assert_counters(wrapper, captures=1, replays=4)


def test_parameter_that_requires_grad_runs_plain(device, wrap) -> None:
    module = nn.Linear(8, 8, device=device)
    wrapper, x = wrap(module), torch.rand(4, 8, device=device)
    module(x)
    for _ in range(2):
        x.uniform_()
        with step(4):
            result = wrapper(x)
        assert result.requires_grad
        assert same(result, module(x))
    (gradient,) = torch.autograd.grad(result.sum(), [module.bias])
    assert torch.equal(gradient, torch.full_like(gradient, 4))
    assert_counters(wrapper, plain={Reason.GRADIENTS: 2})
    with torch.no_grad():
        check(wrapper, module, x)
    assert_counters(wrapper, captures=1, replays=2, plain={Reason.GRADIENTS: 2})
    with step(4):
        assert wrapper(x).requires_grad
    assert_counters(wrapper, captures=1, replays=2, plain={Reason.GRADIENTS: 3})


def test_call_with_gradients_executes_once(device, wrap) -> None:
    weight = torch.rand(8, device=device, requires_grad=True)
    count = torch.zeros((), device=device)

    def function(x):
        count.add_(1)
        return x * weight

    wrapper, x = wrap(function), torch.rand(4, 8, device=device)
    with step(4):
        assert wrapper(x).requires_grad
    assert count.item() == 1
    assert_counters(wrapper, plain={Reason.GRADIENTS: 1})
    (refused,) = wrapper.timeline.records
    assert refused.why == f"gradients: a result of {wrapper.name} requires grad"


@pytest.mark.parametrize("kind", ["method", "wrapper"])
def test_module_behind_another_callable_gives_gradients(device, wrap, kind) -> None:
    """Captured without grad mode; a later call with it must not return detached results."""
    module = nn.Linear(8, 8, device=device)
    inner = module.forward if kind == "method" else wrap(module, PIECEWISE)
    wrapper, x = wrap(inner), torch.rand(4, 8, device=device)
    module(x)
    with torch.no_grad():
        check(wrapper, module, x)
    assert_counters(wrapper, captures=1, replays=2)
    with step(4):
        assert wrapper(x).requires_grad
    assert_counters(wrapper, captures=1, replays=2, plain={Reason.GRADIENTS: 1})


# ---------------------------------------------------------------- outputs


def add_one(x):
    y = x + 1
    return y, y[1:], y.t()


OUTPUTS = {
    "nested": lambda x: (x * 2, {"sum": x.sum(0), "more": [x + 1, None, 7, "text"]}),
    "view of an input": lambda x: x.mul_(2)[1:, ::2],
    "the input": lambda x: (x, x.add_(1)),
    "shared memory": add_one,
    "empty": lambda x: (x[:0] * 2, x + 1),
}


def offsets(value, x):
    """Where the tensors of a result begin: in bytes after that of an input, or of the first."""
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    starts = [leaf.data_ptr() for leaf in leaves if leaf.numel()]
    first = x.data_ptr() if x.data_ptr() <= starts[0] < x.data_ptr() + x.nbytes else starts[0]
    return [start - first for start in starts]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_equal_eager_in_structure_and_aliasing(device, wrap, kind) -> None:
    wrapper, x = wrap(OUTPUTS[kind]), torch.rand(4, 8, device=device)
    check(wrapper, OUTPUTS[kind], x)
    with step(4):
        result = wrapper(x)
    other = x.clone()
    expected = OUTPUTS[kind](other)
    assert tree_structure(result) == tree_structure(expected)
    if kind != "nested":
        assert offsets(result, x) == offsets(expected, other)
    assert_counters(wrapper, captures=1, replays=3)


class Shows(nn.Module):
    """Returns its own parameter beside a result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8), requires_grad=False)

    def forward(self, x):
        return self.weight, x * self.weight


def test_output_is_a_parameter(device, wrap) -> None:
    module = Shows().to(device)
    wrapper, x = wrap(module), torch.rand(4, 8, device=device)
    for _ in range(3):
        module.weight.uniform_()
        with step(4):
            weight, result = wrapper(x)
        assert weight.data_ptr() == module.weight.data_ptr()
        assert torch.equal(weight, module.weight)
        assert torch.equal(result, x * module.weight)
    assert_counters(wrapper, captures=1, replays=2)


def test_outputs_with_memory_of_their_own_outlive_other_descriptors(device, wrap) -> None:
    options = CUDAGraphOptions(weak_ref_output=False)
    wrapper = wrap(wave, options=options)
    small, large = torch.rand(4, 64, device=device), torch.rand(5, 64, device=device)
    with step(4):
        wrapper(small)
        first = wrapper(small)
    expected = wave(small)
    for _ in range(2):
        large.uniform_()
        with step(5):
            second = wrapper(large)
        assert torch.equal(second, wave(large))
        assert torch.equal(first, expected)
    assert_counters(wrapper, captures=2, replays=2)


def test_weak_outputs_leave_their_memory_to_later_captures(wrap) -> None:
    reserved = {}
    for weak in (True, False):
        wrapper = wrap(wave, options=CUDAGraphOptions(weak_ref_output=weak))
        for tokens in (7, 6, 5):
            check(wrapper, wave, torch.rand(tokens, 256), tokens)
            reserved.setdefault(weak, []).append(wrapper.pool.memory.reserved)
        assert_counters(wrapper, captures=3, replays=6)
    assert len(set(reserved[True])) == 1, reserved
    assert sorted(set(reserved[False])) == reserved[False], reserved
    assert reserved[True][-1] < reserved[False][-1]


def test_result_that_is_held_keeps_its_memory(device, wrap, monkeypatch) -> None:
    """The result of a capturing call is not in the memory of later captures while it lives."""
    monkeypatch.setenv("CGCOMPILE_DEBUG", "0")  # which lets each result expire with the next step
    wrapper = wrap(wave)
    small, large = torch.rand(4, 64, device=device), torch.rand(5, 64, device=device)
    with step(4):
        held = wrapper(small)
    check(wrapper, wave, large, tokens=5)
    assert torch.equal(held, wave(small))
    assert_counters(wrapper, captures=2, replays=2)


# ---------------------------------------------------------------- what it passes on


def test_attributes_are_those_of_the_module(wrap) -> None:
    module = nn.Linear(8, 4)
    wrapper = wrap(wrap(module, PIECEWISE))
    assert wrapper.in_features == 8
    assert wrapper.weight is module.weight
    assert list(wrapper.state_dict()) == ["weight", "bias"]
    assert not hasattr(wrapper, "missing")


def test_missing_attribute_names_both_types(wrap) -> None:
    with pytest.raises(AttributeError, match=r"CUDAGraphWrapper nor the Linear .* 'missing'"):
        _ = wrap(nn.Linear(8, 4)).missing


def test_unwrap_through_wrappers(wrap) -> None:
    module = nn.Linear(8, 4)
    inner = wrap(module, PIECEWISE)
    assert inner.unwrap() is module
    assert wrap(inner).unwrap() is module
    config = CompilationConfig(capture_device="host")
    for kind in (CUDAGraphWrapper, BreakableCUDAGraphWrapper):
        assert kind(inner, config, FULL).unwrap() is module
    assert wrap(wave).unwrap() is wave


def _pickled(wrapper):
    return pickle.loads(pickle.dumps(wrapper))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
def test_copies_have_no_graphs_and_work(device, wrap, copied) -> None:
    module = nn.Linear(8, 8, device=device).requires_grad_(False)
    options = CUDAGraphOptions(weak_ref_output=False)
    wrapper = wrap(module, PIECEWISE, options, on_fallback="raise", name="block")
    x = torch.rand(4, 8, device=device)
    check(wrapper, module, x, mode=PIECEWISE)
    other = copied(wrapper)
    assert type(other) is type(wrapper)
    assert (other.runtime_mode, other.options, other.name) == (PIECEWISE, options, "block")
    assert other.config.strict
    assert other.out_features == 8
    assert not other.concrete_cudagraph_entries
    assert_counters(other)
    assert (other.runnable is module) is (copied is copy.copy)
    check(other, module, x, mode=PIECEWISE)
    assert_counters(other, captures=1, replays=2)
    check(wrapper, module, x, mode=PIECEWISE)
    assert_counters(wrapper, captures=1, replays=5)


def test_entries_are_read_only(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    check(wrapper, wave, x)
    entries = wrapper.concrete_cudagraph_entries
    with pytest.raises(TypeError, match="does not support item assignment"):
        entries[BatchDescriptor(5)] = entries[BatchDescriptor(4)]
    entry = entries[BatchDescriptor(4)]
    with pytest.raises(AttributeError, match="cannot assign"):
        entry.output = None
    assert entry.batch_descriptor == BatchDescriptor(4)
    x.uniform_()
    entry.graph.replay()
    assert torch.equal(entry.output, wave(x))


# ---------------------------------------------------------------- dropping graphs


def test_cleared_graphs_are_captured_again(device, wrap) -> None:
    wrapper, x, moved = wrap(wave), *(torch.rand(4, 8, device=device) for _ in range(2))
    check(wrapper, wave, x)
    wrapper.clear_graphs()
    assert not wrapper.concrete_cudagraph_entries
    check(wrapper, wave, moved)
    assert_counters(wrapper, captures=2, replays=4)


def test_one_descriptor_is_dropped(device, wrap) -> None:
    wrapper = wrap(wave)
    small, large = torch.rand(2, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, wave, small, tokens=2)
    check(wrapper, wave, large, tokens=6)
    entry = wrapper.concrete_cudagraph_entries[BatchDescriptor(2)]
    wrapper.drop(entry)
    wrapper.drop(entry)  # it is gone already
    assert set(wrapper.concrete_cudagraph_entries) == {BatchDescriptor(6)}
    check(wrapper, wave, large, tokens=6)
    check(wrapper, wave, small, tokens=2)
    assert_counters(wrapper, captures=3, replays=9)


def test_clear_all_graphs_of_a_shared_pool(device, wrap, pool) -> None:
    first, second, own = wrap(wave, pool=pool), wrap(torch.sin, pool=pool), wrap(torch.cos)
    x = torch.rand(4, 8, device=device)
    wrappers = ((first, wave), (second, torch.sin), (own, torch.cos))
    for wrapper, plain in wrappers:
        check(wrapper, plain, x)
    memory = pool.memory
    assert first.pool is second.pool is pool
    first.clear_all_graphs()
    assert [len(each.concrete_cudagraph_entries) for each, _ in wrappers] == [0, 0, 1]
    assert pool.memory is not memory
    for wrapper, plain in wrappers:
        check(wrapper, plain, x)
    assert_counters(first, captures=2, replays=4)
    assert_counters(second, captures=2, replays=4)
    assert_counters(own, captures=1, replays=5)


def test_wrappers_of_one_pool_do_not_disturb_each_other(device, wrap, pool) -> None:
    x = torch.rand(4, 8, device=device)
    plains = [torch.sin, torch.cos, wave, torch.exp]
    wrappers = [wrap(plain, pool=pool) for plain in plains]
    for _ in range(3):
        x.uniform_()
        for wrapper, plain in zip(wrappers, plains, strict=True):
            with step(4):
                assert torch.equal(wrapper(x), plain(x))
    for wrapper in wrappers:
        assert_counters(wrapper, captures=1, replays=2)


def test_clear_all_graphs_before_the_first_capture(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    assert wrapper.pool is None
    wrapper.clear_all_graphs()
    check(wrapper, wave, x)
    assert_counters(wrapper, captures=1, replays=2)


# ---------------------------------------------------------------- counters


def test_counters_add_up_after_anything(device, wrap) -> None:
    def function(x, fail=False):
        if fail:
            raise ValueError("asked for")
        return wave(x)

    wrapper, x = wrap(function), torch.rand(4, 8, device=device)
    wrapper(x)
    check(wrapper, wave, x, mode=NONE)
    check(wrapper, wave, x, mode=PIECEWISE)
    with step(3), pytest.raises(ValueError, match="asked for"):
        wrapper(x, fail=True)
    with pytest.raises(ValueError, match="asked for"):
        wrapper(x, fail=True)
    check(wrapper, wave, x)
    with step(4), pytest.raises(AddressChangedError):
        wrapper(x.clone())
    with allow_capture(False), step(3):
        wrapper(x)
    check(wrapper, wave, x, calls=2)
    plain = {
        Reason.NO_CONTEXT: 1,
        Reason.MODE_NONE: 3,
        Reason.OTHER_MODE: 3,
        Reason.CAPTURE_FORBIDDEN: 1,
    }
    assert_counters(wrapper, captures=1, replays=4, failures=3, plain=plain)
    assert wrapper.counters.calls == 16
    assert repr(wrapper) == f"{type(wrapper).__name__}(function, FULL, 1 captured)"
