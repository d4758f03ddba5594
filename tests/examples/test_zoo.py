"""The model zoo tells right, wrong, refused and crashed rows apart; the docs have its rows."""

import dataclasses
import json
import re
import select
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.examples import EXAMPLES, load
from lib.patience import PATIENCE
from lib.snapshots import assert_snapshot
from model_zoo import table
from model_zoo.catalogue import CATALOGUE, ENTRIES, LIBRARIES
from model_zoo.compare import Mismatch, compare
from model_zoo.entries import Entry, from_config, from_timm, normal
from model_zoo.measure import Settings, measure
from model_zoo.pool import measured

import cgcompile

QUICK = Settings(sizes=(1, 3, 4), rounds=5)
RESULTS = EXAMPLES / "benchmarks" / "results" / "zoo.json"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("llama", "decode"),
        ("convnext", "compile"),
        ("vit", "traced"),
        ("autocast_layers", "compile"),
    ],
)
def test_a_model_is_right_and_replayed(name: str, way: str) -> None:
    row = measure(CATALOGUE[name], way, QUICK)
    assert (row.outcome, row.detail, row.replayed) == ("right", "", 1.0), row
    assert row.calls == len(QUICK.sizes) * (3 if way == "decode" else 1)
    assert (row.breaks, row.splitting) == (0, "fx")
    assert 1 <= row.graphs <= len(QUICK.sizes)
    assert row.captures >= len(QUICK.sizes)
    assert row.moves > 5 * QUICK.tolerance > row.difference


def test_each_query_of_padded_text_has_a_key_in_its_sliding_window() -> None:
    mistral = CATALOGUE["mistral"]
    window = mistral.make().config.sliding_window
    for _ in range(20):
        kept = mistral.inputs(8)["attention_mask"].bool()
        queries, keys = torch.arange(kept.shape[1])[:, None], torch.arange(kept.shape[1])
        mask = (keys <= queries) & (keys > queries - window) & kept[:, None]
        assert mask.any(-1).all()


# ---------------------------------------------------------------- faults


