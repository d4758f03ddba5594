"""Several threads, captures inside of others, and a fork while another thread runs a step."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.entry import marked
from lib.front_ends import (
    COMPILED,
    FRONT_ENDS,
    ROWS,
    WIDTH,
    WRAPPERS,
    FrontEnd,
    check,
    context,
    front_end,
    settings,
    under_context,
)
from lib.patience import PATIENCE
from lib.programs import run_code
from torch import nn

import cgcompile
from cgcompile import CUDAGraphMode
from cgcompile.errors import CaptureBusyError, DispatchError, ManagerError
from cgcompile.graphs.breakable import (
    BreakableCUDAGraphCapture,
    BreakableCUDAGraphWrapper,
    eager_break_during_capture,
)
from cgcompile.graphs.capture import captured_elsewhere
from cgcompile.graphs.capture_all import capture_all
from cgcompile.reasons import Reason

pytestmark = pytest.mark.usefixtures("without_gradients")


def model(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 + 1


def run_in_thread(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a function in another thread; return it, and the list of its result or its error."""
    results: list[Any] = []

    def run() -> None:
        try:
            with torch.inference_mode():
                results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


class Captures:
    """Another thread that is inside of a capture until ``go_on`` is set."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __enter__(self) -> "Captures":
        self.thread, self.results = run_in_thread(self.capture)
        assert self.inside.wait(PATIENCE)
        assert captured_elsewhere()
        return self

    def capture(self) -> Any:
        x = torch.ones(2, 2, device=self.device)
        with BreakableCUDAGraphCapture(device=self.device):
            y = x * 2
            self.inside.set()
            self.go_on.wait(PATIENCE)
            return y + 1

    def __exit__(self, *error: object) -> None:
        self.go_on.set()
        self.thread.join(PATIENCE)
        assert isinstance(self.results[0], torch.Tensor)


def skip_uncompiled(name: str, device: str) -> None:
    if (name, device) == ("torch.compile", "cpu"):
        pytest.skip("while the host recorder captures, what torch.compile made runs uncompiled")


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_a_capture_waits_for_that_of_another_thread(name: str, device: str) -> None:
    skip_uncompiled(name, device)
    served = front_end(name, model, device)
    inputs = [torch.rand(ROWS, WIDTH, device=device) for _ in range(4)]
    with torch.inference_mode(), Captures(device) as other:  # CUDA draws no numbers in it
        timer = threading.Timer(0.5, other.go_on.set)
        timer.start()
        for x in inputs:
            torch.testing.assert_close(served.step(x), model(x))
        timer.join()
    counters = served.counters()
    assert counters.captures == 1
    assert counters.plain[Reason.CAPTURE_BUSY] == 0
    assert counters.replays >= 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_a_wait_for_a_capture_that_does_not_end_is_bounded(name: str, device: str) -> None:
    skip_uncompiled(name, device)
    served = front_end(name, model, device)
    calls = 2 if name in COMPILED else 1  # the first call of a compiled model warms up
    inputs = [torch.rand(ROWS, WIDTH, device=device) for _ in range(calls)]
    with torch.inference_mode(), Captures(device) as other:
        for x in inputs:
            torch.testing.assert_close(served.step(x), model(x))
        assert not other.go_on.is_set()
    counters = served.counters()
    assert (counters.captures, counters.plain[Reason.CAPTURE_BUSY]) == (0, 1)
    check(served.step, model, device, steps=3)
    assert served.counters().captures == 1


@pytest.mark.usefixtures("impatient")
def test_an_eager_break_that_waits_for_another_thread_that_captures(device: str) -> None:
    inner = front_end("CUDAGraphWrapper", model, device)
    inner.target.allow_threads()  # each result is cloned before the next thread begins
    ones = torch.ones(ROWS, WIDTH, device=device)
    results: list[Any] = []

    @cgcompile.eager_break_during_capture
    def attend(x: torch.Tensor) -> torch.Tensor:
        thread, result = run_in_thread(lambda: inner.step(ones).clone())
        thread.join(PATIENCE)
        results.extend(result)
        return x * 2

    wrapper = BreakableCUDAGraphWrapper(lambda x: attend(x + 1) - 1, settings(device))
    x = torch.empty(ROWS, WIDTH, device=device)
    for _ in range(3):
        with torch.inference_mode(), context(mode=CUDAGraphMode.PIECEWISE):
            torch.testing.assert_close(wrapper(x.uniform_()), (x + 1) * 2 - 1)
    assert wrapper.counters.replays == 2
    for result in results:
        torch.testing.assert_close(result, model(ones))
    assert inner.counters().plain[Reason.CAPTURE_BUSY] == 1
    assert inner.counters().captures == 1


@pytest.mark.usefixtures("impatient")
def test_a_raw_capture_waits_and_raises_in_the_end(device: str) -> None:
    capture = BreakableCUDAGraphCapture(device=device)
    busy = pytest.raises(CaptureBusyError, match="runs in another thread")
    with Captures(device), busy, capture:
        pass
    with capture:
        torch.ones(2, device=device)
    assert capture.num_graphs == 1


def test_a_capture_inside_of_a_break_raises_and_the_step_is_not_run_again(device: str) -> None:
    """Code before the break has run: a second run, without a graph, would do it twice."""
    count = torch.zeros(1, device=device)

    @eager_break_during_capture
    def captures(x: torch.Tensor) -> torch.Tensor:
        with BreakableCUDAGraphCapture(device=device):
            return x + 1

    def step(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return captures(x * 2)

    wrapper = BreakableCUDAGraphWrapper(step, settings(device), CUDAGraphMode.PIECEWISE)
    busy = pytest.raises(CaptureBusyError, match="in this thread")
    with context(mode=CUDAGraphMode.PIECEWISE), busy:
        wrapper(torch.randn(ROWS, WIDTH, device=device))
    assert count.item() == 1
    assert wrapper.counters.failures == 1


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_capture_that_waits_does_not_block_replays(name: str, device: str) -> None:
    """Another buffer needs another capture: this call waits for the other capture, others replay."""
    config = settings(device, on_input_change="recapture")
    wrapper = getattr(cgcompile, name)(model, config, CUDAGraphMode.FULL)
    wrapper.allow_threads()  # results are cloned at once, and there are two buffers
    known, new, *inputs = (torch.rand(ROWS, WIDTH, device=device) for _ in range(5))

    def step(x: torch.Tensor) -> Any:
        with torch.inference_mode(), context():
            return wrapper(x).clone()

    torch.testing.assert_close(step(known), model(known))
    with Captures(device) as other:
        thread, results = run_in_thread(lambda: step(new))
        time.sleep(0.3)
        assert thread.is_alive()
        for x in inputs:
            torch.testing.assert_close(step(known.copy_(x)), model(x))
        assert not other.go_on.is_set()
        assert thread.is_alive()
        other.go_on.set()
        thread.join(PATIENCE)
    torch.testing.assert_close(results[0], model(new))
    counters = wrapper.counters
    assert (counters.captures, counters.replays) == (2, 3)
    assert counters.plain[Reason.CAPTURE_BUSY] == 0


# ---------------------------------------------------------------- results that are views

RETURN_VIEWS = (*COMPILED, *WRAPPERS, "CudaGraphManager")
REFUSED = r"in thread '[^']+', after steps in thread '[^']+'.*\n.*allow_threads\(\)"


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return model(x)


def returning_views(name: str, device: str) -> FrontEnd:
    """Put ``model`` behind a front end whose steps take any number of rows and return views."""
    if name not in COMPILED:
        return front_end(name, Model(), device)
    backend = cgcompile.Backend(settings(device))
    if name == "torch.compile":
        # ``dynamic=`` changes a setting at each call, which torch 2.11 has once for all threads.
        compiled = torch.compile(Model(), backend=backend)
        return FrontEnd(name, under_context(lambda x: compiled(marked(x))), backend)
    compiled = cgcompile.compile(Model(), backend, dynamic_dims={"x": 0})
    return FrontEnd(name, under_context(compiled), backend)


def release(served: FrontEnd) -> None:
    served.target.clear_all_graphs() if served.name in WRAPPERS else served.target.release()


def run_once(served: FrontEnd, device: str, steps: int = 1) -> None:
    check(served.step, model, device, steps)


@pytest.mark.parametrize("name", RETURN_VIEWS)
def test_the_first_step_of_a_second_thread_is_an_error(name: str, device: str) -> None:
    served = returning_views(name, device)
    run_once(served, device, steps=4)
    replays = served.counters().replays
    assert replays >= 2
    thread, results = run_in_thread(lambda: run_once(served, device))
    thread.join(PATIENCE)
    with pytest.raises(DispatchError, match=REFUSED):
        raise results[0]
    run_once(served, device)
    assert served.counters().replays == replays + 1
    release(served)
    thread, results = run_in_thread(lambda: run_once(served, device, steps=4))
    thread.join(PATIENCE)
    assert results == [None]
    with pytest.raises(DispatchError, match="which has ended"):
        run_once(served, device, steps=4)


@pytest.mark.parametrize("name", RETURN_VIEWS)
def test_of_two_threads_that_begin_at_once_one_is_refused(name: str, device: str) -> None:
    served = returning_views(name, device)
    inputs = {rows: torch.rand(rows, WIDTH, device=device) for rows in (ROWS, 2)}
    thread, results = run_in_thread(lambda: capture(served, inputs))
    thread.join(PATIENCE)
    assert results == [None]
    barrier, refused = threading.Barrier(2), threading.Barrier(2)

    def serve(x: torch.Tensor) -> list[str]:
        outcomes = []
        for _ in range(4):
            barrier.wait(PATIENCE)
            try:
                result = served.step(x)
                refused.wait(PATIENCE)  # the step of the other thread has ended
                torch.testing.assert_close(result, model(x))
                outcomes.append("right")
            except DispatchError:
                refused.wait(PATIENCE)
                outcomes.append("refused")
        return outcomes

    running = [run_in_thread(partial(serve, x)) for x in inputs.values()]
    for thread, _ in running:
        thread.join(PATIENCE)
    assert sorted(results[0] for _, results in running) == [["refused"] * 4, ["right"] * 4]


def capture(served: FrontEnd, inputs: dict[int, torch.Tensor]) -> None:
    """Capture all graphs in a bulk, and once more, where they are replayed."""
    if served.name == "CudaGraphManager":
        served.step(torch.empty(0, WIDTH, device=inputs[ROWS].device))  # captures, and runs plain
        served.target.release()
        assert served.target.capture()
        return
    for _ in range(2):
        bulk = partial(capture_all, target=served.target)
        bulk = getattr(served.target, "capture", bulk)
        report = bulk(lambda rows: served.step(inputs[rows]), [*inputs])
        assert sorted(report.captured) == sorted(inputs), report
    assert served.counters().replays >= len(inputs)


@pytest.mark.parametrize("name", RETURN_VIEWS)
def test_threads_that_lock_their_steps_and_declare_it(name: str, device: str) -> None:
    served = returning_views(name, device)
    run_once(served, device, steps=4)
    before, lock, barrier = served.counters(), threading.Lock(), threading.Barrier(3)
    served.target.allow_threads()

    def serve() -> None:
        barrier.wait(PATIENCE)
        for _ in range(20):
            with lock:
                run_once(served, device)

    running = [run_in_thread(serve) for _ in range(3)]
    for thread, results in running:
        thread.join(PATIENCE)
        assert results == [None]
    after = served.counters()
    assert (after.calls, after.replays) == (before.calls + 60, before.replays + 60)
    release(served)  # what was declared stays
    for _ in range(2):
        thread, results = run_in_thread(lambda: run_once(served, device, steps=4))
        thread.join(PATIENCE)
        assert results == [None]


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_a_thread_that_captures_while_another_one_serves_is_refused(name: str, device: str) -> None:
    served = returning_views(name, device)
    inputs = {rows: torch.rand(rows, WIDTH, device=device) for rows in (ROWS, 2)}
    run_once(served, device, steps=4)
    thread, results = run_in_thread(lambda: capture(served, inputs))
    thread.join(PATIENCE)
    with pytest.raises(DispatchError, match=REFUSED):
        raise results[0]
    run_once(served, device)


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("mode", [CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE])
def test_a_step_without_a_context_leaves_the_results_of_another_thread(
    name: str, mode: CUDAGraphMode, device: str
) -> None:
    """A replay would overwrite them: it runs plain, unless the program declares that it locks."""
    served = front_end(name, Model(), device)
    step = under_context(served.step, mode=mode)
    x, *inputs = (torch.randn(ROWS, WIDTH, device=device) for _ in range(5))

    def serve() -> None:
        for x in inputs:
            torch.testing.assert_close(served.step(x), model(x))

    with torch.inference_mode():
        for _ in range(4):
            torch.testing.assert_close(served.step(x), model(x))
            kept = step(x)
        before = served.counters()
        thread, results = run_in_thread(serve)
        thread.join(PATIENCE)
        assert results == [None]
        torch.testing.assert_close(kept, model(x))
    after = served.counters()
    assert after.replays == before.replays > 2
    assert after.plain - before.plain == {Reason.OTHER_THREAD: 4}
    served.target.allow_threads()
    thread, results = run_in_thread(serve)
    thread.join(PATIENCE)
    assert results == [None]
    assert served.counters().replays == after.replays + 4


def test_plain_steps_of_other_threads_and_tasks_of_one_thread(device: str) -> None:
    served = front_end("cgcompile.compile", Model(), device)
    step = under_context(served.step)

    def plain() -> None:
        with cgcompile.set_forward_context():
            check(served.step, model, device)

    async def serve() -> None:
        for _ in range(3):
            check(step, model, device)
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(serve(), serve())

    check(step, model, device, steps=4)
    replays = served.counters().replays
    thread, results = run_in_thread(plain)
    thread.join(PATIENCE)
    assert results == [None]
    asyncio.run(main())
    assert served.counters().replays == replays + 6


class Slow(nn.Module):
    """Stays inside of a step until ``go_on`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside.set()
        assert self.go_on.wait(PATIENCE)
        return x + 1


def test_a_manager_refuses_a_second_thread_at_once_and_waits_to_release(device: str) -> None:
    """A step of rows without a graph runs plain, so Python is inside of the step."""
    slow = Slow()
    served = front_end("CudaGraphManager", slow, device)
    x, large = (torch.rand(rows, WIDTH, device=device) for rows in (ROWS, 0))

    def steps() -> torch.Tensor:
        torch.testing.assert_close(served.step(x), x + 1)
        slow.inside.clear()
        slow.go_on.clear()
        ready.set()
        return served.step(large)

    ready = threading.Event()
    thread, results = run_in_thread(steps)
    assert ready.wait(PATIENCE)
    assert slow.inside.wait(PATIENCE)
    with torch.inference_mode():
        for call in (
            lambda: served.step(x),
            lambda: served.target.run_fullgraph(ROWS),
            served.target.capture,
        ):
            with pytest.raises((DispatchError, ManagerError)):
                call()
        releasing, released = run_in_thread(served.target.release)
        assert not released
        slow.go_on.set()
        releasing.join(PATIENCE)
        thread.join(PATIENCE)
        assert released == [None]
        assert results[0].shape == large.shape
        served.target.capture()
        torch.testing.assert_close(served.step(x), x + 1)
    assert served.counters().replays >= 2


def test_managers_of_one_model_release_at_once(device: str) -> None:
    """Each tells the other one, and none holds its own lock meanwhile."""
    compiled = cgcompile.compile(nn.Linear(WIDTH, WIDTH).to(device), settings(device))
    rows = [cgcompile.serving.InputBuffer("input", ("tokens", WIDTH), torch.float32)]
    limits = {"max_num_tokens": ROWS, "max_num_reqs": ROWS}
    managers = [cgcompile.CudaGraphManager.from_model(compiled, rows, **limits) for _ in range(2)]

    def release(manager: Any) -> int:
        released = 0
        for _ in range(300):
            manager.release()
            released += 1
        return released

    running = [run_in_thread(partial(release, manager)) for manager in managers]
    for thread, results in running:
        thread.join(PATIENCE)
        assert results == [300]


# ---------------------------------------------------------------- fork


FORKS = """
import os, signal, sys, threading
sys.path.insert(0, sys.argv[1])
import gc, torch
from lib.front_ends import ROWS, WIDTH, check, front_end
from lib.patience import PATIENCE
from cgcompile.locks import _locks

def model(x):
    return x * 2 + 1

def status_of_fork(name):
    served = front_end(name, model, "cpu")
    check(served.step, model, "cpu", steps=4)
    locks = list(_locks)
    assert locks, "no lock is held"
    held = threading.Event()

    def hold():
        for lock in locks:
            lock.acquire()
        held.set()
        threading.Event().wait(PATIENCE)

    threading.Thread(target=hold, daemon=True).start()
    held.wait(PATIENCE)
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    signal.alarm(int(PATIENCE))  # ends a child that hangs
    check(served.step, model, "cpu")
    os._exit(0)

gc.collect()
gc.freeze()
for name in sys.argv[2:]:  # each in a process that knows no other
    if pid := os.fork():
        print(name, os.waitpid(pid, 0)[1], flush=True)
    else:
        os._exit(status_of_fork(name) != 0)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_while_another_thread_holds_the_locks_of_a_step() -> None:
    printed = run_code(FORKS, str(Path(__file__).parents[1]), *FRONT_ENDS)
    assert printed.splitlines() == [f"{name} 0" for name in FRONT_ENDS]


@pytest.mark.parametrize("name", COMPILED + WRAPPERS)
def test_the_result_of_a_capture_counts(name: str, device: str) -> None:
    """Outside of a bulk capture, a capturing step returns views, as a replay does."""
    skip_uncompiled(name, device)
    served = front_end(name, model, device)
    x = torch.rand(ROWS, WIDTH, device=device)

    def step() -> Any:
        with torch.inference_mode(), context():
            return served.step(x)

    while not served.counters().captures:
        result = step()
    assert served.counters().replays == 0
    expected = model(x.clone())
    x.uniform_()
    thread, results = run_in_thread(step)
    thread.join(PATIENCE)
    torch.testing.assert_close(result, expected)
    assert isinstance(results[0], DispatchError), results
