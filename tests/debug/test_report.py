"""The page of a running model says what its value says, and the value what has run."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lib.breakable import FULL, PIECEWISE, step
from lib.command_line import Page
from lib.encoders import images
from lib.encoders import manager as encoder_manager
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile.debug.drawing import histogram_svg, sizes_svg, split_svg, steps_svg
from cgcompile.debug.output import duration, human
from cgcompile.debug.pages import render
from cgcompile.debug.report import Overview
from cgcompile.errors import ConfigError
from cgcompile.reasons import Reason


@pytest.fixture(scope="module")
def overview() -> Overview:
    """A manager of a compiled decoder that has run decode, mixed and one oversize batch."""
    served = manager(kind="compiled")
    served.capture()
    for count in (1, 3, 5, 3):
        served.run(requests(*[1] * count, decode=True))
    for count in (3, 9, 30):
        served.run(requests(count - 2, 2))
    report = cgcompile.debug.report(served)
    assert report.counters.replays == served.counters.replays == 6
    assert sum(report.memory.values()) == served.memory().total > 0
    return report


@pytest.fixture(scope="module")
def page(overview: Overview) -> Page:
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


def compiled_and_run(model: nn.Module, **settings: Any) -> Any:
    compiled = cgcompile.compile(model, compiler="eager", capture_device="host", **settings)
    with torch.inference_mode():
        compiled(torch.randn(2, 4, 8))
    return compiled


# ---------------------------------------------------------------- the page against the value

NUMBERS = {  # of a table: where the rows are in the value, and the field of each column
    "steps": (
        lambda found: found["steps"],
        {
            "graphs": "graphs",
            "breaks": "breaks",
            "bytes": "nbytes",
            "capture": "seconds",
            "replays": "replays",
        },
    ),
    "timeline": (
        lambda data: [
            {
                **record,
                "after": record["start"] - data["timeline"][0]["start"],
                "length": len(record["segments"]),
            }
            for record in data["timeline"]
        ],
        {"after": "after", "time": "seconds", "bytes": "nbytes", "segments": "length"},
    ),
    "coverage": (lambda found: found["coverage"]["rows"], {"steps": "hits", "padding": "padding"}),
    "pieces": (lambda found: found["graphs"][0]["pieces"], {"ops": "num_ops"}),
    "pieces#1": (lambda found: found["graphs"][1]["pieces"], {"ops": "num_ops"}),
}
TEXTS = {  # of a table: what stands in a column, of a row of the value
    "steps": {"batch": lambda step: step["batch"], "mode": lambda step: step["mode"]},
    "timeline": {
        "batch": lambda record: record["batch"],
        "what": lambda record: record["name"],
        "mode": lambda record: record["mode"],
    },
    "coverage": {
        "batches": lambda row: row["batches"],
        "mode": lambda row: row["mode"],
        "graph": lambda row: row["graph"] or "",
        "why without a graph": lambda row: " ".join(filter(None, (row["reason"], row["detail"]))),
    },
    "pieces": {"kind": lambda piece: "captured" if piece["captured"] else "eager"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_tables_are_those_of_the_value(page: Page, overview: Overview, name: str) -> None:
    (rows_of, fields), texts = NUMBERS[name], TEXTS[name.split("#")[0]]
    values = rows_of(overview.to_dict())
    rows = page.rows(name)
    assert len(rows) == {"steps": 9, "timeline": 9, "coverage": 10}.get(name, 5)
    for row, value in zip(rows, values, strict=True):
        assert {c: exact(row, c) for c in fields} == {c: value[f] for c, f in fields.items()}
        assert {c: row[c][0] for c in texts} == {c: f(value) for c, f in texts.items()}


def drawing(page: Page, start: str) -> list[str]:
    """The titles of the one drawing whose label starts so, without its own."""
    ((_, titles),) = [found for found in page.drawings if found[0].startswith(start)]
    return titles[1:]


@pytest.mark.slow
def test_drawings_are_those_of_the_value(page: Page, overview: Overview) -> None:
    assert len(overview.graphs) == 2
    for graph in overview.graphs:
        titles = drawing(page, f"The pieces of graph {graph.index} in order: 3 captured, 2 eager")
        pieces = [title for title in titles if " passes on " not in title]
        assert [title.split(",")[0] for title in pieces] == [piece.name for piece in graph.pieces]
        assert pieces[1].startswith("piece_1, eager, 1 op; splitting_op: cgserve::attend")
        assert [title for title in titles if " passes on " in title] == [
            f"{piece.name} passes on {human(piece.bytes_out.traced)}" for piece in graph.pieces[:-1]
        ]
    captures = drawing(page, "Captures")
    for title, record in zip(captures, overview.timeline, strict=True):
        assert title.startswith(f"{record.name}, {record.mode.name}, {record.batch}: ")
    assert drawing(page, "Batches") == [
        f"{row.mode} {row.graph or row.reason}: {row.hits} steps"
        + ("" if row.padding is None else f", {row.padding:.1%} padding")
        for row in overview.coverage.rows
    ]
    assert drawing(page, "Memory") == [
        f"{kind}: {human(count)}" for kind, count in overview.memory.items() if count
    ]
    grown: dict[int, int] = {}
    for recorded in overview.steps:
        size = int(re.findall(r"\d+", recorded.batch)[0])
        grown[size] = grown.get(size, 0) + recorded.nbytes
    titles = drawing(page, "Recorded steps by size")
    assert [title.split(" in ")[0] for title in titles] == [
        f"size {size}: {human(nbytes)}" for size, nbytes in sorted(grown.items())
    ]


@pytest.mark.slow
def test_measured_steps_are_drawn_in_order() -> None:
    model = compiled_and_run(Attends().eval(), cudagraph_mode="PIECEWISE")
    with torch.inference_mode(), cgcompile.debug.profile(model) as measured:
        for _ in range(4):
            model(torch.randn(2, 4, 8))
    report = cgcompile.debug.report(model, profile=measured)
    assert report.segments == measured.segments
    assert [segment.kind for segment in report.segments] == ["graph", "eager", "graph"]
    page = read(report)
    assert drawing(page, "Segments of measured steps") == [
        f"{segment.name}, {segment.kind}: {duration(segment.host_us / 1e6)}"
        for segment in report.segments
    ]
    text = steps_svg(report.to_dict()["segments"], "steps")
    wide = [float(found) for found in re.findall(r' width="([\d.]+)%"', text)]
    whole = sum(each.host_us for each in report.segments)
    expected = [100 * each.host_us / whole for each in report.segments]
    assert wide == pytest.approx(expected, abs=0.001)
    assert re.findall(r'<rect class="(\w+)"', text) == ["on", "off", "on"]
    timed = [{**each, "device_us": 2.0} for each in report.to_dict()["segments"]]
    lanes = re.findall(r"<text [^>]*>([^<]*)</text>", steps_svg(timed, "steps"))
    assert lanes[0].endswith(" of the host")
    assert lanes[1].endswith(": 6.0 us of the device")
    assert "Time of a step" not in read(cgcompile.debug.report(model)).text


def test_lanes_and_columns_of_nothing() -> None:
    for text in (steps_svg([], "a"), sizes_svg([], "a"), histogram_svg([], "steps", "a")):
        ElementTree.fromstring(text)
    nothing = [{"batch": "num_tokens=4", "nbytes": 0}]
    assert "size 4: 0 B in 1 recorded step<" in sizes_svg(nothing, "a")


def test_distinct_pieces_are_those_of_the_value(page: Page, overview: Overview) -> None:
    for graph, name in zip(overview.graphs, ("distinct", "distinct#1"), strict=True):
        rows = page.rows(name)
        assert sum(exact(row, "times") for row in rows) == len(graph.pieces)
        assert len(rows) == graph.totals.distinct
        assert "splitting_op cgserve::attend" in rows[1]["why, and where"][0]
        assert "manager.py:" in rows[0]["why, and where"][0]


def test_counters_and_memory_are_those_of_the_value(page: Page, overview: Overview) -> None:
    counters = overview.to_dict()["counters"]
    assert (overview.coverage.total, overview.coverage.on_graphs) == (7, 6)
    (line,) = [line for line in page.text.splitlines() if " calls: " in line]
    counts = [counters[name] for name in ("calls", "captures", "replays")]
    counts += [sum(counters["plain"].values()), counters["failures"]]
    assert [int(number) for number in re.findall(r"\d+", line)] == counts
    for name in ("plain", "degraded"):
        assert (name in page.tables) == bool(counters[name])
    rows = {row["reason"][0]: exact(row, "calls") for row in page.rows("plain")}
    assert rows == counters["plain"]
    memory = {row["kind"][0]: exact(row, "bytes") for row in page.rows("memory")}
    assert memory == overview.memory
    versions = {row["what"][0]: row["which"][0] for row in page.rows("versions")}
    assert versions == overview.environment
    compilations = re.findall(r"Compilation took .*: (.*)\.", page.text)
    assert compilations == [f"{len(g.compilation.pieces)} compiled" for g in overview.graphs]
    assert "oversize" in page.rows("coverage")[-1]["why without a graph"][0]


def test_no_number_comes_from_elsewhere(page: Page, overview: Overview) -> None:
    """Numbers of the page are leaves of the value, lengths of its lists, or sums over them."""
    known: set[Any] = set()

    def visit(value: Any) -> None:
        if isinstance(value, dict):
            known.add(sum(each for each in value.values() if isinstance(each, int)))
            for inner in value.values():
                visit(inner)
        elif isinstance(value, list):
            known.add(len(value))
            for name in {name for each in value if isinstance(each, dict) for name in each}:
                numbers = [each[name] for each in value if isinstance(each.get(name), (int, float))]
                known.add(sum(numbers))
            for inner in value:
                visit(inner)
        else:
            known.add(value)

    data = overview.to_dict()
    visit(data)
    rows = data["coverage"]["rows"]
    known |= {
        sum(row["hits"] for row in rows if row["reason"] == reason) for reason in data["remedies"]
    }
    known |= {record["start"] - data["timeline"][0]["start"] for record in data["timeline"]}
    known |= {  # how many pieces have one structure
        sum(piece["same_as"] == other["same_as"] for other in graph["pieces"])
        for graph in data["graphs"]
        for piece in graph["pieces"]
    }
    assert len(page.numbers) > 100
    assert {json.loads(number) for number in page.numbers} <= known


# ---------------------------------------------------------------- how the page is made


def test_the_first_screen(page: Page, overview: Overview) -> None:
    """The verdict, what had no graph, and what to do about it."""
    assert overview.verdict == "Graphs served 6 of 7 steps; without a graph: 1 oversize."
    assert overview.verdict in page.text
    (row,) = page.rows("off")
    assert {title: text for title, (text, _) in row.items()} == {
        "reason": "oversize",
        "steps": "1",
        "remedy": Reason.OVERSIZE.remedy,
    }
    assert "not measured" in page.text


def test_verdicts(tmp_path: Path) -> None:
    model = cgcompile.compile(Attends().eval(), compiler="eager", capture_device="host")
    x, verdicts = torch.randn(2, 4, 8), []
    with torch.inference_mode():
        for _ in range(4):
            verdicts.append(cgcompile.debug.report(model).verdict)
            model(x)
    assert verdicts == [
        "Nothing has run yet.",
        "No graph served any of 1 step: 1 warming.",
        "Graphs served all 1 step after 1 warming.",
        "Graphs served all 2 steps after 1 warming.",
    ]


@pytest.mark.slow
def test_the_verdict_names_lesser_modes_and_errors() -> None:
    """They are no steps without a graph, and a reader of the first screen has to see them."""
    config = cgcompile.CompilationConfig(
        compiler="eager", capture_device="host", splitting_ops="aten::cos"
    )

    class Splits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().cos().sin()

    model, x = cgcompile.compile(Splits(), config), torch.randn(4, 8)
    for _ in range(4):
        with torch.inference_mode(), step(4, FULL):
            model(x)
    served = "Graphs served all 3 steps after 1 warming."
    lesser = "In a lesser mode than requested: 4 attention_support."
    report = cgcompile.debug.report(model)
    assert report.verdict == f"{served} {lesser}"
    assert f"{served} {lesser}" in read(report).text

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    wrapper = cgcompile.BreakableCUDAGraphWrapper(Raises(), config)
    assert cgcompile.debug.report(wrapper).verdict == "Nothing has run yet."
    for _ in range(2):
        with torch.inference_mode(), step(4, PIECEWISE), pytest.raises(ValueError, match="no"):
            wrapper(x)
    report = cgcompile.debug.report(wrapper)
    assert report.verdict == "No step was completed. 2 calls raised an error."
    assert "Nothing ran without its graph." not in read(report).text


@pytest.mark.slow
def test_a_measured_speed_is_shown() -> None:
    model = compiled_and_run(Attends().eval())
    report = cgcompile.debug.report(model, speed=(0.006, 0.0015))
    assert (report.speed, report.speedup) == ((0.006, 0.0015), 4.0)
    page = read(report)
    assert "4.00 \N{MULTIPLICATION SIGN}" in page.text
    assert "6.0 ms to 1.5 ms" in page.text
    for speed in ((0.0, 1.0), (1.0,)):
        with pytest.raises(ConfigError, match="speed"):
            cgcompile.debug.report(model, speed=speed)  # type: ignore[arg-type]


@pytest.mark.slow
def test_repeated_pieces_are_drawn_once() -> None:
    model = nn.Sequential(*[Attends() for _ in range(20)]).eval()
    explanation = cgcompile.explain(model, torch.randn(2, 4, 8))
    assert len(explanation.pieces) == 41
    drawn = re.findall(r"<title>(piece_\d+), ", split_svg(explanation.to_dict()["pieces"], "split"))
    assert drawn == ["piece_0", "piece_1", "piece_2", "piece_39", "piece_40"]
    text = split_svg(explanation.to_dict()["pieces"], "split")
    assert text.count("these 2 pieces, 18 times more</text>") == 1
    few = cgcompile.explain(
        nn.Sequential(Attends(), Attends(), Attends()).eval(), torch.randn(2, 4, 8)
    )
    assert "these 2 pieces, 1 time more</text>" in split_svg(few.to_dict()["pieces"], "split")


def test_a_long_split_is_cut_in_the_middle() -> None:
    model = nn.Sequential(*[Attends() for _ in range(2)]).eval()
    piece = cgcompile.explain(model, torch.randn(2, 4, 8)).to_dict()["pieces"][0]
    pieces = [{**piece, "name": f"piece_{index}", "same_as": index} for index in range(50)]
    text = split_svg(pieces, "a & b")
    drawn = re.findall(r"<title>piece_(\d+), ", text)
    assert drawn == [*map(str, range(18)), *map(str, range(45, 50))]
    assert "27 more rows" in text
    handed = re.findall(r"<title>piece_(\d+) passes on ", text)  # not into a row that is left out
    assert handed == [*map(str, range(17)), *map(str, range(45, 49))]
    assert 'aria-label="a &amp; b"' in text


def test_a_drawing_is_a_file_of_its_own(tmp_path: Path) -> None:
    name = "<b>&"
    model = type(name, (Attends,), {})().eval()
    path = cgcompile.explain(model, torch.randn(2, 4, 8)).to_svg(tmp_path / "deep" / "split.svg")
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.attrib["aria-label"] == f"The pieces of {name}"
    rectangles = root.findall(".//{http://www.w3.org/2000/svg}rect")
    kinds = [each.attrib["class"] for each in rectangles]
    assert kinds == ["piece captured", "piece eager", "piece captured"]
    (style,) = root.findall("{http://www.w3.org/2000/svg}style")
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_the_page_stands_alone(page: Page) -> None:
    assert "script" not in {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "action"):
            address = attributes.get(name)
            assert address is None or address[0] == "#" or address == "data:,", (tag, address)
        assert not [name for name in attributes if name.startswith("on")]


def test_the_page_is_accessible(page: Page) -> None:
    levels = [level for level, _ in page.headings]
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert [text for level, text in page.headings if level == 2] == [
        "Without a graph, or on a lesser one",
        "Batches",
        "Memory",
        "Coverage",
        "Recorded steps",
        "Timeline of captures",
        "Split",
        "Counters",
        "Settings",
        "Versions",
    ]
    assert all(page.captions[name].strip() for name in page.tables)
    assert all(label and titles for label, titles in page.drawings)
    assert all("scope" in found for tag, found in page.tags if tag == "th")
    ids = [found["id"] for _, found in page.tags if "id" in found]
    assert len(ids) == len(set(ids))
    for _, attributes in page.tags:
        assert attributes.get("href", "#split")[1:] in [*ids, "ata:,"]
        assert attributes.get("aria-labelledby", ids[0]) in ids
    assert dict(page.tags)["html"]["lang"] == "en"


@pytest.mark.slow
def test_what_users_name_is_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    model = type(name, (Attends,), {})().eval()
    overview = cgcompile.debug.report(compiled_and_run(model), tmp_path / "deep" / "page.html")
    assert overview.title == name
    cgcompile.explain(model, torch.randn(2, 4, 8)).to_html(tmp_path / "deep" / "explain.html")
    for path in (tmp_path / "deep").iterdir():
        text = path.read_text(encoding="utf-8")
        assert "<script" not in text
        assert Page(text).headings[0] == (1, name)


@pytest.mark.slow
def test_long_lists_are_folded() -> None:
    model = nn.Sequential(*[Attends() for _ in range(3)]).eval()
    compiled = compiled_and_run(model, dynamic_dims={"input": 0})
    with torch.inference_mode():
        for size in range(3, 22):
            for _ in range(2):
                compiled(torch.randn(size, 4, 8))
        compiled(torch.randn(2, 4, 8))
    overview = cgcompile.debug.report(compiled)
    page = read(overview)
    assert (len(page.rows("steps")), len(page.rows("more-steps"))) == (16, 4)
    assert len(overview.steps) == 20
    assert [tag for tag, attributes in page.tags if tag == "details" and "open" not in attributes]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 us"), (2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-7, "0.4 us")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- the value against what ran


def read(overview: Overview) -> Page:
    assert json.loads(overview.to_json()) == overview.to_dict()
    return Page(render("overview", overview.to_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("door", ["torch.compile", "compile", "breakable", "backend"])
def test_every_door(door: str) -> None:
    """A model warms up, is captured and replays twice."""
    model, x = Attends().eval(), torch.randn(2, 4, 8)
    backend = cgcompile.Backend(compiler="eager", capture_device="host")
    if door == "compile":
        compiled = cgcompile.compile(model, backend.config)
    elif door == "breakable":
        compiled = cgcompile.compile(model, splitting="breakable", capture_device="host")
    else:
        compiled = torch.compile(model, backend=backend)
    with torch.inference_mode(), step(2, PIECEWISE):
        for _ in range(4):
            result = compiled(x)
        assert torch.equal(result, model(x))
    overview = cgcompile.debug.report(backend if door == "backend" else compiled, title="mine")
    assert overview.title == "mine"
    (ran,) = overview.steps
    assert (ran.batch, ran.mode, ran.graphs, ran.breaks) == ("num_tokens=2", "PIECEWISE", 2, 1)
    assert ran.replays == overview.counters.replays >= 2
    assert overview.counters.calls == 4
    (record,) = overview.timeline
    assert (ran.seconds, ran.nbytes) == (record.seconds, record.nbytes)
    kinds = [[piece.captured for piece in graph.pieces] for graph in overview.graphs]
    assert kinds == ([] if door == "breakable" else [[True, False, True]])
    assert overview.memory["pools"] > 0
    assert exact(read(overview).rows("steps")[0], "replays") == ran.replays


def test_an_encoder_manager() -> None:
    encoder = encoder_manager(token_budgets=[8, 16])
    encoder.execute(images((4, 4), (4, 6)))
    encoder.execute(images((16, 16)))
    overview = cgcompile.debug.report(encoder)
    assert overview.kind == "EncoderCudaGraphManager"
    assert (overview.coverage.unit, overview.coverage.total) == ("items", 3)
    assert sum(step.replays for step in overview.steps) == encoder.counters.replays > 0
    page = read(overview)
    assert "Split" not in [text for _, text in page.headings]
    assert len(page.rows("steps")) == 2
    hits = [row.hits for row in overview.coverage.rows]
    assert [exact(row, "items") for row in page.rows("coverage")] == hits


@pytest.mark.slow
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
    assert origins["on_fallback"] == ("warn", "default")
    page = read(overview)
    chosen = {row["setting"][0]: row["from"][0] for row in page.rows("settings")}
    assert chosen == {name: origin for name, (_, origin) in origins.items() if origin != "default"}
    assert set(chosen) == {"compiler", "capture_device", "num_warmups", "cache_dir"}
    assert len(chosen) + len(page.rows("defaults")) == len(origins)


def test_nothing_has_run() -> None:
    overview = cgcompile.debug.report(cgcompile.compile(Attends(), compiler="eager"))
    assert overview.steps == overview.timeline == overview.graphs == ()
    assert overview.notes == (
        "Nothing was compiled yet: call the model, then call report() again.",
    )
    text = read(overview).text
    assert "Nothing is recorded." in text
    assert "Nothing was captured." in text


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a Linear"):
        cgcompile.debug.report(nn.Linear(2, 2), tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    model = cgcompile.compile(Attends(), compiler="eager")
    with pytest.raises(ConfigError, match=r"page.html.*a file that can be written \(File exists\)"):
        cgcompile.debug.report(model, tmp_path / "file" / "page.html")


@pytest.mark.slow
def test_representations_are_short() -> None:
    """In a notebook the text of a result is shown; its ``repr`` is the first line of that."""
    model = type("A<b>", (Attends,), {})().eval()
    compiled, x = compiled_and_run(model), torch.randn(2, 4, 8)
    report = cgcompile.debug.report(compiled)
    assert repr(report) == "<Overview A<b>: No graph served any of 1 step: 1 warming.>"
    assert report._repr_html_().startswith("<pre>A&lt;b&gt;: No graph served any")
    results = [report, cgcompile.explain(model, x), cgcompile.coverage(compiled)]
    results += [cgcompile.verify(compiled, x)]
    results += [cgcompile.debug.doctor(model, x), cgcompile.debug.timeline(compiled)]
    for result in results:
        assert len(repr(result)) < 120, repr(result)
        assert "\n" not in repr(result)
        assert result._repr_html_().startswith("<pre>")
    summary = str(cgcompile.coverage(compiled)).splitlines()[-1]
    assert re.fullmatch(r"\d+ of \d+ steps on graphs(, .* padding)?", summary)
    assert repr(cgcompile.coverage(compiled)) == f"<Coverage {summary}>"
    captures = cgcompile.debug.timeline(compiled)
    assert repr(captures) == f"<Captures {len(captures)}>"
