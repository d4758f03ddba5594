"""The manager: capture, calls and results, limits, statistics; numbers equal eager."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.encoders import (
    BUDGETS,
    C,
    H,
    Rows,
    check,
    close,
    config,
    counts,
    images,
    manager,
    new_pool,
    one_by_one,
    patches,
    rows,
    videos,
)

import cgcompile
from cgcompile.encoder import Costs, EncoderCudaGraphManager, GraphKey, fitted_budgets
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.manager import _milliseconds
from cgcompile.errors import ConfigError
from cgcompile.reasons import Reason

# ------------------------------------------------------------------ capture


class ReadsOnHost(Rows):
    """One size cannot be captured: the forward reads a value on the host."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        if len(inputs["x"]) == self.size:
            inputs["x"].sum().item()
        return super().encoder_cudagraph_forward(inputs)


def test_one_graph_for_each_budget_largest_first(device: str) -> None:
    encoder = manager(device=device, captured=False, token_budgets=[16, 8, 64])  # in any order
    assert not encoder.is_captured()
    assert [batch.num_tokens for batch in encoder.capture().captured] == [64, 16, 8]
    assert encoder.budget_graphs == [GraphKey("default", size) for size in (64, 16, 8)]
    assert encoder.token_budgets == [8, 16, 64]
    assert encoder.capture().captured == ()  # nothing is missing
    assert encoder.counters.captures == 3
    encoder.get_cumulative_stats()["token_budgets"].clear()
    assert encoder.token_budgets == [8, 16, 64]  # it was a copy


