"""The pages and the docstrings: their code runs, and the reference has every public name."""

import doctest
import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from lib.programs import run_program
from torch import nn

import cgcompile
from cgcompile import debug, errors
from cgcompile.cli import main
from cgcompile.config import CompilationConfig
from cgcompile.debug.output import duration

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load("docs_tables", ROOT / "docs" / "tables.py")
pictures = load("docs_pictures", ROOT / "docs" / "pictures.py")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    monkeypatch.setenv("CGCOMPILE_COMPILER", "eager")
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", "off")
    monkeypatch.chdir(tmp_path)


# ---------------------------------------------------------------- pages


blocks = pictures.blocks
WITH_CODE = [page for page in PAGES if blocks(page)]


def test_the_pages_have_code() -> None:
    assert len(WITH_CODE) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_as_a_program(page: Path, tmp_path: Path) -> None:
    for module in re.findall(
        r"^(?:import|from) (accelerate|diffusers|transformers)\b", page.read_text(), re.M
    ):
        pytest.importorskip(module)
    file = tmp_path / f"{page.stem}_page.py"  # torch reads the source of what it traces
    file.write_text("\n\n".join(blocks(page)))
    done = run_program(file)
    assert done.code == 0, (done.stdout + done.stderr)[-4000:]


# ---------------------------------------------------------------- pictures


def test_the_pictures_of_the_figures_are_those_of_the_results() -> None:
    step = json.loads(pictures.RESULTS.read_text())["models"]["main"]["batches"]["8"]["rows"]
    lanes = re.findall(r"<rect [^>]*><title>([^<]*)</title>", pictures.inline("backends"))
    assert lanes == [
        f"{name}: {duration(step[name]['wall'] / 1e6)}, "
        f"host part {duration(step[name]['host'] / 1e6)}"
        for name in pictures.SHOWN
    ]
    lanes = re.findall(r"<text [^>]*>([^<]*)</text>", pictures.inline("before_after"))
    assert lanes == [
        f"{words}, {where}: busy {duration(step[name][metric] / 1e6)} "
        f"of {duration(step[name]['wall'] / 1e6)}"
        for words, name in (("eager", "eager"), ("one replay", "cgcompile FULL"))
        for where, metric in (("host", "host"), ("device", "gpu"))
    ]
    assert any(
        row.endswith(f" {step['cgcompile FULL']['wall']:,.0f} |") for row in pictures.table()
    )


@pytest.mark.slow
def test_the_pictures_of_a_model_are_of_one_that_ran() -> None:
    data = pictures.served()
    assert data["coverage"]["on_graphs"] == data["coverage"]["total"] > 20
    assert len(data["graphs"][0]["pieces"]) == 3
    texts = {}
    for name in ("split", "steps", "sizes", "traffic"):
        drawing = ElementTree.fromstring(pictures.inline(name))
        texts[name] = [each.text or "" for each in drawing.iter("title")][1:]
    pieces = [title for title in texts["split"] if " passes on " not in title]
    assert [title.split(",")[0] for title in pieces] == ["piece_0", "piece_1", "piece_2"]
    breaks = [title for title in texts["steps"] if "batching::attention, eager: " in title]
    assert breaks
    assert len(texts["steps"]) == len(data["segments"]) > len(breaks)
    sizes = {int(re.findall(r"\d+", step["batch"])[0]) for step in data["steps"]}
    assert [title.split(":")[0] for title in texts["sizes"]] == [f"size {n}" for n in sorted(sizes)]
    padded = [f"{row['padding']:.1%} padding" for row in data["coverage"]["rows"] if row["hits"]]
    assert [title.split(", ")[-1] for title in texts["traffic"] if "padding" in title] == padded


def test_every_picture_is_on_a_page() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"^```\{picture\} (\w+)$", page.read_text(), re.MULTILINE)
    }
    assert named == {*pictures.DRAWINGS, *pictures.MEASURED}


