"""The page of a running model says what its value says, and the value what has run."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.command_line import Page
from lib.encoders import config as encoder_config
from lib.encoders import images, patches
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile.debug.output import duration, render
from cgcompile.errors import ConfigError


@pytest.fixture(scope="module")
def overview() -> cgcompile.debug.Overview:
    """A manager of a compiled decoder that has run decode, mixed and one oversize batch."""
    served = manager(kind="compiled")
    served.capture()
    for count in (1, 3, 5, 3):
        served.run(requests(*[1] * count, decode=True))
    for count in (3, 9, 30):
        served.run(requests(count - 2, 2))
    found = cgcompile.debug.report(served)
    assert found.counters.replays == served.counters.replays == 6
    assert sum(found.memory.values()) == served.graph_memory().total > 0
    return found


@pytest.fixture(scope="module")
def page(overview: cgcompile.debug.Overview) -> Page:
    return Page(render("overview", overview.to_dict()))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v))


def exact(row: dict[str, tuple[str, list[str]]], column: str) -> Any:
    """The one number of a cell; None where there is a dash."""
    text, numbers = row[column]
    if not numbers:
        assert text.strip() in ("\N{EN DASH}", "")
        return None
    (number,) = numbers
    return json.loads(number)


# ---------------------------------------------------------------- the page against the value


def test_recorded_steps_are_those_of_the_value(
    page: Page, overview: cgcompile.debug.Overview
) -> None:
    found = overview.to_dict()["steps"]
    assert len(found) == 9  # four FULL sizes of decode, five PIECEWISE ones
    columns = {
        "graphs": "graphs",
        "breaks": "breaks",
        "bytes": "nbytes",
        "capture": "seconds",
        "replays": "replays",
    }
    for row, step in zip(page.rows("steps"), found, strict=True):
        assert row["batch"][0] == step["batch"]
        assert row["mode"][0] == step["mode"]
        assert {each: exact(row, each) for each in columns} == {
            title: step[name] for title, name in columns.items()
        }


def test_pieces_are_those_of_the_value(page: Page, overview: cgcompile.debug.Overview) -> None:
    for number, graph in enumerate(overview.to_dict()["graphs"]):
        suffix = f"#{number}" if number else ""
        pieces = graph["pieces"]
        rows = page.rows(f"pieces{suffix}")
        assert [exact(row, "ops") for row in rows] == [piece["num_ops"] for piece in pieces]
        kinds = ["captured" if piece["captured"] else "eager" for piece in pieces]
        assert [row["kind"][0] for row in rows] == kinds
        first = page.rows(f"distinct{suffix}")
        assert sum(exact(row, "times") for row in first) == len(pieces)
        assert len(first) == graph["totals"]["distinct"]
        assert "splitting_op cgserve::attend" in first[1]["why, and where"][0]
        assert "manager.py:" in first[0]["why, and where"][0]
        label, titles = page.drawings[number]
        assert label == f"The pieces of graph {number} in order: 3 captured, 2 eager"
        assert len(titles) == 1 + len(pieces)
        assert titles[2].startswith("piece_1, eager, 1 ops; splitting_op: cgserve::attend")


def test_timeline_is_that_of_the_value(page: Page, overview: cgcompile.debug.Overview) -> None:
    found = overview.to_dict()["timeline"]
    assert [each["batch"] for each in found] == [each.batch for each in overview.timeline]
    rows = page.rows("timeline")
    assert len(rows) == len(found) == 9
    for row, record in zip(rows, found, strict=True):
        assert exact(row, "time") == record["seconds"]
        assert exact(row, "bytes") == record["nbytes"]
        assert exact(row, "segments") == len(record["segments"])
        assert exact(row, "after") == record["start"] - found[0]["start"]
    drawing = next(titles for label, titles in page.drawings if label.startswith("Captures"))
    for record in found:
        assert [title for title in drawing if title.startswith(f"{record['batch']}: ")]


def test_coverage_is_that_of_the_value(page: Page, overview: cgcompile.debug.Overview) -> None:
    found = overview.to_dict()["coverage"]
    assert found["total"] == 7
    assert found["on_graphs"] == 6
    for row, each in zip(page.rows("coverage"), found["rows"], strict=True):
        assert exact(row, "steps") == each["hits"]
        assert exact(row, "padding") == each["padding"]
        assert row["graph"][0] == (each["graph"] or "")
        assert (each["reason"] or "") in row["why without a graph"][0]
    assert "oversize" in page.rows("coverage")[-1]["why without a graph"][0]
    drawing = next(titles for label, titles in page.drawings if label.startswith("Real"))
    assert drawing[1:] == [
        f"{each['mode']} {each['graph']}: {each['padding']:.1%} padding in {each['hits']} steps"
        for each in found["rows"]
        if each["padding"] is not None
    ]


def test_counters_and_memory_are_those_of_the_value(
    page: Page, overview: cgcompile.debug.Overview
) -> None:
    found = overview.to_dict()
    (line,) = [each for each in page.text.splitlines() if " calls: " in each]
    counts = [found["counters"][each] for each in ("calls", "captures", "replays", "failures")]
    plain = sum(found["counters"]["plain"].values())
    assert [int(each) for each in re.findall(r"\d+", line)] == [*counts[:3], plain, counts[3]]
    for name in ("plain", "degraded"):
        assert (name in page.tables) == bool(found["counters"][name])
    rows = {row["reason"][0]: exact(row, "calls") for row in page.rows("plain")}
    assert rows == found["counters"]["plain"]
    assert [exact(row, "bytes") for row in page.rows("memory")] == list(found["memory"].values())


def test_no_number_comes_from_elsewhere(page: Page, overview: cgcompile.debug.Overview) -> None:
    """Numbers of the page are leaves of the value, lengths of its lists, or sums over them."""
    known: set[Any] = set()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            known.add(sum(each for each in value.values() if isinstance(each, int)))
            for each in value.values():
                visit(each)
        elif isinstance(value, list):
            known.add(len(value))
            for name in {name for each in value if isinstance(each, dict) for name in each}:
                numbers = [each[name] for each in value if isinstance(each.get(name), (int, float))]
                known.add(sum(numbers))
            for each in value:
                visit(each)
        else:
            known.add(value)

    found = overview.to_dict()
    visit(found)
    known |= {each["start"] - found["timeline"][0]["start"] for each in found["timeline"]}
    known |= {  # how many pieces have one structure
        sum(piece["same_as"] == other["same_as"] for other in graph["pieces"])
        for graph in found["graphs"]
        for piece in graph["pieces"]
    }
    assert len(page.numbers) > 100
    assert {json.loads(number) for number in page.numbers} <= known


# ---------------------------------------------------------------- how the page is made


def test_the_page_stands_alone(page: Page) -> None:
    assert "script" not in {tag for tag, _ in page.tags}
    for tag, found in page.tags:
        for name in ("src", "href", "data", "action"):
            address = found.get(name)
            assert address is None or address[0] == "#" or address == "data:,", (tag, address)
        assert not [name for name in found if name.startswith("on")]


def test_the_page_is_accessible(page: Page) -> None:
    levels = [level for level, _ in page.headings]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert [text for level, text in page.headings if level == 2] == [
        "Split",
        "Recorded steps",
        "Coverage",
        "Timeline of captures",
        "Counters",
        "Settings",
        "Versions",
    ]
    assert all(page.captions[name].strip() for name in page.tables)
    assert all(label and titles for label, titles in page.drawings)
    assert all("scope" in found for tag, found in page.tags if tag == "th")
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids))
    for _, found in page.tags:
        assert found.get("href", "#split")[1:] in [*ids, "ata:,"]
        assert found.get("aria-labelledby", ids[0]) in ids
    assert dict(page.tags)["html"]["lang"] == "en"


def test_what_users_name_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    model = type(name, (Attends,), {})().eval()
    compiled = cgcompile.compile(model, compiler="eager", capture_device="host")
    with torch.inference_mode():
        compiled(torch.randn(2, 4, 8))
    overview = cgcompile.debug.report(compiled, tmp_path / "deep" / "page.html")
    text = (tmp_path / "deep" / "page.html").read_text(encoding="utf-8")
    assert overview.title == name
    assert "<script" not in text
    found = Page(text)
    assert found.headings[0] == (1, name)
    explained = cgcompile.explain(model, torch.randn(2, 4, 8)).to_html(tmp_path / "e.html")
    assert Page(explained.read_text(encoding="utf-8")).headings[0] == (1, name)


def test_long_lists_are_folded() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Attends() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    compiled = cgcompile.compile(
        Deep().eval(), compiler="eager", capture_device="host", dynamic_dims={"x": 0}
    )
    with torch.inference_mode():
        for size in range(2, 22):
            for _ in range(2):
                compiled(torch.randn(size, 4, 8))
    overview = cgcompile.debug.report(compiled)
    found = Page(render("overview", overview.to_dict()))
    assert len(found.rows("steps")) == 16
    assert len(found.rows("more-steps")) == 4
    assert len(overview.steps) == 20
    assert [tag for tag, given in found.tags if tag == "details" and "open" not in given]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-7, "0.4 us")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- the value against what ran


@pytest.fixture(params=["torch.compile", "compile", "breakable", "backend"])
def run_model(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A model that has warmed up, captured and replayed twice, through one of the doors."""
    settings: dict[str, Any] = {"compiler": "eager", "capture_device": "host"}
    model, x = Attends().eval(), torch.randn(2, 4, 8)
    found: Any
    if request.param == "compile":
        found = cgcompile.compile(model, **settings)
    elif request.param == "breakable":
        found = cgcompile.compile(model, splitting="breakable", capture_device="host")
    else:
        backend = cgcompile.Backend(**settings)
        found = torch.compile(model, backend=backend)
    batch = cgcompile.BatchDescriptor(num_tokens=2)
    with (
        torch.inference_mode(),
        cgcompile.set_forward_context(
            cudagraph_runtime_mode=cgcompile.CUDAGraphMode.PIECEWISE, batch_descriptor=batch
        ),
    ):
        for _ in range(4):
            result = found(x)
        assert torch.equal(result, model(x))
    request.node.model = found  # a backend does not keep it
    return (backend if request.param == "backend" else found), request.param


