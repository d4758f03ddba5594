"""coverage(): the numbers are those of what ran, as a test counts it by itself; strict raises."""

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from lib import manager as ms
from lib.debug import names_of
from lib.encoders import H, Rows, config, manager, rows
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, coverage, set_forward_context
from cgcompile.debug.coverage import CoverageRow
from cgcompile.encoder import Costs
from cgcompile.errors import ConfigError, DispatchError

SIZES = ms.SIZES


def served(lengths: tuple[int, ...], decode: bool) -> tuple[str, int]:
    """(mode, padded tokens) of a batch in mode FULL_AND_PIECEWISE, by the documents alone."""
    tokens = sum(lengths)
    if decode and max(lengths) == 1 and tokens <= ms.MAX_REQS:
        return "FULL", min(size for size in SIZES if size >= tokens)
    enough = [size for size in SIZES if size >= tokens]
    return ("PIECEWISE", min(enough)) if enough else ("NONE", tokens)


def batch(draw: random.Random) -> tuple[tuple[int, ...], bool]:
    if draw.random() < 0.5:
        return (1,) * draw.randint(1, ms.MAX_REQS), True
    return tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4))), False


def key_of(row: CoverageRow) -> tuple[str, int]:
    return row.mode, int(row.graph.split("num_tokens=")[1].split(",")[0])


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_a_manager_counts_what_ran(kind: str) -> None:
    made = ms.manager(kind=kind)
    made.capture()
    before = coverage(made).counters
    hits: Counter[tuple[str, int]] = Counter()
    real: Counter[tuple[str, int]] = Counter()
    draw = random.Random(7)
    for _ in range(80):
        lengths, decode = batch(draw)
        made.run(ms.requests(*lengths, decode=decode))
        key = served(lengths, decode)
        hits[key] += 1
        real[key] += sum(lengths)
    found = coverage(made)
    assert {mode for mode, _ in hits} == {"FULL", "PIECEWISE", "NONE"}
    for row in found.rows:
        if row.graph is not None:
            key = key_of(row)
            assert (row.hits, row.captured) == (hits[key], True)
            waste = 1 - real[key] / (hits[key] * key[1]) if hits[key] else None
            assert row.padding == (waste if waste is None else pytest.approx(waste))
    plain = sum(count for (mode, _), count in hits.items() if mode == "NONE")
    (without,) = [row for row in found.rows if row.graph is None]
    assert (without.mode, without.reason, without.hits) == ("NONE", "oversize", plain)
    assert (found.total, found.on_graphs) == (80, 80 - plain)
    # What the graphs themselves have counted: one replay for each step.
    assert found.counters.replays - before.replays == found.on_graphs
    ran = sum(count * size for (mode, size), count in hits.items() if mode != "NONE")
    rows_real = sum(count for (mode, _), count in real.items() if mode != "NONE")
    assert found.padding == pytest.approx(1 - rows_real / ran)


def test_a_lazy_manager_counts_the_warming_step_as_plain() -> None:
    made = ms.manager(lazily=True)
    for _ in range(4):
        made.run(ms.requests(3))
    found = coverage(made)
    by_reason = {row.reason: row.hits for row in found.rows if row.reason}
    assert by_reason == {"warming": 1}
    assert [(row.mode, row.hits) for row in found.rows if row.hits] == [
        ("PIECEWISE", 3),
        ("NONE", 1),
    ]
    assert (found.counters.captures, found.counters.replays) == (1, 2)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).sin()


def test_a_model_counts_what_ran() -> None:
    model = cgcompile.compile(
        Small(),
        compiler="eager",
        capture_device="host",
        dynamic_dims={"x": 0},
        max_captured_shapes=4,
    )
    calls: Counter[int] = Counter()
    captured: set[int] = set()
    plain: Counter[str] = Counter()
    draw = random.Random(3)
    with torch.inference_mode():
        for _ in range(60):
            size = draw.randint(2, 8)
            x = torch.randn(size, 4)
            torch.testing.assert_close(model(x), Small.forward(model.unwrap(), x))
            # The first call warms up, the second captures, if there is still room.
            if size in captured:
                calls[size] += 1
            elif len(captured) == 4:
                plain["too_many_shapes"] += 1
            elif calls[size] == 0:
                plain["warming"] += 1
                calls[size] = 1
            else:
                captured.add(size)
    found = coverage(model)
    graphs = {key_of(row)[1]: row.hits for row in found.rows if row.graph}
    assert graphs == {size: calls[size] for size in captured}
    assert {row.reason: row.hits for row in found.rows if row.reason} == plain
    assert (found.total, found.on_graphs) == (60, sum(graphs.values()))
    assert found.counters.calls == 60
    assert coverage(model.backend) == found


