"""Good models are verified in every form; what cannot be compared or replayed is not ok."""

import io
import itertools
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from lib import encoders
from lib.cases import D
from lib.command_line import Page
from lib.debug import FULL, PIECEWISE, only, step
from lib.encoders import counts
from lib.faulty_models import Calculates, Good, Stale, built, config, miscompiler, rows, softmax
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CUDAGraphWrapper, verify
from cgcompile.debug.compare import InputSets, Tolerance, padded
from cgcompile.encoder import Costs, PatchTable
from cgcompile.errors import ConfigError

# ---------------------------------------------------------------- good models


@pytest.mark.slow
def test_text() -> None:
    verdict = verify(built(Good, "cpu"), rows("cpu"), config=config(), padded_sizes=(8,))
    assert_expected_inline(
        str(verdict),
        """\
Good: ok
check                      inputs  replays  tolerance  result
eager against replay       3       3        bitwise    equal
padded to 8 against exact  3       3        by dtype   equal""",
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("form", ["plain", "torch.compile", "cgcompile.compile"])
def test_a_good_model(device: str, mode: str, form: str) -> None:
    model, settings = built(Good, device), config(cudagraph_mode=mode)
    called: Any = model
    if form == "torch.compile":
        called = torch.compile(model, backend=cgcompile.Backend(settings))
    elif form == "cgcompile.compile":
        called = cgcompile.compile(model, settings)
    x = rows(device)
    before, random = x.clone(), torch.get_rng_state()
    more = {"config": settings} if form == "plain" else {}
    verdict = verify(called, x, padded_sizes=(8,), tails="nan", **more)
    assert verdict.ok, verdict
    assert [(check.compared, check.replays) for check in verdict.checks] == [(3, 3)] * 2
    assert verdict.checks[0].tolerance == ("bitwise" if device == "cpu" else "by dtype")
    assert torch.equal(x, before)
    assert model.count.item() == 0
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_good_wrapper(device: str, kind: Any) -> None:
    host = cgcompile.CompilationConfig(capture_device="host")
    wrapper = kind(built(Good, device), host)
    with step(FULL):
        verdict = verify(wrapper, rows(device), sets=4)
    assert verdict.ok, verdict
    assert verdict.replays == 4


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "kind"), [("FULL", "plain"), ("PIECEWISE", "compiled")])
def test_a_good_manager(device: str, mode: str, kind: str) -> None:
    graph_manager = manager(mode, kind, device)
    graph_manager.capture()
    batches = [requests(*each, device=device) for each in ((1, 1, 1), (3, 1), (7,), (2, 2))]
    verdict = verify(graph_manager, *batches, rtol=1e-4, atol=1e-5)
    assert verdict.ok, verdict
    assert {check.name: check.replays for check in verdict.checks} == {
        "exact eager against exact replay": 2,
        "exact eager against padded replay": 2,
    }
    verdict = verify(graph_manager, prepare=lambda: requests(60, device=device), sets=2)
    assert not verdict.ok
    assert "batch 0 has no graph: oversize" in str(verdict)


class Mixes(encoders.Rows):
    """Rows that depend on all rows of the buffer: on padding, and on other items."""

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        result = super().encoder_cudagraph_forward(inputs)
        return result + result.sum()


