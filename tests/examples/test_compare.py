"""The comparison with other ways to run a step: measurements, verdicts and reports."""

import copy
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import figures_table
import pytest
import torch
from lib.examples import run
from lib.patience import PATIENCE
from rivals import report
from rivals.budget import budget
from rivals.bytecode import bytecode_in
from rivals.decoder import Dims, arguments_of, attend, counted, make_decoder
from rivals.measure import BURST, Broken, Row, beside_floors, check, measure, one_round
from rivals.ours import Ours, all_ours
from rivals.plot import can_plot, plot
from rivals.torchs import MetaPieces, Plain
from rivals.variant import LeftOut, Setup, Variant
from rivals.worker import Worker

from cgcompile import CUDAGraphMode

SMALL = Dims(2, 16, 2, 1, 24, 64, 4)


@pytest.fixture
def setup(without_gradients: None) -> Setup:
    dims = replace(SMALL, thin=True)
    return Setup(dims, "cpu", torch.float32, "eager", (2, 4), (4, 2))


@pytest.mark.slow
def test_compare_measures_cgcompile_on_a_cpu(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--layers", "2", "--models", "main", "--rounds", "1"]
    arguments += ["--repeats", "2", "--batches", "4", "2", "--out", str(tmp_path)]
    arguments += ["--seconds", str(2 * PATIENCE)]  # a process is ended that has had half of it
    names = ["cgcompile piecewise", "cgcompile FULL", "reduce-overhead"]
    printed = run("benchmarks/compare.py", *arguments, "--variants", *names)
    results = json.loads((tmp_path / "compare.json").read_text())
    assert results["schema"] == 1
    assert set(results["versions"]) >= {"python", "torch"}
    model = results["models"]["main"]
    assert model == json.loads((tmp_path / "main.json").read_text())
    assert model["pieces"] == 3
    for batch in ("4", "2"):
        rows = model["batches"][batch]["rows"]
        assert list(rows) == ["eager", *names[:2]]
        for name in names[:2]:
            assert rows[name]["host_noop"] > 0
            assert rows[name]["host"] > 0
            assert rows[name]["floor"]["host"] > 0
            assert "gpu" not in rows[name]
            assert model["variants"][name]["errors"][batch] <= model["error_limit"] == 1e-4
    captured = model["variants"]["cgcompile piecewise"]["capture"]
    assert (captured["sizes"], captured["graphs"]) == (2, 3)
    assert "reduce-overhead was left out: reduce-overhead needs a CUDA device" in "\n".join(printed)
    assert "main: 2 layers (3 pieces)" in (tmp_path / "compare.txt").read_text()
    assert (tmp_path / "compare.png").exists() == can_plot()


# ---------------------------------------------------------------- variants


@pytest.mark.slow
def test_every_way_of_ours_is_right_and_has_a_floor(setup: Setup) -> None:
    eager = Plain(setup, "eager")
    ran = []
    for variant in all_ours(setup, eager, eager, few=False):
        try:
            variant.prepare()
        except LeftOut:
            continue
        captured = variant.capture(1.0)
        assert check(setup, variant, 4) <= 1e-5
        floor = variant.floor(4)
        if captured is None:
            assert variant.name == "cgcompile without graphs"
            assert floor is None
        else:
            assert (captured.sizes, captured.missing) == (2, ())
            setup.steps.draw(7)
            expected = setup.model(*setup.steps.views(4)).clone()
            result = variant.step(4)()
            own = not isinstance(variant, Ours) or variant.mode is not None
            result = result if own else result.clone()
            assert floor is not None
            floor()  # replays the same graphs, which write the result
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
        ran.append(variant.name)
    assert len(ran) == 8


def test_patient_variants_are_compiled_last_or_left_out(setup: Setup, tmp_path: Path) -> None:
    for deadline, names in ((math.inf, {"other", "patient"}), (0.0, {"other"})):
        order: list[str] = []
        worker = Worker(setup, tmp_path / "w.json", few=True, only=("none",), deadline=deadline)
        for name in ("patient", "other"):
            variant = Variant(setup, name)
            variant.prepare = partial(order.append, name)  # type: ignore[method-assign]
            variant.can_wait = name == "patient"
            worker.variants.append(variant)
            worker.found["variants"][name] = {}
        worker.prepare()
        assert order == [name for name in ("other", "patient") if name in names]
        kept = [variant.name for variant in worker.variants]
        assert kept == ["eager", *[name for name in ("patient", "other") if name in names]]
        reason = worker.found["variants"]["patient"].get("left_out")
        assert reason == (None if "patient" in names else "no time left to compile it")


class Wrong(Variant):
    """Adds ``change`` to each result, or returns a stale one."""

    def __init__(
        self, setup: Setup, change: float = 0.0, stale: bool = False, calls: int | None = None
    ) -> None:
        super().__init__(setup, "wrong")
        self.change, self.stale = change, stale
        self.results: list[torch.Tensor] = []
        self.attention_calls = setup.dims.layers if calls is None else calls

    def step(self, batch: int) -> Any:
        def run() -> torch.Tensor:
            result = self.setup.model(*self.setup.steps.views(batch)) + self.change
            self.results.append(result.clone())
            return self.results[0 if self.stale else -1]

        return run


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"change": 0.1}, r"batch 4: relative L2 .*, allowed 0.0001"),
        ({"change": math.nan}, "relative L2"),
        ({"stale": True}, "relative L2"),
        ({"calls": 0}, "attention was called 2 times in a step, not 0"),
    ],
    ids=str,
)
def test_a_check_finds_a_fault(fault: dict[str, Any], message: str, setup: Setup) -> None:
    assert check(setup, Wrong(setup), 4) == 0
    with pytest.raises(Broken, match=message):
        check(setup, Wrong(setup, **fault), 4)


