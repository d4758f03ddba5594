"""What the pages of ``docs/`` promise is so: their tables name what exists, their code does it."""

import importlib.util
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import piecewise_cuda_graphs as rival
import pytest
import torch
from lib.pages import DOCS, blocks, section, split_lines

import cgcompile
from cgcompile import errors
from cgcompile.debug.findings import KINDS
from cgcompile.debug.locate import STAGES

COMING = (DOCS / "coming_from.md").read_text()
TOOLS = (DOCS / "howto" / "tools.md").read_text()
DEPARTURES = section(COMING, "Departures")
NAMES = section(COMING, "From vLLM, SGLang or Meta's package")
ROOMS = ("boundaries", "context", "debug", "encoder", "graphs", "serving")


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the code of a page from its first block to its last; return its names."""
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    monkeypatch.setenv("CGCOMPILE_COMPILER", "eager")
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", "off")
    monkeypatch.chdir(tmp_path)

    def run(name: str) -> dict[str, Any]:
        file = tmp_path / "page.py"  # torch reads the source of what it traces
        file.write_text("\n\n".join(blocks((DOCS / name).read_text())))
        scope: dict[str, Any] = {"__name__": "page", "__file__": str(file)}
        exec(compile(file.read_text(), str(file), "exec"), scope)
        return scope

    return run


# ---------------------------------------------------------------- tables


def first_column(table: str) -> list[str]:
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


def test_departures_name_what_can_be_imported() -> None:
    departures, coming = first_column(DEPARTURES), first_column(NAMES)
    assert len(departures) >= 20
    assert len(coming) >= 18
    for name in departures + coming:
        top, _, member = name.partition(".")
        assert top in cgcompile.__all__ or top in ROOMS
        assert not member or attrgetter(member)(getattr(cgcompile, top))


def test_names_of_metas_package_are_its_own() -> None:
    table = NAMES.split("|---|---|---|---|\n")[1]
    columns = [row.split("|")[4] for row in table.splitlines() if row.startswith("|")]
    names = {name for each in columns for name in re.findall(r"`([^`]+)`", each)}
    assert names >= set(rival.__all__)
    for name in names:
        top, _, member = name.partition(".")
        assert hasattr(getattr(rival, top), member) if member else hasattr(rival, top)


def test_the_page_of_settings_leaves_their_list_to_the_reference() -> None:
    """Names that it mentions exist; what each one means stands in the docstring alone."""
    page, names = (DOCS / "howto" / "settings.md").read_text(), cgcompile.CompilationConfig.names()
    assert not {*first_column(page)} & {*names}
    assert "(../reference/settings.rst)" in page
    matches = re.findall(r"Backend\((\w+)=|\{\"(\w+)\": |CGCOMPILE_(\w+)=|--set (\w+)=", page)
    assert [each for found in matches for each in found if each] == ["compiler"] * 2 + [
        "COMPILER",
        "compiler",
    ]
    assert {"compile_sizes"} <= {*names}


def rows_of_faults() -> list[list[str]]:
    table = TOOLS.split("| fault | tool | result |\n|---|---|---|\n")[1]
    return [row.split("|")[1:4] for row in table.split("\n\n")[0].splitlines()]


def test_each_fault_is_in_the_table() -> None:
    assert len(rows_of_faults()) == 14


@pytest.mark.parametrize("row", rows_of_faults(), ids=lambda row: row[0].strip())
def test_the_table_of_faults_names_what_exists(row: list[str]) -> None:
    tools, said = (re.findall(r"`([^`]+)`", column) for column in row[1:])
    for name in tools:
        room, _, function = name.rpartition(".")
        assert (
            name in cgcompile.__all__
            or function in getattr(getattr(cgcompile, room, None), "__all__", ())
            or importlib.util.find_spec(f"cgcompile.{name}")
        )
    stages = {"padding", "tracing", *STAGES.values()}
    known = {*KINDS, *stages, *(reason.value for reason in cgcompile.Reason)}
    assert tools
    assert said
    for name in said:
        assert name in known or issubclass(getattr(errors, name), cgcompile.CGCompileError)


def commands() -> list[str]:
    from cgcompile.cli import command_line

    (action,) = [each for each in command_line()._actions if isinstance(each.choices, dict)]
    return list(action.choices)


def test_the_commands_exist() -> None:
    """Every command is shown, and what is shown can be typed."""
    from cgcompile.cli import command_line

    lines = re.findall(r"^cgcompile ([a-z][^#\n]*)", TOOLS, re.MULTILINE)
    lines += re.findall(
        r"^cgcompile ([a-z][^#\n]*)", (DOCS / "howto" / "cache.md").read_text(), re.MULTILINE
    )
    page = (DOCS / "howto" / "settings.md").read_text()
    lines += re.findall(r"^cgcompile ([a-z][^#\n]*)", page, re.MULTILINE)
    assert len(lines) >= 13
    assert {line.split()[0] for line in lines} == set(commands())
    for line in lines:
        parsed = command_line().parse_args(line.split())
        assert callable(parsed.run)


# ---------------------------------------------------------------- code


def test_the_pass_of_a_page_works(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = ran("howto/passes.md")
    backend = page["backend"]
    assert "graph  drop_dropout" in capsys.readouterr().out
    assert page["gone"]["drop_dropout"] == {"torch.nn.functional.dropout": -1}
    torch.testing.assert_close(page["result"], page["x"].sin())
    without = cgcompile.Backend(backend.config, passes=(*backend.config.passes, "-drop_dropout"))
    assert without.config.disabled_passes == ("drop_dropout",)


def test_the_boundaries_of_a_page_work(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = ran("howto/boundaries.md")
    assert len(page["backend"].config.splitting_ops) == 5
    assert "eager_region" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tools_of_a_page_work(
    ran: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = ran("howto/tools.md")
    printed = capsys.readouterr().out
    assert "2 pieces: 1 captured, 1 eager" in printed
    assert [line.where.split(":")[0] for line in page["eager"]] == ["page.py"]
    assert json.loads((tmp_path / "split.json").read_text())["totals"]["eager"] == 1
    for check in ("eager against replay", "padded to 8 against exact"):
        assert re.search(rf"^{check} +3 +3 +.*equal$", printed, re.MULTILINE)
    assert printed.count("Model: ok\n") == 2, printed  # the second time with bisect=True
    assert re.search(r"^steps 2, ", printed, re.MULTILINE)
    assert re.search(r"^num_tokens=4 FULL 0\.\d+ \d+ None$", printed, re.MULTILINE)
    assert page["page"].counters.replays > 6  # of the calls, verify and profile
    assert "</html>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_the_engine_of_a_page_works(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = ran("howto/engine.md")
    assert "7 batches captured" in capsys.readouterr().out
    counters, replays = page["backend"].counters, page["backend"].counters.replays
    for size in (2, 8, 1, 4):
        page["tokens"].random_(9)
        with torch.inference_mode():
            expected = page["model"](page["tokens"][:size])
        torch.testing.assert_close(page["step"](size), expected)
    assert counters.captures == page["backend"].counters.captures == 7
    assert page["backend"].counters.replays == replays + 4


@pytest.mark.slow
def test_the_attention_op_of_a_page_works(ran: Any) -> None:
    page = ran("howto/attention_op.md")
    counters = page["backend"].counters
    assert (counters.captures, counters.replays) == (1, 2)
    assert [page[name].captured for name in ("full", "pieces")] == [(4, 2), (4, 2)]
    assert not page["full"].degraded
    assert page["found"].replays == 3
    modes = {row.mode: row.hits for row in cgcompile.coverage(page["cached"]).rows}
    assert (modes["FULL"], modes["PIECEWISE"]) == (1, 1)  # the last of each: two tokens
    wrong = page["verified"]([1, 7])
    assert [difference.stage for difference in wrong.differences] == ["replay"] * 3


@pytest.mark.slow
def test_the_traced_model_of_a_page_works(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = ran("howto/traced_once.md")
    torch.testing.assert_close(page["y"], page["module"](page["x"]))
    assert re.match(r"traced in [\d.]+ s, compiled in [\d.]+ s", capsys.readouterr().out)
    device = page["x"].device
    with torch.inference_mode():
        page["model"](torch.randn(7, 4, device=device))  # another size of the same trace
        with pytest.raises(cgcompile.CGCompileError, match="is frozen"):
            page["model"](torch.randn(3, 1, 4, device=device))


def test_the_breakable_model_of_a_page_works(ran: Any) -> None:
    page = ran("howto/untraceable.md")
    model, x = page["model"], page["x"]
    assert (model.counters.captures, model.counters.replays) == (1, 2)
    with torch.inference_mode(), cgcompile.set_forward_context(0.3):
        assert torch.equal(page["y"], model.unwrap()(x))
    (entry,) = model.concrete_cudagraph_entries.values()
    assert (entry.sequence.num_graphs, entry.sequence.num_eager_breaks) == (2, 1)


def test_the_loop_of_a_page_works(ran: Any) -> None:
    page = ran("howto/loops.md")
    decode, state = page["decode"], page["state"]
    counters = decode.counters
    assert (counters.captures, counters.plain.total()) == (1, 1)
    assert counters.replays == page["tokens"].shape[0] - 2 or state["done"].all()
    state["position"].zero_()  # else there is no room in the cache
    assert cgcompile.verify(decode, state).ok


@pytest.mark.slow
def test_the_encoder_of_a_page_works(ran: Any, capsys: pytest.CaptureFixture[str]) -> None:
    page = ran("howto/encoders.md")
    assert [list(each.shape) for each in page["features"]] == [
        [16, 96],
        [64, 96],
        [32, 96],
        [640, 96],
    ]
    assert (page["manager"].statistics.hits, page["manager"].statistics.misses) == (3, 1)
    shown = re.search(r"```text\n(.*?)```", (DOCS / "howto/encoders.md").read_text(), re.DOTALL)
    assert shown is not None
    assert shown[1] in capsys.readouterr().out
    assert page["tight"].statistics.waste() == 0.125
    for name, hits in (("derived", 2), ("siglip_manager", 3), ("tile_manager", 2)):
        statistics = page[name].statistics
        assert (statistics.hits, statistics.misses) == (hits, 0)
    assert repr(page["derived"].model) in (DOCS / "howto/encoders.md").read_text()
    assert list(page["film"].shape) == [12, 96]
    vit, places = page["vit"], page["places"]
    for mine, part, grid in zip(page["features"], page["rows"], page["grids"], strict=True):
        starts = torch.tensor([0, len(part)])
        with torch.inference_mode():
            expected = vit(part, places([grid]), starts)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_printed_split_has_the_form_of_today(ran: Any) -> None:
    text = (DOCS / "start.md").read_text()
    shown = re.findall(r"```text\n(5 pieces.*?)```", text, re.DOTALL)[0].splitlines()
    real = ran("start.md")["split"].text().splitlines()
    for line in split_lines(shown):
        assert any(row.startswith(line) for row in split_lines(real)), f"the page shows {line!r}"


@pytest.mark.parametrize("source", ["argument", "environment"])
def test_accelerate_refuses_the_name_as_its_page_tells(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = pytest.importorskip("accelerate.utils").TorchDynamoPlugin
    if source == "environment":
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "cgcompile")
    message = "'CGCOMPILE' is not a valid DynamoBackend"
    assert message in (DOCS / "howto" / "accelerate.md").read_text()
    with pytest.raises(ValueError, match=message):
        plugin(backend="cgcompile" if source == "argument" else None)
    assert "cgcompile" in torch._dynamo.list_backends()
