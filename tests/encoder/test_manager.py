"""The manager: captures, packs, replays, and gives everyone their own; numbers equal eager."""

import functools
import logging
import threading
from typing import Any

import lib.manager
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.encoders import (
    BUDGETS,
    TABLES,
    C,
    H,
    Rows,
    Tower,
    check,
    close,
    config,
    images,
    manager,
    one_by_one,
    patches,
    rows,
    videos,
)
from lib.manager import requests

import cgcompile
from cgcompile.encoder import Costs, EncoderCudaGraphManager, GraphKey, PatchEncoder
from cgcompile.errors import AddressChangedError, CaptureError
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.reasons import Reason

STATS = ("hits", "misses", "hit_rate", "num_budgets", "token_budgets")


def counts(made: EncoderCudaGraphManager) -> tuple[int, int]:
    return made.statistics.hits, made.statistics.misses


# ------------------------------------------------------------------ capture


def test_one_graph_for_each_budget_largest_first(device: str) -> None:
    made = manager(device=device, captured=False, token_budgets=[16, 8, 64])  # in any order
    assert not made.is_captured()
    found = made.capture()
    assert [each.num_tokens for each in found.captured] == [64, 16, 8]
    assert made.budget_graphs == [GraphKey("default", size) for size in (64, 16, 8)]
    assert made.counters.captures == 3
    assert made.token_budgets == [8, 16, 64]
    again = made.capture()  # nothing is missing
    assert (again.captured, made.counters.captures) == ((), 3)


def test_the_pool_is_the_one_given(device: str) -> None:
    found = capture_device(torch.device(device), "host")
    assert found is not None
    pool = GraphPool(found)
    first, second = manager(device=device, pool=pool), manager(device=device)
    assert first.pool is pool
    assert second.pool is not pool
    for made in (first, second):
        check(made, patches(device), images((4, 4), (2, 8), device=device))


def test_clear_and_recapture(device: str) -> None:
    model = patches(device)
    made = manager(model, device)
    call = images((4, 4), (8, 8), device=device)
    kept = [each.clone() for each in check(made, model, call)]
    inputs = made.graph_inputs(GraphKey("default", 8))
    made.clear()
    assert (made.is_captured(), made.budget_graphs) == (False, [])
    check(made, model, call)
    assert made.statistics.reasons() == {Reason.NOT_CAPTURED: 2}
    assert made.capture().missing == ()
    assert made.graph_inputs(GraphKey("default", 8))["cells"] is not inputs["cells"]
    for mine, other in zip(check(made, model, call), kept, strict=True):
        close(mine, other)
    assert counts(made) == (4, 2)


def test_before_capture_everything_runs_eager(device: str) -> None:
    model = patches(device)
    made = manager(model, device, captured=False)
    check(made, model, images((4, 4), (2, 2), device=device))
    assert counts(made) == (0, 2)
    assert made.counters.captures == 0


def test_without_a_capture_device_everything_runs_eager() -> None:
    model = patches()
    made = manager(model, config=cgcompile.CompilationConfig(), captured=False)
    assert len(made.capture().missing) == len(BUDGETS)
    check(made, model, images((4, 4)))
    assert made.statistics.reasons() == {Reason.NO_DEVICE: 1}


class Refuses(Rows):
    """One size cannot be captured: the host would have to read."""

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        x = inputs["x"]
        if len(x) == 16 and float(x.sum().item()) > 1e9:
            return x
        return self.linear(x)


def test_a_graph_that_is_refused_is_named_and_the_others_serve() -> None:
    model = Refuses()
    made = manager(model, captured=False)
    missing = made.capture().missing
    assert [batch.num_tokens for batch, _ in missing] == [16]
    assert "item" in missing[0][1]
    check(made, model, rows(12))
    assert [key.budget for key in made.budget_graphs] == [64, 32, 8]
    assert made.statistics.as_dict()["graphs"][0]["budget"] == 32
    with pytest.raises(BaseException, match=r"item|strict"):
        manager(Refuses(), config=config(strict=True)).capture()