@pytest.mark.slow
def test_a_check_counts_replays(setup: Setup) -> None:
    variant = Ours(setup, "pieces", CUDAGraphMode.PIECEWISE)
    variant.prepare()
    with pytest.raises(Broken, match=r"3 steps made [12] replays"):
        check(setup, variant, 4)  # it was not captured before
    variant.capture(1.0)
    assert check(setup, variant, 4) <= 1e-5


def test_the_arguments_of_a_step_are_those_of_each_layer(setup: Setup) -> None:
    step = Plain(setup, "eager").step(2)
    calls = arguments_of(step)
    caches = [layer.k_cache.data_ptr() for layer in setup.model.layers]
    assert [arguments[4].data_ptr() for arguments in calls] == caches
    assert counted(step) == len(calls) == 2


def test_attention_is_that_of_the_last_position() -> None:
    model = make_decoder(SMALL, 3, "cpu", torch.float32)
    layer = model.layers[0]
    q, k, v = torch.randn(2, 2, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
    out, untouched = torch.empty(2, 2, 8), layer.k_cache[2].clone()
    attend(q, k, v, out, layer.k_cache, layer.v_cache)
    keys, values = layer.k_cache[:2, :, 0], layer.v_cache[:2, :, 0]
    assert torch.equal(keys[:, -1:], k)
    assert torch.equal(layer.k_cache[2], untouched)
    weights = torch.softmax(torch.einsum("nhd,ncd->nhc", q, keys) / 8**0.5, -1)
    torch.testing.assert_close(out, torch.einsum("nhc,ncd->nhd", weights, values))


def test_a_failure_of_one_does_not_stop_the_others(setup: Setup, tmp_path: Path) -> None:
    worker = Worker(setup, tmp_path / "w.json", few=True, only=("none",), deadline=math.inf)
    bad = Wrong(setup, change=1.0)
    worker.variants = [bad, *worker.variants]
    worker.found["variants"]["wrong"] = {}
    worker.capture()
    right = [variant for variant in worker.variants if worker.check(variant, 4)]
    assert [variant.name for variant in right] == ["eager"]
    (failure,) = worker.found["variants"]["wrong"]["failures"]
    assert failure.startswith("check of batch 4: batch 4: relative L2")

    class Raises(Variant):
        def step(self, batch: int) -> Any:
            return lambda: 1 / 0

    variants = [Raises(setup, "r"), *right]
    result = measure(setup, variants, 4, rounds=2, repeats=1, until=math.inf, probe=None)
    assert result["rows"]["r"] == {"error": "ZeroDivisionError: division by zero"}
    assert result["rows"]["eager"]["host"] > 0
    assert result["steps"] == 2


def test_a_package_that_is_not_installed_is_left_out(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rivals.torchs.META", "no_such_package_of_graphs")
    with pytest.raises(LeftOut, match="pip install piecewise-cuda-graphs"):
        MetaPieces(setup, "meta", Plain(setup, "eager")).prepare()


# ---------------------------------------------------------------- figures


@pytest.fixture
def results() -> dict[str, Any]:
    """A result of a GPU, in which the first goal is missed and all others are reached."""
    pieces = {**dict(host_noop=240, gpu=2200), "floor": dict(host_noop=200, gpu=2190)}
    direct = {**dict(host_noop=110, gpu=2200), "floor": dict(host_noop=100, gpu=2190)}
    rows: dict[str, Any] = {
        "torch.compile dynamic": dict(host=4400),
        "graph by hand, static": dict(gpu=2160),
        "cgcompile piecewise": pieces,
        "cgcompile piecewise, op's function": direct,
        "cgcompile FULL": {**dict(host_noop=9, gpu=2090), "floor": dict(host_noop=5, gpu=2090)},
        "cgcompile without graphs": dict(host=4500),
        "cgcompile lean piecewise": dict(gpu=2150),
        "cgcompile lean FULL": dict(gpu=2000),
    }
    capture = {"sizes": 20, "graphs": 33, "pool_bytes": 2.8e7, "missing": []}
    variants: dict[str, Any] = {name: {} for name in rows}
    variants["cgcompile piecewise"]["capture"] = {**capture, "seconds": 0.2, "device_bytes": 1e8}
    variants["cgcompile FULL"]["capture"] = {**capture, "seconds": 0.1, "device_bytes": 5e7}
    model = {
        "dims": vars(Dims(32, 2048, 16, 8, 5632, 32000)),
        "dtype": "bfloat16",
        "device": "cuda",
        "pieces": 33,
        "sizes": list(range(20)),
        "variants": variants,
        "batches": {"8": {"steps": 50, "pace": [1.0, 1.01], "rows": rows}},
        "complete": True,
    }
    deep = {**copy.deepcopy(model), "pieces": 65}
    deep["batches"]["8"]["rows"]["cgcompile piecewise"]["host_noop"] = 220
    return {
        "machine": {"device": "a GPU", "cpu": "a CPU", "cores": 4},
        "versions": {"torch": "2.0"},
        "date": "2030-01-02",
        "models": {"main": model, "deep": deep},
        "starts": {"Dynamo alone": {"cold": 4.5}, "cgcompile guards none": {"cold": 8, "warm": 5}},
        "notes": [],
    }


def test_the_budget_has_a_verdict_for_each_goal(results: dict[str, Any]) -> None:
    goals = budget(results)
    assert len(goals) == 14
    assert [goal.verdict for goal in goals] == ["missed by 4.3 %", *["reached"] * 13]
    values = {goal.name: goal.value for goal in goals}
    assert values["GPU time of a boundary, cache written in pieces"] == pytest.approx(150 / 32)
    assert values["cold compile beyond Dynamo alone"] == 3.5
    assert values["device memory of 20 sizes, piecewise"] == 100
    assert values["host, FULL step over its replay"] == 1.8


def test_the_budget_names_figures_that_are_missing(results: dict[str, Any]) -> None:
    del results["models"]["deep"], results["starts"]["Dynamo alone"]
    main = results["models"]["main"]
    del main["batches"]["8"]["rows"]["cgcompile piecewise"]["floor"]
    main["variants"]["cgcompile FULL"]["capture"]["sizes"] = 19
    goals = {goal.name: goal for goal in budget(results) if goal.value is None}
    assert all(goal.reached is None and goal.verdict == "not measured" for goal in goals.values())
    assert [goal.about for goal in goals.values()] == [
        "no host_noop time of floor of cgcompile piecewise, main, batch 8",
        "no host_noop time of cgcompile piecewise, deep, batch 8",
        "no host_noop time of cgcompile piecewise, op's function, deep, batch 8",
        "no gpu time of floor of cgcompile piecewise, main, batch 8",
        "no cold start of Dynamo alone",
        "cgcompile FULL captured 19 sizes, not 20",
        "cgcompile FULL captured 19 sizes, not 20",
    ]


def test_the_report_names_every_trouble(results: dict[str, Any]) -> None:
    assert list(report.troubles(results)) == []
    main = results["models"]["main"]
    main["complete"] = False
    main["variants"]["cgcompile FULL"]["failures"] = ["capture: no"]
    main["variants"]["reduce-overhead"] = {"left_out": "why"}
    main["batches"]["8"]["rows"]["cgcompile FULL"]["floor"]["error"] = "E: x"
    main["batches"]["64"] = {"error": "no time left"}
    results["starts"]["Dynamo alone"]["cold_error"] = "a\nb"
    assert list(report.troubles(results)) == [
        "main: cgcompile FULL FAILED: capture: no",
        "main: reduce-overhead was left out: why",
        "main: floor of cgcompile FULL, batch 8, FAILED: E: x",
        "main: batch 64: no time left",
        "main: ended before it was done",
        "start of Dynamo alone: b",
    ]
    text = report.whole_text(results)
    assert "missed by 4.3 %" in text
    assert "a GPU, a CPU, 4 cores; torch 2.0; 2030-01-02" in text


@pytest.mark.skipif(not can_plot(), reason="needs matplotlib")
def test_the_plot_is_a_picture(results: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "made.png"
    plot(results, file)
    assert file.read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- docs


def test_the_page_has_the_figures_that_are_kept() -> None:
    page = figures_table.PAGE.read_text()
    assert figures_table.between(page) == figures_table.section_of(figures_table.RESULTS)


def test_the_section_is_written_between_the_comments(
    results: dict[str, Any], tmp_path: Path
) -> None:
    kept, page = tmp_path / "r.json", tmp_path / "page.md"
    kept.write_text(json.dumps(results))
    around = f"a\n{figures_table.BEGIN}\nold\n{figures_table.END}\nb\n"
    page.write_text(around)
    assert figures_table.main([str(kept), "--page", str(page)]) == 0
    written = page.read_text()
    text = figures_table.section(results)
    assert written == around.replace("old\n", text)
    assert figures_table.between(written) == text == figures_table.section_of(kept)
    assert "| cgcompile FULL | 9.0 | 5.0 |" in text
    assert "| 1.20 x | 1.15 x | missed by 4.3 % |" in text
    assert "2030-01-02" in text
    with pytest.raises(ValueError, match="expected one"):
        figures_table.between("nothing here")
    with pytest.raises(ValueError, match="expected one"):
        figures_table.between(around + around)


@pytest.mark.slow
def test_processes_find_bytecode_that_was_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "cgunseen"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("import sys\nprint(__cached__)\n")
    (package / "other.py").write_text("of another version of Python(\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    names = ("cgunseen", "not_there_at_all")
    wanted = bytecode_in(str(tmp_path / "bytecode"), names)
    command = [sys.executable, "-v", "-c", "import cgunseen.part"]
    for variables in (wanted, {}):
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        rows = [row for row in done.stderr.splitlines() if "code object from" in row]
        compiled = any(str(package / "part.py") in row for row in rows)
        assert compiled is not bool(variables)
        assert done.stdout.startswith(str(tmp_path / "bytecode")) is bool(variables)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(package)], check=False)
    assert bytecode_in(str(tmp_path / "more"), names) == {}
    assert not (tmp_path / "more").exists()


def test_rows_with_one_floor_go_there_and_back() -> None:
    calls: list[str] = []
    rows = {name: Row(partial(calls.append, name)) for name in ("a", "b", "its floor", "alone")}
    groups = beside_floors(rows, {"a": "its floor", "b": "its floor"})
    one_round(groups, "cpu", 3)
    there = ["a", "b", "its floor"]
    once = [*there, *there[::-1], *there, "alone", "alone", "alone"]
    assert calls[::BURST] == once * 2  # without attention, and in full
    assert all(
        len(row.samples["host"]) == len(row.samples["host_noop"]) == 3 for row in rows.values()
    )
