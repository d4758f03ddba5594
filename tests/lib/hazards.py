"""The form of the table of hazards, and its one runner.

A hazard is what a program changes between the capture of a graph and its replay. ``observe`` puts a
model behind a front end, compares each call with eager on new random inputs, and returns what the
calls after the change did. ``tests/hazards/table.py`` has the rows; ``tests/hazards/test_table.py``
runs them on every front end and device.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from cgcompile.reasons import Counters, Reason
from lib.front_ends import COLUMNS, ROWS, WIDTH, FrontEnd, column, context
from lib.patience import PATIENCE

RIGHT = "right"  # every call returns what eager returns
STALE = "stale"  # a call returns something else, without an error
DOCUMENTED = "stale, documented"  # an exception of the promise that the documentation names
ABSENT = "-"  # the front end has no such state
CALLS = 5  # before the change, and after it
_PREPARING = {Reason.WARMING, Reason.INSIDE_CAPTURE}


@dataclass(frozen=True)
class Refused:
    """A cell whose step is an error before the change already: no graph can hold it."""

    error: type[Exception]


Outcome = Any  # RIGHT, STALE, DOCUMENTED, ABSENT, a class of errors, a Reason, or Refused


def _input(device: str) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, device=device, dtype=torch.float32)


def _call(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    return step(x)


def _nothing() -> None:
    return None


@dataclass
class Scene:
    """One model, and what its program does.

    Attributes:
        model: takes x f32[rows, WIDTH] and returns tensors.
        change: what the program does after the graphs were captured.
        undo: restores what ``change`` left in the process.
        around: entered around each call, of eager too.
        inputs: makes the input of a call, f32[rows, WIDTH] on ``device``.
        call: calls the step with an input.
        metadata: makes the metadata of the forward context of a call.
        state: tensors that a call writes; compared with those of the eager model.
    """

    model: Any
    change: Callable[[], None] = _nothing
    undo: Callable[[], None] = _nothing
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    inputs: Callable[[str], torch.Tensor] = _input
    call: Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any] = _call
    metadata: Callable[[], Any] = dict
    state: Callable[[], list[torch.Tensor]] = list


@dataclass(frozen=True)
class Row:
    """One hazard.

    Attributes:
        name: what the program changes.
        build: makes the scene for a device; called twice, for the front end and for eager.
        expect: the outcome of columns; RIGHT if left out. Keys are a column or a tuple of columns,
            and later ones override earlier ones. A step that no graph serves has its reason or
            error here as well.
        on_cuda: outcomes that only CUDA has.
        grad: the mode of gradients of all calls.
        settings: fields of CompilationConfig.
        devices: where the row can run.
        same_graphs: the change needs no other graph: each call after it is a replay.
    """

    name: str
    build: Callable[[str], Scene]
    expect: Mapping[Any, Outcome] = field(default_factory=dict)
    on_cuda: Mapping[Any, Outcome] = field(default_factory=dict)
    grad: Callable[[], AbstractContextManager[Any]] = torch.inference_mode
    settings: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    same_graphs: bool = False

    def outcome(self, name: str, device: str) -> Outcome:
        """Return the outcome that a column must have."""
        assert name in COLUMNS
        outcome: Outcome = RIGHT
        expect = [*self.expect.items(), *(self.on_cuda.items() if device == "cuda" else ())]
        for columns, value in expect:
            if name == columns or (isinstance(columns, tuple) and name in columns):
                outcome = value
        if name == "breakable" and outcome is not ABSENT:
            return Reason.NO_CONTEXT  # it never replays
        return outcome


@contextmanager
def _scenes(row: Row, device: str) -> Iterator[tuple[Scene, Scene]]:
    """Make the scene of the front end and that of eager, of equal numbers."""
    scenes = []
    for _ in range(2):
        torch.manual_seed(0)
        scenes.append(row.build(device))
    try:
        yield scenes[0], scenes[1]
    finally:
        for scene in reversed(scenes):
            scene.undo()


def _agrees(scene: Scene, eager: Scene, front: FrontEnd, device: str) -> bool:
    """Call both on one new input; return whether results and state are equal."""
    x = eager.inputs(device)
    with eager.around(), context(metadata=eager.metadata()):
        wanted = eager.call(eager.model, x.clone(memory_format=torch.preserve_format))
    with scene.around():
        result = scene.call(front.step, x)
    try:
        torch.testing.assert_close(result, wanted)
        torch.testing.assert_close(scene.state(), eager.state())
        assert result.requires_grad == wanted.requires_grad
    except AssertionError:
        return False
    return True


def _plain_since(before: Counters, now: Counters) -> list[Reason]:
    return [reason for reason in now.plain - before.plain if reason not in _PREPARING]


def observe(row: Row, name: str, device: str) -> Outcome:
    """Run a row on a column; return RIGHT, STALE, the class of an error, or a Reason.

    Raises:
        AssertionError: a result is wrong before the change, or nothing was replayed there and
            nothing is counted for it.
    """
    with _scenes(row, device) as (scene, eager), row.grad():
        front = column(name, scene.model, device, scene.metadata, **row.settings)
        changed = False
        try:
            for number in range(CALLS):
                right = _agrees(scene, eager, front, device)
                assert right, f"call {number} before the change is wrong"
            changed = True
            return _after_the_change(row, device, scene, eager, front)
        except Exception as error:
            if type(error).__module__ != "cgcompile.errors":
                raise
            return type(error) if changed else Refused(type(error))


def _after_the_change(
    row: Row, device: str, scene: Scene, eager: Scene, front: FrontEnd
) -> Outcome:
    before = front.counters()
    with torch.inference_mode(False):  # Dynamo tells tensors that are made in it from others
        eager.change()
        scene.change()
    if not all([_agrees(scene, eager, front, device) for _ in range(CALLS)]):
        return STALE
    now = front.counters()
    reasons = _plain_since(before if before.replays else Counters(), now)
    if not before.replays:
        assert reasons, f"nothing was replayed before the change: {before}"
    if row.same_graphs and not reasons:
        assert (now.captures, now.replays) == (before.captures, before.replays + CALLS)
    return reasons[0] if reasons else RIGHT


def in_another_thread(step: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    """Call a step in a thread of its own, under the caller's grad mode; raise what it raises."""
    return in_threads([lambda: step(x)])[0]


def in_threads(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call functions in a thread each, under the caller's grad mode; raise what one raises.

    The threads begin together.
    """
    done: dict[int, Any] = {}
    errors: list[Exception] = []
    barrier = threading.Barrier(len(functions))
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(index: int) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad and not inference):
            try:
                barrier.wait(PATIENCE)
                done[index] = functions[index]()
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [done[index] for index in range(len(functions))]


def cell(outcome: Outcome) -> str:
    """Return an outcome as text."""
    if isinstance(outcome, Refused):
        return f"refused: {cell(outcome.error)}"
    return outcome.value if isinstance(outcome, Reason) else getattr(outcome, "__name__", outcome)
