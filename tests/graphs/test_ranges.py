"""Names of pieces and breaks in profilers, and what a replay pays while nobody looks: nothing."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lib.breakable import (
    FULL,
    PIECEWISE,
    Asked,
    eager_break_during_capture,
    in_thread,
    rand,
    soft,
    step,
)
from lib.entry import HOOKED, Hooked, assert_same, backend_for, batch, compiled_model, marked
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CompilationConfig, CUDAGraphWrapper
from cgcompile.errors import CaptureError
from cgcompile.graphs import GraphSequence
from cgcompile.graphs.sequence import OBSERVERS, EagerSegment, GraphSegment, Slot

pytestmark = pytest.mark.usefixtures("without_gradients")

CONFIG = CompilationConfig(capture_device="host")
OF_A_STEP = [
    "cgcompile/step [num_tokens=6]",
    "cgcompile/piece_0 [num_tokens=6]",
    "cgcompile/break_1 cgentry::hooked",
    "cgcompile/piece_2 [num_tokens=6]",
]


class Blocks(nn.Module):
    """Two breaks between plain code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = cut(x.sin()) + 1
        return x


cut = eager_break_during_capture(soft)


class Log:
    """Ranges as they open and close; at most ``depth`` were open at once."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.open = self.depth = 0

    def push(self, name: str) -> None:
        self.opened.append(name)
        self.open += 1
        self.depth = max(self.depth, self.open)

    def pop(self) -> None:
        self.open -= 1
        assert self.open >= 0


@pytest.fixture
def log() -> Log:
    return Log()


def ranges(log: Log) -> Any:
    return cgcompile.debug.tracing_ranges(log.push, log.pop)


def profiled(run: Callable[[], Any]) -> Counter[str]:
    with torch.profiler.profile() as profiler:
        run()
    host = torch.autograd.DeviceType.CPU
    events = [each for each in profiler.events() if each.device_type == host]
    return Counter(each.name for each in events if each.name.startswith("cgcompile/"))


# ---------------------------------------------------------------- names


def test_pieces_and_breaks_have_names_in_torch_s_profiler(device: str) -> None:
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED)
    x = batch(device)
    for _ in range(3):
        assert_same(compiled(x), model(x))
    assert backend.counters.replays == 1
    new = batch(device)
    results: list[torch.Tensor] = []

    def run() -> None:
        results.extend([compiled(x), compiled(new)])

    assert profiled(run) == dict.fromkeys(OF_A_STEP, 2)
    assert_same(results, [model(x), model(new)])
    assert not torch.equal(*results)


def test_breaks_have_one_name_for_all_batches() -> None:
    model, compiled, _ = compiled_model(Hooked, "cpu", **HOOKED)
    sizes = [marked(batch("cpu", size)) for size in (6, 3)]
    for x in 3 * sizes:
        assert_same(compiled(x), model(x))
    counts = profiled(lambda: [compiled(x) for x in sizes])
    assert counts["cgcompile/break_1 cgentry::hooked"] == 2
    assert counts["cgcompile/piece_0 [num_tokens=6]"] == counts["cgcompile/piece_0 [num_tokens=3]"]
    assert len(counts) == 7


@pytest.mark.parametrize("mode", [PIECEWISE, FULL], ids=lambda mode: mode.name)
def test_names_without_tracing(device: str, mode: Any) -> None:
    model = BreakableCUDAGraphWrapper(Blocks(), CONFIG, mode)
    x = rand(device=device)
    with step(4, mode):
        model(x)
        assert (
            profiled(lambda: model(x))
            == {
                PIECEWISE: {
                    "cgcompile/Blocks [num_tokens=4]": 1,
                    "cgcompile/piece_0 [num_tokens=4]": 1,
                    "cgcompile/break_1 soft": 1,
                    "cgcompile/piece_2 [num_tokens=4]": 1,
                    "cgcompile/break_3 soft": 1,
                    "cgcompile/piece_4 [num_tokens=4]": 1,
                },
                FULL: {"cgcompile/Blocks [num_tokens=4]": 1},  # one graph: no range around it
            }[mode]
        )


def test_what_is_no_splitting_op_is_named_by_its_reason() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        with cgcompile.eager_region():
            x = x.cos()
        return x.sin() + 1

    backend = backend_for()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(6, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), x.sin().cos().sin() + 1)
    (recording,) = backend.graphs[-1].recordings
    assert recording.sequence.labels == (
        "cgcompile/piece_0 [num_tokens=6]",
        "cgcompile/break_1 eager_region",
        "cgcompile/piece_2 [num_tokens=6]",
    )


def test_ranges_of_another_profiler(log: Log) -> None:
    model, compiled, _ = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu")
    for _ in range(2):
        compiled(x)
    with ranges(log):
        assert log.opened == ["cgcompile/ranges"]  # tried once on entering
        assert_same(compiled(x), model(x))
        compiled(x)
    assert log.opened == ["cgcompile/ranges", *OF_A_STEP, *OF_A_STEP]
    assert (log.open, log.depth) == (0, 2)
    compiled(x)
    assert len(log.opened) == 9


def test_a_break_that_raises_closes_its_ranges(hook: Callable[[Any], None], log: Log) -> None:
    model, compiled, _ = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu")
    for _ in range(3):
        compiled(x)

    def refuse(x: torch.Tensor) -> torch.Tensor:
        raise Asked("break")

    with ranges(log):
        hook(refuse)
        with pytest.raises(Asked):
            compiled(x)
        assert (log.open, len(log.opened)) == (0, 4)
        hook(torch.sin)
        assert_same(compiled(x), model(x))
    assert (log.open, len(log.opened)) == (0, 8)


def test_only_the_thread_that_asked_is_seen(log: Log) -> None:
    wrapper = CUDAGraphWrapper(torch.sin, CONFIG)
    wrapper.allow_threads()
    x = torch.rand(4)

    def replay() -> torch.Tensor:
        with step(4, FULL):
            return wrapper(x).clone()

    replay()
    with ranges(log):
        result, _ = in_thread(replay)
        assert torch.equal(result, x.sin())
        assert log.opened == ["cgcompile/ranges"]
        replay()
    assert log.opened == ["cgcompile/ranges", "cgcompile/sin [num_tokens=4]"]
    assert wrapper.counters.replays == 2


def test_without_nvtx_the_context_is_an_error(log: Log) -> None:
    def push(name: str) -> None:
        raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")

    entered = False
    with (
        pytest.raises(CaptureError, match="no NVTX"),
        cgcompile.debug.tracing_ranges(push, log.pop),
    ):
        entered = True
    assert not entered
    assert OBSERVERS.get() == ()


@pytest.mark.gpu
def test_nvtx_changes_no_result() -> None:
    model, compiled, backend = compiled_model(Hooked, "cuda", **HOOKED)
    for _ in range(2):
        compiled(batch("cuda"))
    with cgcompile.debug.tracing_ranges():
        x = batch("cuda")
        assert_same(compiled(x), model(x))
    assert backend.counters.replays == 1


# ---------------------------------------------------------------- the cost while nobody looks


def executed(run: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """How many Python instructions ran in each function, and how often each was called."""
    instructions: Counter[str] = Counter()
    calls: Counter[str] = Counter()

    def traced(frame: Any, event: str, argument: Any) -> Any:
        name = frame.f_code.co_name
        frame.f_trace_opcodes = True
        calls[name] += event == "call"
        instructions[name] += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        run()
    finally:
        sys.settrace(before)
    return instructions, calls


def sequence_of(graphs: int, breaks: int) -> GraphSequence:
    """Its steps are functions of C, so that all instructions are the replay's own."""
    nothing: dict[Any, Any] = {}
    segments = [GraphSegment(str(k), SimpleNamespace(replay=nothing.clear)) for k in range(graphs)]
    return GraphSequence([*segments, *[EagerSegment("b", nothing.clear) for _ in range(breaks)]])


