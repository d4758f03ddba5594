"""coverage(): the numbers are those of what ran, as a test counts it by itself; strict raises."""

import json
import random
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import entry_points
from types import FrameType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from lib import manager as ms
from lib.debug import names_of
from lib.encoders import H, Rows, config, manager, rows
from lib.entry import HOOKED, Hooked, batch, compiled_model, marked
from lib.snapshots import assert_snapshot
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, Reason, coverage, set_forward_context
from cgcompile.debug.coverage import CoverageRow
from cgcompile.encoder import Costs
from cgcompile.errors import ConfigError, DispatchError
from cgcompile.runtime.recording import Recording

FULL = CUDAGraphMode.FULL


def step(tokens: int, mode: CUDAGraphMode = FULL, **more: Any) -> Any:
    batch = BatchDescriptor(tokens)
    return set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch, **more)


def size_of(row: CoverageRow) -> int:
    return int(row.graph.split("num_tokens=")[1].split(",")[0])


def small(**settings: Any) -> Any:
    return cgcompile.compile(
        nn.Linear(4, 4),
        compiler="eager",
        capture_device="host",
        dynamic_dims={"input": 0},
        **settings,
    )


# ------------------------------------------------------------------ managers


def served(lengths: tuple[int, ...], decode: bool) -> tuple[str, int]:
    """(mode, padded tokens) of a batch in mode FULL_AND_PIECEWISE, by the documents alone."""
    tokens = sum(lengths)
    enough = [size for size in ms.SIZES if size >= tokens]
    if decode and tokens <= ms.MAX_REQS:
        return "FULL", min(enough)
    return ("PIECEWISE", min(enough)) if enough else ("NONE", tokens)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_a_manager_counts_what_ran(kind: str) -> None:
    graph_manager = ms.manager(kind=kind)
    graph_manager.capture()
    before = coverage(graph_manager).counters
    hits: Counter[tuple[str, int]] = Counter()
    real: Counter[tuple[str, int]] = Counter()
    draw = random.Random(7)
    for _ in range(80):
        decode = draw.random() < 0.5
        lengths = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        lengths = (1,) * draw.randint(1, ms.MAX_REQS) if decode else lengths
        graph_manager.run(ms.requests(*lengths, decode=decode))
        key = served(lengths, decode)
        hits[key] += 1
        real[key] += sum(lengths)
    summary = coverage(graph_manager)
    assert {mode for mode, _ in hits} == {"FULL", "PIECEWISE", "NONE"}
    for row in summary.rows:
        if row.graph is not None:
            key = row.mode, size_of(row)
            assert (row.hits, row.captured, row.real) == (hits[key], True, real[key])
            waste = 1 - real[key] / (hits[key] * key[1]) if hits[key] else None
            assert row.padding == (waste if waste is None else pytest.approx(waste))
    plain = sum(count for (mode, _), count in hits.items() if mode == "NONE")
    (without,) = [row for row in summary.rows if row.graph is None]
    assert (without.mode, without.reason, without.hits) == ("NONE", "oversize", plain)
    assert (summary.total, summary.on_graphs) == (80, 80 - plain)
    # What the graphs themselves have counted: one replay for each step.
    assert summary.counters.replays - before.replays == summary.on_graphs
    ran = sum(count * size for (mode, size), count in hits.items() if mode != "NONE")
    rows_real = sum(count for (mode, _), count in real.items() if mode != "NONE")
    assert summary.padding == pytest.approx(1 - rows_real / ran)


def test_a_lazy_manager_counts_the_warming_step_as_plain() -> None:
    graph_manager = ms.manager(lazily=True)
    for _ in range(4):
        graph_manager.run(ms.requests(3))
    summary = coverage(graph_manager)
    ran = [(row.mode, row.hits, row.reason) for row in summary.rows if row.hits]
    assert ran == [("PIECEWISE", 3, None), ("NONE", 1, "warming")]
    assert (summary.counters.captures, summary.counters.replays) == (1, 2)


# ------------------------------------------------------------------ models