def test_padding_of_a_model_is_what_callers_say() -> None:
    model = cgcompile.compile(
        Small(), compiler="eager", capture_device="host", dynamic_dims={"x": 0}, num_warmups=0
    )
    x = torch.randn(8, 4)
    with torch.inference_mode():
        for real in (8, 5, 2):
            with set_forward_context(
                cudagraph_runtime_mode=cgcompile.CUDAGraphMode.FULL,
                batch_descriptor=BatchDescriptor(8),
                num_unpadded_tokens=real,
            ):
                model(x)
    (row,) = coverage(model).rows
    assert (row.mode, row.hits, row.batches) == ("FULL", 3, "8 tokens")
    assert row.padding == pytest.approx(9 / 24)
    model.backend.release()
    (gone,) = coverage(model).rows
    assert (gone.captured, gone.hits) == (False, 3)


def test_a_wrapper_counts_what_ran() -> None:
    settings = cgcompile.CompilationConfig(capture_device="host")
    wrapper = cgcompile.CUDAGraphWrapper(Small(), settings)
    x = torch.randn(2, 4)
    with torch.inference_mode():
        wrapper(x)
        for _ in range(5):
            with set_forward_context(
                cudagraph_runtime_mode=cgcompile.CUDAGraphMode.FULL,
                batch_descriptor=BatchDescriptor(2),
            ):
                wrapper(x)
    found = coverage(wrapper)
    assert [(row.mode, row.hits, row.reason) for row in found.rows] == [
        ("FULL", 5, None),
        ("NONE", 1, "no_forward_context"),
    ]


BUDGETS = (8, 16, 32)


def encoder(**more: Any) -> Any:
    return manager(Rows(), token_budgets=list(BUDGETS), **more)


@pytest.mark.parametrize("kind", ["plain", "breakable", "compiled"])
def test_all_captures_of_a_batch_are_there(kind: str) -> None:
    """With ``recapture`` a batch has one for each place of its inputs."""
    settings = cgcompile.CompilationConfig(
        capture_device="host", compiler="eager", on_input_change="recapture", num_warmups=0
    )
    mode = cgcompile.CUDAGraphMode.PIECEWISE if kind == "compiled" else cgcompile.CUDAGraphMode.FULL
    make = {
        "plain": cgcompile.CUDAGraphWrapper,
        "breakable": cgcompile.BreakableCUDAGraphWrapper,
        "compiled": cgcompile.compile,
    }[kind]
    model, xs = make(nn.Linear(8, 8), settings), [torch.randn(4, 8) for _ in range(3)]
    with torch.inference_mode():
        for x in (*(xs[i] for i in (0, 1, 0, 1, 2, 0, 0)), xs[0][:2]):
            batch = BatchDescriptor(len(x))
            with set_forward_context(cudagraph_runtime_mode=mode, batch_descriptor=batch):
                model(x)
    found = coverage(model)
    assert (found.total, found.on_graphs, found.counters.captures) == (8, 8, 4)
    rows_ = {key: [r for r in found.rows if key_of(r)[1] == key] for key in (4, 2)}
    assert sorted(row.hits for row in rows_[4]) == [1, 2, 4]
    assert [row.detail[:15] for row in rows_[4]] == [f"capture {n} of 3:" for n in (1, 2, 3)]
    assert [(row.hits, row.detail, row.captured) for row in rows_[2]] == [(1, "", True)]
    assert len(found.rows) == 4


