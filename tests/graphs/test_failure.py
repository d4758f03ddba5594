"""What a capture that fails leaves behind: the first error, and nothing else."""

import gc
import threading
import traceback

import pytest
import torch
from lib.breakable import FULL, TIMEOUT, Asked, assert_calls, assert_counters, in_thread, same
from lib.breakable import step as step_in_mode

from cgcompile import BatchDescriptor
from cgcompile.context import current_forward_context, override_forward_context
from cgcompile.errors import CaptureBusyError, CaptureError
from cgcompile.graphs.capture import capture, captured_elsewhere
from cgcompile.graphs.pool import GraphPool
from cgcompile.graphs.steps import allow_capture, capture_allowed
from cgcompile.reasons import Reason


@pytest.fixture
def wrap(wrap_either):
    return wrap_either


class Stop(BaseException):
    """Like KeyboardInterrupt: no Exception."""


def step(tokens):
    return step_in_mode(tokens, FULL)


def wave(x):
    return x.sin() + x * 2


def check(wrapper, x, tokens=4, calls=3):
    assert_calls(wrapper, wave, x, FULL, tokens, calls)


def check_replays(graph, x, result, plain=wave, times=2):
    """Compare what replays leave in ``result`` with eager."""
    for _ in range(times):
        x.uniform_()
        graph.replay()
        assert same(result, plain(x))


def check_capture_works(pool, device):
    x = torch.rand(4, 8, device=device)
    check_replays(*capture_of(wave, pool, x))


def capture_of(function, pool, x, name="a step", **settings):
    """Capture ``function(x)``; the graph, ``x`` and the result."""
    graph, result = capture(lambda: function(x), pool, name, **settings)
    return graph, x, result


class Held:
    """A capture in another thread that stays inside until it is let go."""

    def __init__(self, pool, device, what):
        self._pool, self._what = pool, what
        self._x = torch.rand(4, 8, device=device)
        self._inside, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.captured = None

    def _function(self):
        y = wave(self._x)
        self._inside.set()
        assert self._leave.wait(TIMEOUT)
        return y + 1

    def _run(self):
        self.captured = capture(self._function, self._pool, self._what)

    def __enter__(self):
        self._thread.start()
        assert self._inside.wait(TIMEOUT)
        return self

    def __exit__(self, *_):
        self._leave.set()
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def check(self):
        graph, result = self.captured
        check_replays(graph, self._x, result, lambda x: wave(x) + 1)


# ---------------------------------------------------------------- the first error, as it is


def deep_inside(x):
    raise Asked("on purpose", 7)


@pytest.mark.parametrize("collect", [False, True])
def test_error_keeps_type_message_and_traceback(device, pool, collect) -> None:
    x = torch.rand(4, 8, device=device)
    with pytest.raises(Asked) as caught:
        capture(lambda: deep_inside(wave(x)), pool, "broken", collect=collect)
    assert caught.value.args == ("on purpose", 7)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "deep_inside"
    check_capture_works(pool, device)


