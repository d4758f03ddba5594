"""The command line, as a user sees it: texts, JSON, pages, errors and exit statuses."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from lib.command_line import HERE, Page
from lib.snapshots import assert_snapshot

import cgcompile
from cgcompile.cli import main
from cgcompile.pieces.cache import Store, key_of

EAGER = ("--set", "compiler=eager")
OF_MODELS = ["explain", "doctor", "verify", "report", "profile"]
COMMANDS = [*OF_MODELS, "settings", "reasons", "env", "cache"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command and return (status, output, errors)."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(words)
        except SystemExit as error:  # of argparse
            status = int(str(error.code))
        out, errors = capsys.readouterr()
        errors = re.sub(r"^V\d+ .*torch/_dynamo/.*\n", "", errors, flags=re.M)  # torch's own trace
        return status, out.rstrip("\n"), errors.replace(str(HERE), "FILE").rstrip("\n")

    return run


def target(function: str) -> str:
    return f"{HERE}:{function}"


def page_of(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------- commands on a model


@pytest.mark.slow
def test_explain(run: Any, tmp_path: Path) -> None:
    status, out, _ = run("explain", target("pair"), "--set", "splitting_ops=aten::relu")
    assert status == 0
    assert_snapshot("cli_explain", re.sub(r"\.py:\d+", ".py:N", out))
    page = tmp_path / "page.html"
    status, out, _ = run("explain", target("triple"), "--json", "--html", str(page))
    assert json.loads(out)["totals"]["captured"] == 2
    assert page_of(page).headings[0] == (1, "Net")
    status, out, _ = run("explain", target("reads"), "--json")
    assert status == 1
    assert [each["entry_point"] for each in json.loads(out)["breaks"]] == ["torch.compile"]


@pytest.mark.parametrize("name", ["lib.command_line:pair", target("decorated")])
def test_targets(run: Any, name: str) -> None:
    status, out, _ = run("explain", name)
    assert (status, out.startswith("Net: 3 pieces: 2 captured, 1 eager")) == (0, True)


def test_doctor(run: Any, tmp_path: Path) -> None:
    assert run("doctor", target("pair")) == (0, "Net on cpu: nothing found", "")
    page = tmp_path / "page.html"
    status, out, _ = run("doctor", target("reads"), "--json", "--html", str(page))
    (finding,) = json.loads(out)["findings"]
    assert (status, finding["kind"]) == (1, "host_sync")
    (row,) = page_of(page).rows("findings")
    assert row["what"][0].startswith("host_sync")
    assert row["times"] == (str(finding["count"]), [str(finding["count"])])


@pytest.mark.slow
@pytest.mark.parametrize("function", ["pair", "triple", "named"])
def test_verify(run: Any, function: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("--sets", "2", "--html", str(page))
    status, out, _ = run("verify", target(function), *EAGER, *words)
    assert status == 0
    assert_expected_inline(
        out.replace(str(page), "PAGE"),
        """\
Net: ok
check                 inputs  replays  tolerance  result
eager against replay  2       2        bitwise    equal
page: PAGE""",
    )
    (row,) = page_of(page).rows("checks")
    assert row["replays"] == ("2", ["2"])
    assert "missing" not in row


def test_verify_finds_a_difference(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ("--json", "--sets", "1", "--html", str(page))
    status, out, _ = run("verify", target("miscompiled"), *words)
    assert status == 1
    (check,) = json.loads(out)["checks"]
    (row,) = page_of(page).rows("differences")
    assert [float(text) for text in row["largest"][1]] == [check["findings"][0]["largest"]]


@pytest.mark.slow
def test_report(run: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run("report", target("named"), *EAGER, "--html", str(page), "--calls", "5")
    assert status == 0
    assert_expected_inline(
        out.replace(str(page), "PAGE"),
        """\
Net: Graphs served all 4 steps after 1 warming.
batches   mode  graph         padding  hits
2 tokens  FULL  num_tokens=2  -        4
          NONE  -             -        1
          warming: call 1 of 1 before a capture; last call: x [2, 4, 8]