@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("limit", [None, 2**40])
def test_captures_run_in_a_context_and_buffers_are_made_outside(
    limit: int | None, earlier: bool
) -> None:
    """There they have memory of the caller's stream, also if the context changes the stream."""
    inside, seen = [0], set()

    @contextmanager
    def graph_capture() -> Iterator[None]:
        inside[0] += 1
        yield
        inside[0] -= 1

    class Looks(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            seen.add(("buffers", inside[0]))
            return super().prepare_encoder_cudagraph_capture_inputs(*args)

        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            seen.add(("forward", inside[0]))
            return super().encoder_cudagraph_forward(inputs)

    if earlier:
        with pytest.warns(FutureWarning, match="graph_capture is deprecated: use capture"):
            encoder = manager(Looks(), captured=False, graph_capture=graph_capture)
        encoder.capture(max_graph_bytes=limit)
    else:
        encoder = manager(Looks(), captured=False)
        encoder.capture(max_graph_bytes=limit, around=graph_capture)
    assert len(encoder.budget_graphs) == len(BUDGETS)
    trial = set() if limit is None else {("buffers", 1)}  # which are dropped
    assert seen == {("forward", 1), ("buffers", 0), *trial}


def test_without_graphs_calls_run_eager(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device, captured=False)
    call = images((4, 4), (8, 8), device=device)
    kept = [result.clone() for result in check(encoder, model, call)]
    assert (counts(encoder), encoder.counters.captures) == ((0, 2), 0)
    encoder.capture()
    inputs = encoder.graph_inputs(GraphKey("default", 8))
    close(check(encoder, model, call), kept)
    encoder.clear()
    assert (encoder.is_captured(), encoder.budget_graphs) == (False, [])
    check(encoder, model, call)
    assert encoder.statistics.reasons() == {Reason.NOT_CAPTURED: 4}
    assert encoder.capture().missing == ()
    assert encoder.graph_inputs(GraphKey("default", 8))["cells"] is not inputs["cells"]
    close(check(encoder, model, call), kept)
    assert counts(encoder) == (4, 4)


def test_without_a_capture_device_calls_run_eager() -> None:
    model = patches()
    encoder = manager(model, config=cgcompile.CompilationConfig(), captured=False)
    assert len(encoder.capture().missing) == len(BUDGETS)
    check(encoder, model, images((4, 4)))
    assert encoder.statistics.reasons() == {Reason.NO_DEVICE: 1}


def test_a_refused_graph_is_named_and_the_others_serve() -> None:
    model = ReadsOnHost(16)
    encoder = manager(model, captured=False)
    ((batch, why),) = encoder.capture().missing
    assert batch.num_tokens == 16
    assert "item" in why
    check(encoder, model, rows(12))
    assert [key.budget for key in encoder.budget_graphs] == [64, 32, 8]
    assert encoder.statistics.as_dict()["graphs"][0]["budget"] == 32
    with pytest.raises(BaseException, match=r"item|on_fallback"):
        manager(ReadsOnHost(16), config=config(on_fallback="raise")).capture()


def test_reasons_without_the_largest_graph() -> None:
    model = ReadsOnHost(64)
    encoder = manager(model, captured=False)
    assert len(encoder.capture().missing) == 1
    check(encoder, model, rows(40))
    check(encoder, model, rows(70))
    assert encoder.statistics.reasons() == {Reason.CAPTURE_FAILED: 1, Reason.OVERSIZE: 1}


# ------------------------------------------------------------------ numbers


SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 4),),
    ((3, 5),),  # odd
    ((1, 1),),  # no output
    ((5, 5), (1, 1), (7, 3), (2, 2)),
    ((4, 4), (2, 6), (8, 2)),  # several in one budget
    ((2, 2),) * 16,  # twice as many as a graph takes
    ((20, 20),),  # larger than every budget
    ((2, 2), (20, 20), (4, 6), (24, 24), (6, 6)),
    (),
)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_call_equals_eager(sizes: Any, device: str) -> None:
    model = patches(device)
    encoder = manager(model, device)
    first = check(encoder, model, images(*sizes, device=device))
    second = check(encoder, model, images(*sizes, device=device))
    assert [list(result.shape) for result in first] == [[h // 2 * (w // 2), H] for h, w in sizes]
    assert {(result.dtype, result.device.type) for result in first} <= {(torch.float32, device)}
    for result, other in zip(first, second, strict=True):
        assert not result.numel() or not torch.equal(result, other)
    large = sum(h // 2 * (w // 2) > 64 for h, w in sizes)
    idle = sum(h < 2 or w < 2 for h, w in sizes)
    assert counts(encoder) == (2 * (len(sizes) - large - idle), 2 * large)
    assert encoder.statistics.idle == 2 * idle
    assert encoder.statistics.reasons() == ({Reason.OVERSIZE: 2 * large} if large else {})
    assert encoder.counters.captures == len(BUDGETS)


def test_items_that_a_changed_setting_keeps_from_their_graph_are_no_hits(device: str) -> None:
    model = Rows()
    encoder = manager(model, device, config=config(device, on_input_change="eager"))
    check(encoder, model, rows(3, 5, device=device))
    replays, call = encoder.counters.replays, rows(3, 5, device=device)
    torch.set_default_dtype(torch.float64)  # which a capture bakes in
    try:
        check(encoder, model, call)
    finally:
        torch.set_default_dtype(torch.float32)
    assert counts(encoder) == (2, 2)
    assert encoder.statistics.reasons() == {Reason.INPUT_CHANGED: 2}
    assert encoder.counters.plain[Reason.INPUT_CHANGED] == 1
    check(encoder, model, rows(3, 5, device=device))
    assert (counts(encoder), encoder.counters.replays) == ((4, 2), replays + 1)


@pytest.fixture(scope="module")
def encoder_of_rows() -> Any:
    model = Rows()
    return manager(model), model


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(st.lists(st.integers(0, 70), max_size=12), min_size=1, max_size=4))
def test_any_calls_equal_eager(encoder_of_rows: Any, calls: list[list[int]]) -> None:
    encoder, model = encoder_of_rows
    replays = encoder.counters.replays
    for lengths in calls:
        check(encoder, model, rows(*lengths))
    fits = [n for lengths in calls for n in lengths if 0 < n <= 64]
    assert (encoder.counters.replays > replays) is bool(fits)


def test_images_and_videos_through_one_manager(device: str) -> None:
    model = patches(device, frames=4)
    encoder = manager(model, device)
    assert encoder.max_frames_per_batch == 4 * encoder.max_batch_size
    for _ in range(2):
        check(encoder, model, images((4, 4), (2, 2), device=device))
        results = check(encoder, model, videos((2, 4, 4), (3, 2, 5), device=device))
        assert [len(result) for result in results] == [8, 6]
    check(encoder, model, videos((4, 2, 2), (4, 16, 16), device=device))  # the second is oversize
    assert counts(encoder) == (9, 1)
    assert len(encoder.budget_graphs) == len(BUDGETS)


def test_several_outputs_of_an_item(device: str) -> None:
    model = patches(device, deep=True)
    encoder = manager(model, device)
    results = check(encoder, model, images((4, 4), (2, 6), (30, 30), (5, 3), device=device))
    deep = [list(result["deep"][0].shape) for result in results]
    assert deep == [[n, 2 * H] for n in (4, 3, 225, 2)]
    assert counts(encoder) == (3, 1)


def test_items_without_tokens_are_not_selected() -> None:
    class Selects(Rows):
        def select_encoder_cudagraph_items(self, mm_kwargs: Any, indices: list[int]) -> Any:
            assert all(mm_kwargs["lengths"][index] for index in indices)
            return super().select_encoder_cudagraph_items(mm_kwargs, indices)

    encoder = manager(Selects())
    assert [len(result) for result in encoder.execute(rows(3, 0, 5, 0))] == [3, 0, 5, 0]
    assert (counts(encoder), encoder.statistics.idle) == ((2, 0), 2)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("sizes", [((1, 1),), ((1, 1), (4, 4)), ((4, 4), (1, 1))])
def test_an_item_without_tokens_has_the_structure_of_others(sizes: Any, captured: bool) -> None:
    encoder = manager(patches(deep=True), captured=captured)
    shapes = [list(result["deep"][0].shape) for result in encoder.execute(images(*sizes))]
    assert shapes == [[h // 2 * (w // 2), 2 * H] for h, w in sizes]
    assert encoder.statistics.idle == 1


def test_the_model_joins_items_without_tokens() -> None:
    class Wraps(Rows):
        def postprocess_encoder_output(
            self, output: Any, indices: Any, counts: Any, dest: Any, **named: Any
        ) -> None:
            assert named["batch_mm_kwargs"]["lengths"] == counts
            for index, part in zip(indices, output.split(counts), strict=True):
                dest[index] = {"features": part, "end": part.new_ones(1)}

    encoder = manager(Wraps())
    results = encoder.execute(rows(3, 0, 5, 0))
    assert [len(result["features"]) for result in results] == [3, 0, 5, 0]
    assert all(result["end"].item() == 1 for result in results)
    assert counts(encoder) == (2, 0)


def test_results_have_the_order_of_the_items(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device)
    sizes = [(2, 2), (16, 8), (4, 4), (20, 20), (6, 2), (8, 8), (3, 3), (2, 10)]
    call = images(*sizes, device=device)
    expected = one_by_one(model, call)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(len(sizes), generator=generator).tolist()
        results = encoder.execute(model.select_encoder_cudagraph_items(call, order))
        close(results, [expected[item] for item in order])


# ------------------------------------------------------------------ items and frames


@pytest.mark.parametrize(
    ("span", "budgets", "items"),
    [
        ((8, 64), [8], 8),
        ((8, 64), [32, 64], 8),
        ((1, 64), [32, 64], 32),
        ((8, 9), [32, 64], 1),
        (None, [16], 1),
        (None, [8, 16], 2),
    ],
)
def test_items_follow_the_range_of_the_model(span: Any, budgets: list[int], items: int) -> None:
    model: Any = Rows() if span is None else patches(budget_range=span)
    encoder = manager(model, token_budgets=budgets)
    assert encoder.max_batch_size == items
    check(encoder, model, rows(*[1] * items) if span is None else images(*[(2, 2)] * items))
    assert (counts(encoder), encoder.statistics.replays) == ((items, 0), 1)
    encoder_manager = manager(model, token_budgets=budgets, max_batch_size=2, captured=False)
    assert encoder_manager.max_batch_size == 2


@pytest.mark.parametrize(
    ("fields", "limit", "frames"),
    [
        ({"max_frames_per_video": 8}, None, 2),  # no videos: one for each item
        ({"max_frames_per_video": 8, "modalities": ["image", "video"]}, None, 16),
        ({"max_frames_per_video": 8, "modalities": ["image", "video"]}, 5, 5),
        ({"max_frames_per_video": 0}, None, 0),
    ],
)
def test_frames_of_a_replay(fields: Any, limit: int | None, frames: int) -> None:
    settings = {"token_budgets": [8, 16], "max_frames_per_batch": limit, "captured": False}
    assert manager(Rows(**fields), **settings).max_frames_per_batch == frames


def test_more_frames_than_a_graph_takes_run_eager(device: str) -> None:
    model = patches(device, frames=4)
    encoder = manager(model, device, max_frames_per_batch=5)
    check(encoder, model, videos((6, 2, 2), device=device))
    assert counts(encoder) == (0, 1)
    check(encoder, model, videos((3, 2, 2), (3, 2, 2), (2, 2, 2), (7, 2, 2), device=device))
    assert counts(encoder) == (3, 2)
    assert encoder.statistics.reasons() == {Reason.TOO_MANY_FRAMES: 2}
    assert encoder.statistics.replays == 2  # 3 and 2 frames, then 3


def test_without_frames_of_videos_each_item_has_one(device: str) -> None:
    model = patches(device, frames=4)
    encoder = manager(model, device, max_frames_per_batch=0)
    assert (encoder.max_frames_per_batch, encoder.max_batch_size) == (0, 8)
    check(encoder, model, images(*[(2, 2)] * 8, device=device))
    assert (counts(encoder), encoder.statistics.replays) == ((8, 0), 1)
    check(encoder, model, videos((9, 2, 2), (8, 2, 2), device=device))  # the first has too many
    assert counts(encoder) == (9, 1)
    plain = Rows(max_frames_per_video=0)
    other = manager(plain)
    check(other, plain, rows(3, 4, 5, frames=[1, 9, 1]))
    for one in (encoder, other):
        assert one.statistics.reasons() == {Reason.TOO_MANY_FRAMES: 1}


# ------------------------------------------------------------------ results and buffers


def test_results_never_alias_a_later_replay(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device)
    calls = [images((4, 4), (2, 6), (2, 2), device=device) for _ in range(4)]
    results = [encoder.execute(call) for call in calls]
    assert encoder.statistics.replays >= 4
    for call, mine in zip(calls, results, strict=True):
        close(mine, one_by_one(model, call))
    tensors = [tensor for mine in results for tensor in mine]
    assert encoder.pool is not None
    assert not any(map(encoder.pool.owns, tensors))
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(storages) == encoder.statistics.replays  # one copy for each replay


def test_graphs_keep_the_tensors_of_the_model(device: str) -> None:
    buffers: dict[int, torch.Tensor] = {}

    class Keeps(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            inputs = super().prepare_encoder_cudagraph_capture_inputs(*args)
            buffers[args[0]] = inputs.values["x"]
            return inputs

    model = Keeps()  # its forward pops from its dictionary
    encoder = manager(model, device, token_budgets=[8, 16])
    addresses = {size: buffer.data_ptr() for size, buffer in buffers.items()}
    for number in range(50):
        check(encoder, model, rows(1 + number % 16, device=device))
    for size, buffer in buffers.items():
        assert encoder.graph_inputs(GraphKey("default", size)) == {"x": buffer}
        assert buffer.data_ptr() == addresses[size]
    assert encoder.statistics.replays == 50


def test_what_a_call_runs_of_the_model() -> None:
    model = Rows()
    encoder = manager(model)
    forwards = model.calls["forward"]
    encoder.execute(rows(3, 20))
    assert (model.calls["forward"], model.calls["specs"]) == (forwards, 1)
    encoder.execute(rows())
    assert model.calls["specs"] == 2


# ------------------------------------------------------------------ statistics and costs


def test_statistics(device: str) -> None:
    encoder = manager(Rows(), device, captured=False)
    names = ("hits", "misses", "hit_rate", "num_budgets", "token_budgets")

    def stats() -> tuple[Any, ...]:
        assert tuple(encoder.get_cumulative_stats()) == names
        return tuple(encoder.get_cumulative_stats().values())

    assert stats() == (0, 0, 0.0, 0, list(BUDGETS))
    encoder.execute(rows(3, device=device))
    assert stats() == (0, 1, 0.0, 0, list(BUDGETS))
    encoder.statistics.clear()
    encoder.capture()
    encoder.execute(rows(3, 4, 5, device=device))
    encoder.execute(rows(70, device=device))
    assert stats() == (3, 1, 0.75, len(BUDGETS), list(BUDGETS))
    assert encoder.statistics.tokens() == (12, 16)
    assert encoder.statistics.waste() == 0.25


def test_coverage() -> None:
    encoder = manager(Rows())
    encoder.execute(rows(3, 4, 70, 0))
    head, first, *_, eager, total, limit = encoder.coverage().splitlines()
    assert head.split()[:4] == ["path", "budget", "graph", "replays"]
    assert first.split() == ["default", "8", "yes", "1", "2", "12.5%", "-"]
    assert eager == "eager: oversize: 1 item, 70 tokens a group"
    assert total == "2 hits, 1 miss, 1 without tokens"
    assert limit == "at most 8 items, 8 frames a replay"


def test_what_is_cheaper_eager_runs_eager() -> None:
    model = Rows()
    encoder = manager(model, costs=Costs(fixed=1.0, eager_fixed=10.0))
    check(encoder, model, rows(40))  # a budget of 64 against 50
    assert encoder.statistics.reasons() == {Reason.CHEAPER_EAGER: 1}
    check(encoder, model, rows(60))
    assert counts(encoder) == (1, 1)


def test_calibration(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device, costs="measured")
    assert encoder.counters.plain.total() == len(BUDGETS)  # the warm-ups: timed runs do not count
    assert all(float(row.split()[-1]) > 0 for row in encoder.coverage().splitlines()[1:5])
    assert all(encoder.costs.replay(0, budget) > 0 for budget in BUDGETS)
    assert encoder.costs.eager(0, 64) >= encoder.costs.eager(0, 8) > 0
    check(encoder, model, images((4, 4), (8, 8), device=device))


class Clock:
    """A clock on which a replay takes 50 ms."""

    now, took = 0.0, 0.05

    def perf_counter(self) -> float:
        self.now += self.took
        self.took = 0.05
        return self.now


def test_one_interruption_does_not_decide_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, clock, ran = [0.05, 0.1] + [0.002] * 20, Clock(), []
    monkeypatch.setattr("cgcompile.encoder.manager.time", clock)

    def run() -> None:
        if ran:  # the first run is not measured
            clock.took = waits[len(ran) - 1]
        ran.append(1)

    assert _milliseconds(run, torch.device("cpu")) == pytest.approx(2)
    assert len(ran) == 5  # one before, the two that are interrupted, and two that are close


class Timed(Rows):
    """On whose clock the forward takes 1 ms for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        self.clock.took = len(inputs["x"]) * 1e-3  # not at replays on the host
        return super().encoder_cudagraph_forward(inputs)


def test_measured_costs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    call = rows(40)  # 40 ms without a graph, or padded to 64 rows
    model = Timed()
    monkeypatch.setattr("cgcompile.encoder.manager.time", model.clock)
    estimated = manager(model, token_budgets=[16, 64])
    check(estimated, model, call)
    assert counts(estimated) == (1, 0)  # by the given costs graphs are always cheaper
    encoder = manager(model, token_budgets=[16, 64], costs="measured")
    assert encoder.costs.replay(0, 64) == pytest.approx(50)
    assert encoder.costs.eager(0, 40) == pytest.approx(40)
    check(encoder, model, call)
    assert encoder.statistics.reasons() == {Reason.CHEAPER_EAGER: 1}
    check(encoder, model, rows(60))
    assert counts(encoder) == (1, 1)


def test_measured_costs_have_one_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Timed()
    monkeypatch.setattr("cgcompile.encoder.manager.time", model.clock)
    costs = manager(model, token_budgets=[16, 64], costs="measured").costs
    numbers = [costs.fixed, costs.per_token, costs.eager_fixed, costs.eager_per_token]
    assert numbers == pytest.approx([50, 0, 0, 1], abs=1e-6)
    assert costs.replay(0, 512) == pytest.approx(50)  # not measured
    assert fitted_budgets([40, 60, 200, 500], 1, costs=costs) == (500,)
    encoder = manager(model, token_budgets=[16, 64, 128], costs=costs)
    check(encoder, model, rows(100))
    assert counts(encoder) == (1, 0)


def test_earlier_arguments() -> None:
    with pytest.raises(ConfigError, match="expected Costs or Literal"):
        manager(Rows(), costs="measure")
    with (
        pytest.warns(FutureWarning, match="calibrate is deprecated: use costs='measured'"),
        pytest.raises(ConfigError, match="calibrate=True with costs="),
    ):
        manager(Rows(), calibrate=True)
    told = "(calibrate|inference_mode|check_weights) is deprecated"
    with pytest.warns(FutureWarning, match=told) as warned:
        encoder = EncoderCudaGraphManager(
            Rows(),
            device="cpu",
            dtype=torch.float32,
            token_budgets=[8],
            calibrate=True,
            inference_mode=False,
            check_weights=False,
            config={"capture_device": "host"},
        )
    assert len([each for each in warned if "deprecated" in str(each.message)]) == 3
    with torch.no_grad():
        encoder.capture()
        assert not encoder.execute(rows(3))[0].is_inference()
    assert encoder._setup.settings.checks == ("metadata", "state")
    assert encoder.costs != Costs()


def test_a_small_budget_limits_the_items_of_all(caplog: pytest.LogCaptureFixture) -> None:
    call = rows(*[4] * 6)
    with caplog.at_level(logging.WARNING, logger="cgcompile"):
        for budgets, items in (([2, 64], None), ([8, 64], None), ([2, 64], 2)):
            manager(Rows(), token_budgets=budgets, max_batch_size=items).execute(call)
            manager(Rows(), token_budgets=[8]).execute(rows(8, 8))  # no padding
        encoder = manager(Rows(), token_budgets=[1, 64])
        encoder.execute(call)
    (first, second) = [record.getMessage() for record in caplog.records]
    assert first.startswith(
        "a replay of encoder budget 64 had 8 output tokens: it takes at most 2 "
    )
    assert "had 4 output tokens: it takes at most 1 items. Remedy: leave out small" in second
    assert encoder.coverage().splitlines()[-1] == "at most 1 item, 1 frame a replay"
    assert "at most 1 item a replay" in repr(encoder)


def test_the_plan_of_a_call() -> None:
    encoder = manager(Rows(), token_budgets=[8, 16])
    call = rows(3, 40, 4, 12, 0)
    runs = encoder.plan(call)
    shown = [(run.items, run.budget, run.padding, run.reason) for run in runs]
    assert sorted(shown) == [
        ((0, 2), 8, 1, None),
        ((1,), None, 0, Reason.OVERSIZE),
        ((3,), 16, 4, None),
    ]
    assert counts(encoder) == (0, 0)
    encoder.execute(call)
    assert encoder.statistics.replays == 2


def test_the_plan_of_a_rank() -> None:
    class Second:
        rank = 1
        agree = gather = check = None

        def assign(self, sizes: Any) -> list[list[int]]:
            return [[0, 2], [1, 3]]

    encoder = manager(Rows(), token_budgets=[8, 16], sharder=Second())
    (run,) = encoder.plan(rows(3, 5, 4, 2))
    assert (sorted(run.items), run.tokens) == ([1, 3], 7)


def test_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cgcompile"):
        encoder = manager(Rows(), token_budgets=[16, 64])
    planned = (
        "encoder graphs of Rows: token budgets [16, 64], at most 4 items and 4 frames a replay"
    )
    assert planned in caplog.messages
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="cgcompile.encoder"):
        for _ in range(9):
            encoder.execute(rows(*[2] * 30))
    lines = [line for line in caplog.messages if line.startswith("encoder graphs: {")]
    assert len(lines) == 2  # of 270 items
    assert "'hits': 120, 'misses': 0" in lines[0]
    caplog.clear()
    encoder.statistics.clear()
    with caplog.at_level(logging.DEBUG, logger="cgcompile.encoder"):
        encoder.execute(rows(2))
    assert not caplog.messages
    manager(Rows(), token_budgets=list(range(8, 80)), captured=False)
    assert "72 encoder graphs are planned" in caplog.text


# ------------------------------------------------------------------ modes


def test_inference_mode_and_gradients() -> None:
    assert manager(Rows()).execute(rows(3))[0].is_inference()
    model, call = Rows(), rows(3)
    encoder = manager(model, inference_mode=False, captured=False)
    with torch.no_grad():
        encoder.capture()
        result = encoder.execute(call)[0]
    assert not result.is_inference()
    encoder.execute(call)[0].sum().backward()
    assert model.linear.weight.grad is not None
    assert encoder.statistics.reasons() == {Reason.GRADIENTS: 1}
    with torch.no_grad():
        check(encoder, model, call)
    assert counts(encoder) == (2, 1)


# ------------------------------------------------------------------ a limit of bytes


def bytes_of(*sizes: int, model: Any = None) -> int:
    encoder = manager(model or patches(), token_budgets=sizes)
    assert encoder.pool is not None
    return encoder.pool.nbytes


def limited(model: Any, limit: int, **more: Any) -> tuple[Any, list[int], tuple[Any, ...]]:
    """Return a manager that has captured what fits in ``limit`` bytes, its budgets, the others."""
    encoder = manager(model, captured=False, **more)
    missing = encoder.capture(max_graph_bytes=limit).missing
    assert encoder.pool is not None
    assert encoder.pool.nbytes <= limit
    return encoder, [key.budget for key in encoder.budget_graphs], missing


def test_bytes_that_count() -> None:
    encoder = manager(Rows(), token_budgets=[64])
    pool = encoder.pool
    assert pool is not None
    assert pool.nbytes == pool.usage.pools + pool.arena.nbytes + 64 * C * 4
    assert pool.usage.pools >= 64 * H * 4
    encoder.clear()
    assert pool.nbytes == 0


@pytest.mark.slow
def test_all_are_captured_where_there_is_room(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device, captured=False)
    assert encoder.capture(max_graph_bytes=2**40).missing == ()
    assert [key.budget for key in encoder.budget_graphs] == sorted(BUDGETS, reverse=True)
    check(encoder, model, images((4, 4), (8, 8), (2, 2), device=device))
    assert encoder.statistics.misses == 0
    if device == "cpu":
        whole = bytes_of(*BUDGETS)  # exactly enough: trial captures leave nothing
        encoder, _, missing = limited(patches(), whole)
        assert (encoder.pool.nbytes, missing) == (whole, ())


@pytest.mark.parametrize("make", [patches, Rows])
@pytest.mark.parametrize("share", [0.99, 0.95, 0.9, 0.86, 0.5])
def test_a_limit_of_bytes_is_kept(share: float, make: Any) -> None:
    limit = int(share * bytes_of(*BUDGETS, model=make()))
    model = make()
    encoder, budgets, missing = limited(model, limit)
    assert missing
    for batch, why in missing:
        assert batch.num_tokens not in budgets
        assert why.startswith(f"{Reason.NOT_CAPTURED.value}: no room in max_graph_bytes={limit}")
    assert f"max_graph_bytes={limit}" in encoder.coverage()
    if make is Rows:  # most is the largest graph's, then the buffers of the others
        expected = {0.99: [64, 32, 16], 0.95: [64, 32], 0.9: [64], 0.86: [64], 0.5: []}
        assert budgets == expected[share]
    call = rows(3, 40, 12, 6) if make is Rows else images((4, 4), (8, 8), (2, 2), (6, 10))
    check(encoder, model, call)
    assert set(encoder.statistics.reasons()) <= {Reason.NOT_CAPTURED}
    assert encoder.counters.captures == len(budgets)


def test_items_of_a_graph_without_room_take_the_next_larger_one() -> None:
    model = Rows()
    encoder, budgets, _ = limited(model, bytes_of(32, 64, model=Rows()))
    assert budgets == [64, 32]  # of those below 64, 32 saves the most padding
    check(encoder, model, rows(7))
    assert [graph["budget"] for graph in encoder.statistics.as_dict()["graphs"]] == [32]
    assert encoder.statistics.misses == 0


@pytest.mark.slow
def test_with_no_room_for_the_largest_everything_runs_eager() -> None:
    model = patches()
    encoder, budgets, missing = limited(model, bytes_of(64) - 1)
    assert (budgets, len(missing), encoder.pool.nbytes) == ([], len(BUDGETS), 0)
    check(encoder, model, images((4, 4), (8, 8), (2, 2)))
    assert encoder.statistics.reasons() == {Reason.NOT_CAPTURED: 3}
    assert len(encoder.capture(max_graph_bytes=0).missing) == len(BUDGETS)
    assert encoder.capture().missing == ()  # without a limit
    check(encoder, model, images((4, 4)))
    assert counts(encoder) == (1, 3)
    assert "max_graph_bytes" not in encoder.coverage()


@pytest.mark.slow
@pytest.mark.parametrize("more", ["all", "one", "none"])
def test_two_managers_share_a_pool_and_its_limit(more: str) -> None:
    alone, graph = bytes_of(*BUDGETS), bytes_of(64, model=Rows())
    room = {"all": bytes_of(*BUDGETS, model=Rows()), "one": graph, "none": 0}[more]
    expected = {"all": len(BUDGETS), "one": 1, "none": 0}[more]
    pool, models = new_pool(), (patches(), Rows())
    first, _, missing = limited(models[0], alone + room, pool=pool)
    assert missing == ()
    second, budgets, missing = limited(models[1], alone + room, pool=pool)
    assert all(f"{room} were left" in why for _, why in missing)
    assert len(budgets) == expected
    for _ in range(2):
        check(first, models[0], images((4, 4), (8, 8)))
        check(second, models[1], rows(5, 12, 60))
    assert counts(first) == (4, 0)
    assert second.statistics.hits == (6 if expected else 0)


def test_with_a_limit_the_capture_reports_what_cannot_be_captured() -> None:
    _, _, missing = limited(ReadsOnHost(16), 2**20)
    assert [(batch.num_tokens, "item" in why) for batch, why in missing] == [(16, True)]
    without_device = manager(config=None, captured=False)
    assert len(without_device.capture(max_graph_bytes=2**20).missing) == len(BUDGETS)
    for limit in (-1, True, 2.5, "1 GiB"):
        with pytest.raises(EncoderError, match="max_graph_bytes"):
            without_device.capture(max_graph_bytes=limit)