@pytest.mark.parametrize("kind", [Asked, Stop, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_every_error_propagates_and_leaves_no_entry(device, wrap, kind) -> None:
    failing = []

    def function(x):
        y = wave(x)
        if failing:
            raise kind("on purpose")
        return y

    wrapper = wrap(function)
    x, other = torch.rand(4, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, x)
    for count in (1, 2):
        failing.append(True)
        with step(6), pytest.raises(kind, match="on purpose"):
            wrapper(other)
        failing.clear()
        assert set(wrapper.concrete_cudagraph_entries) == {BatchDescriptor(4)}
        assert wrapper.counters.failures == count
        assert wrapper.counters.captures == 1
        check(wrapper, x)
    check(wrapper, other, tokens=6)
    check(wrapper, x)
    assert_counters(wrapper, captures=2, replays=13, failures=2)


def test_many_failures_in_a_row(device, wrap) -> None:
    calls = []

    def function(x):
        calls.append(1)
        y = wave(x)
        if len(calls) < 5:
            raise Asked(f"call {len(calls)}")
        return y

    wrapper, x = wrap(function), torch.rand(4, 8, device=device)
    for call in range(1, 5):
        with step(4), pytest.raises(Asked, match=f"call {call}"):
            wrapper(x)
    check(wrapper, x)
    assert len(calls) == 5
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 2)


def test_failed_capture_leaves_no_trace(device, pool) -> None:
    x, cache = torch.rand(4, 8, device=device), torch.zeros(4, 8, device=device)
    before = x.clone()

    def function():
        cache.add_(1)
        x.mul_(2)
        raise Asked("after writing")

    with pytest.raises(Asked):
        capture(function, pool, "broken")
    assert torch.equal(x, before)
    assert not cache.any()
    check_capture_works(pool, device)


def test_failure_keeps_graphs_of_the_same_pool(device, pool) -> None:
    x = torch.rand(4, 8, device=device)
    first, result = capture(lambda: wave(x), pool, "first")
    memory = pool.memory
    with pytest.raises(Asked):
        capture(lambda: deep_inside(wave(x)), pool, "broken")
    second, other = capture(lambda: x.cos(), pool, "second")
    assert pool.memory is not memory
    for _ in range(3):
        check_replays(first, x, result, times=1)
        check_replays(second, x, other, torch.cos, times=1)


def test_refused_op_names_itself_and_leaves_no_entry(device, wrap) -> None:
    wrapper, x = wrap(lambda x: wave(x) * x.sum().item()), torch.rand(4, 8, device=device)
    for _ in range(2):
        with step(4), pytest.raises(RuntimeError, match="operation not permitted when stream is"):
            wrapper(x)
    assert not wrapper.concrete_cudagraph_entries
    assert wrapper.counters.failures == wrapper.counters.calls == 2
    assert torch.equal(wrapper(x), wave(x) * x.sum().item())
    assert wrapper.counters.plain == {Reason.NO_CONTEXT: 1}


def test_refused_op_leaves_random_numbers_and_graphs_usable(device, pool) -> None:
    x = torch.rand(4, 8, device=device)
    torch.manual_seed(5)
    expected = torch.rand(4, 8, device=device)
    graph, result = capture(lambda: wave(x), pool, "before")
    torch.manual_seed(5)
    with pytest.raises(RuntimeError, match="captur"):
        capture(lambda: torch.rand(3, device=device).sum().item(), pool, "refused")
    x.add_(1)
    graph.replay()
    assert torch.equal(result, wave(x))
    assert torch.equal(torch.rand(4, 8, device=device), expected)
    check_capture_works(pool, device)


# ---------------------------------------------------------------- state around a capture


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_collector(device, pool, fails, enabled) -> None:
    x, inside, before = torch.rand(4, 8, device=device), [], gc.isenabled()

    def function():
        inside.append(gc.isenabled())
        return deep_inside(x) if fails else wave(x)

    (gc.enable if enabled else gc.disable)()
    try:
        if fails:
            with pytest.raises(Asked):
                capture(function, pool, "collected")
        else:
            graph, result = capture(function, pool, "collected")
            graph.replay()
            assert torch.equal(result, wave(x))
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert inside == [False]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_modes_and_context(device, pool, fails, mode) -> None:
    x = torch.rand(4, 8, device=device)

    def function():
        with torch.inference_mode(), override_forward_context(None), step(9):
            assert current_forward_context().batch_descriptor == BatchDescriptor(9)
            return deep_inside(x) if fails else wave(x)

    with mode(), step(4):
        context, modes = current_forward_context(), _modes()
        if fails:
            with pytest.raises(Asked):
                capture(function, pool, "modes")
        else:
            graph, result = capture(function, pool, "modes")
            graph.replay()
            assert torch.equal(result, wave(x))
        assert current_forward_context() is context
        assert _modes() == modes
        assert not pool.device.is_capturing()
    assert current_forward_context() is None


def _modes():
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@pytest.mark.gpu
@pytest.mark.parametrize("fails", [None, deep_inside, torch.Tensor.item])
def test_current_stream(fails) -> None:
    pool, x = GraphPool("cuda"), torch.rand(1, device="cuda")
    stream, streams = torch.cuda.Stream(), []

    def function():
        streams.append(torch.cuda.current_stream())
        return wave(x) if fails is None else fails(x)

    with torch.cuda.stream(stream):
        if fails is None:
            graph, result = capture(function, pool, "streams")
            graph.replay()
            stream.synchronize()
            assert torch.equal(result, wave(x))
        else:
            with pytest.raises((Asked, RuntimeError)):
                capture(function, pool, "streams")
        assert torch.cuda.current_stream() == stream
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert streams == [pool.stream]
    check_capture_works(pool, "cuda")


# ---------------------------------------------------------------- one capture at a time


def test_capture_inside_of_a_capture_is_an_error_by_name(device, pool, new_pool) -> None:
    x, other = torch.rand(4, 8, device=device), new_pool()

    def outer():
        y = wave(x)
        capture(lambda: y + 1, other, "the inner one")

    with pytest.raises(CaptureError, match="capture of the inner one: a capture runs"):
        capture(outer, pool, "the outer one")
    check_capture_works(pool, device)
    check_capture_works(other, device)


def test_outer_capture_survives_an_inner_one_that_is_refused(device, pool) -> None:
    x = torch.rand(4, 8, device=device)

    def outer():
        y = wave(x)
        with pytest.raises(CaptureError, match="captures do not nest"):
            capture(lambda: y + 1, pool, "the inner one")
        return y + 2

    graph, result = capture(outer, pool, "the outer one")
    check_replays(graph, x, result, lambda x: wave(x) + 2)


def test_capture_while_someone_else_captures_is_an_error(device, pool) -> None:
    """A capture that torch runs itself, without this library."""
    x, graph = torch.rand(4, 8, device=device), pool.device.new_graph()
    with pool.device.on_stream(pool.stream):
        graph.begin(pool.memory)
        result = wave(x)
        with pytest.raises(CaptureError, match="capture of mine: a capture runs"):
            capture(lambda: wave(x), pool, "mine")
        graph.end()
    check_replays(graph, x, result)
    check_capture_works(pool, device)


@pytest.mark.usefixtures("impatient")
def test_capture_in_another_thread_names_the_running_one(device, pool, new_pool) -> None:
    other, x = new_pool(), torch.rand(4, 8, device=device)
    with Held(pool, device, "the long one") as held:
        assert captured_elsewhere()
        text = "capture of the short one: the capture of the long one runs in another thread"
        with pytest.raises(CaptureBusyError, match=text):
            capture(lambda: wave(x), other, "the short one")
    assert not captured_elsewhere()
    held.check()
    check_capture_works(other, device)
    check_capture_works(pool, device)


@pytest.mark.usefixtures("impatient")
def test_unknown_graph_while_another_thread_captures(device, pool, wrap) -> None:
    wrapper = wrap(wave)
    x, other = torch.rand(4, 8, device=device), torch.rand(6, 8, device=device)
    check(wrapper, x)
    with Held(pool, device, "the long one") as held, step(6):
        for _ in range(2):
            other.add_(1)
            assert torch.equal(wrapper(other), wave(other))  # after a wait
    held.check()
    check(wrapper, other, tokens=6)
    assert_counters(wrapper, captures=2, replays=4, plain={Reason.CAPTURE_BUSY: 2})


def test_known_graph_while_another_thread_captures(device, pool, wrap) -> None:
    """No random numbers here: torch draws none on CUDA while any thread captures."""
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    check(wrapper, x)
    with Held(pool, device, "the long one") as held:
        for _ in range(2):
            x.add_(1)
            with step(4):
                result = wrapper(x)
            assert torch.equal(result, wave(x))
    held.check()
    check(wrapper, x)
    assert wrapper.counters.failures == 0
    assert wrapper.counters.captures == 1


def test_known_graph_inside_of_a_capture_runs_plain(device, pool, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)
    check(wrapper, x)
    with step(4):
        graph, result = capture(lambda: wrapper(x) + 1, pool, "around")
    check_replays(graph, x, result, lambda x: wave(x) + 1)
    check(wrapper, x)
    assert_counters(wrapper, captures=1, replays=5, plain={Reason.INSIDE_CAPTURE: 1})


def test_unknown_graph_inside_of_a_capture_runs_plain(device, wrap) -> None:
    inner = wrap(wave, on_fallback="raise")
    outer, x = wrap(lambda x: inner(x)), torch.rand(4, 8, device=device)
    check(outer, x)
    assert not inner.concrete_cudagraph_entries
    assert inner.counters.plain == {Reason.INSIDE_CAPTURE: 1}
    assert (outer.counters.captures, outer.counters.replays) == (1, 2)


# ---------------------------------------------------------------- who may capture


def test_allow_capture_nests() -> None:
    forbidden, allowed = allow_capture(False), allow_capture(True)
    answers = [capture_allowed()]
    with forbidden:
        answers.append(capture_allowed())
        with allowed:
            answers.append(capture_allowed())
            with forbidden:
                answers.append(capture_allowed())
            answers.append(capture_allowed())
        answers.append(capture_allowed())
    answers.append(capture_allowed())
    assert answers == [True, False, True, False, True, False, True]


def test_allow_capture_is_left_with_an_error(device, wrap) -> None:
    wrapper, x = wrap(wave), torch.rand(4, 8, device=device)

    def forbidden():
        with allow_capture(False), step(4):
            deep_inside(wrapper(x))

    with pytest.raises(Asked):
        forbidden()
    assert wrapper.counters.plain == {Reason.CAPTURE_FORBIDDEN: 1}
    check(wrapper, x)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 2)


def test_allow_capture_is_that_of_one_thread(device, wrap) -> None:
    wrapper = wrap(wave)
    x, other = torch.rand(4, 8, device=device), torch.rand(6, 8, device=device)
    with allow_capture(False):
        assert in_thread(lambda: check(wrapper, x)) == (None, None)
        assert not capture_allowed()
        check(wrapper, other, tokens=6)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, 2)
    assert wrapper.counters.plain == {Reason.CAPTURE_FORBIDDEN: 3}
    assert in_thread(capture_allowed) == (True, None)