def test_the_style_of_the_pictures_follows_the_theme() -> None:
    head = pictures.head()
    assert "prefers-color-scheme" not in head
    assert ":root" not in head
    assert 'html[data-theme="dark"] {\n  .picture {\n    --paper:' in head
    assert head.count('id="hatch"') == 1


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs" / "concepts").glob("*.md")), ids=lambda page: page.stem
)
def test_a_concept_has_a_picture(page: Path) -> None:
    names = re.findall(r"^```\{picture\} (\w+)$", page.read_text(), re.MULTILINE)
    assert names or page.stem == "index"
    for name in names:
        drawing = ElementTree.fromstring(pictures.inline(name))
        width, height = map(int, drawing.attrib["viewBox"].split()[2:])
        for box in drawing.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, wide, high = (float(box.attrib[key]) for key in ("x", "y", "width", "height"))
            assert 0 <= x <= x + wide <= width
            assert 0 <= y <= y + high <= height


# ---------------------------------------------------------------- docstrings


def public() -> Iterator[tuple[str, str, Any]]:
    """Every public class and function, with the first room that has it."""
    seen = set()
    for room in tables.ROOMS:
        module = importlib.import_module(room)
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and value not in seen:
                seen.add(value)
                yield room, name, value


@pytest.mark.slow
def test_the_reference_has_every_public_name() -> None:
    rooms = {
        f"cgcompile.{path.parent.name}"
        for path in [*ROOT.glob("cgcompile/*/__init__.py"), ROOT / "passes" / "__init__.py"]
        if "__all__" in path.read_text()
    }
    assert set(tables.ROOMS) == {"cgcompile", *rooms}
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("*.rst"))
    assert set(re.findall(r"^\.\. from-code:: (\S+)$", pages, re.MULTILINE)) == set(tables.PAGES)
    for room in tables.ROOMS:
        text = "\n".join(tables.public_names(room))
        for name in importlib.import_module(room).__all__:
            assert re.search(rf":: {room}\.{name}$|^``{name}``$", text, re.MULTILINE), name


@pytest.mark.parametrize(
    ("name", "value"), [(f"{room}.{name}", value) for room, name, value in public()]
)
def test_the_example_of_a_docstring_runs(name: str, value: Any) -> None:
    scope = {"torch": torch, "nn": nn, "cgcompile": cgcompile, "__name__": "example"}
    example = doctest.DocTestParser().get_doctest(value.__doc__ or "", scope, name, None, 0)
    assert any(each.want for each in example.examples), f"the docstring of {name} has no example"
    shown: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=shown.append)
    assert not result.failed, "".join(shown)


# ---------------------------------------------------------------- tables of the reference


def test_the_settings_have_a_meaning_and_a_variable() -> None:
    text = "\n".join(tables.settings())
    listed = re.findall(
        r"^\.\. confval:: (\w+)\n   :default: ``.+``\n\n"
        r"   (\S.{20,}\.)\n\n   Environment: ``CGCOMPILE_(\w+)``$",
        text,
        re.MULTILINE,
    )
    assert [name for name, _, _ in listed] == [*CompilationConfig.names()]
    assert all(variable == name.upper() for name, _, variable in listed)
    assert len({meaning for _, meaning, _ in listed}) == len(listed) == text.count("confval::")
    assert ":default: ``PIECEWISE``" in text
    assert "STOCK_TORCH_COMPILE  NONE, FULL, FULL_DECODE_ONLY" in text
    assert "calls of a new shape that run without a graph" in text.lower()


def test_a_reason_has_a_cause_a_remedy_and_an_address() -> None:
    text = "\n".join(tables.reasons())
    for reason in cgcompile.Reason:
        assert reason.when
        assert reason.remedy
        assert reason is cgcompile.Reason(reason.value)
        assert f".. reason:: {reason.value}\n" in text
        assert reason.page == f"{errors.DOCUMENTATION}/reference/reasons#reason-{reason.value}"


