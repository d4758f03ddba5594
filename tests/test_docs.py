"""The code of each page runs, from its first block to its last, in one namespace."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


WITH_CODE = [page for page in PAGES if blocks(page)]


def test_the_pages_have_code() -> None:
    assert len(WITH_CODE) >= 12


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    monkeypatch.setenv("CGCOMPILE_CAPTURE_DEVICE", "host")
    monkeypatch.setenv("CGCOMPILE_COMPILER", "eager")
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", "off")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / f"{page.stem}.py"  # torch reads the source of what it traces
    file.write_text("\n\n".join(blocks(page)))
    scope: dict[str, Any] = {"__name__": page.stem, "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), scope)