def test_every_door(run_model: tuple[Any, str]) -> None:
    target, door = run_model
    overview = cgcompile.debug.report(target, title="mine")
    assert overview.title == "mine"
    (step,) = overview.steps
    assert (step.batch, step.mode, step.graphs, step.breaks) == ("num_tokens=2", "PIECEWISE", 2, 1)
    assert step.replays == overview.counters.replays >= 2
    assert overview.counters.calls == 4
    (record,) = overview.timeline
    assert (step.seconds, step.nbytes) == (record.seconds, record.nbytes)
    assert [each.index for each in overview.graphs] == ([] if door == "breakable" else [0])
    assert [p.captured for g in overview.graphs for p in g.pieces] == (
        [] if door == "breakable" else [True, False, True]
    )
    assert overview.memory["pools"] > 0
    assert json.loads(overview.to_json()) == overview.to_dict()
    found = Page(render("overview", overview.to_dict()))
    assert exact(found.rows("steps")[0], "replays") == step.replays


def test_an_encoder_manager() -> None:
    encoder = cgcompile.EncoderCudaGraphManager(
        patches(),
        device="cpu",
        dtype=torch.float32,
        token_budgets=[8, 16],
        config=encoder_config(),
    )
    encoder.capture()
    encoder.execute(images((4, 4), (4, 6)))
    encoder.execute(images((16, 16)))
    overview = cgcompile.debug.report(encoder)
    assert overview.kind == "EncoderCudaGraphManager"
    assert overview.coverage.unit == "items"
    assert overview.coverage.total == 3
    assert sum(step.replays for step in overview.steps) == encoder.counters.replays > 0
    assert [setting.origin for setting in overview.settings if setting.name == "capture_device"]
    found = Page(render("overview", overview.to_dict()))
    assert "Split" not in [text for _, text in found.headings]
    assert len(found.rows("steps")) == 2
    assert [exact(row, "items") for row in found.rows("coverage")] == [
        row.hits for row in overview.coverage.rows
    ]