4 of 5 steps on graphs
page: PAGE""",
    )
    assert [row["replays"][1] for row in page_of(page).rows("steps")] == [["3"]]
    status, out, _ = run("report", target("ran"), "--json")
    assert (status, json.loads(out)["counters"]["replays"]) == (0, 1)
    status, _, _ = run("report", target("pair"), *EAGER, "--calls", "1")
    assert status == 1  # nothing was replayed
    status, out, _ = run("report", target("pair"), *EAGER, "--json", "--speed")
    data = json.loads(out)
    assert status == 0
    assert data["speedup"] == data["speed"][0] / data["speed"][1] > 0


@pytest.mark.slow
def test_bisect(run: Any) -> None:
    status, out, _ = run("verify", target("triple"), *EAGER, "--sets", "1", "--bisect")
    assert (status, out.splitlines()[-1]) == (0, "  1. inputs 0, all replayed: right")
    status, out, _ = run("verify", target("miscompiled"), "--json", "--bisect")
    (check,) = json.loads(out)["checks"]
    (fault,) = check["findings"]
    assert (status, fault["stage"], fault["op"]) == (1, "compilation", "torch._C._nn.linear")
    assert "all pieces uncompiled: right" in check["steps"]
    assert run("verify", target("miscompiled"), "--atol", "100", "--sets", "1", "--bisect")[0] == 0


@pytest.mark.slow
def test_a_trace_of_the_captures(run: Any, tmp_path: Path) -> None:
    trace = tmp_path / "deep" / "trace.json"
    status, out, _ = run("report", target("pair"), *EAGER, "--trace", str(trace))
    assert (status, out.splitlines()[-1]) == (0, "3 of 4 steps on graphs")
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
    assert names == ["thread_name", "FULL num_tokens=2"]
    status, _, errors = run("report", target("pair"), "--trace", str(tmp_path))
    assert (status, "is a folder; expected the path of a file" in errors) == (2, True)


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("bisect", "verify --bisect"),
        ("coverage", "report"),
        ("timeline", "report --trace PATH"),
    ],
)
def test_removed_commands_name_their_replacement(run: Any, command: str, instead: str) -> None:
    status, out, errors = run("--traceback", command, target("pair"))
    assert (status, out) == (2, "")
    assert errors == (
        f"cgcompile: there is no command {command!r} any more.\n  Use 'cgcompile {instead}'."
    )
    assert run(*instead.split()[:1], "--help")[0] == 0


def test_profile(run: Any) -> None:
    status, out, _ = run("profile", target("pair"), *EAGER, "--calls", "6", "--json")
    data = json.loads(out)
    assert (status, data["steps"]) == (0, 5)  # that of the capturing call too
    assert [segment["count"] for segment in data["segments"]] == [5]
    status, out, _ = run("profile", target("pair"), *EAGER, "--calls", "1")
    assert (status, out.startswith("no step was replayed")) == (1, True)


def test_settings(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "0")
    status, out, _ = run("settings", "--set", "compiler=aot")
    assert status == 0
    lines = out.splitlines()
    at = lines.index("compiler = 'aot' (options)")
    assert lines[at + 1].startswith("    what compiles a piece: ``inductor``")
    assert "num_warmups = 0 (environment)" in lines
    status, out, _ = run("settings", "--json")
    rows = {each["name"]: each for each in json.loads(out)}
    assert [*rows] == [*cgcompile.CompilationConfig.names()]
    assert all(each["meaning"] for each in rows.values())
    assert rows["on_fallback"]["origin"] == "default"
    assert run("settings", "--set", "compilr=aot")[0] == 2
    monkeypatch.setattr(cgcompile.CompilationConfig, "__doc__", None)  # as of python -OO
    status, out, _ = run("settings")
    assert (status, len(out.splitlines())) == (0, len(rows))
    assert {each["meaning"] for each in json.loads(run("settings", "--json")[1])} == {None}


def test_reasons(run: Any) -> None:
    status, out, _ = run("reasons", "warming", "host_sync")
    assert status == 0
    assert [line for line in out.splitlines() if line[0] != " "] == ["warming", "host_sync"]
    assert "\n  remedy  keep the value on the device" in out
    status, out, _ = run("reasons", "--json")
    reasons = json.loads(out)
    assert (status, [*reasons]) == (0, [reason.value for reason in cgcompile.Reason])
    assert all(each["when"] and each["remedy"] and each["page"] for each in reasons.values())
    status, _, errors = run("reasons", "warning")
    assert status == 2
    assert "argument REASON: 'warning'; expected warming" in errors


def test_env(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, out, _ = run("env", "--json")
    data = json.loads(out)
    private = data.pop("private")
    assert {name: sorted(values) for name, values in data.items()} == {
        "versions": sorted(
            ["cgcompile", "torch", "triton", "runtime", "python", "system", "driver", "gpu"]
        ),
        "cache": ["bytes", "entries", "folder"],
        "settings": ["CGCOMPILE_CACHE_DIR"],
    }
    assert (status, len(private) > 80) == (0, True)
    assert private["torch._dynamo.guards.CheckFunctionManager"] is True
    status, out, _ = run("env")
    assert status == 0
    assert f"cgcompile: {cgcompile.__version__}\n" in out
    missing = [name for name, exists in private.items() if not exists]
    assert re.findall(r"  missing: (.*)", out) == missing
    assert out.endswith("cache: off\nCGCOMPILE_CACHE_DIR=off")
    monkeypatch.setenv("CGCOMPILE_ON_FALBACK", "1")
    status, _, errors = run("env")
    assert (status, "CGCOMPILE_ON_FALLBACK" in errors) == (2, True)


def test_a_module_that_imports_lazily(run: Any, tmp_path: Path) -> None:
    (tmp_path / "lazy.py").write_text(
        "def make(): ...\n"
        "def __dir__(): return ['heavy', 'make']\n"
        "def __getattr__(name): raise ImportError if name == 'heavy' else AttributeError\n"
    )
    status, _, errors = run("explain", f"{tmp_path / 'lazy.py'}:make_it")
    assert (status, "has no function" in errors) == (2, True)


@pytest.mark.slow
def test_as_a_program(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom helper import width\n"
        "def make():\n    return torch.nn.Linear(width, 2), torch.ones(1, width)\n"
    )
    (tmp_path / "helper.py").write_text("width = 3\n")
    command = [sys.executable, "-m", "cgcompile", "explain", str(tmp_path / "mine.py") + ":make"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith("Linear: 1 piece: 1 captured, 0 eager")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(run: Any, command: str) -> None:
    status, out, _ = run(*command.split(), "--help")
    assert status == 0
    assert_snapshot(f"cli_help_{command or 'all'}", out.replace("optional arguments:", "options:"))


# ---------------------------------------------------------------- mistakes

NO_OP = "splitting_ops: splitting op 'aten::nonsense': no operator, higher-order op or functi"
NOT_TAKEN = (
    "takes (x: torch.Tensor, scale: float = 1.0) -> torch.Tensor, and cannot be called with "
    "these inputs: missing a required argu"
)
TAKES = "takes arguments, (x: torch.Tensor, scale: float = 1.0) -> torch."
SIZED = "takes arguments, (size: int, *, deep: bool = False) -> Any; ex"
MISTAKES = [  # words, exit status, beginning of the message
    ("verify FILE:par", 2, "FILE has no function 'par'. Did you mean 'pair'?"),
    ("verify FILE:number", 2, "FILE:number returned a model of type int; expected a model and its"),
    ("verify FILE:sized", 2, f"FILE:sized {SIZED}"),
    ("verify FILE:Wide", 2, "FILE:Wide takes arguments, (width: int) -> None; expected a functi"),
    ("verify FILE:net", 2, f"FILE:net {TAKES}"),
    ("verify FILE:confuses", 1, "TypeError: sized() missing 1 required positional argument: 'si"),
    ("verify FILE:four", 2, "FILE:four returned a tuple of 4; expected a model and its inputs."),
    ("verify FILE:ran", 2, "FILE:ran returned a model without inputs, and verify calls it."),
    ("profile FILE:ran", 2, "FILE:ran returned a model without inputs, and profile calls it."),
    ("report FILE:alone", 2, "FILE:alone returned a model without inputs, and report calls"),
    ("doctor FILE:alone", 2, "FILE:alone returned a model without inputs, and doctor calls"),
    (
        "verify FILE:miscompiled --set compiler=eager",
        2,
        "--set for a model that FILE:miscompiled has compiled already: its",
    ),
    ("verify FILE:pair --set compilr=eager", 2, "options: there is no setting 'compilr'. Did"),
    ("verify FILE:pair --set compiler", 2, "--set compiler: expected key=value, such as --set"),
    ("verify FILE:pair --set num_warmups=-1", 2, "options: num_warmups = '-1'; expected a whole"),
    *((f"{c} FILE:pair --set splitting_ops=aten::nonsense", 2, NO_OP) for c in OF_MODELS),
    ("verify FILE:raises", 1, "RuntimeError: boo\n  at FILE:"),
    ("verify FILE:leaves", 1, "SystemExit: 5\n  at FILE:"),
    ("explain FILE:without_inputs", 1, f"Net.forward {NOT_TAKEN}"),
    *((f"{c} FILE:without_inputs", 1, f"Net {NOT_TAKEN}") for c in ("doctor", "verify")),
    ("explain model.py", 2, "'model.py' is no target; expected module:function or path/to/file."),
    ("explain nowhere.py:f", 2, "cannot import 'nowhere.py': there is no such file."),
    ("explain no_such:f", 2, "cannot import 'no_such': No module named 'no_such'."),
]


@pytest.mark.parametrize(("words", "status", "said"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes(run: Any, words: str, status: int, said: str) -> None:
    before = list(sys.path)
    code, out, errors = run(*words.replace("FILE", str(HERE)).split())
    assert (code, out) == (status, "")
    assert errors.startswith(f"cgcompile: {said}")
    assert "Traceback" not in errors
    assert sys.path == before


@pytest.mark.parametrize("words", ["", "verify", "explane a:b", "cache", "cache eat"])
def test_usage(run: Any, words: str) -> None:
    status, out, errors = run(*words.split())
    assert (status, out) == (2, "")
    assert errors.startswith("usage: cgcompile")


@pytest.mark.parametrize("words", ["verify --sets", "report --calls", "profile --calls"])
@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_bad_numbers(run: Any, words: str, number: str) -> None:
    command, option = words.split()
    status, _, errors = run(command, target("pair"), f"{option}={number}")
    assert status == 2
    assert f"argument {option}: {number!r}; expected a whole number of at least 1" in errors


def test_a_page_that_cannot_be_written(run: Any, tmp_path: Path) -> None:
    for command in ("explain", "doctor", "verify", "report"):
        status, _, errors = run(command, target("pair"), "--html", str(tmp_path))
        assert status == 2
        assert "is a folder; expected the path of a file" in errors
    (tmp_path / "file").write_text("")
    page = tmp_path / "file" / "page.html"
    status, out, errors = run("explain", target("pair"), "--html", str(page))
    assert (status, out) == (2, "")
    assert re.match(r"cgcompile: to_html: path = .*page.html.*a file that can be written", errors)


@pytest.mark.parametrize(
    ("function", "line"), [("raises", 'raise RuntimeError("boo")'), ("leaves", "sys.exit(5)")]
)
def test_traceback(run: Any, function: str, line: str) -> None:
    status, _, errors = run("--traceback", "explain", target(function))
    assert status == 1
    assert f"in {function}\n    {line}" in errors


# ---------------------------------------------------------------- commands on the cache

GRAPH = "%0 = input f32[s0, 4] cpu\n%1 = method sin(%0) -> f32[s0, 4]\nreturn (%1)"
SETTINGS = "\n".join(f"option_{i} = {i}" for i in range(50))
FACTS = {"graph": GRAPH, "inductor": SETTINGS, "compiler": "inductor", "torch": "2.13.0 abc"}
OTHER = {**FACTS, "graph": GRAPH.replace("sin", "cos"), "torch": "2.15.0 def"}
LINE = "model.py:4 in forward"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two pieces and a trace."""
    store = Store(tmp_path / "cache")
    for facts in (FACTS, OTHER):
        store.put("piece", key_of(facts), b"x" * 100, facts, {"line": LINE})
    store.put("trace", "1" * 64, b"x", {"source": "def f(x): ..."})
    return store