def test_an_error_ends_its_traceback_with_its_address() -> None:
    text = "\n".join(tables.error_tree())
    with pytest.raises(errors.ConfigError) as caught:
        cgcompile.Backend(compiler="gcc")
    (note,) = caught.value.__notes__
    assert (ROOT / errors.DOCUMENTATION / "reference" / "errors.rst").is_file()
    command, _, anchor = note.partition(f"`, {errors.DOCUMENTATION}/reference/errors#")
    assert command == "See `python -m cgcompile settings"
    assert anchor == "cgcompile.errors.ConfigError"
    assert f".. autoexception:: {anchor}\n" in text
    assert errors.DOCUMENTATION not in str(caught.value)
    assert "   ``bad_value``\n" in text
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    listed = set(re.findall(r"autoexception:: cgcompile\.errors\.(\w+)", text))
    assert listed == {name for name in classes if name.endswith("Error")}


def test_the_commands_that_errors_name_exist(capsys: pytest.CaptureFixture[str]) -> None:
    for error, command in (
        (errors.ConfigError.backend_class(), "settings"),
        (errors.DispatchError.strict(what="a step", why="host_sync"), "reasons"),
    ):
        assert f"`python -m cgcompile {command}`" in error.__notes__[0]
        assert main([command]) == 0
        assert capsys.readouterr().out
    (note,) = errors.ArgumentsError.refused(name="f", signature="()", why="", settings="").__notes__
    assert note == f"See {errors.DOCUMENTATION}/reference/errors#cgcompile.errors.ArgumentsError"


def test_the_commands_are_those_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(tables.commands())
    for command in ("explain", "cache why"):
        assert f"\ncgcompile {command}\n---" in text
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert tables.indented(capsys.readouterr().out.rstrip()) in text


def conforms(value: Any, schema: dict[str, Any], defs: dict[str, Any]) -> bool:
    """Return whether plain data matches a schema of the kinds that ``tables.schema`` makes."""
    if "$ref" in schema:
        return conforms(value, defs[schema["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in schema:
        return any(conforms(value, each, defs) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
        "null": type(None),
    }
    wanted = schema.get("type", [])
    wanted = wanted if isinstance(wanted, list) else [wanted]
    if wanted and not any(isinstance(value, kinds[each]) for each in wanted):
        return False
    if isinstance(value, bool) and wanted and "boolean" not in wanted:
        return False
    if isinstance(value, dict) and "properties" in schema:
        fields = schema["properties"]
        same = value.keys() == fields.keys() == set(schema["required"])
        return same and all(conforms(value[name], fields[name], defs) for name in fields)
    if isinstance(value, dict):
        others = schema.get("additionalProperties", {})
        return all(conforms(item, others, defs) for item in value.values())
    if isinstance(value, list):
        first = schema.get("prefixItems")
        if first is not None:
            pairs = zip(value, first, strict=True)
            return len(value) == len(first) and all(conforms(*pair, defs) for pair in pairs)
        return all(conforms(item, schema.get("items", {}), defs) for item in value)
    return True


def results() -> Iterator[Any]:
    module, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    model = cgcompile.compile(module, dynamic_dims={"input": 0})
    with torch.inference_mode():
        for _ in range(3):
            model(x)
        yield cgcompile.explain(module, x, sizes=[4], dynamic_dims={"input": 0})
        yield cgcompile.verify(model, x)
        yield cgcompile.coverage(model)
        yield debug.doctor(lambda x: x * x.max().item(), x)
        yield debug.report(model)
        yield debug.bisect(model, x)
        yield from debug.timeline(model)


@pytest.mark.slow
def test_json_is_as_its_schema() -> None:
    text, checked = "\n".join(tables.schemas()), set()
    for result in results():
        name = type(result).__name__
        schema, data = tables.schema(type(result)), result.to_dict()
        assert f".. _json-{name}:" in text
        assert conforms(data, schema, schema.get("$defs", {})), name
        less = {key: value for key, value in data.items() if key != next(iter(data))}
        assert not conforms(less, schema, schema.get("$defs", {})), name
        checked.add(name)
    assert len(checked) == 7