@pytest.mark.parametrize(
    ("case", "ok", "text"),
    [
        ("items", True, "eager items against replayed budgets"),
        ("padding", True, "equal"),
        ("baked", False, "wrong by replay, inputs 0: the whole step"),
        ("oversize", True, "note: call 1 has items without a graph: 1 oversize"),
        ("cheaper", True, "note: call 1 has items without a graph: 1 cheaper_eager"),
        ("no replay", False, "nothing was replayed: call 0 has items without a graph: 1 oversize"),
        ("nothing", False, "call 0 has items without a graph: 2 not_captured"),
        ("none", False, "there are no calls"),
    ],
)
def test_an_encoder_manager(case: str, ok: bool, text: str) -> None:
    model = Mixes() if case == "baked" else encoders.Rows()
    costs = Costs(fixed=1.0, eager_fixed=10.0) if case == "cheaper" else encoders.GRAPHS
    encoder = encoders.manager(model, captured=case != "nothing", costs=costs)
    calls = {
        "cheaper": [encoders.rows(4), encoders.rows(40)],
        "no replay": [encoders.rows(1000)],
        "items": [encoders.rows(4, 2), encoders.rows(1, 3, 5)],
        "padding": [encoders.rows(3)],
        "baked": [encoders.rows(3)],
        "oversize": [encoders.rows(4), encoders.rows(4, 1000)],
        "nothing": [encoders.rows(4, 2)],
        "none": [],
    }[case]
    verdict = verify(encoder, *calls)
    assert verdict.ok == ok, verdict
    assert text in str(verdict)
    assert str(verdict).startswith("EncoderCudaGraphManager of ")
    assert bool(verdict.replays) == (case not in ("nothing", "none", "no replay"))
    replayed = {"nothing": 0, "no replay": 0, "cheaper": 1}.get(case, len(calls))
    assert verdict.checks[0].compared == replayed
    assert counts(encoder) == (0, 0)  # of serving


def test_an_encoder_manager_takes_calls_alone() -> None:
    encoder = encoders.manager(encoders.Rows(), config=encoders.config(on_fallback="raise"))
    with pytest.raises(ConfigError, match="calls of the encoder, each a dict"):
        verify(encoder, [1])
    verdict = verify(
        encoder, prepare=lambda: encoders.rows(4, 3), sets=2
    )  # strict lets it run eager
    assert verdict.ok, verdict
    assert verdict.checks[0].compared == 2
    assert encoder.statistics.reasons() == {}  # of serving


def test_a_difference_of_an_encoder_names_what_shared_the_replay() -> None:
    def restarts(grids: Any) -> torch.Tensor:  # at each image, where it must go on
        return torch.cat([encoders.cells([grid]) for grid in grids])

    tables = {**encoders.TABLES, "cells": PatchTable(restarts, (4,), torch.int64, "tokens")}
    encoder = encoders.manager(encoders.patches(tables=tables), token_budgets=[16])
    (difference,) = verify(encoder, encoders.images((4, 4), (8, 4), (2, 2))).differences
    assert (
        "in a replay of budget 16: items 0 (1, 4, 4), 1 (1, 8, 4), 2 (1, 2, 2)" in difference.detail
    )
    assert "tables or offsets= that do not count the rows of earlier items" in difference.detail
    assert "tail='positions'" in difference.detail
    assert "a weight was replaced that is not in tower=" in difference.detail


# ---------------------------------------------------------------- nothing to compare


