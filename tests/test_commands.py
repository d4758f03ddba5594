"""The commands that look at a model, as a user sees them: texts, JSON, pages, exit statuses."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expecttest import TestCase
from lib.command_line import Page, runner

import cgcompile
from cgcompile.cli import main

EAGER = ("--set", "compiler=eager")


class Snapshot(TestCase):
    def runTest(self) -> None: ...  # so that it can be made outside of a runner

    def check(self, found: str, expected: str) -> None:
        self.assertExpectedInline(found, expected, skip=1)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return runner(capsys, monkeypatch)


def test_explain(run: Any, tmp_path: Path) -> None:
    status, out, _ = run("explain", "pair", "--set", "splitting_ops=aten::relu")
    assert status == 0
    out = re.sub(r"\.py:\d+", ".py:N", out)
    Snapshot().check(
        out,
        """\
Net: 3 pieces: 2 captured, 1 eager; 3 distinct, 2 to compile; 8 ops
bytes 1280 B (1.2 KiB) cross
      1152 B (1.1 KiB) static
mode  FULL_AND_PIECEWISE; without a forward context FULL; boundaries allow FULL graphs: ALWAYS
piece    kind      ops  same as  bytes out  where, why
piece_0  captured  5    -        768        command_line.py:N in forward: q, k, v = self.qkv(x)....
piece_1  eager     1    -        256        command_line.py:N in forward: return self.out(torch....
          splitting_op: torch.nn.functional.scaled_dot_product_attention [ALWAYS]
piece_2  captured  2    -        256        command_line.py:N in forward: return self.out(torch....
set   splitting_ops = ('aten::relu',) (options)
set   cache_dir = 'off' (environment)
note  all tensors are on the CPU, so copies between host and device cannot be told: make the model
      under torch.device('meta') to see what a GPU would refuse""",
    )
    page = tmp_path / "page.html"
    status, out, _ = run("explain", "triple", "--json", "--html", str(page))
    found = json.loads(out)
    assert found["totals"]["captured"] == 2
    assert Page(page.read_text(encoding="utf-8")).headings[0] == (1, "Net")


def test_explain_tells_a_break(run: Any) -> None:
    status, out, _ = run("explain", "reads", "--json")
    found = json.loads(out)
    assert [each["entry_point"] for each in found["breaks"]] == ["torch.compile"]
    assert status == 1


def test_doctor(run: Any, tmp_path: Path) -> None:
    assert run("doctor", "pair") == (0, "Net on cpu: nothing found", "")
    page = tmp_path / "page.html"
    status, out, _ = run("doctor", "reads", "--json", "--html", str(page))
    assert status == 1
    found = json.loads(out)["findings"]
    assert [each["kind"] for each in found] == ["host_sync"]
    (row,) = Page(page.read_text(encoding="utf-8")).rows("findings")
    assert row["what"][0].startswith("host_sync")
    assert row["times"] == (str(found[0]["count"]), [str(found[0]["count"])])


@pytest.mark.parametrize("function", ["pair", "triple", "named"])
def test_verify(run: Any, function: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run("verify", function, *EAGER, "--sets", "2", "--html", str(page))
    assert status == 0
    assert out == (
        "Net: ok\n"
        "check                 inputs  replays  tolerance  result\n"
        "eager against replay  2       2        bitwise    equal\n"
        f"page: {page}"
    )
    (row,) = Page(page.read_text(encoding="utf-8")).rows("checks")
    assert row["replays"] == ("2", ["2"])


def test_verify_finds_a_difference(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run("verify", "wrong", "--json", "--sets", "1", "--html", str(page))
    assert status == 1
    (check,) = json.loads(out)["checks"]
    (row,) = Page(page.read_text(encoding="utf-8")).rows("differences")
    assert [float(each) for each in row["largest"][1]] == [check["findings"][0]["largest"]]


def test_report(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run("report", "named", *EAGER, "--html", str(page), "--calls", "5")
    assert status == 0
    Snapshot().check(
        out.replace(str(page), "PAGE"),
        """\
Net:
batches   mode  graph         padding  hits
2 tokens  FULL  num_tokens=2  -        4
          NONE  -             -        1
          warming: call 1 of 1 before a capture
4 of 5 steps on graphs
page: PAGE""",
    )
    found = Page(page.read_text(encoding="utf-8"))
    assert [row["replays"][1] for row in found.rows("steps")] == [["3"]]
    status, out, _ = run("report", "ran", "--json")
    assert status == 0
    assert json.loads(out)["counters"]["replays"] == 1
    status, out, _ = run("report", "pair", *EAGER, "--calls", "1")
    assert status == 1  # nothing was replayed


def test_env(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: sorted(each) for name, each in found.items() if name != "private"} == {
        "versions": sorted(
            ["cgcompile", "torch", "triton", "runtime", "python", "system", "driver", "gpu"]
        ),
        "cache": ["bytes", "entries", "folder"],
        "settings": ["CGCOMPILE_CACHE_DIR"],
    }
    private = found["private"]
    assert len(private) > 80
    assert private["torch._dynamo.guards.CheckFunctionManager"] is True
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert f"cgcompile: {cgcompile.__version__}\n" in out
    missing = [name for name, there in private.items() if not there]
    assert re.findall(r"  missing: (.*)", out) == missing
    assert out.endswith("cache: off\nCGCOMPILE_CACHE_DIR=off\n")
    monkeypatch.setenv("CGCOMPILE_STRCT", "1")
    assert main(["env"]) == 2
    assert "CGCOMPILE_STRICT" in capsys.readouterr().err


def test_a_module_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "lib.command_line:pair"]) == 0
    assert capsys.readouterr().out.startswith("Net: 3 pieces: 2 captured, 1 eager")


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["verify"], ["report", "a:b", "--calls", "0"], ["explane", "a:b"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2


def test_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom helper import width\n"
        "def make():\n    return torch.nn.Linear(width, 2), torch.ones(1, width)\n"
    )
    (tmp_path / "helper.py").write_text("width = 3\n")
    command = [sys.executable, "-m", "cgcompile", "explain", str(tmp_path / "mine.py") + ":make"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Linear: 1 piece: 1 captured, 0 eager")


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--help"])
    assert stopped.value.code == 0
    # The titles of argparse are those of the Python version.
    return capsys.readouterr().out.replace("optional arguments:", "options:")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.usefixtures("wide")
class TestHelp:
    def test_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        Snapshot().check(
            told(capsys),
            """\
usage: cgcompile [-h] [--traceback] COMMAND ...

See what cgcompile does to a model. Also: python -m cgcompile.

positional arguments:
  COMMAND
    explain    what would be split where, and why; runs nothing
    doctor     what CUDA graphs cannot hold, with the line and the fix
    verify     eager against replayed, on several inputs
    report     one page: split, graphs, coverage, timeline, settings
    env        versions, machine, cache and settings, for an issue
    cache      what is kept on disk

options:
  -h, --help   show this help message and exit
  --traceback  of an error, show where it was

cgcompile COMMAND --help tells more, with an example.
""",
        )

    def test_explain(self, capsys: pytest.CaptureFixture[str]) -> None:
        Snapshot().check(
            told(capsys, "explain"),
            """\
usage: cgcompile explain [-h] [--set KEY=VALUE] [--json] [--html PATH] TARGET

What would be split where, and why; runs nothing.

positional arguments:
  TARGET           what makes the model; see below

options:
  -h, --help       show this help message and exit
  --set KEY=VALUE  a setting, as in options of torch.compile; may be repeated
  --json           as JSON, not as text
  --html PATH      write a page there as well

TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report and doctor)
Exit status: 0 fine; 1 a graph break, or an error; 2 words that cannot be.
Example: cgcompile explain model.py:make --set splitting_ops=mylib::attend --html split.html
""",
        )

    def test_verify(self, capsys: pytest.CaptureFixture[str]) -> None:
        Snapshot().check(
            told(capsys, "verify"),
            """\
usage: cgcompile verify [-h] [--set KEY=VALUE] [--json] [--html PATH] [--sets SETS] [--rtol RTOL]
                        [--atol ATOL]
                        TARGET

Eager against replayed, on several inputs.

positional arguments:
  TARGET           what makes the model; see below

options:
  -h, --help       show this help message and exit
  --set KEY=VALUE  a setting, as in options of torch.compile; may be repeated
  --json           as JSON, not as text
  --html PATH      write a page there as well
  --sets SETS      sets of inputs (default: 3)
  --rtol RTOL      relative tolerance; left out: by dtype
  --atol ATOL      absolute tolerance; left out: by dtype

TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report and doctor)

Tensors on the CPU are recorded by the host recorder, unless capture_device is set.
Exit status: 0 fine; 1 a difference, or an error; 2 words that cannot be.
Example: cgcompile verify model.py:make --set compiler=aot --sets 5
""",
        )

    def test_examples(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name in ("explain", "doctor", "verify", "report", "env"):
            assert f"Example: cgcompile {name} " in told(capsys, name)
