"""Files around the code: what they name exists, and versions agree."""

import ast
import re
import stat
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lib.pages import ROOT, section
from test_imports import FLOORS

import cgcompile
from cgcompile.boundaries import BUILTIN_SPLITTING_OPS
from cgcompile.graphs import device
from cgcompile.passes import base, pipeline
from cgcompile.pieces import cache
from cgcompile.torch_compat.presence import TESTED

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


@pytest.fixture(scope="module")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_metadata_is_complete(project: dict) -> None:
    assert {"authors", "classifiers", "description", "keywords", "license"} <= project.keys()
    assert {"readme", "requires-python"} <= project.keys()
    oldest = project["requires-python"].removeprefix(">=")
    assert f"Programming Language :: Python :: {oldest}" in project["classifiers"]
    assert not [
        classifier for classifier in project["classifiers"] if classifier.startswith("License")
    ]  # see license
    packages = [re.split(r"[<>=]", each)[0] for each in project["dependencies"]]
    assert packages == ["torch", "sympy", "tqdm"]


def test_versions_agree(project: dict) -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == cgcompile.__version__
    assert citation["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert cgcompile.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_the_tested_versions_of_torch_are_named_everywhere(project: dict) -> None:
    *older, newest = TESTED
    text = f"{', '.join(older)} and {newest}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/start.md"):
        assert text in (ROOT / page).read_text(), page
    (older_in_ci,) = re.findall(r"^older=(\d+\.\d+)", (ROOT / ".ci" / "run").read_text(), re.M)
    assert older_in_ci in TESTED
    assert f"torch>={TESTED[0]}" in project["dependencies"]


def test_the_hosted_ci_runs_the_script_and_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR


def test_the_hooks_run_the_tools_of_the_extra_dev(project: dict) -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    tools = {hook["entry"].split()[0] for hook in hooks}
    assert tools == {"ruff", "mypy"}
    assert tools <= {*project["optional-dependencies"]["dev"]}
    assert all(hook["language"] == "system" for hook in hooks)


@pytest.mark.parametrize("name", ["bug", "wrong_result", "not_replayed"])
def test_a_template_of_an_issue_names_what_exists(name: str) -> None:
    text = (ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.md").read_text()
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head).keys() == {"name", "about"}
    assert "cgcompile env" in body
    for call in re.findall(r"cgcompile\.([\w.]+)\(", body):
        room, _, function = call.rpartition(".")
        owner = getattr(cgcompile, room) if room else cgcompile
        assert callable(getattr(owner, function))


def test_the_rooms_of_the_guide_are_those_of_the_tree() -> None:
    table = section(CONTRIBUTING, "Where things go").split("|---|---|---|---:|\n")[1]
    rows = [row.split("|")[1:-1] for row in table.split("\n\n")[0].splitlines()]
    for code, _, tests, seconds in rows:
        for path in re.findall(r"`([^`]+)`", code + tests):
            assert (ROOT / path).exists(), path
        assert int(seconds) > 0
    named = {Path(path).name for row in rows for path in re.findall(r"`([^`]+)`", row[2])}
    assert {"debug", "encoder", "graphs", "passes", "pieces", "runtime", "serving"} <= named


def test_the_floors_of_the_guide_are_those_of_the_tests() -> None:
    (text,) = re.findall(
        r"^Floors, from the ground up: (.*?)\. An import", CONTRIBUTING, re.M | re.S
    )
    level = {name: number for number, floor in enumerate(FLOORS) for name in floor}
    numbers = [{level[name] for name in re.findall(r"`(\w+)`", floor)} for floor in text.split(";")]
    assert numbers == [{number} for number in range(len(FLOORS))]


def test_the_guide_names_what_exists() -> None:
    places = {
        "BUILTIN_SPLITTING_OPS": BUILTIN_SPLITTING_OPS,
        "PIPELINE": pipeline.PIPELINE,
        "OPTIONAL": pipeline.OPTIONAL,
        "GraphPass": base.GraphPass,
        "CaptureDevice": device.CaptureDevice,
        "DeviceGraph": device.DeviceGraph,
        "DevicePool": device.DevicePool,
        "capture_device()": device.capture_device,
        "TESTED": TESTED,
    }
    assert all(f"`{name}`" in CONTRIBUTING for name in places)
    for path in re.findall(
        r"`((?:cgcompile|passes|tests|docs|torch_compat)/[\w/.]+)`", CONTRIBUTING
    ):
        there = ROOT / (f"cgcompile/{path}" if path.startswith("torch_compat") else path)
        assert there.exists(), path


def readings_of_time(tree: ast.AST) -> Iterator[str]:
    """Each clock that is read, and each wait whose bound is a number of this test alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            clocks = ("time", "monotonic", "perf_counter", "process_time", "thread_time")
            if node.value.id == "time" and node.attr.removesuffix("_ns") in clocks:
                yield f"line {node.lineno}: time.{node.attr}"
        elif isinstance(node, ast.Call):
            waits = isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "wait")
            bounds = [*node.args[:1]] if waits else []
            bounds += [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            for bound in bounds:
                value = bound.value if isinstance(bound, ast.Constant) else None
                if isinstance(value, (int, float)) and value >= 1:
                    yield f"line {node.lineno}: waits for {value} seconds"


def test_no_test_depends_on_the_time() -> None:
    """Clocks are replaced where a test needs one; a wait that may hang ends after PATIENCE."""
    programs = {"fuzz/__main__.py", "fuzz/soak.py"}  # which run for as long as they are told
    for path in sorted((ROOT / "tests").glob("**/*.py")):
        if str(path.relative_to(ROOT / "tests")) not in programs:
            assert not [*readings_of_time(ast.parse(path.read_text()))], path


def test_security_names_the_checks_of_the_cache() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert cache.LARGEST == 1 << 30
    assert "at most 1 GiB" in text
    assert "New folders get mode 0700, new files 0600." in text


RIDDLES = re.compile(
    r"\b(likewise|so many|nobody|whoever)\b|\bNone of (a|an|any|all|anything|each|one|others?|such)\b"
)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment and each text of a file, docstrings and messages included."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                yield token.start[0], token.string


def test_the_prose_of_the_library_has_a_noun_where_one_fits() -> None:
    paths = [*ROOT.glob("cgcompile/**/*.py"), *ROOT.glob("passes/*.py")]
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {match[0]}"
        for path in paths
        for line, text in prose(path)
        if (match := RIDDLES.search(" ".join(text.split()))) is not None
    ]
    assert not riddles, "say which value, case or argument it is"
