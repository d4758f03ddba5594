"""The notebook is valid, and its code runs in order and shows what its text describes."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lib.examples import EXAMPLES

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(request.param.read_text())


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_a_notebook_is_valid(notebook: dict[str, Any]) -> None:
    """The fields that format 4.5 requires, of their types; no output is kept."""
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"].keys() == {"display_name", "language", "name"}
    common = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell.keys() == common | {"execution_count", "outputs"}
            assert (cell["execution_count"], cell["outputs"]) == (None, [])
        else:
            assert cell["cell_type"] == "markdown"
            assert cell.keys() == common
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert cell["metadata"] == {}
        assert source(cell)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])


def test_links_of_a_notebook_lead_to_files(notebook: dict[str, Any]) -> None:
    text = "\n".join(source(each) for each in notebook["cells"] if each["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert links
    assert all((EXAMPLES / link).is_file() for link in links)


@pytest.mark.slow
def test_the_notebook_compiles_and_verifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = NOTEBOOKS
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", "off")
    module = ModuleType("cells")
    monkeypatch.setitem(sys.modules, "cells", module)  # torch 2.13 imports what it reads globals of
    names = vars(module)
    cells = [each for each in json.loads(path.read_text())["cells"] if each["cell_type"] == "code"]
    for number, cell in enumerate(cells):
        file = tmp_path / f"cell_{number}.py"  # torch reads the source of what it traces
        file.write_text(source(cell))
        exec(compile(source(cell), str(file), "exec"), names)
    printed = capsys.readouterr().out
    assert "Sequential: 5 pieces: 3 captured, 2 eager" in printed
    assert "calls 7: captures 2, replays 2, " in printed
    rows = [row.split()[:3] for row in printed.splitlines()]
    assert ["4", "tokens", "FULL"] in [row[-3:] for row in rows]
    assert names["verification"].ok
    assert names["verification"].replays >= 3
    x = torch.randn(8, 16, 64, device=names["device"])
    with torch.inference_mode():
        torch.testing.assert_close(names["compiled"](x), names["model"](x))