def test_graph_breaks_of_dynamo_are_named() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if y.sum() > 100:
            y = y / 2
        return y.cos()

    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    compiled = torch.compile(branches, backend=backend)
    with torch.inference_mode():
        compiled(torch.randn(3, 4))
    summary = coverage(backend)
    line = branches.__code__.co_firstlineno + 2
    assert summary.graphs == 2
    assert len(summary.breaks) == 1
    assert summary.breaks[0].endswith(f"(test_coverage.py:{line})")
    assert "2 compiled graphs, 1 graph break of Dynamo" in str(summary)
    assert summary.to_dict()["breaks"] == list(summary.breaks)
    whole = small()
    with torch.inference_mode():
        whole(torch.randn(3, 4))
    assert (coverage(whole).graphs, coverage(whole).breaks) == (1, ())
    assert "Dynamo" not in str(coverage(whole))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x.sin())[0]


class Assigned(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.sin().exp()
        y, _ = self.rnn(x)
        return y.cos()


@pytest.mark.parametrize(
    ("kind", "graphs", "text"),
    [
        (Recurrent, False, ": Attempted to wrap RNN, GRU, or LSTM (test_coverage.py:"),
        (Assigned, True, "Dynamo cannot trace 'y, _ = self.rnn(x)' (test_coverage.py:"),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_what_dynamo_gives_up_is_named(
    kind: type[nn.Module],
    graphs: bool,
    text: str,
    named: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A count, one warning, and the reason with torch's hint, wherever calls are counted."""
    options = {"compiler": "eager", "capture_device": "host", "max_captured_shapes": 37 + graphs}
    model = kind().eval()
    if named:  # as in a process that has not looked it up
        registry = torch._dynamo.backends.registry
        entry = next(iter(entry_points(group="torch_dynamo_backends", name="cgcompile")))
        monkeypatch.setitem(registry._BACKENDS, "cgcompile", entry)  # 2.11 forgets what it loaded
        monkeypatch.delitem(registry._COMPILER_FNS, "cgcompile", raising=False)
        compiled = torch.compile(model, backend="cgcompile", options=options)
    else:
        compiled = torch.compile(model, backend=cgcompile.Backend(**options, on_fallback="raise"))
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(5, 3, 4)
            torch.testing.assert_close(compiled(x), model(x))
    backend = cgcompile.runtime(compiled)
    summary = coverage(backend)
    assert bool(summary.graphs) is graphs
    (row,) = [each for each in (*summary.breaks, *summary.given_up) if text in each]
    assert bool(summary.breaks) is graphs
    assert bool(summary.given_up) is not graphs
    assert ("Hint: Set torch._dynamo.config.allow_rnn=True" in row) is not graphs
    assert ("Dynamo compiled nothing of" in str(summary)) is not graphs
    warnings = [text for text in caplog.messages if text.startswith("Dynamo compiled nothing of")]
    assert backend.counters.degraded[Reason.NOT_COMPILED] == len(warnings) == (not graphs)
    if graphs:
        return
    line = kind.forward.__code__.co_firstlineno
    assert row.startswith(f"Dynamo compiled nothing of forward (test_coverage.py:{line}): Attemp")
    assert row in warnings[0]
    assert "not_compiled: " + row in str(backend.counters)
    assert "Dynamo compiled nothing of 1 function" in repr(backend)
    assert row in str(cgcompile.verify(compiled, x))
    with pytest.raises(DispatchError) if not named else nullcontext() as error:
        report = backend.capture(lambda _: compiled(x), [3])
    assert row in (str(report) if error is None else str(error.value))


def test_code_that_dynamo_gave_up_for_another_handle() -> None:
    """Dynamo skips it for all backends then, without a callback."""
    first, second = (cgcompile.Backend(compiler="eager", capture_device="host") for _ in range(2))
    x = torch.randn(5, 3, 4)
    for backend in (first, second):
        torch.compile(Recurrent().eval(), backend=backend)(x)
    assert second.counters.calls == 0
    (text,) = coverage(second).given_up
    assert text.startswith("in this process, for any model, Dynamo compiled nothing of forward (")
    (text,) = coverage(first).given_up
    assert text.startswith("Dynamo compiled nothing of forward (")


def test_a_function_that_is_nothing_but_a_break() -> None:
    """From torch 2.15 on no failure of a compilation, such as a bare LSTM."""
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.counters.clear()
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    assert not coverage(backend).given_up
    text = "Unsupported call\n  Explanation: Dynamo does not support LSTM\n\n  context"
    torch._dynamo.utils.counters["graph_break"][text] = 1
    (row,) = coverage(backend).given_up
    assert row.endswith(
        "of a function: Unsupported call. Explanation: Dynamo does not support LSTM"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_that_dynamo_may_trace_are_captured(kind: type[nn.Module]) -> None:
    model = kind(4, 4).eval()
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    with torch._dynamo.config.patch(allow_rnn=True), torch.inference_mode():
        compiled = torch.compile(model, backend=backend)
        for _ in range(4):
            x = torch.randn(5, 3, 4)
            torch.testing.assert_close(compiled(x)[0], model(x)[0])
    assert backend.counters.replays == 2
    assert not coverage(backend).breaks
    with pytest.raises(cgcompile.CGCompileError, match=r"LSTM[\s\S]*allow_rnn=True"):
        cgcompile.compile(nn.Sequential(kind(4, 4)), backend)(torch.randn(5, 3, 4))


def test_a_reason_names_the_call() -> None:
    """By the shapes of its inputs, by its descriptor, or by the name of what ran."""
    model = small()
    for size in (3, 5):
        model(torch.randn(size, 4))
    (row,) = coverage(model).rows
    assert row.reason == "gradients"
    assert row.detail.endswith("; last call: input [5, 4]")
    with torch.inference_mode(), step(7, CUDAGraphMode.NONE):
        model(torch.randn(7, 4))
    _, row = coverage(model).rows
    assert row.detail == "the forward context has runtime mode NONE; last call: num_tokens=7"
    wrapper = cgcompile.BreakableCUDAGraphWrapper(nn.Linear(4, 4), model.backend.config)
    with torch.inference_mode(), step(9, CUDAGraphMode.NONE):
        wrapper(torch.randn(9, 4))
    (row,) = coverage(wrapper).rows
    assert row.detail.endswith("; last call: num_tokens=9")
    model.backend.close_capture()
    with torch.inference_mode(), step(6):
        model(torch.randn(6, 4))
    forbidden = coverage(model).rows[-1]  # which has the descriptor already
    assert forbidden.detail == "no graph for num_tokens=6, and capture is closed"


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["torch", "cgcompile"])
def test_a_forbidden_capture_names_the_mode_that_has_a_graph(entry: str) -> None:
    backend = cgcompile.Backend(capture_device="host", compiler="eager")
    module, x = nn.Linear(4, 4), torch.randn(6, 4)
    model: Any = (
        torch.compile(module, backend=backend, dynamic=True)
        if entry == "torch"
        else cgcompile.compile(module, backend, dynamic_dims={"input": 0})
    )

    def run(size: int, mode: Any = torch.inference_mode) -> None:
        with mode(), step(size):
            model(x[:size])

    assert not backend.capture(run, [6]).missing
    backend.close_capture()
    run(6, torch.no_grad)
    bare = "no graph for num_tokens=6, and capture is closed"
    detail = f"{bare}; it has one in inference_mode, and this call is in no_grad"
    assert backend.counters.details[Reason.CAPTURE_FORBIDDEN] == detail
    for mode in (torch.no_grad, torch.inference_mode):  # that size has none in any mode
        run(5, mode)
        assert backend.counters.details[Reason.CAPTURE_FORBIDDEN] == bare.replace("6", "5")
    other = torch.compile(nn.Linear(4, 4), backend=backend, dynamic=True)  # of the same handle
    with torch.no_grad(), step(6):
        other(x)
    assert backend.counters.details[Reason.CAPTURE_FORBIDDEN] == bare


def test_a_model_counts_what_ran() -> None:
    model = small(max_captured_shapes=4)
    calls: Counter[int] = Counter()
    captured: set[int] = set()
    plain: Counter[str] = Counter()
    draw = random.Random(3)
    with torch.inference_mode():
        for _ in range(60):
            x = torch.randn(draw.randint(2, 8), 4)
            torch.testing.assert_close(model(x), model.unwrap()(x))
            # The first call warms up, the second captures, if there is still room.
            if len(x) in captured:
                calls[len(x)] += 1
            elif len(captured) == 4:
                plain["too_many_shapes"] += 1
            elif calls[len(x)] == 0:
                plain["warming"] += 1
                calls[len(x)] = 1
            else:
                captured.add(len(x))
    summary = coverage(model)
    graphs = {size_of(row): row.hits for row in summary.rows if row.graph}
    assert graphs == {size: calls[size] for size in captured}
    assert {row.reason: row.hits for row in summary.rows if row.reason} == plain
    assert (summary.total, summary.on_graphs) == (60, sum(graphs.values()))
    assert summary.counters.calls == 60
    assert coverage(model.backend) == summary


def test_padding_of_a_model_is_what_callers_say() -> None:
    model, x = small(num_warmups=0), torch.randn(8, 4)
    with torch.inference_mode():
        for real in (5, 8, 2):  # the first step captures
            with step(8, num_unpadded_tokens=real):
                model(x)
    (row,) = coverage(model).rows
    assert (row.mode, row.hits, row.batches) == ("FULL", 3, "8 tokens")
    assert row.padding == pytest.approx(9 / 24)
    model.backend.release()
    (dropped,) = coverage(model).rows
    assert (dropped.captured, dropped.hits) == (False, 3)


def test_a_wrapper_counts_what_ran() -> None:
    settings = cgcompile.CompilationConfig(capture_device="host")
    wrapper, x = cgcompile.CUDAGraphWrapper(nn.Linear(4, 4), settings), torch.randn(2, 4)
    with torch.inference_mode():
        wrapper(x)
        for _ in range(5):
            with step(2):
                wrapper(x)
    ran = [(row.mode, row.hits, row.reason) for row in coverage(wrapper).rows]
    assert ran == [("FULL", 5, None), ("NONE", 1, "no_forward_context")]


MAKERS = {
    "plain": cgcompile.CUDAGraphWrapper,
    "breakable": cgcompile.BreakableCUDAGraphWrapper,
    "compiled": cgcompile.compile,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_all_captures_of_a_batch_are_there(kind: str) -> None:
    """With ``recapture`` a batch has one for each place of its inputs."""
    settings = cgcompile.CompilationConfig(
        capture_device="host", compiler="eager", on_input_change="recapture", num_warmups=0
    )
    mode = CUDAGraphMode.PIECEWISE if kind == "compiled" else FULL
    model, xs = MAKERS[kind](nn.Linear(8, 8), settings), [torch.randn(4, 8) for _ in range(3)]
    with torch.inference_mode():
        for x in (*(xs[i] for i in (0, 1, 0, 1, 2, 0, 0)), xs[0][:2]):
            with step(len(x), mode):
                model(x)
    summary = coverage(model)
    assert (summary.total, summary.on_graphs, summary.counters.captures) == (8, 8, 4)
    of_size = {size: [r for r in summary.rows if size_of(r) == size] for size in (4, 2)}
    assert sorted(row.hits for row in of_size[4]) == [1, 2, 4]
    assert [row.detail[:15] for row in of_size[4]] == [f"capture {n} of 3:" for n in (1, 2, 3)]
    assert [(row.hits, row.detail, row.captured) for row in of_size[2]] == [(1, "", True)]
    assert len(summary.rows) == 4


@pytest.mark.usefixtures("without_gradients")
def test_steps_in_a_lesser_mode_are_there_twice() -> None:
    _, compiled, _ = compiled_model(Hooked, "cpu", **HOOKED)
    x = batch("cpu", 6)
    for _ in range(4):
        with step(6):
            compiled(x)
    summary = coverage(compiled)
    assert (summary.total, summary.on_graphs) == (4, 3)
    assert [(row.mode, row.hits) for row in summary.rows] == [("PIECEWISE", 3), ("NONE", 1)]
    (lesser,) = summary.lesser
    assert (lesser.reason, lesser.hits) == ("attention_support", 4)
    apart = str(summary).split("\nof these, in a lesser mode than requested:\n")
    assert [text.count(lesser.detail) for text in apart] == [0, 1]


@pytest.mark.usefixtures("without_gradients")
def test_captures_in_another_thread_while_rows_are_listed() -> None:
    _, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    for size in (6, 6, 7, 7):
        compiled(marked(batch("cpu", size)))
    assert backend.counters.captures == 2
    met: list[Recording] = []

    def capture_more(frame: FrameType, event: str, value: Any) -> Any:
        """Capture between two of the recorded steps, as another thread could."""
        if event == "return" and isinstance(value, Recording) and not met:
            met.append(value)
            for _ in range(2):
                compiled(marked(batch("cpu", 8)))
        return capture_more

    before = sys.gettrace()
    sys.settrace(capture_more)
    try:
        summary = coverage(backend)
    finally:
        sys.settrace(before)
    assert met
    assert backend.counters.captures == 3
    assert {"6 tokens", "7 tokens"} <= {row.batches for row in summary.rows}


# ------------------------------------------------------------------ encoders

BUDGETS = (8, 16, 32)


def encoder(**more: Any) -> Any:
    return manager(Rows(), token_budgets=list(BUDGETS), **more)


def test_an_encoder_counts_what_ran() -> None:
    encoder_manager = encoder()
    hits: Counter[int] = Counter()
    real: Counter[int] = Counter()
    draw = random.Random(5)
    for _ in range(40):
        tokens = draw.randint(1, 40)
        encoder_manager.execute(rows(tokens))  # alone, so that the least budget is the cheapest
        budget = min((size for size in BUDGETS if size >= tokens), default=0)
        hits[budget] += 1
        real[budget] += tokens
    summary = coverage(encoder_manager)
    assert hits[0]
    *graphs, without = summary.rows
    spans = ("1..8 tokens", "9..16 tokens", "17..32 tokens")
    for row, span, budget in zip(graphs, spans, BUDGETS, strict=True):
        assert (row.batches, row.graph, row.hits) == (span, f"budget {budget}", hits[budget])
        assert row.padding == pytest.approx(1 - real[budget] / (hits[budget] * budget))
    assert (without.graph, without.reason, without.hits) == (None, "oversize", hits[0])
    assert (summary.total, summary.on_graphs, summary.unit) == (40, 40 - hits[0], "items")
    assert summary.counters.replays == summary.on_graphs
    data = summary.to_dict()
    encoder_manager.execute(rows(1))
    assert summary.to_dict() == data != coverage(encoder_manager).to_dict()  # of one moment


# ------------------------------------------------------------------ how it prints


def test_how_it_prints() -> None:
    graph_manager = ms.manager("FULL_DECODE_ONLY")
    graph_manager.capture()
    for lengths, decode in (((1, 1, 1), True), ((5, 4), False)):
        graph_manager.run(ms.requests(*lengths, decode=decode))
    text = str(coverage(graph_manager))
    assert_expected_inline(
        text,
        """\
batches                    mode  graph                                   padding  hits
decode, 1 request x 1      FULL  num_tokens=1, num_reqs=1, uniform=True  -        0
decode, 2 requests x 1     FULL  num_tokens=2, num_reqs=2, uniform=True  -        0
decode, 3..4 requests x 1  FULL  num_tokens=4, num_reqs=4, uniform=True  25.0%    1
decode, 5..8 requests x 1  FULL  num_tokens=8, num_reqs=8, uniform=True  -        0
9 tokens                   NONE  -                                       -        1
          mixed_batch: mode FULL_DECODE_ONLY has graphs for decode alone
1 of 2 steps on graphs, 25.0% of their rows padding""",
    )
    assert max(map(len, text.splitlines())) <= 100


def test_batches_of_a_missing_graph_are_in_the_row_of_the_next() -> None:
    graph_manager = ms.manager()
    graph_manager.capture()
    for mode, key in graph_manager.dispatcher.plan():
        if key.num_tokens in (1, 2, 4):
            graph_manager.dispatcher.refused(mode, key, "a test")
    graph_manager.run(ms.requests(2, 1))
    graph_manager.run(ms.requests(1, decode=True))
    text = str(coverage(graph_manager))
    assert_expected_inline(
        text,
        """\
batches                    mode       graph                                   padding  hits
decode, 1..8 requests x 1  FULL       num_tokens=8, num_reqs=8, uniform=True  87.5%    1
1..8 tokens                PIECEWISE  num_tokens=8                            62.5%    1
9..16 tokens               PIECEWISE  num_tokens=16                           -        0
2 of 2 steps on graphs, 75.0% of their rows padding
planned, without a graph (tokens): FULL 1, 2, 4; PIECEWISE 1, 2, 4""",
    )
    printed = str(graph_manager.statistics)
    assert printed == graph_manager.statistics.coverage()
    assert "1..8 tokens                PIECEWISE  num_tokens=8 " in printed
    assert "1 token " not in printed
    assert repr(graph_manager.statistics) == "<DispatchStatistics: 2 steps, 2 on graphs>"
    lazy = ms.manager(lazily=True)  # captures its graphs one by one: none is missing
    lazy.run(ms.requests(3))
    assert "5..8 tokens " in str(coverage(lazy))
    assert "planned, without" not in str(coverage(lazy))


def test_a_long_key_leaves_room_for_the_numbers() -> None:
    key = "num_tokens=8, num_reqs=8, uniform=True, has_lora=True, num_active_loras=4, extra=(1, 2)"
    row = CoverageRow("decode, 5..8 requests x 1", "FULL", 3, key, captured=False, real=12, ran=24)
    summary = replace(coverage(small()), rows=(row,))
    head, first, *_ = str(summary).splitlines()
    assert len(first) <= 100
    assert head.split()[-2:] == ["padding", "hits"]
    assert first.split()[-2:] == ["50.0%", "3"]
    assert "... (not captured)" in first


def test_schema() -> None:
    """A change of this snapshot raises VERSION in coverage.py."""
    summary = coverage(encoder())
    data = summary.to_dict()
    assert json.loads(summary.to_json()) == data
    assert data["version"] == 3
    assert_snapshot("coverage_schema", names_of(data))


def test_what_has_no_coverage() -> None:
    with pytest.raises(ConfigError, match="found a Linear"):
        coverage(nn.Linear(2, 2))


# ------------------------------------------------------------------ strict


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_strict_managers_refuse_what_no_graph_serves(kind: str) -> None:
    graph_manager = ms.manager(kind=kind, on_fallback="raise")
    with pytest.raises(DispatchError, match="not_captured"):
        graph_manager.run(ms.requests(3))
    graph_manager.capture()
    assert graph_manager.run(ms.requests(3)).shape == (3, ms.D)
    with pytest.raises(DispatchError, match=r"a batch of 20 tokens would run.*oversize"):
        graph_manager.run(ms.requests(20))
    assert coverage(graph_manager).total == 1  # what was refused did not run
    # Requested, and nothing to run: no error.
    graph_manager.run(ms.requests(3), valid_modes=())
    assert graph_manager.run(None) is None
    assert [row.reason for row in coverage(graph_manager).rows if row.reason] == ["mode_excluded"]


def test_strict_lazy_managers_may_warm_up() -> None:
    graph_manager = ms.manager(lazily=True, on_fallback="raise")
    for _ in range(3):
        graph_manager.run(ms.requests(3))
    assert coverage(graph_manager).counters.captures == 1


def test_a_strict_encoder_refuses_what_would_run_eager() -> None:
    model = Rows()
    encoder_manager = manager(
        model, token_budgets=list(BUDGETS), config=config(on_fallback="raise"), captured=False
    )
    with pytest.raises(DispatchError, match=r"item 0 of an encoder would run.*not_captured"):
        encoder_manager.execute(rows(3))
    encoder_manager.capture()
    ran = model.calls["forward"]
    with pytest.raises(DispatchError, match=r"item 1 of an encoder would run.*oversize: 40 output"):
        encoder_manager.execute(rows(3, 40))
    assert (model.calls["forward"], coverage(encoder_manager).total) == (
        ran,
        0,
    )  # nothing of the call ran
    assert [tuple(out.shape) for out in encoder_manager.execute(rows(3, 20))] == [(3, H), (20, H)]
    assert coverage(encoder_manager).on_graphs == 2


def test_a_strict_encoder_takes_the_cheaper_way() -> None:
    eager_is_free = Costs(fixed=1e6, eager_fixed=0.0)
    encoder_manager = encoder(config=config(on_fallback="raise"), costs=eager_is_free)
    encoder_manager.execute(rows(3))
    (row,) = [row for row in coverage(encoder_manager).rows if row.reason]
    assert (row.reason, row.hits) == ("cheaper_eager", 1)


class Shares:
    """The first of two ranks, which gives the other what the first has not."""

    rank = 0

    def assign(self, sizes: list[int]) -> list[list[int]]:
        return [[0], list(range(1, len(sizes)))]

    def check(self, own: list[Any]) -> None:
        """The other rank has nothing to say."""

    def agree(self, failed: BaseException | None) -> None:
        """It agrees."""

    def gather(self, own: list[Any], shares: Any, empty: Any, rows: Any) -> list[Any]:
        return own


def test_a_strict_encoder_refuses_on_all_ranks() -> None:
    encoder_manager = encoder(config=config(on_fallback="raise"), sharder=Shares())
    assert len(encoder_manager.execute(rows(3, 20))) == 1
    with pytest.raises(DispatchError, match="oversize"):
        encoder_manager.execute(rows(3, 40))  # the large item is another rank's