def test_an_encoder_counts_what_ran() -> None:
    made = encoder()
    hits: Counter[int] = Counter()
    real: Counter[int] = Counter()
    draw = random.Random(5)
    for _ in range(40):
        tokens = draw.randint(1, 40)
        made.execute(rows(tokens))  # alone, so that the least budget is the cheapest
        budget = min((size for size in BUDGETS if size >= tokens), default=0)
        hits[budget] += 1
        real[budget] += tokens
    found = coverage(made)
    assert hits[0]
    shown = [(row.batches, row.graph, row.hits) for row in found.rows if row.graph]
    spans = ("1..8 tokens", "9..16 tokens", "17..32 tokens")
    assert shown == [(s, f"budget {b}", hits[b]) for s, b in zip(spans, BUDGETS, strict=True)]
    for row, budget in zip(found.rows, BUDGETS, strict=False):
        assert row.padding == pytest.approx(1 - real[budget] / (hits[budget] * budget))
    (without,) = [row for row in found.rows if row.graph is None]
    assert (without.reason, without.hits) == ("oversize", hits[0])
    assert (found.total, found.on_graphs, found.unit) == (40, 40 - hits[0], "items")
    assert found.counters.replays == found.on_graphs


# ------------------------------------------------------------------ how it prints


def test_how_it_prints() -> None:
    made = ms.manager("FULL_DECODE_ONLY")
    made.capture()
    for lengths, decode in (((1, 1, 1), True), ((5, 4), False)):
        made.run(ms.requests(*lengths, decode=decode))
    text = str(coverage(made))
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


def test_as_data() -> None:
    found = coverage(encoder())
    data = found.to_dict()
    assert json.loads(found.to_json()) == data
    assert data["version"] == 2
    assert_expected_inline(
        names_of(data),
        """\
total: int
on_graphs: int
padding: NoneType
version: int
kind: str
unit: str
rows: list
  padding: NoneType
  batches: str
  mode: str
  hits: int
  graph: str
  captured: bool
  real: int
  ran: int
  part: str
  reason: NoneType
  detail: str
lesser: list
counters:
  calls: int
  captures: int
  replays: int
  failures: int
  plain:
    warming: int
  degraded:

  details:
    warming: str""",
    )


def test_what_has_no_coverage() -> None:
    with pytest.raises(ConfigError, match="found a Linear"):
        coverage(nn.Linear(2, 2))


# ------------------------------------------------------------------ strict


@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_strict_managers_refuse_what_no_graph_serves(kind: str) -> None:
    made = ms.manager(kind=kind, strict=True)
    with pytest.raises(DispatchError, match="not_captured"):
        made.run(ms.requests(3))
    made.capture()
    found = made.run(ms.requests(3))
    assert found.shape == (3, ms.D)
    with pytest.raises(DispatchError, match=r"a batch of 20 tokens would run.*oversize"):
        made.run(ms.requests(20))
    assert coverage(made).total == 1  # what was refused did not run
    # Asked for, and nothing to run: no error.
    made.run(ms.requests(3), valid_modes=())
    assert made.run(None) is None
    assert [row.reason for row in coverage(made).rows if row.reason] == ["mode_excluded"]


def test_strict_lazy_managers_may_warm_up() -> None:
    made = ms.manager(lazily=True, strict=True)
    for _ in range(3):
        made.run(ms.requests(3))
    assert coverage(made).counters.captures == 1


def test_a_strict_encoder_refuses_what_would_run_eager() -> None:
    model = Rows()
    made = manager(model, token_budgets=list(BUDGETS), config=config(strict=True), captured=False)
    with pytest.raises(DispatchError, match=r"item 0 of an encoder would run.*not_captured"):
        made.execute(rows(3))
    made.capture()
    ran = model.calls["forward"]
    with pytest.raises(DispatchError, match=r"item 1 of an encoder would run.*oversize: 40 output"):
        made.execute(rows(3, 40))
    assert (model.calls["forward"], coverage(made).total) == (ran, 0)  # nothing of the call ran
    found = made.execute(rows(3, 20))
    assert [tuple(each.shape) for each in found] == [(3, H), (20, H)]
    assert coverage(made).on_graphs == 2


def test_a_strict_encoder_takes_the_cheaper_way() -> None:
    eager_is_free = Costs(fixed=1e6, eager_fixed=0.0)
    made = encoder(config=config(strict=True), costs=eager_is_free)
    made.execute(rows(3))
    (row,) = [row for row in coverage(made).rows if row.reason]
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
    made = encoder(config=config(strict=True), sharder=Shares())
    assert len(made.execute(rows(3, 20))) == 1
    with pytest.raises(DispatchError, match="oversize"):
        made.execute(rows(3, 40))  # the large item is another rank's