def scale(gm: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Multiply one result of the graph by 1.05."""
    node = next(node for node in gm.graph.nodes if "linear" in str(node.target))
    with gm.graph.inserting_after(node):
        scaled = gm.graph.call_function(torch.mul, (node, 1.05))
    node.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)
    return gm


def quick(**more: Any) -> Settings:
    """Return quick settings whose backends have more fields."""

    class Changed(Settings):
        def backend(self, **settings: Any) -> cgcompile.Backend:
            return super().backend(**more, **settings)

    return Changed(**dataclasses.asdict(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["compile", "traced"])
def test_a_pass_that_changes_a_result_is_wrong(way: str) -> None:
    passes = (cgcompile.passes.FunctionPass("scale", scale),)
    row = measure(CATALOGUE["distilbert"], way, quick(passes=passes))
    assert row.outcome == "wrong", row
    assert "round 0, result 0: differs by" in row.detail


def stale(model: Any, entry: Any, backend: Any) -> Any:
    """Return the result of the second call from the third call of a size on."""
    seen: dict[int, list[Any]] = {}

    def call(**inputs: Any) -> Any:
        results = seen.setdefault(len(inputs["input_ids"]), [])
        results.append(model(**inputs))
        return results[min(len(results), 2) - 1]

    return call


def overwriting(model: Any, entry: Any, backend: Any) -> Any:
    """Let the results of a size share their memory."""
    memory: dict[int, torch.Tensor] = {}

    def call(**inputs: Any) -> Any:
        logits = model(**inputs).logits
        return {"logits": memory.setdefault(len(logits), logits).copy_(logits)}

    return call


def writing(model: Any, entry: Any, backend: Any) -> Any:
    """Change an input."""

    def call(**inputs: Any) -> Any:
        result = model(**inputs)
        inputs["input_ids"].add_(1)
        return result

    return call


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiled", "sizes", "message"),
    [
        (stale, (1, 3), "round 2, result 0: differs by"),
        (overwriting, (3,), "the result of the call before batch 3, round 1"),
        (writing, (3,), "inputs of batch 3, round 0"),
    ],
)
def test_faults_of_replays_are_wrong(compiled: Any, sizes: tuple[int, ...], message: str) -> None:
    settings = dataclasses.replace(QUICK, sizes=sizes)
    row = measure(CATALOGUE["distilbert"], "compile", settings, compiled)
    assert row.outcome == "wrong", row
    assert message in row.detail


@pytest.mark.slow
def test_a_model_that_is_never_replayed_is_refused_with_its_reason() -> None:
    row = measure(CATALOGUE["distilbert"], "compile", quick(cudagraph_mode="NONE"))
    assert (row.outcome, row.replayed, row.calls) == ("refused", 0.0, 3)
    assert row.reasons == {"mode_none": 3}
    assert row.detail.startswith("mode_none: ")


def test_an_error_is_a_row() -> None:
    def broken(model: Any, entry: Any, backend: Any) -> Any:
        return lambda **inputs: model(inputs["no such input"])

    row = measure(CATALOGUE["distilbert"], "compile", QUICK, broken)
    assert row.outcome == "error"
    assert row.detail.startswith("KeyError: ")


class Delicate(torch.nn.Module):
    """It cannot be traced, and raises an error of CUDA where it is captured.

    Args:
        after: what later calls do: "well", "raises" or "drifts"; "slip" raises an error of
            Python in the capture instead.
    """

    def __init__(self, after: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.after, self.refused = after, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if cgcompile.BreakableCUDAGraphCapture.is_active():
            self.refused = 1
            if self.after == "slip":
                raise KeyError("x")
            raise RuntimeError("Cannot copy between CPU and CUDA tensors")
        if self.refused and self.after != "well":
            self.refused += 1
            if self.after == "raises":
                raise RuntimeError("the device is gone")
        return self.linear(x * (1.0 if x.sum().item() > 0 else 2.0)) * max(1, self.refused)


@pytest.mark.parametrize(
    ("after", "outcome", "message"),
    [
        ("well", "refused", r"breakable: test_zoo.py:\d+ in forward: RuntimeError: Cannot copy"),
        ("raises", "error", "RuntimeError: the device is gone"),
        ("slip", "error", "KeyError: 'x'"),
        ("drifts", "wrong", "a plain call after a refusal, batch"),
    ],
)
def test_an_error_in_a_capture_alone_is_a_refusal(after: str, outcome: str, message: str) -> None:
    entry = Entry("delicate", "", "", "", lambda: Delicate(after), normal("x", 4), {})
    row = measure(entry, "traced", dataclasses.replace(QUICK, rounds=3))
    assert (row.outcome, row.replayed) == (outcome, 0.0), row
    assert re.search(message, row.detail), row.detail


def test_an_error_without_a_capture_is_an_error() -> None:
    def broken() -> Any:
        raise RuntimeError("Cannot copy between CPU and CUDA tensors")

    row = measure(Entry("none", "", "", "", broken, normal("x", 4), {}), "traced", QUICK)
    assert (row.outcome, row.detail.split(":")[0]) == ("error", "RuntimeError")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (from_config("NoSuchModel", "llama"), "transformers .* has no NoSuchModel"),
        (from_timm("no_such_model"), "timm"),
    ],
)
def test_models_that_a_library_lacks_are_not_counted(make: Any, message: str) -> None:
    row = measure(Entry("new", "", "", "", make, normal("x", 4), {}), "compile", QUICK)
    assert row.outcome == "not there"
    assert re.search(message, row.detail)
    assert table.sums([row.to_json()]) == {}


def test_infinities_must_be_at_the_same_places() -> None:
    one = torch.tensor([1.0, float("inf"), float("nan")])
    assert compare(one, one.clone(), 0.0, "call") == 0.0
    with pytest.raises(Mismatch, match="differs by inf"):
        compare(one, torch.tensor([1.0, float("-inf"), float("nan")]), 1.0, "call")
    with pytest.raises(Mismatch, match="differs by inf"):
        compare(torch.ones(3), torch.tensor([1.0, 1.0, float("nan")]), 1.0, "call")


# ---------------------------------------------------------------- workers

WORKER = """
import json, os, sys, time
from pathlib import Path
for line in sys.stdin:
    name, way = json.loads(line)
    if name == "dies":
        sys.stderr.write("bus error\\n")
        os._exit(3)
    if name == "hangs":
        Path(sys.argv[1], "hangs").touch()
        time.sleep(3600)
    row = {"name": name, "way": way, "outcome": "right", "pid": os.getpid(), "replayed": 1.0}
    row |= {"splitting": "fx", "calls": 10, "graphs": 1, "captures": 5, "breaks": 0, "detail": ""}
    print(json.dumps(row | {"difference": 0.0, "seconds": 1.0}), flush=True)
"""


class Waits:
    """Clock and ``select`` of the workers: time passes only while one hangs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.now, self.hangs = 0.0, folder / "hangs"
        monkeypatch.setattr("model_zoo.pool.time", self)
        monkeypatch.setattr("model_zoo.pool.select", self)

    def perf_counter(self) -> float:
        return self.now

    def select(self, read: Any, write: Any, errors: Any, seconds: float) -> Any:
        while not (ready := select.select(read, write, errors, 0.02))[0]:
            if self.hangs.exists():
                self.hangs.unlink()
                self.now += seconds
                break
        return ready


@pytest.mark.slow
def test_a_crash_and_a_time_out_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Waits(monkeypatch, tmp_path)
    names = ["a", "dies", "b", "hangs", "c"]
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    rows = list(measured([(name, "compile") for name in names], 1, command, limit=2.0))
    assert [row["name"] for row in rows] == names
    assert [row["outcome"] for row in rows] == ["right", "crash", "right", "time-out", "right"]
    assert rows[1]["detail"] == "exit 3: bus error"
    assert (rows[3]["detail"], rows[3]["seconds"]) == ("after 2 s", 2)
    assert len({rows[index]["pid"] for index in (0, 2, 4)}) == 3


@pytest.mark.slow
def test_workers_take_turns_at_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo = load("benchmarks/zoo.py")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert zoo.places_of(zoo.arguments(["--device", "cpu"])) == [{}]
    places = zoo.places_of(zoo.arguments(["--device", "cuda"]))
    reporting = WORKER.replace('"detail": ""', '"detail": os.environ["CUDA_VISIBLE_DEVICES"]')
    # Each waits at its first row until all three are there.
    meeting = """
    Path(sys.argv[1], str(os.getpid())).touch()
    while len(list(Path(sys.argv[1]).iterdir())) < 3:
        time.sleep(0.02)
    name, way"""
    command = [sys.executable, "-c", reporting.replace("\n    name, way", meeting), str(tmp_path)]
    tasks = [(str(number), "compile") for number in range(6)]
    rows = list(measured(tasks, 3, command, PATIENCE, places=places))
    gpus = {row["pid"]: row["detail"] for row in rows}
    assert sorted(gpus.values()) == ["2", "2", "5"]


@pytest.mark.slow
def test_a_run_that_is_out_of_time_keeps_what_it_has(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    Waits(monkeypatch, tmp_path)
    zoo, output = load("benchmarks/zoo.py"), tmp_path / "new" / "zoo.json"
    last_time = [("llama", "compile", 9), ("llama", "traced", 8), ("vit", "compile", 7)]
    rows = [{"name": name, "way": way, "seconds": took} for name, way, took in last_time]
    rows.append({"name": "vit", "way": "traced", "seconds": 6})
    monkeypatch.setattr(zoo, "kept", lambda: {"rows": rows})  # those that took longest come first
    arguments = ["--device", "cpu", "--models", "llama", "vit", "--ways", "compile", "traced"]
    arguments += ["--workers", "1", "--seconds", "4", "--output", str(output)]
    hanging = WORKER.replace('name == "hangs"', '(name, way) == ("vit", "compile")')
    result = zoo.run(zoo.arguments(arguments), [sys.executable, "-c", hanging, str(tmp_path)])
    assert [(row["name"], row["way"]) for row in result["rows"]] == [
        ("llama", "compile"),
        ("llama", "traced"),
    ]
    assert result["not_run"] == [["vit", "compile"], ["vit", "traced"]]
    assert zoo.status(result) == 3
    assert zoo.status(result | {"not_run": []}) == 0
    assert zoo.status(result | {"rows": [{"outcome": "wrong"}]}) == 1
    assert json.loads(output.read_text()) == result
    assert "vit" not in output.with_suffix(".md").read_text()
    assert "vit                              not run" in table.text(result)
    assert capsys.readouterr().out.startswith("1/4  compile  llama")
    assert [file.name for file in output.parent.iterdir() if file.suffix == ".part"] == []


def test_slow_ones_are_left_out_unless_asked_for() -> None:
    zoo = load("benchmarks/zoo.py")
    slow = {entry.name for entry in ENTRIES if entry.slow}

    def names(*arguments: str) -> set[str]:
        return {name for name, _ in zoo.tasks_of(zoo.arguments([*arguments, "--device", "cpu"]))}

    assert slow
    architectures = {entry.name for entry in ENTRIES}
    assert names() == architectures - slow
    assert names("--slow") == architectures
    assert names("--part", "libraries") == {entry.name for entry in LIBRARIES}
    assert names("--models", *slow) == slow


# ---------------------------------------------------------------- tables


def test_at_least_forty_architectures_of_both_libraries() -> None:
    assert len(ENTRIES) >= 40
    assert len(CATALOGUE) == len(ENTRIES) + len(LIBRARIES)  # no name twice
    assert {entry.library for entry in ENTRIES} == {"transformers", "timm"}


def test_the_page_has_the_rows_that_were_measured() -> None:
    zoo = load("benchmarks/zoo.py")
    result, page = zoo.kept(), zoo.PAGE.read_text()
    assert table.into(page, result) == page
    if result is None:
        assert table.NOTHING in page
        return
    names = {entry["name"] for entry in result["entries"]} | {name for name, _ in result["not_run"]}
    assert names | {entry.name for entry in ENTRIES if entry.slow} == {
        entry.name for entry in ENTRIES
    }
    assert len(result["entries"]) >= 40
    assert len(table.markdown(result).splitlines()) <= 100
    assert RESULTS.read_text() == table.dumped(result)


def test_tables() -> None:
    zoo = load("benchmarks/zoo.py")
    args = zoo.arguments(["--device", "cpu", "--models", "llama", "vit"])
    assert sorted(zoo.tasks_of(args)) == [
        (name, way)
        for name, ways in (("llama", "compile decode traced"), ("vit", "compile traced"))
        for way in ways.split()
    ]
    rows = [
        {"replayed": 1.0, "outcome": "right", "splitting": "full", "reasons": {}, "detail": ""},
        {"replayed": 0.5, "outcome": "right", "reasons": {"warming": 5, "captured": 1}},
        {"replayed": 0.0, "outcome": "wrong", "calls": 0, "detail": "batch 3, round 0: ..."},
        {"outcome": "refused", "calls": 0, "detail": "piece_4: For 2*s16, expected [s16]"},
        {"outcome": "refused", "calls": 0, "detail": "piece_6: For 4*s43, expected [s43]"},
        {"outcome": "refused", "detail": "fx: no; breakable: aten.item at a.py:3; full: no"},
        {"outcome": "not there", "detail": "none"},
        {"outcome": "right"},
    ]
    numbers = {"calls": 10, "graphs": 2, "captures": 5, "breaks": 0, "difference": 1e-6}
    numbers |= {"replayed": 1.0, "seconds": 2.0, "splitting": "fx", "reasons": {}, "detail": "why"}
    tasks = [("llama", "compile"), ("llama", "traced"), ("vit", "compile"), ("beit", "compile")]
    tasks += [("swin", "compile"), ("swin", "traced"), ("detr", "compile"), ("dinov2", "compile")]
    machine = {"device": "a GPU", "torch": "2", "transformers": "5", "timm": "1"}
    result = {
        "machine": {**machine, "compiler": "inductor", "seconds": 9, "workers": 2},
        "entries": [
            {"name": name, "kind": entry.kind, "structure": entry.structure}
            for name, entry in CATALOGUE.items()
            if name in dict(tasks)
        ],
        "not_run": [["mpt", "traced"]],
        "rows": [
            {"name": name, "way": way, **numbers, **row}
            for (name, way), row in zip(tasks, rows, strict=True)
        ],
    }
    assert_snapshot("zoo_text", table.text(result))
    assert_snapshot("zoo_markdown", table.markdown(result))