class Layouts(nn.Module):
    """A result with the batch in its second dimension, and a cache and a result of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4, D, dtype=torch.float8_e4m3fn))

    def forward(self, x):
        y = F.scaled_dot_product_attention(x, x, x).sin()
        self.cache.copy_(y[:2])
        return y.transpose(0, 1) + 1, y.to(torch.float8_e5m2)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["eager", "aot"])  # compared bitwise, and by dtype
def test_rows_in_another_dimension_and_narrow_numbers(compiler: str) -> None:
    settings = config(compiler=compiler)
    verdict = verify(Layouts(), rows("cpu"), config=settings, padded_sizes=(8,))
    assert verdict.ok, verdict
    assert verdict.replays == 6


def test_nothing_replayed_is_not_ok() -> None:
    verdict = verify(built(Good, "cpu"), rows("cpu"), config=config(capture_device="auto"))
    assert (verdict.ok, verdict.replays, verdict.differences) == (False, 0, ())
    assert "nothing was replayed: no_capture_device" in str(verdict)
    assert verify(manager()).checks[0].missing == "there are no batches"


@pytest.mark.slow
def test_a_padded_size_needs_fewer_rows_and_no_context(tmp_path: Path) -> None:
    model = built(Good, "cpu")
    verdict = verify(model, rows("cpu"), config=config(), padded_sizes=(6,))
    assert not verdict.ok
    assert verdict.checks[1].missing == "the batch has 6 rows, not fewer"
    page = Page(verdict.to_html(tmp_path / "page.html").read_text(encoding="utf-8"))
    missing = [row["missing"][0] for row in page.rows("checks")]
    assert missing == ["", verdict.checks[1].missing]
    compiled = cgcompile.compile(model, config())
    with step(PIECEWISE), torch.no_grad():
        verdict = verify(compiled, rows("cpu"), padded_sizes=(8,))
    assert verdict.checks[0].ok
    assert "a forward context sets the padding" in verdict.checks[1].missing


def test_settings_that_cannot_be() -> None:
    compiled = cgcompile.compile(built(Good, "cpu"), config())
    with pytest.raises(ConfigError):
        verify(compiled, rows("cpu"), config=config())
    with pytest.raises(ConfigError, match="tails"):
        verify(compiled, rows("cpu"), tails="zeros")


# ---------------------------------------------------------------- faults


def test_padding_rows_are_named(hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    model, x = cgcompile.compile(built(Stale, "cpu"), config()), rows("cpu")
    with step(PIECEWISE, real=4), torch.no_grad():
        assert verify(model, x, sets=2).ok
        factor = 3.0
        difference = only(verify(model, x, sets=1))
    assert (difference.piece, difference.op, difference.padding_rows) == (
        "piece_2",
        "_operator.add",
        (4, 5),
    )
    assert "rows [4, 5] are padding" in str(difference)


@pytest.mark.parametrize(("row", "ok"), [(3, False), (4, True), (5, True)])
def test_only_real_rows_have_to_be_equal(row: int, ok: bool, hook: Any) -> None:
    """Of six rows four are real."""
    factor = 1.0

    def op(x: torch.Tensor) -> torch.Tensor:
        result = softmax(x)
        result[row] *= factor
        return result

    hook(op)
    model, x = cgcompile.compile(built(Stale, "cpu"), config()), rows("cpu")
    with step(PIECEWISE, real=4), torch.no_grad():
        assert verify(model, x, sets=2).ok
        factor = 3.0
        verdict = verify(model, x, sets=2)
    assert (verdict.ok, verdict.replays) == (ok, 2), verdict
    assert [difference.rows for difference in verdict.differences] == [(row,)] * (0 if ok else 2)
    with step(PIECEWISE), torch.no_grad():  # each row is real
        assert only(verify(model, x, sets=1)).rows == (row,)


def test_a_replay_that_returns_an_earlier_result(hook: Any) -> None:
    """The first set of inputs cannot show it; a later one is replayed only once."""
    plain, results = [], []

    class Late(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                plain.append(True)
            return torch.ops.cgentry.hooked(x.sin()).cos()

    def late(x: torch.Tensor) -> torch.Tensor:
        results.append(x * 2)
        if plain:
            plain.clear()
            return results.pop()
        return results[-2:][0].clone()

    hook(late)
    settings = config(splitting_ops=("cgentry::hooked",))
    assert verify(built(Late, "cpu"), rows("cpu"), config=settings, sets=1).ok
    verdict = verify(built(Late, "cpu"), rows("cpu"), config=settings, sets=2)
    assert [difference.inputs for difference in verdict.differences] == [1]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, D)

    def forward(self, input_ids, positions, inputs_embeds=None):
        return torch.ops.cgentry.hooked(self.embed(input_ids))


def test_a_manager_whose_op_has_baked_in_a_number(hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    # with the state compared, the step is refused before verify compares it
    graph_manager = manager("FULL", model=built(Scaled, "cpu"), checks="-state")
    graph_manager.capture()
    batches = [requests(1, 1, 1), requests(3, 1)]
    assert verify(graph_manager, *batches).ok
    factor = 2.0
    verdict = verify(graph_manager, *batches)
    assert [difference.inputs for difference in verdict.differences] == [1, 0]
    exact, padded = verdict.differences
    for difference in verdict.differences:
        assert "an op inside has baked in a number" in difference.detail
        assert "a weight was replaced" in difference.detail
        assert difference.piece == "the whole step"
        assert "location unknown" not in str(difference)
    assert ("padding" in padded.detail, "padding" in exact.detail) == (True, False)


def test_a_difference_as_data(hook: Any) -> None:
    """The kernel of an op does something else than while it was captured."""
    hook(softmax)
    model = cgcompile.compile(built(Stale, "cpu"), config())
    assert verify(model, rows("cpu"), sets=1).ok
    hook(lambda x: softmax(x) * 2)
    verdict = verify(model, rows("cpu"), sets=1)
    assert [check.ok for check in verdict.checks] == [False]
    assert [difference.stage for difference in verdict.differences] == ["replay"]
    data = verdict.to_dict()
    assert json.loads(verdict.to_json()) == data
    assert (data["ok"], data["subject"]) == (False, "Stale")
    assert data["checks"][0]["findings"][0]["rows"] == list(range(6))


# ---------------------------------------------------------------- values


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_progress_is_shown_on_a_terminal_alone(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = kind()
    monkeypatch.setattr("sys.stderr", shown)
    assert not verify(
        built(Calculates, "cpu"), rows("cpu"), config=config(compiler=miscompiler), bisect=True
    ).ok
    bars = [
        text in shown.getvalue()
        for text in ("verify: eager against replay", "verify: bisect: 0run")
    ]
    assert bars == [kind is Terminal] * 2, shown.getvalue()


@pytest.mark.slow
def test_progress_is_shown_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    assert verify(built(Good, "cpu"), rows("cpu"), config=config()).ok
    served = manager()
    served.capture()
    assert verify(served, requests(1, 1, 1)).ok
    for text in ("verify: eager against replay", "verify: batches"):
        assert text in shown.getvalue()


def test_sets_of_inputs() -> None:
    x, ids = torch.randn(4, 3) * 5 + 7, torch.tensor([2, 5, 3, 4])
    sets = InputSets(((), {"x": x, "ids": ids, "n": 3}))
    first = x.clone(), ids.clone()
    for number in (1, 2):
        args, kwargs = sets.fill(number)
        assert (args, kwargs["n"]) == ((), 3)
        assert kwargs["x"] is x
        assert not torch.equal(x, first[0])
        assert 2 <= int(ids.min()) <= int(ids.max()) <= 5
        assert 2 < float(x.mean()) < 12
    numbers = itertools.count()

    def prepare() -> torch.Tensor:
        number = next(numbers)
        return torch.full((number // 2 + 1,), float(number))

    prepared = InputSets(((), {}), prepare)
    assert prepared.fill(1)[0][0] is prepared.first[0][0]
    assert prepared.first[0][0].item() == 1.0
    assert prepared.fill(2)[0][0].tolist() == [2.0, 2.0]


def test_padded_inputs() -> None:
    x, ids, other = torch.randn(3, 2), torch.tensor([4, 5, 6]), torch.zeros(5)
    generator = torch.Generator().manual_seed(0)
    (large, more, same), _ = padded(((x, ids, other), {}), 6, "nan", generator)
    assert torch.equal(large[:3], x)
    assert large[3:].isnan().all()
    assert set(more[3:].tolist()) <= {4, 5, 6}
    assert same is other


@pytest.mark.parametrize(
    ("tolerance", "dtype", "expected", "text"),
    [
        (Tolerance(True), torch.float32, (0.0, 0.0), "bitwise"),
        (Tolerance(), torch.float32, (1e-3, 1e-4), "by dtype"),
        (Tolerance(), torch.bfloat16, (5e-2, 1e-2), "by dtype"),
        (Tolerance(), torch.complex64, (1e-3, 1e-4), "by dtype"),
        (Tolerance(), torch.int64, (0.0, 0.0), "by dtype"),
        (Tolerance(True, rtol=0.5), torch.float32, (0.5, 0.0), "rtol=0.5, atol=0"),
    ],
)
def test_tolerances(tolerance: Tolerance, dtype: Any, expected: Any, text: str) -> None:
    assert tolerance.of(dtype) == expected
    assert str(tolerance) == text
