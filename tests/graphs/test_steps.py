"""The step table: the order of its decisions, what it counts, and when it holds its lock."""

import threading

import pytest
from lib.patience import PATIENCE

from cgcompile import BatchDescriptor, CompilationConfig
from cgcompile.errors import DispatchError, HostValueChangedError
from cgcompile.graphs.capture import capture_lock
from cgcompile.graphs.steps import Call, Steps, StepTable
from cgcompile.graphs.timeline import Timeline
from cgcompile.reasons import Fallback, Reason, RunPlain

FAILED = Fallback(Reason.CAPTURE_FAILED, "an op was refused")


class Numbers(Call[int]):
    """Doubles a number; a captured step is the number that it was captured for."""

    __slots__ = ("log", "number", "refusals")

    def __init__(self, steps: Steps[str, int], number: int, *refusals: RunPlain) -> None:
        self.steps, self.number = steps, number
        self.key, self.descriptor = "key", BatchDescriptor(1)
        self.log: list[str] = []
        self.refusals = list(refusals)  # of captures

    def compare(self, step: int) -> None:
        self.log.append(f"compare {step}")
        if step != self.number:
            raise HostValueChangedError("another number")

    def replay(self, step: int) -> int:
        self.log.append("replay")
        return 2 * step

    def check_fit(self) -> None:
        self.log.append("check_fit")

    def record(self) -> tuple[int, int]:
        self.log.append("record")
        if self.refusals:
            raise self.refusals.pop(0)
        return self.number, 2 * self.number

    def plain(self, why: Fallback) -> int:
        self.log.append(f"plain {why.reason.value}")
        return 2 * self.number


def table(**settings) -> tuple[StepTable, Steps[str, int]]:
    config = CompilationConfig(**settings)
    return StepTable("numbers", config, Timeline(warns=False), None), Steps(attempts=2)


def test_a_call_is_captured_once_and_then_replayed() -> None:
    machine, steps = table()
    first, second = Numbers(steps, 3), Numbers(steps, 3)
    assert [machine.run(first), machine.run(second)] == [6, 6]
    assert first.log == ["check_fit", "record"]
    assert second.log == ["compare 3", "replay"]
    assert (machine.timeline.counters.captures, machine.timeline.counters.replays) == (1, 1)


def test_a_call_that_differs_follows_the_policy() -> None:
    for policy, expected in (("eager", "plain input_changed"), ("recapture", "record")):
        machine, steps = table(on_input_change=policy)
        machine.run(Numbers(steps, 3))
        other = Numbers(steps, 4)
        assert machine.run(other) == 8
        assert other.log[-1] == expected
    assert machine.run(Numbers(steps, 3)) == 6  # both numbers are captured now
    assert list(steps) == [3, 4]
    machine, steps = table()
    machine.run(Numbers(steps, 3))
    with pytest.raises(HostValueChangedError):
        machine.run(Numbers(steps, 4))
    assert machine.timeline.counters.failures == 1


def test_a_key_is_refused_after_some_failed_captures() -> None:
    machine, steps = table()
    for _ in range(2):
        failing = Numbers(steps, 3, RunPlain(FAILED))
        assert machine.run(failing) == 6
        assert failing.log == ["check_fit", "record", "plain capture_failed"]
    machine.closed = True  # the failure is the better reason
    refused = Numbers(steps, 3)
    assert machine.run(refused) == 6
    assert refused.log == ["plain capture_failed"]
    assert machine.timeline.counters.plain == {Reason.CAPTURE_FAILED: 3}


def test_a_step_that_ran_while_it_was_captured_does_not_run_again() -> None:
    machine, steps = table()
    call = Numbers(steps, 3, RunPlain(FAILED, 7))
    assert machine.run(call) == 7
    assert call.log == ["check_fit", "record"]
    assert machine.timeline.counters.plain == {Reason.CAPTURE_FAILED: 1}


def test_strict_raises_where_a_plain_run_can_be_avoided() -> None:
    machine, steps = table(on_fallback="raise")
    machine.closed = True
    with pytest.raises(DispatchError, match="capture is closed"):
        machine.run(Numbers(steps, 3))
    machine.closed = False
    assert machine.run(Numbers(steps, 3, RunPlain(Fallback(Reason.WARMING, "call 1 of 1")))) == 6
    counters = machine.timeline.counters
    assert (counters.failures, counters.plain) == (1, {Reason.WARMING: 1})


def test_the_lock_is_free_while_a_call_waits_for_another_capture() -> None:
    machine, steps = table()
    captures, waits = threading.Event(), threading.Event()
    busy = RunPlain(Fallback(Reason.CAPTURE_BUSY, "another capture runs"))
    taken: list[bool] = []

    def capture() -> None:
        with capture_lock("another"):
            captures.set()
            assert waits.wait(PATIENCE)
            taken.append(machine.running.lock.acquire(timeout=PATIENCE))
            machine.running.lock.release()

    class Waiting(Numbers):
        def compare(self, step: int) -> None:
            waits.set()
            raise busy if not taken else HostValueChangedError("another number")

    steps.keep("key", 3)
    thread = threading.Thread(target=capture)
    thread.start()
    assert captures.wait(PATIENCE)
    with pytest.raises(HostValueChangedError):  # of the second attempt
        machine.run(Waiting(steps, 4))
    thread.join()
    assert taken == [True]
    assert machine.running.owner == 0
