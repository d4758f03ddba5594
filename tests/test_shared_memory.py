"""Memory that several values of a step share, and what a caller may do with results."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from lib.entry import HOOKED, assert_counts, assert_same, backend_for, batch, operators
from torch import nn

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphWrapper,
    Reason,
    eager_break_during_capture,
    set_forward_context,
)
from cgcompile.errors import CaptureError
from cgcompile.graphs.capture import inside_capture

pytestmark = pytest.mark.usefixtures("without_gradients")
HOST = CompilationConfig(capture_device="host")


@pytest.fixture(autouse=True)
def library() -> None:
    operators()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not inside_capture()


@eager_break_during_capture
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def check_wrapper(function: Any, device: str, steps: int = 4) -> BreakableCUDAGraphWrapper:
    wrapper = BreakableCUDAGraphWrapper(function, HOST, PIECEWISE)
    x = torch.randn(4, 8, device=device)
    for _ in range(steps):
        x.normal_()
        expected = function(x.clone())
        with step(4):
            assert_same(wrapper(x), expected)
    assert (wrapper.counters.captures, wrapper.counters.replays) == (1, steps - 1)
    return wrapper


# ---------------------------------------------------------------- bridges


def test_one_of_two_results_of_a_break_outlives_the_next(device: str) -> None:
    @eager_break_during_capture
    def halves(x):
        whole = x * 3
        return whole[:2], whole[2:]

    @eager_break_during_capture
    def hundredfold(x):
        return x * 100

    def model(x):
        first, second = halves(x)
        more = second + 1
        del second
        return first + hundredfold(torch.cat([more, more]))[:2]

    check_wrapper(model, device)


class ReturnsAView(nn.Module):
    def forward(self, x):
        hooked = torch.ops.cgentry.hooked(x + 1)
        view = hooked[:2]
        for _ in range(3):
            hooked = torch.ops.cgentry.hooked(hooked * 3 + 1)
        return view, hooked.sin()


def test_a_returned_view_of_a_bridge_stays(device: str) -> None:
    backend = backend_for(**HOOKED)
    model = ReturnsAView()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    before: Any = None
    for _ in range(5):
        x = batch(device, 4)
        result = compiled(x)
        assert_same(result, model(x))
        assert before is None or torch.equal(before[0], before[1])
        before = (result[0], result[0].clone())
    assert_counts(backend, 1, 3, {Reason.WARMING: 1})


@pytest.mark.slow
def test_results_of_a_step_whose_capture_failed_stay(device: str) -> None:
    def function(x):
        hooked = torch.ops.cgentry.hooked(x + 1)
        picked = torch.ops.cgentry.hooked(hooked * 3).reshape(-1)
        return hooked, picked.sin() + fails(picked), x.view(-1)

    def fails(x):
        return torch.repeat_interleave(x, (x > 1e9).long()).sum()  # the host reads how many

    backend = backend_for(**HOOKED)
    compiled = torch.compile(function, backend=backend, dynamic=True)
    kept = []
    for size in (4, 4, 5, 5, 3, 3, 4, 5):
        x = batch(device, size)
        result = compiled(x)
        assert result[2].data_ptr() == x.data_ptr()
        kept.append((result, function(x)))
    for result, expected in kept:
        assert_same(result, expected)


# ---------------------------------------------------------------- results as inputs


def test_a_result_under_a_context_as_the_input_of_a_capture_runs_plain(device: str) -> None:
    backend = backend_for()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh()).to(device)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    x = batch(device, 4)
    for _ in range(5):
        x.normal_()
        with step(4, FULL):
            first = compiled(x)
        kept = first.clone()
        with step(5, FULL):
            second = compiled(first)
        assert torch.equal(first, kept)
        assert_same(second, model(kept))
    counters = backend.counters
    assert counters.captures == 1
    assert counters.plain[Reason.UNSUPPORTED_INPUT] == 4


# ---------------------------------------------------------------- what a break leaves


def model_with_breaks(kind: str, cache: torch.Tensor) -> Any:
    @eager_break_during_capture
    def get_cache():
        return cache

    @eager_break_during_capture
    def write(target, x):
        target.add_(x)

    @eager_break_during_capture
    def append(x, results):
        results.append(x + len(results))

    def model(x):
        if kind == "break appends to a list":
            results: list[torch.Tensor] = []
            append(x + 1, results)
            return results[0] * 2
        kept = get_cache()
        target = kept if kind.endswith("copy") else cache
        if kind.startswith("graph"):
            target.add_(x)
        else:
            write(target, x)
        return kept + 1

    return model


REFUSED = {
    "graph writes the copy": r"add_.*'.*get_cache'.*a copy",
    "graph writes the original": r"get_cache.*one of the two is stale",
    "break writes the copy": r"get_cache.*one of the two is stale",
    "break writes the original": r"get_cache.*one of the two is stale",
    "break appends to a list": "append' changed a list",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_change_that_a_replay_would_not_show_is_an_error(device: str, kind: str) -> None:
    cache = torch.zeros(4, 8, device=device)
    wrapper = BreakableCUDAGraphWrapper(model_with_breaks(kind, cache), HOST, PIECEWISE)
    with step(4), pytest.raises(CaptureError, match=REFUSED[kind]):
        wrapper(torch.ones(4, 8, device=device))
    assert not wrapper.concrete_cudagraph_entries


KEEPERS = {
    "a tensor": (lambda tensor: tensor, lambda tensor: tensor),
    "a view": (lambda tensor: tensor[1:], lambda view: view),
    "C++": (torch.utils.dlpack.to_dlpack, torch.from_dlpack),
}
KEPT = [("a tensor", False), ("a view", False), ("a view", True), ("C++", True)]


@pytest.mark.parametrize(("keeper", "by_break"), KEPT)
def test_a_result_of_a_break_that_is_kept_and_written(
    device: str, keeper: str, by_break: bool
) -> None:
    keep, take = KEEPERS[keeper]
    kept = []

    @eager_break_during_capture
    def doubles(x):
        result = x * 2
        kept[:] = [keep(result)]
        return result

    def write(target):
        target.add_(1)

    write_here = eager_break_during_capture(write) if by_break else write

    def model(x):
        result = doubles(x)
        write_here(take(kept[0]))
        return result + 1

    wrapper = BreakableCUDAGraphWrapper(model, HOST, PIECEWISE)
    with step(4), pytest.raises(CaptureError, match=r"doubles.*one of the two is stale"):
        wrapper(torch.ones(4, 8, device=device))
    assert not wrapper.concrete_cudagraph_entries


HIDDEN: list[torch.Tensor] = []  # a global: nothing that the wrapper reads holds its items


def test_a_result_of_a_break_that_is_written_and_dropped_by_the_next_one(device: str) -> None:
    @eager_break_during_capture
    def doubles(x):
        HIDDEN[:] = [x * 2]
        return HIDDEN[0]

    @eager_break_during_capture
    def drop():
        HIDDEN.clear()

    def model(x):
        result = doubles(x)
        HIDDEN[0].add_(1)
        drop()
        return result + 1

    wrapper = BreakableCUDAGraphWrapper(model, HOST, PIECEWISE)
    with step(4), pytest.raises(CaptureError, match=r"doubles.*one of the two is stale"):
        wrapper(torch.ones(4, 8, device=device))
    assert not wrapper.concrete_cudagraph_entries


@pytest.mark.parametrize(
    ("returns", "as_view", "grad_mode"),
    [
        (False, False, torch.inference_mode),
        (False, True, torch.no_grad),
        (True, False, torch.no_grad),
        (True, True, torch.inference_mode),  # in which a view does not keep its base
    ],
)
def test_a_result_of_a_break_that_another_one_writes_and_drops(
    device: str, returns: bool, as_view: bool, grad_mode: Any
) -> None:

    @eager_break_during_capture
    def doubles(x):
        result = x * 2
        HIDDEN[:] = [result[:2] if as_view else result]
        return result

    @eager_break_during_capture
    def take():
        written = HIDDEN.pop().add_(1)
        return written if returns else None

    def model(x):
        result = doubles(x)
        taken = take()
        return result + 1 if taken is None else result.sum() + taken.sum()

    wrapper = BreakableCUDAGraphWrapper(model, HOST, PIECEWISE)
    with (
        grad_mode(),
        step(4),
        pytest.raises(CaptureError, match=r"doubles.*one of the two is stale"),
    ):
        wrapper(torch.ones(4, 8, device=device))
    assert not wrapper.concrete_cudagraph_entries


def test_a_graph_may_write_what_a_break_made(device: str) -> None:
    check_wrapper(lambda x: doubled(x).add_(x).sin_() + x, device)


class Outer(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_program_inside_of_a_capture_is_named(device: str) -> None:
    def model(x):
        with Outer():
            return doubled(x + 1) - 1

    wrapper = BreakableCUDAGraphWrapper(model, HOST, PIECEWISE)
    x = torch.randn(4, 8, device=device)
    for _ in range(2):
        with step(4), pytest.raises(CaptureError, match="Outer, a dispatch mode"):
            wrapper(x)
        assert_same(model(x), (x + 1) * 2 - 1)
    with Outer():  # around the whole it is no trouble
        check_wrapper(lambda x: doubled(x + 1) - 1, device)


# ---------------------------------------------------------------- interrupts


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("which", [1, 2])
def test_a_segment_that_cannot_begin_leaves_nothing(
    device: str, error: type[BaseException], which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cgcompile.graphs.breaks import BreakMode

    switch_on, calls = BreakMode.switch_on, [0]

    def failing(self):
        calls[0] += 1
        if calls[0] == which:
            raise error("interrupted")
        switch_on(self)

    wrapper = BreakableCUDAGraphWrapper(lambda x: doubled(x + 1) - 1, HOST, PIECEWISE)
    x = torch.randn(4, 8, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(BreakMode, "switch_on", failing)
        with step(4), pytest.raises(error, match="interrupted"):
            wrapper(x)
    assert not inside_capture()
    check_wrapper(lambda x: doubled(x + 1) - 1, device)


# ---------------------------------------------------------------- what the program keeps


def test_what_the_program_keeps_and_nobody_writes_is_read_anew(device: str) -> None:
    table = torch.zeros(4, 8, device=device)

    @eager_break_during_capture
    def get_table():
        return table

    wrapper = BreakableCUDAGraphWrapper(lambda x: get_table() * x, HOST, PIECEWISE)
    x = torch.rand(4, 8, device=device)
    for _ in range(4):
        table.normal_()
        with step(4):
            assert_same(wrapper(x), table * x)
    assert wrapper.counters.replays == 3


def test_release_inside_of_a_step_or_a_capture_is_an_error(device: str, hook: Any) -> None:
    backend = backend_for(**HOOKED)
    model = ReturnsAView()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    for _ in range(3):
        compiled(batch(device, 4))

    def releases(x):
        backend.release()
        return x

    hook(releases)
    with pytest.raises(CaptureError, match="from inside one of its own steps"):
        compiled(batch(device, 4))
    hook(lambda x: torch.softmax(x, -1))
    x = batch(device, 4)
    assert_same(compiled(x), model(x))

    def clears(x):
        wrapper.clear_all_graphs()
        return x

    wrapper = CUDAGraphWrapper(clears, HOST)
    with step(4, FULL), pytest.raises(CaptureError, match="inside of a capture"):
        wrapper(torch.rand(4, 8, device=device))


class WritesOneReadsAnother(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x.mul_(y.flip(0))
        z = y.sin()
        x.add_(z)
        return y * 2, z.flip(0)


@pytest.mark.parametrize("own", [True, False], ids=["auto", "context"])
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_arguments_that_overlap_later_were_compiled_as_apart(
    compiler: str, own: bool, device: str
) -> None:
    """Functions that compilers make read an argument in another order than the model wrote it."""
    model, backend = WritesOneReadsAnother(), backend_for(compiler=compiler)
    compiled = torch.compile(model, backend=backend, dynamic=False)
    apart = torch.zeros(8, 4, device=device), torch.zeros(8, 4, device=device)
    memory = torch.zeros(16, 4, device=device)
    for start in (None, None, None, 4, 4, 4, None, 2, 0, 8, 8, 8, 4):
        inputs = apart if start is None else (memory[:8], memory[start : start + 8])
        for tensor in (*apart, memory):
            tensor.normal_()
        others = copy.deepcopy(inputs)  # shares what they share
        batch = BatchDescriptor(8, extra=(start,))
        context = set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=batch)
        with nullcontext() if own else context:
            torch.testing.assert_close(compiled(*inputs), model(*others))
        torch.testing.assert_close(inputs, others)
    refused = 9 if own else 6  # a copy is not made of any part of memory that is written
    assert backend.counters.plain[Reason.UNSUPPORTED_INPUT] == refused, backend.counters
    assert backend.counters.replays >= 2, backend.counters