def test_settings_say_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "0")
    options = {"compiler": "eager", "capture_device": "host"}
    compiled = torch.compile(Attends().eval(), backend="cgcompile", options=options)
    with torch.inference_mode():
        for _ in range(2):
            compiled(torch.randn(2, 4, 8))
    overview = cgcompile.debug.report(compiled)
    origins = {each.name: (each.value, each.origin) for each in overview.settings}
    assert origins["compiler"] == ("eager", "options")
    assert origins["num_warmups"] == (0, "environment")
    assert origins["strict"] == (False, "default")
    found = Page(render("overview", overview.to_dict()))
    chosen = {row["setting"][0]: row["from"][0] for row in found.rows("settings")}
    assert chosen == {name: origin for name, (_, origin) in origins.items() if origin != "default"}
    assert set(chosen) == {"compiler", "capture_device", "num_warmups", "cache_dir"}
    assert len(chosen) + len(found.rows("defaults")) == len(origins)


def test_nothing_has_run() -> None:
    overview = cgcompile.debug.report(cgcompile.compile(Attends(), compiler="eager"))
    assert overview.steps == overview.timeline == overview.graphs == ()
    assert overview.notes == ("Nothing was compiled yet: call the model, then ask again.",)
    text = Page(render("overview", overview.to_dict())).text
    assert "Nothing is recorded." in text
    assert "Nothing was captured." in text


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a Linear"):
        cgcompile.debug.report(nn.Linear(2, 2), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    model = cgcompile.compile(Attends(), compiler="eager")
    with pytest.raises(OSError, match="file"):
        cgcompile.debug.report(model, tmp_path / "file" / "page.html")
