"""The command line, as a user sees it; keys, times and folders are masked."""

import re
import time
from pathlib import Path

import pytest
from expecttest import TestCase

from cgcompile.cli import main
from cgcompile.pieces.cache import Store, key_of

GRAPH = "%0 = input f32[s0, 4] cpu\n%1 = method sin(%0) -> f32[s0, 4]\nreturn (%1)"
SETTINGS = "\n".join(f"option_{i} = {i}" for i in range(50))
FACTS = {"graph": GRAPH, "inductor": SETTINGS, "compiler": "inductor", "torch": "2.13.0 abc"}
OTHER = {**FACTS, "graph": GRAPH.replace("sin", "cos"), "torch": "2.15.0 def"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Two pieces and a trace."""
    store = Store(tmp_path / "cache")
    for facts in (FACTS, OTHER):
        store.put("piece", key_of(facts), b"x" * 100, facts, {"line": "model.py:4 in forward"})
    store.put("trace", "1" * 64, b"x", {"source": "def f(x): ..."})
    return store


class Snapshot(TestCase):
    def runTest(self) -> None: ...  # so that it can be made outside of a runner

    def check(self, found: str, expected: str) -> None:
        self.assertExpectedInline(found, expected, skip=1)


def run(capsys: pytest.CaptureFixture[str], store: Store, *words: str) -> tuple[int, str]:
    """(status, what was printed), masked."""
    capsys.readouterr()
    status = main(["cache", *words, "--dir", str(store.folder)])
    printed = "".join(capsys.readouterr())
    printed = printed.replace(str(store.folder), "FOLDER")
    printed = printed.replace(key_of(FACTS)[:12], "<key one...>").replace(
        key_of(OTHER)[:12], "<key two...>"
    )
    printed = re.sub(r"[0-9a-f]{52}\b", "...", printed)
    printed = re.sub(r"\b\d+ bytes in", "N bytes in", printed)
    # However slow the machine is, entries were made less than a minute ago.
    printed = re.sub(r"  \d+ ( *)[1-5]?\d s", r"  N \g<1>0 s", printed)
    return status, printed.rstrip("\n")


def test_list(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, store, "list")
    assert status == 0
    rows = printed.splitlines()
    assert rows[0].split() == ["key", "kind", "bytes", "age", "what", "line"]
    assert sorted(re.split(r"  +", row) for row in rows[1:-1]) == [
        ["111111111111", "trace", "N", "0 s"],
        [
            "<key one...>",
            "piece",
            "N",
            "0 s",
            "1 ops, inductor, 2.13.0",
            "model.py:4 in forward",
        ],
        [
            "<key two...>",
            "piece",
            "N",
            "0 s",
            "1 ops, inductor, 2.15.0",
            "model.py:4 in forward",
        ],
    ]
    assert rows[-1] == "3 entries, N bytes in FOLDER"


def test_list_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, Store(tmp_path / "none"), "list")
    assert found == (0, "0 entries, N bytes in FOLDER")
    assert not (tmp_path / "none").exists()


def test_why_of_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, store, "why", key_of(FACTS)[:20])
    assert status == 0
    shortened = re.sub(r"(    option_\d+ = \d+\n)+", "    (options)\n", printed)
    Snapshot().check(
        shortened,
        """\
piece <key one...>...
depends on:
  graph:
    %0 = input f32[s0, 4] cpu
    %1 = method sin(%0) -> f32[s0, 4]
    return (%1)
  inductor:
    (options)
    ... and 10 more lines (--full)
  compiler: inductor
  torch: 2.13.0 abc
notes:
  line: model.py:4 in forward""",
    )
    _, full = run(capsys, store, "why", key_of(FACTS)[:20], "--full")
    assert "option_49 = 49" in full
    assert "option_49 = 49" not in printed


def test_why_of_two(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, store, "why", key_of(FACTS), key_of(OTHER))
    assert status == 0
    Snapshot().check(
        printed,
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
    _, printed = run(capsys, store, "why", key_of(FACTS), "11")
    assert "kind: piece, trace" in printed


def test_unknown_and_ambiguous_keys(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, store, "why", "xyz")
    assert status == 2
    Snapshot().check(
        printed,
        """\
cgcompile: no entry of FOLDER has a key that starts with 'xyz'.
  'cgcompile cache list' shows what is there; --dir names another folder.""",
    )
    status, printed = run(capsys, store, "why", "")
    assert status == 2
    assert "3 entries have a key that starts with ''" in printed
    status, printed = run(capsys, store, "clear", "11", "xyz")
    assert status == 2
    assert len(list(store.entries())) == 3  # nothing is removed if one of the keys is wrong


def test_clear_one(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed = run(capsys, store, "clear", key_of(FACTS)[:20])
    assert status == 0
    Snapshot().check(
        printed,
        """\
removed piece <key one...>  model.py:4 in forward
1 entries removed from FOLDER""",
    )
    assert sorted(each.kind for each in store.entries()) == ["piece", "trace"]


def test_clear_all(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    (store.folder / ".half-1").write_bytes(b"")
    (store.folder / "inductor-0").mkdir()
    (store.folder / "inductor-0" / "kernel.so").write_bytes(b"")
    (store.folder / "mine.txt").write_text("")
    status, printed = run(capsys, store, "clear")
    assert status == 0
    assert printed.count("removed piece") == 2
    assert [path.name for path in store.folder.iterdir()] == ["mine.txt"]


def test_the_folder_of_the_settings(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "list"]) == 2
    assert "cache_dir is 'off'" in capsys.readouterr().err
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", str(store.folder))
    assert main(["cache", "list"]) == 0
    assert "3 entries" in capsys.readouterr().out


def test_ages(store: Store, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = time.time()
    for seconds, text in ((90, "2 min"), (7300, "2 h"), (200000, "2 d"), (-5, "0 s")):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        main(["cache", "list", "--dir", str(store.folder)])
        assert f"  {text}" in capsys.readouterr().out


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["cache"], ["cache", "eat"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2
