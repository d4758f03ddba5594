"""What the README says is so: its code runs as pasted, prints what stands there, and links work."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lib.pages import ROOT, blocks, section
from lib.patience import PATIENCE
from rivals.budget import budget
from rivals.report import step_table

import cgcompile

README = (ROOT / "README.md").read_text()
USE = section(README, "Use it")


CHECKED = """
with torch.inference_mode():
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(step(8).clone(), decoder(tokens[:8], positions[:8]))
    for item, result in enumerate(features):
        alone = encoder.select_encoder_cudagraph_items(images, [item])
        torch.testing.assert_close(result, encoder.encoder_eager_forward(alone))
print([tuple(each.shape) for each in features])
"""


def pasted(path: Path, **environment: str) -> str:
    """Run all Python blocks in order in a fresh interpreter, then CHECKED; return the output."""
    file = path / "model.py"
    file.write_text("\n".join([*blocks(README), CHECKED]))
    settings = {k: v for k, v in os.environ.items() if not k.startswith("CGCOMPILE_")}
    settings |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    settings |= {"CGCOMPILE_COMPILER": "eager", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(file)],
        capture_output=True,
        text=True,
        env=settings | environment,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def comparable(line: str) -> str:
    """Leave out what differs from run to run: times, and the tolerance, which the compiler sets."""
    line = re.sub(r"\d+\.\d+ s\b", "# s", line)
    line = re.sub(r"(bitwise|by dtype) +", "# ", line)
    return re.sub(r"model\.py:\d+", "model.py", line)


def test_the_readme_is_two_screens() -> None:
    assert len(README.splitlines()) <= 220


@pytest.mark.slow
def test_the_code_runs_as_pasted_and_prints_what_is_shown(tmp_path: Path) -> None:
    shown = re.findall(r"^```text\n(.*?)^```", USE, re.DOTALL | re.MULTILINE)
    assert len(shown) == 2
    printed = iter(pasted(tmp_path, CGCOMPILE_CAPTURE_DEVICE="host").splitlines())
    lines = [line for text in shown for line in text.splitlines() if line != "..."]
    assert len(lines) >= 14
    for line in lines:  # in this order
        start, *cut = comparable(line).split(", ...")
        assert any(
            comparable(row).startswith(start) if cut else comparable(row) == start
            for row in printed
        ), f"the README shows {line!r}"
    assert [*printed][-1] == "[(4, 32), (16, 32)]"
    assert "# one tensor for each image: [4, 32] and [16, 32]\n" in README


@pytest.mark.slow
def test_the_code_runs_without_a_capture_device(tmp_path: Path) -> None:
    printed = pasted(tmp_path)
    assert printed.startswith("calls 5: captures 0, replays 0, plain 5")
    assert "no_capture_device" in printed


@pytest.mark.parametrize(
    ("marker", "words"),
    [("quickstart", "python examples/quickstart.py"), ("test", "python -m pytest")],
)
def test_the_commands_stand_where_ci_finds_them(marker: str, words: str) -> None:
    (block,) = re.findall(rf"<!-- {marker} command -->\n```bash\n(.*?)\n```\n", README, re.DOTALL)
    assert re.fullmatch(rf"pip install -e '\.\[\w+\]' && {words}", block)
    assert f"$(command_of {marker})" in (ROOT / ".ci" / "run").read_text()


def test_the_figures_are_those_that_are_kept() -> None:
    data = json.loads((ROOT / "examples/benchmarks/results/h200.json").read_text())
    head, *rows = step_table(data["models"]["main"], "8")
    host, wall = head.index("host"), head.index("wall")
    kept = {row[0]: (row[host], row[wall]) for row in rows}
    table = README.split("|---|---:|---:|---|\n")[1].split("\n\n")[0]
    shown = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    assert len(shown) >= 9
    for name, *figures, _ in shown:
        assert tuple(figures) == kept[name]
    (goal,) = (each for each in budget(data) if each.name.startswith("host, step without graphs"))
    assert f"{goal.value:.2f} x the host time of\n`torch.compile`" in README
    machine, versions = data["machine"], data["versions"]
    about = f"{machine['device']}, torch {versions['torch']}, CUDA {versions['cuda']}"
    assert about in README
    assert data["date"] in README


def test_the_counts_of_the_zoo_are_those_that_are_kept() -> None:
    kept = (ROOT / "docs" / "measurements.md").read_text()
    assert "84 architectures in " in kept
    assert "* `torch.compile`: 83 right, 1 refused" in kept
    assert "* traced once: 81 right, 3 refused" in kept
    assert "Of 84 architectures of transformers and timm, one is refused with" in README


PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob(".github/**/*.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    for link in links:
        assert link.startswith("https://") or (page.parent / link).is_file(), link


def test_the_names_exist() -> None:
    """Names in the tables and the text, outside of the blocks of code."""
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    names = re.findall(r"`cgcompile\.(\w+)", prose)
    names += re.findall(r"`(\w*CUDAGraphWrapper|set_forward_context)`", prose)
    assert len(names) >= 6
    for name in names:
        assert name in cgcompile.__all__
    for name in re.findall(r"`(FULL_\w+|PIECEWISE)`", prose):
        assert name in cgcompile.CUDAGraphMode.__members__