def test_what_the_largest_graph_was_for_says_that_it_is_missing() -> None:
    class Large(Rows):
        def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
            if len(inputs["x"]) == 64:
                inputs["x"].sum().item()
            return super().encoder_cudagraph_forward(inputs)

    model = Large()
    made = manager(model, captured=False)
    assert len(made.capture().missing) == 1
    check(made, model, rows(40))
    check(made, model, rows(70))
    assert made.statistics.reasons() == {Reason.NOT_CAPTURED: 1, Reason.OVERSIZE: 1}


# ------------------------------------------------------------------ numbers


SIZES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((4, 4),),  # one even image
    ((3, 5),),  # odd, as all of the next but one
    ((1, 1),),  # no output at all
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
    made = manager(model, device)
    before = check(made, model, images(*sizes, device=device))
    again = check(made, model, images(*sizes, device=device))
    for mine, other in zip(before, again, strict=True):
        assert not mine.numel() or not torch.equal(mine, other)
    large = sum(h // 2 * (w // 2) > 64 for h, w in sizes)
    idle = sum(h < 2 or w < 2 for h, w in sizes)
    assert counts(made) == (2 * (len(sizes) - large - idle), 2 * large)
    assert made.statistics.idle == 2 * idle
    assert made.statistics.reasons() == ({Reason.OVERSIZE: 2 * large} if large else {})
    assert made.counters.captures == len(BUDGETS)


def test_tokens_of_each_item(device: str) -> None:
    made = manager(device=device)
    found = made.execute(images((4, 4), (2, 6), (3, 7), (1, 4), device=device))
    assert [list(each.shape) for each in found] == [[4, H], [3, H], [3, H], [0, H]]
    assert {(each.dtype, each.device.type) for each in found} == {(torch.float32, device)}


def test_images_and_videos_through_one_manager(device: str) -> None:
    model = patches(device, frames=4)
    made = manager(model, device)
    assert made.max_frames_per_batch == 4 * made.max_batch_size
    for _ in range(2):
        check(made, model, images((4, 4), (2, 2), device=device))
        found = check(made, model, videos((2, 4, 4), (3, 2, 5), device=device))
        assert [len(each) for each in found] == [8, 6]
    check(made, model, videos((4, 2, 2), (4, 16, 16), device=device))  # the second is oversize
    assert counts(made) == (9, 1)
    assert len(made.budget_graphs) == len(BUDGETS)


def test_more_frames_than_a_graph_takes_run_eager(device: str) -> None:
    model = patches(device, frames=4)
    made = manager(model, device, max_frames_per_batch=5)
    assert made.max_frames_per_batch == 5
    check(made, model, videos((6, 2, 2), device=device))
    assert counts(made) == (0, 1)
    check(made, model, videos((3, 2, 2), (3, 2, 2), (2, 2, 2), (7, 2, 2), device=device))
    assert counts(made) == (3, 2)
    assert made.statistics.reasons() == {Reason.TOO_MANY_FRAMES: 2}
    assert made.statistics.replays == 2  # 3 and 2, then 3


def test_one_budget_alone_takes_one_item_if_the_model_has_no_range() -> None:
    model = Rows()
    made = manager(model, token_budgets=[16])
    assert made.max_batch_size == 1
    check(made, model, rows(3, 4))
    assert (counts(made), made.statistics.replays) == ((2, 0), 2)


@pytest.mark.parametrize(
    ("span", "budgets", "items"),
    [((8, 64), [8], 8), ((8, 64), [32, 64], 8), ((1, 64), [32, 64], 32), ((8, 9), [32, 64], 1)],
)
def test_items_follow_the_range_of_the_model(
    span: tuple[int, int], budgets: list[int], items: int, device: str
) -> None:
    model = patches(device, budget_range=span)
    made = manager(model, device, token_budgets=budgets)
    assert made.max_batch_size == items
    check(made, model, images(*[(2, 2)] * items, device=device))
    assert (counts(made), made.statistics.replays) == ((items, 0), 1)
    given = manager(model, device, token_budgets=budgets, max_batch_size=2, captured=False)
    assert given.max_batch_size == 2


def test_frames_of_a_model_of_images_are_its_items() -> None:
    made = manager(Rows(max_frames_per_video=8), token_budgets=[8, 16], captured=False)
    assert (made.max_batch_size, made.max_frames_per_batch) == (2, 2)
    videos_too = Rows(max_frames_per_video=8, modalities=["image", "video"])
    made = manager(videos_too, token_budgets=[8, 16], captured=False)
    assert made.max_frames_per_batch == 16


def test_no_frames_of_videos_leave_one_for_each_item(device: str) -> None:
    model = patches(device, frames=4)
    made = manager(model, device, max_frames_per_batch=0)
    assert (made.max_frames_per_batch, made.max_batch_size) == (0, 8)
    check(made, model, images(*[(2, 2)] * 8, device=device))
    assert (counts(made), made.statistics.replays) == ((8, 0), 1)
    check(made, model, videos((9, 2, 2), (8, 2, 2), device=device))  # the first has too many
    assert counts(made) == (9, 1)
    assert made.statistics.reasons() == {Reason.TOO_MANY_FRAMES: 1}


def test_several_outputs_of_an_item(device: str) -> None:
    model = patches(device, deep=True)
    made = manager(model, device)
    found = check(made, model, images((4, 4), (2, 6), (30, 30), (5, 3), device=device))
    assert [list(each["deep"][0].shape) for each in found] == [[n, 2 * H] for n in (4, 3, 225, 2)]
    assert counts(made) == (3, 1)
    assert made.execute(images((1, 1), device=device))[0]["deep"][0].shape == (0, 2 * H)


@pytest.mark.parametrize("captured", [True, False])
def test_an_item_without_tokens_has_the_structure_of_others(captured: bool) -> None:
    for sizes in (((1, 1),), ((1, 1), (4, 4)), ((4, 4), (1, 1))):
        made = manager(patches(deep=True), captured=captured)
        found = made.execute(images(*sizes))
        shapes = [list(each["deep"][0].shape) for each in found]
        assert shapes == [[h // 2 * (w // 2), 2 * H] for h, w in sizes]
        assert made.statistics.idle == 1


def test_the_model_puts_together_what_has_no_tokens() -> None:
    class Wraps(Rows):
        def postprocess_encoder_output(
            self, output: Any, indices: Any, counts: Any, dest: Any, **more: Any
        ) -> None:
            assert more["batch_mm_kwargs"]["lengths"] == counts
            for index, part in zip(indices, output.split(counts), strict=True):
                dest[index] = {"features": part, "end": part.new_ones(1)}

    made = manager(Wraps())
    found = made.execute(rows(3, 0, 5, 0))
    assert [list(each["features"].shape) for each in found] == [[3, H], [0, H], [5, H], [0, H]]
    assert all(each["end"].item() == 1 for each in found)
    assert counts(made) == (2, 0)


def test_the_order_of_results_is_that_of_the_items(device: str) -> None:
    model = patches(device)
    made = manager(model, device)
    sizes = [(2, 2), (16, 8), (4, 4), (20, 20), (6, 2), (8, 8), (3, 3), (2, 10)]
    call = images(*sizes, device=device)
    expected = one_by_one(model, call)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        order = torch.randperm(len(sizes), generator=generator).tolist()
        found = made.execute(model.select_encoder_cudagraph_items(call, order))
        for place, item in enumerate(order):
            close(found[place], expected[item])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(st.integers(0, 70), max_size=12), min_size=1, max_size=4))
def test_any_calls_equal_eager(made_of_rows: Any, calls: list[list[int]]) -> None:
    made, model = made_of_rows
    replays = made.counters.replays
    for lengths in calls:
        check(made, model, rows(*lengths))
    fits = [n for lengths in calls for n in lengths if 0 < n <= 64]
    assert (made.counters.replays > replays) is bool(fits)


@pytest.fixture(scope="module")
def made_of_rows() -> Any:
    model = Rows()
    return manager(model), model


# ------------------------------------------------------------------ results


def test_results_never_alias_a_later_replay(device: str) -> None:
    model = patches(device)
    made = manager(model, device)
    calls = [images((4, 4), (2, 6), (2, 2), device=device) for _ in range(4)]
    found = [made.execute(call) for call in calls]
    assert made.statistics.replays >= 4
    for call, results in zip(calls, found, strict=True):
        for mine, other in zip(results, one_by_one(model, call), strict=True):
            close(mine, other)
    mine = {each.untyped_storage().data_ptr() for results in found for each in results}
    assert made.pool is not None
    assert not any(made.pool.owns(each) for results in found for each in results)
    assert len(mine) == made.statistics.replays  # one copy for each replay, whatever the items


def test_the_recorded_tensors_stay_the_same_objects(device: str) -> None:
    seen: dict[int, torch.Tensor] = {}

    class Mine(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            found = super().prepare_encoder_cudagraph_capture_inputs(*args)
            seen[args[0]] = found.values["x"]
            return found

    model = Mine()
    made = manager(model, device, token_budgets=[8, 16])
    addresses = {size: each.data_ptr() for size, each in seen.items()}
    for number in range(100):
        check(made, model, rows(1 + number % 16, device=device))
    for size, each in seen.items():
        assert made.graph_inputs(GraphKey("default", size))["x"] is each
        assert each.data_ptr() == addresses[size]
    assert made.statistics.replays == 100


def test_the_model_may_take_from_the_inputs(device: str) -> None:
    made = manager(Rows(), device, calibrate=True)  # its forward pops
    for _ in range(2):
        made.execute(rows(3, device=device))
    assert list(made.graph_inputs(GraphKey("default", 8))) == ["x"]


def test_the_model_runs_on_the_host_at_capture_alone(device: str) -> None:
    model = Rows()
    made = manager(model, device)
    before = model.calls["forward"]
    made.execute(rows(3, 20, device=device))
    assert model.calls["forward"] == before


def test_specs_are_asked_once_per_call() -> None:
    model = Rows()
    made = manager(model)
    made.execute(rows(3, 20, 70, 2))
    assert model.calls["specs"] == 1
    made.execute(rows())
    assert model.calls["specs"] == 2


# ------------------------------------------------------------------ statistics


def test_statistics(device: str) -> None:
    model = Rows()
    made = manager(model, device, captured=False)
    assert tuple(made.get_cumulative_stats()) == STATS
    assert made.get_cumulative_stats() == dict(
        zip(STATS, (0, 0, 0.0, 0, list(BUDGETS)), strict=True)
    )
    made.execute(rows(3, device=device))
    assert made.get_cumulative_stats()["hit_rate"] == 0.0
    made.statistics.clear()
    made.capture()
    made.execute(rows(3, 4, 5, device=device))
    assert made.get_cumulative_stats()["hit_rate"] == 1.0
    made.execute(rows(70, device=device))
    found = made.get_cumulative_stats()
    assert found == dict(zip(STATS, (3, 1, 0.75, len(BUDGETS), list(BUDGETS)), strict=True))
    assert made.statistics.tokens() == (12, 16)
    assert made.statistics.waste() == 0.25


def test_coverage() -> None:
    made = manager(Rows())
    made.execute(rows(3, 4, 70, 0))
    lines = made.coverage().splitlines()
    assert lines[0].split() == [
        "path",
        "budget",
        "graph",
        "replays",
        "items",
        "padding",
        "replay",
        "ms",
    ]
    assert lines[1].split() == ["default", "8", "yes", "1", "2", "12.5%", "-"]
    assert lines[-2] == "eager on default: oversize: 1 items, 70..70 tokens"
    assert lines[-1] == "2 hits, 1 misses, 1 without tokens"


def test_what_is_cheaper_eager_runs_eager() -> None:
    model = Rows()
    made = manager(model, costs=Costs(fixed=1.0, eager_fixed=10.0))
    check(made, model, rows(40))  # a budget of 64 against 50
    assert made.statistics.reasons() == {Reason.CHEAPER_EAGER: 1}
    check(made, model, rows(60))
    assert counts(made) == (1, 1)


def test_calibration(device: str) -> None:
    model = patches(device)
    made = manager(model, device, calibrate=True)
    assert made.counters.plain.total() == len(BUDGETS)  # the warm-ups: what is timed is not counted
    rows_of_table = made.coverage().splitlines()[1:5]
    assert all(float(row.split()[-1]) > 0 for row in rows_of_table)
    costs = made.costs
    assert [costs.replay(0, budget) > 0 for budget in BUDGETS] == [True] * 4
    assert costs.eager(0, 64) >= costs.eager(0, 8) > 0
    check(made, model, images((4, 4), (8, 8), device=device))


class Clock:
    """A clock on which a replay takes 50 ms."""

    now, took = 0.0, 0.05

    def perf_counter(self) -> float:
        self.now += self.took
        self.took = 0.05
        return self.now


class Timed(Rows):
    """On whose clock the forward takes 1 ms for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        self.clock.took = len(inputs["x"]) * 1e-3  # replays on the host do not come here
        return super().encoder_cudagraph_forward(inputs)


def test_measured_costs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    call = rows(40)  # 40 ms without a graph, or padded to 64 rows
    model = Timed()
    monkeypatch.setattr("cgcompile.encoder.manager.time", model.clock)
    estimated = manager(model, token_budgets=[16, 64])
    check(estimated, model, call)
    assert counts(estimated) == (1, 0)  # by the costs that were given graphs are always cheaper
    made = manager(model, token_budgets=[16, 64], calibrate=True)
    assert made.costs.replay(0, 64) == pytest.approx(50)
    assert made.costs.eager(0, 40) == pytest.approx(40)
    check(made, model, call)
    assert made.statistics.reasons() == {Reason.CHEAPER_EAGER: 1}
    check(made, model, rows(60))
    assert counts(made) == (1, 1)


# ------------------------------------------------------------------ others


def test_new_values_of_weights_are_seen_and_new_weights_refused(device: str) -> None:
    model = patches(device)
    made = manager(model, device)
    call = images((4, 4), device=device)
    before = check(made, model, call)[0]
    tower: Any = model.tower
    cgcompile.update_weights(tower, {k: v * 2 for k, v in tower.state_dict().items()})
    assert not torch.equal(check(made, model, call)[0], before)
    tower.merge.weight = torch.nn.Parameter(torch.randn_like(tower.merge.weight))
    with pytest.raises(AddressChangedError, match=r"merge\.weight"):
        made.execute(call)
    made.clear()
    made.capture()
    check(made, model, call)
    assert made.statistics.misses == 0


def method(tower: Any) -> Any:
    return tower.forward


def closure(tower: Any) -> Any:
    return lambda buffers: tower(buffers)


def partially(tower: Any) -> Any:
    return functools.partial(lambda held, buffers: held["it"][0](buffers), {"it": [tower]})


class Called:
    __slots__ = ("_tower",)

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __call__(self, buffers: Any) -> Any:
        return self._tower(buffers)


@pytest.mark.parametrize("forward", [method, closure, partially, Called])
def test_weights_are_found_wherever_the_forward_has_them(forward: Any, device: str) -> None:
    tower: Any = Tower().to(device).eval()
    model = PatchEncoder(
        forward(tower), merge_size=2, in_features=C, out_hidden_size=H, tables=TABLES
    )
    made = manager(model, device)
    call = images((4, 4), device=device)
    made.execute(call)
    tower.merge.weight = torch.nn.Parameter(torch.randn_like(tower.merge.weight))
    with pytest.raises(AddressChangedError, match=r"merge\.weight"):
        made.execute(call)


def test_two_managers_share_one_pool(device: str) -> None:
    found = capture_device(torch.device(device), "host")
    assert found is not None
    pool = GraphPool(found)
    models = patches(device), Rows().to(device)
    made = [manager(model, device, pool=pool) for model in models]
    for _ in range(2):
        check(made[0], models[0], images((4, 4), (2, 2), device=device))
        check(made[1], models[1], rows(5, 12, device=device))
    made[0].clear()
    check(made[1], models[1], rows(5, 12, device=device))
    assert counts(made[1]) == (6, 0)
    check(made[0], models[0], images((4, 4), device=device))
    assert counts(made[0]) == (4, 1)
    pool.release()  # by whoever owns it: nothing is replayed that is gone
    check(made[1], models[1], rows(5, device=device))
    assert made[1].statistics.reasons() == {Reason.NOT_CAPTURED: 1}


def test_a_shared_pool_is_smaller_than_two() -> None:
    found = capture_device(torch.device("cpu"), "host")
    assert found is not None
    pool = GraphPool(found)
    for _ in range(2):
        manager(patches(), pool=pool, token_budgets=[64])
    alone = manager(patches(), token_budgets=[64]).pool
    assert alone is not None
    assert pool.memory.reserved < 1.5 * alone.memory.reserved


def test_the_pools_of_encoder_and_decoder_are_separate(device: str) -> None:
    decoder = lib.manager.manager(device=device)
    decoder.capture()
    model = patches(device)
    made = manager(model, device)
    assert made.pool is not None
    assert decoder.pool is not None
    assert made.pool is not decoder.pool
    assert made.pool.memory is not decoder.pool.memory
    call, batch = images((4, 4), device=device), requests(3, 2, device=device)
    expected = decoder.run(batch).clone()
    kept = decoder.run(batch)  # a view of its pool, valid until its own next step
    check(made, model, call)
    assert torch.equal(kept, expected)
    made.clear()
    assert torch.equal(decoder.run(batch), expected)
    decoder.release()
    made.capture()
    check(made, model, call)
    assert counts(made) == (2, 0)


def test_a_compiled_tower(device: str) -> None:
    plain = patches(device)
    compiled = torch.compile(plain.tower, backend="eager", dynamic=True)
    model = patches(device, tower=compiled)
    model._forward = compiled
    made = manager(model, device)
    for sizes in (((4, 4), (2, 6)), ((3, 5),), ((8, 8),)):
        call = images(*sizes, device=device)
        close(made.execute(call), one_by_one(plain, call))
    assert counts(made) == (4, 0)


def test_threads_take_turns(device: str) -> None:
    model = patches(device)
    made = manager(model, device)
    calls = [[images((4, 4), (2, 2 + 2 * n), device=device) for _ in range(6)] for n in range(3)]
    expected = [[one_by_one(model, call) for call in mine] for mine in calls]
    found: list[Any] = [None] * 3

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            found[number] = [made.execute(call) for call in calls[number]]
        if stream is not None:
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for mine, other in zip(found, expected, strict=True):
        for results, wanted in zip(mine, other, strict=True):
            close(results, wanted)
    assert counts(made) == (36, 0)


@pytest.mark.gpu
def test_results_are_ready_on_the_stream_of_the_caller() -> None:
    model = patches("cuda")
    made = manager(model, "cuda")
    call = images((8, 8), (4, 4), device="cuda")
    expected = one_by_one(model, call)
    torch.cuda.synchronize()
    for _ in range(4):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            doubled = [each * 2 for each in made.execute(call)]
        stream.synchronize()
        for mine, other in zip(doubled, expected, strict=True):
            close(mine, other * 2)


@pytest.mark.gpu
def test_cuda_without_an_index_is_the_device_of_now() -> None:
    """Another thread may have another current device."""
    seen = []

    class Mine(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            seen.append(args[3])
            return super().prepare_encoder_cudagraph_capture_inputs(*args)

    manager(Mine(), "cuda", token_budgets=[8])
    assert seen == [torch.device("cuda", torch.cuda.current_device())]


@pytest.mark.gpu
def test_a_call_on_another_stream_waits_before_it_writes_the_buffers() -> None:
    model = patches("cuda")
    made = manager(model, "cuda", token_budgets=[16])
    calls = [images((8, 8), device="cuda") for _ in range(4)]
    expected = [one_by_one(model, call) for call in calls]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in calls], []
    for stream, call in zip(streams, calls, strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            found.append(made.execute(call))
    torch.cuda.synchronize()
    for mine, other in zip(found, expected, strict=True):
        close(mine, other)


def test_inside_of_a_capture_of_others_nothing_is_replayed() -> None:
    model = Rows()
    made = manager(model)
    call = rows(3)
    capture = cgcompile.BreakableCUDAGraphCapture(device="cpu")
    with capture, torch.inference_mode():
        found = made.execute(call)
    capture.replay()
    close(found[0], model.linear(call["x"]).tanh())
    assert made.statistics.reasons() == {Reason.INSIDE_CAPTURE: 1}


def test_nothing_made_inside_of_a_capture_of_others_is_kept() -> None:
    """It would lie in the memory of that capture, and hold what nobody wrote."""
    model = Rows()
    made = manager(model, captured=False)
    call = rows(3)
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), torch.inference_mode():
        made.execute(call)
    assert made._graphs.input_bytes == 0
    inside = pytest.raises(CaptureError, match="capture of encoder graphs")
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), inside:
        made.capture()
    assert made._graphs.input_bytes == 0
    made.capture()
    check(made, model, call)
    inside = pytest.raises(CaptureError, match="inside of a capture")
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), inside:
        made.clear()
    check(made, model, call)
    assert counts(made) == (2, 1)  # the graphs are still there


def test_no_buffer_is_made_again_after_clear() -> None:
    model = Rows()
    made = manager(model)
    assert made._graphs.input_bytes == sum(BUDGETS) * C * 4
    made.clear()
    check(made, model, rows(3, 0))
    assert made._graphs.input_bytes == 0


def test_inference_mode() -> None:
    assert manager(Rows()).execute(rows(3))[0].is_inference()
    made = manager(Rows(), inference_mode=False, captured=False)
    with torch.no_grad():
        made.capture()
        assert not made.execute(rows(3))[0].is_inference()
    assert counts(made) == (1, 0)


def test_with_gradients_nothing_is_replayed() -> None:
    model = Rows()
    made = manager(model, inference_mode=False, captured=False)
    with torch.no_grad():
        made.capture()
    call = rows(3)
    made.execute(call)[0].sum().backward()
    assert model.linear.weight.grad is not None
    assert made.statistics.reasons() == {Reason.GRADIENTS: 1}
    with torch.no_grad():
        close(made.execute(call)[0], model.linear(call["x"]).tanh())
    assert counts(made) == (1, 1)


def test_a_model_without_videos_has_one_frame_for_each_item() -> None:
    model = Rows(max_frames_per_video=0)
    made = manager(model)
    assert made.max_frames_per_batch == 0
    check(made, model, rows(3, 4, 5, frames=[1, 9, 1]))
    assert counts(made) == (2, 1)
    assert made.statistics.reasons() == {Reason.TOO_MANY_FRAMES: 1}


def test_weights_of_graphs_that_are_gone_are_forgotten() -> None:
    model = Rows()
    made = manager(model)
    assert made.pool is not None
    made.pool.release()
    model.linear.weight = torch.nn.Parameter(torch.randn_like(model.linear.weight))
    check(made, model, rows(3))
    made.capture()
    check(made, model, rows(3))
    assert counts(made) == (1, 1)


def test_what_is_planned_and_what_it_was_worth_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = Rows()
    with caplog.at_level(logging.INFO, logger="cgcompile"):
        made = manager(model, token_budgets=[16, 64])
    (line,) = [each for each in caplog.messages if each.startswith("encoder graphs of")]
    assert line == (
        "encoder graphs of Rows: token budgets [16, 64], at most 4 items and 4 frames a replay"
    )
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="cgcompile.encoder"):
        for _ in range(9):
            made.execute(rows(*[2] * 30))
    lines = [each for each in caplog.messages if each.startswith("encoder graphs: {")]
    assert len(lines) == 2  # of 270 items
    assert "'hits': 120, 'misses': 0" in lines[0]
    caplog.clear()
    made.statistics.clear()
    with caplog.at_level(logging.DEBUG, logger="cgcompile.encoder"):
        made.execute(rows(2))
    assert not caplog.messages


def test_many_graphs_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    manager(Rows(), token_budgets=list(range(8, 80)), captured=False)
    assert "72 encoder graphs are planned" in caplog.text