def bare(steps: Any) -> None:
    for call in steps:
        call()


@pytest.mark.parametrize("breaks", [0, 16])
def test_a_segment_costs_what_it_costs_in_a_bare_loop(breaks: int) -> None:
    executed(lambda: None)  # Python 3.12 traces no instructions at the first time
    totals = []
    for graphs in (8, 40):
        sequence = sequence_of(graphs, breaks)
        instructions, calls = executed(sequence.replay)
        assert calls == {"replay": 1}, "whether a profiler runs is read in C, once a step"
        floor = executed(lambda steps=sequence.steps: bare(steps))[0]["bare"]
        totals.append((instructions.total(), floor))
    (few, few_bare), (many, many_bare) = totals
    assert many - few == many_bare - few_bare > 0
    assert many - many_bare <= 56  # slots, rows, the profiler: the same for any number


def test_a_replayed_step_of_a_model_asks_once() -> None:
    model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu")
    for _ in range(3):
        compiled(x)
    (recording,) = backend.graphs[-1].recordings
    results: list[torch.Tensor] = []

    def run() -> None:
        results.append(compiled(x))

    _, calls = executed(run)
    # Of the call, the recording, two graphs, and the sequence.
    assert calls["replay"] == 5
    assert not {"run_observed", "around", "_entered", "labels", "label"} & set(calls)
    assert "labels" not in vars(recording.sequence), "no name was made"
    _, looked = executed(lambda: profiled(run))
    assert looked["run_observed"] == 1
    assert looked["around"] == len(recording.sequence.segments) + 1
    assert_same(results, [model(x)] * 2)


@pytest.fixture(autouse=True)
def nobody_looks_after() -> Iterator[None]:
    yield
    assert OBSERVERS.get() == ()


def test_slots_and_rows_are_the_same_while_somebody_looks(log: Log) -> None:
    """Both loops put the same values in place, padded or not."""
    rows = torch.zeros(4)
    sum_slot = Slot(1)
    sequence = GraphSequence(
        [
            EagerSegment(
                "fill",
                lambda x: (rows.fill_(x), x + 1),
                (Slot(0),),
                stores=((1, sum_slot),),
                tails=(rows,),
            ),
            EagerSegment("look", lambda y: (), (sum_slot,)),
        ],
        inputs=[(Slot(0), 0)],
        slots=2,
        kept=[sum_slot],
        rows=4,
    )
    for real, expected in ((None, [7.0, 7.0, 7.0, 7.0]), (2, [7.0, 7.0, 0.0, 0.0])):
        plain = list(sequence.replay([7.0], real))
        assert rows.tolist() == expected
        rows.zero_()
        with ranges(log):
            assert list(sequence.replay([7.0], real)) == plain == [7.0, 8.0]
        assert rows.tolist() == expected
    assert log.opened.count("cgcompile/break_0 fill") == 2
