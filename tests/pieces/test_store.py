"""The folder of entries: what is put comes back whole, or not at all; nothing here ever raises."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lib.programs import run_code

from cgcompile import CompilationConfig
from cgcompile.pieces.cache import Store, cache_folder, key_of

FACTS = {"graph": "%0 = input f32[s0]\nreturn (%0)", "torch": "2.13"}
KEY = key_of(FACTS)
PAYLOAD = bytes(range(256)) * 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def payload_of(store: Store, kind: str, key: str) -> bytes | None:
    entry = store.entry(kind, key)
    return None if entry is None else entry.payload


def only_file(store: Store) -> Path:
    (path,) = store.folder.iterdir()
    return path


def test_what_is_put_comes_back(store: Store) -> None:
    assert payload_of(store, "piece", KEY) is None
    assert store.put("piece", KEY, PAYLOAD, FACTS, {"line": "model.py:4"})
    assert payload_of(store, "piece", KEY) == PAYLOAD
    entry = store.entry("piece", KEY)
    assert (entry.kind, entry.key, entry.payload) == ("piece", KEY, PAYLOAD)
    assert (entry.facts, entry.notes) == (FACTS, {"line": "model.py:4"})
    assert entry.size == only_file(store).stat().st_size
    assert payload_of(store, "trace", KEY) is None
    assert payload_of(store, "piece", key_of({})) is None


def test_put_replaces(store: Store) -> None:
    for payload in (b"one", b"", b"three"):
        store.put("piece", KEY, payload, FACTS)
        assert payload_of(store, "piece", KEY) == payload
    assert len(list(store.entries())) == 1


def test_entries_remove_and_rubbish(store: Store) -> None:
    for kind, key in (("trace", "b"), ("piece", "b"), ("piece", "a")):
        store.put(kind, key, b"x", FACTS)
    (store.folder / "notes.txt").write_text("not ours")
    (store.folder / ".half-1").write_bytes(b"left by a killed process")
    (store.folder / "piece.c.cgc").write_bytes(b"not an entry")
    entry = list(store.entries())
    assert [(each.kind, each.key) for each in entry] == [
        ("piece", "a"),
        ("piece", "b"),
        ("trace", "b"),
    ]
    assert store.remove(entry[0])
    assert not store.remove(entry[0])
    assert store.remove_rubbish() == 2
    assert sorted(path.name for path in store.folder.iterdir()) == [
        "notes.txt",
        "piece.b.cgc",
        "trace.b.cgc",
    ]


@pytest.mark.parametrize("kind", ["", "a/b", "../x", "a.b"])
def test_kinds_are_names(store: Store, kind: str) -> None:
    with pytest.raises(ValueError, match="must be letters"):
        store.put(kind, KEY, b"", FACTS)


names = st.text(min_size=1, max_size=8)


@pytest.mark.slow
@given(st.dictionaries(names, st.text(max_size=20), max_size=6), st.randoms())
def test_keys_depend_on_every_fact_and_on_no_order(facts: dict[str, str], random) -> None:
    pairs = list(facts.items())
    random.shuffle(pairs)
    assert key_of(dict(pairs)) == key_of(facts)
    for name in facts:
        assert key_of({**facts, name: facts[name] + "x"}) != key_of(facts)
        assert key_of({k: v for k, v in facts.items() if k != name}) != key_of(facts)
    assert key_of({**facts, "new" * 3: ""}) != key_of(facts)


# ---------------------------------------------------------------- damage


def flipped(data: bytes, where: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[where % len(data)] ^= 1 << bit
    return bytes(changed)


DAMAGE = st.one_of(
    st.builds(
        lambda where, bit: lambda data: flipped(data, where, bit), st.integers(0), st.integers(0, 7)
    ),
    st.integers(0).map(lambda length: lambda data: data[: length % len(data)]),
    st.binary(min_size=1, max_size=8).map(lambda more: lambda data: data + more),
)


@pytest.mark.slow
@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(damage=DAMAGE)
def test_a_damaged_file_is_a_miss(store: Store, damage: Callable[[bytes], bytes]) -> None:
    """One flipped bit anywhere, a truncated or a longer file."""
    store.put("piece", KEY, PAYLOAD, FACTS)
    path = only_file(store)
    path.write_bytes(damage(path.read_bytes()))
    assert list(store.entries()) == []
    assert payload_of(store, "piece", KEY) is None
    assert not path.exists()
    store.put("piece", KEY, PAYLOAD, FACTS)
    assert payload_of(store, "piece", KEY) == PAYLOAD


def test_the_entry_of_another_key_is_a_miss(store: Store) -> None:
    store.put("piece", KEY, PAYLOAD, FACTS)
    only_file(store).rename(store.folder / "piece.0000.cgc")
    assert payload_of(store, "piece", "0000") is None
    assert list(store.folder.iterdir()) == []


def test_another_version_of_the_format_is_a_miss(store: Store) -> None:
    store.put("piece", KEY, PAYLOAD, FACTS)
    path = only_file(store)
    path.write_bytes(path.read_bytes().replace(b"cache 2", b"cache 1", 1))
    assert payload_of(store, "piece", KEY) is None


# ---------------------------------------------------------------- folders that refuse


def test_a_full_disk_leaves_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store.put("piece", KEY, b"before", FACTS)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert not store.put("piece", KEY, PAYLOAD, FACTS)
    assert "cannot be written (No space left on device)" in caplog.text
    assert payload_of(store, "piece", KEY) == b"before"
    assert only_file(store).suffix == ".cgc"  # nothing half written is left


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(store: Store) -> None:
    store.put("piece", KEY, PAYLOAD, FACTS)
    store.folder.chmod(0o500)
    try:
        assert not store.put("piece", "other", PAYLOAD, FACTS)
        assert payload_of(store, "piece", KEY) == PAYLOAD
    finally:
        store.folder.chmod(0o700)


# ---------------------------------------------------------------- several processes

WRITERS = """
import os, sys
from cgcompile.pieces.cache import Store
child = os.fork()
name = "a" if child else "b"
store = Store(sys.argv[1])
for _ in range(300):
    assert store.put("piece", "shared", name.encode() * 5000, {"by": name})
    entry = store.entry("piece", "shared").payload
    assert len(set(entry)) == 1 and len(entry) == 5000, entry
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.slow
def test_processes_that_write_one_key_at_once(store: Store) -> None:
    run_code(WRITERS, str(store.folder))
    assert payload_of(store, "piece", "shared") in (b"a" * 5000, b"b" * 5000)
    assert only_file(store).name == "piece.shared.cgc"


# ---------------------------------------------------------------- which folder


def test_folders_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder(CompilationConfig()) is None  # the tests are told to keep nothing
    assert cache_folder(CompilationConfig(cache_dir="off")) is None
    assert cache_folder(CompilationConfig(cache_dir=str(tmp_path))) == tmp_path
    assert cache_folder(CompilationConfig(cache_dir="~/pieces")) == Path.home() / "pieces"
    monkeypatch.setenv("CGCOMPILE_CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder(CompilationConfig()) == Path.home() / ".cache" / "cgcompile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(CompilationConfig()) == tmp_path / "cgcompile"