@pytest.fixture
def cache(run: Any, store: Store) -> Any:
    """Run a command on the store; return (status, output) without keys, sizes and times."""

    def cache(*words: str, of: Store = store) -> tuple[int, str]:
        status, out, errors = run("cache", *words, "--dir", str(of.folder))
        text = (out + errors).replace(str(of.folder), "FOLDER")
        text = text.replace(key_of(FACTS)[:12], "ONE").replace(key_of(OTHER)[:12], "TWO")
        for entry in of.entries():
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
            text = re.sub(rf"\b{entry.size} +{created}", "N  NOW", text)
        text = re.sub(r"[0-9a-f]{52}\b", "...", text)
        return status, re.sub(r"\b\d+ bytes in", "N bytes in", text)

    return cache


def test_list(cache: Any, tmp_path: Path) -> None:
    status, text = cache("list")
    head, *rows, last = text.splitlines()
    assert status == 0
    assert head.split() == ["key", "kind", "bytes", "created", "what", "line"]
    assert sorted(re.split(r"  +", row) for row in rows) == [
        ["111111111111", "trace", "N", "NOW"],
        ["ONE", "piece", "N", "NOW", "1 ops, inductor, 2.13.0", LINE],
        ["TWO", "piece", "N", "NOW", "1 ops, inductor, 2.15.0", LINE],
    ]
    assert last == "3 entries, N bytes in FOLDER"
    empty = Store(tmp_path / "none")
    assert cache("list", of=empty) == (0, "0 entries, N bytes in FOLDER")
    assert not empty.folder.exists()


def test_why_of_one(cache: Any) -> None:
    status, text = cache("why", key_of(FACTS)[:20])
    assert status == 0
    assert_snapshot("cli_cache_why", re.sub(r"(    option_\d+ = \d+\n)+", "    (options)\n", text))
    _, full = cache("why", key_of(FACTS)[:20], "--full")
    assert ("option_49 = 49" in full, "option_49 = 49" in text) == (True, False)


def test_why_of_two(cache: Any) -> None:
    status, text = cache("why", key_of(FACTS), key_of(OTHER))
    assert status == 0
    assert_expected_inline(
        text,
        """\
graph:
  @@ -1,3 +1,3 @@
   %0 = input f32[s0, 4] cpu
  -%1 = method sin(%0) -> f32[s0, 4]
  +%1 = method cos(%0) -> f32[s0, 4]
   return (%1)
torch: 2.13.0 abc, 2.15.0 def
equal: inductor, compiler""",
    )
    assert "kind: piece, trace" in cache("why", key_of(FACTS), "11")[1]


def test_unknown_and_ambiguous_keys(cache: Any, store: Store) -> None:
    status, text = cache("why", "xyz")
    assert status == 2
    assert_expected_inline(
        text,
        """\
cgcompile: no entry of FOLDER has a key that starts with 'xyz'.
  'cgcompile cache list' shows what is there; --dir names another folder.""",
    )
    status, text = cache("why", "")
    assert (status, "3 entries have a key that starts with ''" in text) == (2, True)
    assert cache("clear", "11", "xyz")[0] == 2
    assert len(list(store.entries())) == 3  # nothing is removed if one of the keys is wrong


def test_clear(cache: Any, store: Store) -> None:
    status, text = cache("clear", key_of(FACTS)[:20])
    assert (status, text) == (0, f"removed piece ONE  {LINE}\n1 entries removed from FOLDER")
    assert sorted(entry.kind for entry in store.entries()) == ["piece", "trace"]
    (store.folder / ".half-1").write_bytes(b"")
    (store.folder / "inductor-0").mkdir()
    (store.folder / "inductor-0" / "kernel.so").write_bytes(b"")
    (store.folder / "mine.txt").write_text("")
    status, text = cache("clear")
    assert (status, text.count("removed piece"), text.count("removed trace")) == (0, 1, 1)
    assert [path.name for path in store.folder.iterdir()] == ["mine.txt"]


def test_the_folder_of_the_settings(
    run: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, _, errors = run("cache", "list")
    assert (status, "cache_dir is 'off'" in errors) == (2, True)
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", str(store.folder))
    status, out, _ = run("cache", "list")
    assert (status, "3 entries" in out) == (0, True)
