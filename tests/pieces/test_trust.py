"""A folder or file that others could have written is a miss with one warning, and runs no code."""

import hashlib
import json
import logging
import math
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.pieces.cache import LARGEST, MAGIC, Store, cache_folder
from cgcompile.torch_compat import inductor
from cgcompile.torch_compat.expressions import NotAGuard, guards_hold, require_guards

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
HEADER = {"kind": "piece", "key": "k", "facts": {}, "notes": {}, "created": 0.0}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "cache")
    assert store.put("piece", "k", b"payload", {})
    return store


def payload_of(store: Store) -> bytes | None:
    entry = store.entry("piece", "k")
    return None if entry is None else entry.payload


def path_of(store: Store) -> Path:
    return store.folder / "piece.k.cgc"


def sealed(header: Any, payload: bytes = b"payload") -> bytes:
    """A whole entry with any header, as anybody can write it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = len(text).to_bytes(8, "big") + text + payload
    return MAGIC + hashlib.sha256(MAGIC + body).digest() + body


# ---------------------------------------------------------------- folders

FOLDERS: dict[str, tuple[int, bool]] = {
    "0700": (0o700, True),
    "0755": (0o755, True),
    "0500": (0o500, True),
    "0770": (0o770, False),
    "0775": (0o775, False),
    "0702": (0o702, False),
    "1777": (0o1777, False),
}


@pytest.mark.parametrize(("mode", "hit"), FOLDERS.values(), ids=FOLDERS.keys())
def test_modes_of_folders(
    store: Store, mode: int, hit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store.folder.chmod(mode)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        for _ in range(2):
            assert (payload_of(store) == b"payload") is hit
            assert bool(list(store.entries())) is hit
        if not hit:
            assert not store.put("piece", "k", b"other", {})
            assert store.work_folder("x") is None
    assert caplog.text.count("group or others may write to it") == (0 if hit else 1)
    store.folder.chmod(0o700)
    assert payload_of(Store(store.folder)) == b"payload"  # nothing was removed


@pytest.mark.parametrize(("mode", "hit"), [(0o600, True), (0o644, True), (0o620, False)])
def test_modes_of_files(
    store: Store, mode: int, hit: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(store).chmod(mode)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        assert [payload_of(store) for _ in range(2)] == [b"payload" if hit else None] * 2
    assert caplog.text.count("group or others may write to it") == (0 if hit else 1)
    assert store.put("piece", "k", b"new", {})  # replaces it
    assert payload_of(store) == b"new"


@needs_root
@pytest.mark.parametrize("what", ["folder", "file", "link to the folder"])
def test_other_owners(store: Store, what: str, caplog: pytest.LogCaptureFixture) -> None:
    if what == "link to the folder":
        link = store.folder.parent / "link"
        link.symlink_to(store.folder)
        os.lchown(link, NOBODY, NOBODY)
        store = Store(link)
    else:
        os.chown(store.folder if what == "folder" else path_of(store), NOBODY, NOBODY)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        assert [payload_of(store) for _ in range(2)] == [None] * 2
    assert caplog.text.count("use a folder of your own") == 1
    assert path_of(store).exists()


@pytest.mark.slow
@needs_root
def test_what_root_owns_serves_other_users() -> None:
    """A shared cache that only an administrator writes, read by a process of another user."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        store = Store(Path(name) / "cache")
        assert store.put("piece", "k", b"payload", {})
        store.folder.chmod(0o755)
        path_of(store).chmod(0o644)
        assert as_another_user(store.folder) == "[True, False]"


def as_another_user(folder: Path) -> str:
    """Whether another user can read an entry, and whether it can write one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            mine = Store(folder)
            rows = [payload_of(mine) == b"payload", mine.put("piece", "k", b"x", {})]
            os.write(write, repr(rows).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    text = os.read(read, 1000).decode()
    os.close(read)
    return text


def test_homes_and_folders_may_be_links(store: Store) -> None:
    link = store.folder.parent / "link"
    link.symlink_to(store.folder)
    assert payload_of(Store(link)) == b"payload"
    (store.folder.parent / "home").symlink_to(store.folder.parent)
    assert payload_of(Store(store.folder.parent / "home" / "cache")) == b"payload"


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_folders_are_made_for_this_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        first, second = Store(tmp_path / "a" / "b"), Store(tmp_path / "c" / "d")
        assert first.put("piece", "k", b"payload", {})
        assert second.work_folder("x") == tmp_path / "c" / "d" / "inductor-x"
    finally:
        os.umask(before)
    folders = ["a", "a/b", "c", "c/d", "c/d/inductor-x"]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in folders] == [0o700] * 5
    assert path_of(first).stat().st_mode & 0o777 == 0o600
    assert list((tmp_path / "c/d/inductor-x").iterdir()) == []


# ---------------------------------------------------------------- files that are no plain entries


def to_link(path: Path) -> None:
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def to_socket(path: Path) -> None:
    path.unlink()
    before = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is bounded
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def replaced(how: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        path.unlink()
        how(path)

    return act


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (to_link, "is no regular file"),
    "link to /dev/zero": (replaced(lambda path: path.symlink_to("/dev/zero")), "no regular file"),
    "dangling link": (replaced(lambda path: path.symlink_to("/not/there")), "no regular file"),
    "fifo": (replaced(os.mkfifo), "is no regular file"),
    "socket": (to_socket, "is no regular file"),
    "folder": (replaced(Path.mkdir), "is no regular file"),
    "huge": (lambda path: os.truncate(path, LARGEST + 1), f"bytes, more than {LARGEST}"),
}


@pytest.mark.parametrize(("change", "told"), ODD.values(), ids=ODD.keys())
def test_odd_files(
    store: Store, change: Callable[[Path], object], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    change(path_of(store))
    with caplog.at_level(logging.WARNING, "cgcompile"):
        assert [payload_of(store) for _ in range(2)] == [None, None]
    assert caplog.text.count(told) == 1
    if path_of(store).is_dir() and not path_of(store).is_symlink():
        return
    assert store.put("piece", "k", b"new", {})
    assert payload_of(store) == b"new"


HEADERS: dict[str, Any] = {
    "null": None,
    "a list": [],
    "deep": b"[" * 100_000,
    "deep tables": b'{"a":' * 100_000,
    "no text": b"\xff\xfe",
    "a number": b"9" * 100_000,
    "notes are null": {**HEADER, "notes": None},
    "notes hold numbers": {**HEADER, "notes": {"guards": 3}},
    "facts are a list": {**HEADER, "facts": []},
    "facts hold null": {**HEADER, "facts": {"graph": None}},
    "created is a text": {**HEADER, "created": "now"},
    "a name more": {**HEADER, "payload": "x"},
    "a name less": {"kind": "piece", "key": "k"},
    "another key": {**HEADER, "key": "l"},
    "key is a number": {**HEADER, "key": 3},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS.keys())
def test_whole_entries_with_odd_headers(
    store: Store, header: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(store).write_bytes(sealed(header))
    with caplog.at_level(logging.WARNING, "cgcompile"):
        assert payload_of(store) is None
        assert payload_of(store) is None
    assert caplog.text.count("removed, it will be compiled again") == 1
    assert not path_of(store).exists()


def test_the_table_of_headers_starts_from_a_good_one(store: Store) -> None:
    path_of(store).write_bytes(sealed(HEADER))
    assert payload_of(store) == b"payload"


def test_a_payload_belongs_to_its_key(store: Store) -> None:
    """Two payloads that swap their places, and their checksums, under headers that stay."""
    assert store.put("piece", "l", b"another", {})
    one, other = path_of(store), store.folder / "piece.l.cgc"
    first, second = one.read_bytes(), other.read_bytes()
    end = len(MAGIC) + 32
    one.write_bytes(second[:end] + first[end:].removesuffix(b"payload") + b"another")
    other.write_bytes(second)
    assert payload_of(store) is None
    other.replace(one)  # the whole file of another key
    assert payload_of(store) is None


# ---------------------------------------------------------------- guards

GOOD = {
    "": None,
    "L['t0'] < 100": [5],
    "2 <= L['t0'] and L['t0'] <= 10": [10],
    "2 <= L['t0'] <= 10": [2],
    "((L['t0'] + 8) // 8) * 8 >= L['t1']": [8, 16],
    "(L['t0'] % 8) == 0 or not (L['t0'] != 3)": [3],
    "math.floor(L['t0'] / 2) == 2 and -L['t0'] < -4": [5],
    "max(2, L['t0'], L['t1']) == 7": [3, 7],
    "torch.sym_max(L['t0'], 4) > 3 and L['t0']**2 == 9": [3],
    "torch.sym_float(L['t0']) > 1.5": [2],
}


@pytest.mark.parametrize(("text", "sizes"), GOOD.items())
def test_guards_that_hold(text: str, sizes: list[int] | None) -> None:
    if sizes is None:
        assert inductor.SizeGuards([]).hold(text)
        return
    assert guards_hold(text, sizes) is True
    names = {"math": math, "torch": torch, "L": {f"t{n}": size for n, size in enumerate(sizes)}}
    assert eval(text, names)


def test_guards_that_do_not_hold() -> None:
    assert guards_hold("L['t0'] < 100", [100]) is False
    assert guards_hold("2 <= L['t0'] <= 10", [11]) is False
    assert guards_hold("L['t0'] % 8 == 0 and L['t0'] < 3", [16]) is False


BAD = [
    "__import__('os').system('true')",
    "L['t0'].__class__",
    "L['t0'].__class__.__mro__[1]",
    "L.t0 < 3",
    "L['x'] < 3",
    "L['t0'][0] < 3",
    "L['t1'] < 3",  # there is one size
    "L['t999999999'] < 3",
    "t0 < 3",
    "(lambda: 3)() < 4",
    "[each for each in (1, 2)] == [1, 2]",
    "f'{L}' < 'a'",
    "'a' < 'b'",
    "eval('1') == 1",
    "getattr(L, 'x') == 1",
    "torch.load('x') == 1",
    "math.factorial(9999999) == 1",
    "math.floor.__self__ == 1",
    "9 ** 9 ** 9 ** 9 == 1",
    "1 << 99999999999 == 1",
    "L['t0'] < 3; L",
    "(x := 3) < 4",
    "(" * 500 + "1" + ")" * 500,
    "-" * 5000 + "1",
    f"[0][{'-' * 900}1]",  # parses, but is too deep to be quoted
    "1" + "+1" * 5000,
    "max(*L) == 1",
    "max(1, key=abs) == 1",
    "L['t0'] is 3",
    "L['t0'] in 3",
    "True if L else False",
    "\0",
    "",
]


@pytest.mark.parametrize("text", BAD, ids=[text[:30] or "empty" for text in BAD])
def test_texts_that_are_no_guards(text: str) -> None:
    with pytest.raises(NotAGuard):
        guards_hold(text, [2])
    if text not in ("L['t1'] < 3", "L['t999999999'] < 3"):
        with pytest.raises(NotAGuard):
            require_guards(text)


@pytest.mark.slow
def test_guards_of_an_entry_are_not_evaluated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The entry passes all other checks: a file of this user, in a folder of this user."""
    folder, marker = tmp_path / "cache", tmp_path / "marker"
    compiled_on(folder)
    store = Store(folder)
    (entry,) = store.entries()
    code = f"__import__('pathlib').Path({str(marker)!r}).write_text('ran') or True"
    assert store.put(entry.kind, entry.key, entry.payload, entry.facts, {"guards": code})
    with caplog.at_level(logging.WARNING, "cgcompile"):
        _, done = compiled_on(folder)
    assert [piece.how for piece in done.pieces] == ["compiled"]
    assert "removed, it will be compiled again: torch cannot load it" in caplog.text
    assert not marker.exists()


# ---------------------------------------------------------------- no home, full disks


def test_no_home_is_no_cache(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_home(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)  # as with no HOME and no entry in passwd
    for folder in (None, "~/cache"):
        with caplog.at_level(logging.WARNING, "cgcompile"):
            assert cache_folder(CompilationConfig(cache_dir=folder or "~")) is None
        assert "no cache: " in caplog.text
        assert "set cache_dir" in caplog.text
    backend = cgcompile.Backend(cache_dir="~/cache", compiler="eager")
    assert backend.counters.replays == 0


@pytest.mark.parametrize(
    "name", ["\0", "x" * 300, "a\ud800", "file/below"], ids=["nul", "long", "surrogate", "below"]
)
def test_folders_that_cannot_be(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / name)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        assert not store.put("piece", "k", b"payload", {})
        assert store.work_folder("x") is None
        assert payload_of(store) is None
        assert list(store.entries()) == []
    assert caplog.text.count("cannot be written") == 1


def compiled_on(folder: Path) -> tuple[torch.Tensor, Any]:
    torch._dynamo.reset()
    backend = cgcompile.Backend(cache_dir=str(folder), capture_device="host")
    x = torch.randn(3, 4)
    with torch.inference_mode():
        step = torch.compile(lambda x: torch.tanh(x) * 2 + 1, backend=backend, dynamic=True)
        torch.testing.assert_close(step(x), torch.tanh(x) * 2 + 1)
    return x, backend.graphs[-1].compilation


@pytest.mark.slow
def test_a_compiler_on_a_full_disk_is_run_again_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, calls = tmp_path / "cache", []
    real = inductor.compile_saveable

    def full(*args: Any) -> Any:
        calls.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
        if calls[-1].startswith(str(folder)):
            raise RuntimeError("backend failed") from OSError(28, os.strerror(28))
        return real(*args)

    monkeypatch.setattr(inductor, "compile_saveable", full)
    with caplog.at_level(logging.WARNING, "cgcompile"):
        _, done = compiled_on(folder)
    assert [each.how for each in done.pieces] == ["compiled"]
    assert len(calls) == 2
    assert calls[0].startswith(str(folder))
    assert not calls[1].startswith(str(folder))
    assert caplog.text.count("cannot write to the cache folder") == 1


@pytest.mark.slow
@needs_root
@pytest.mark.parametrize("size", ["4k", "16k", "128k"])
def test_full_disks(tmp_path: Path, size: str) -> None:
    folder = tmp_path / "full"
    folder.mkdir()
    options = f"size={size},mode=0700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount")
    try:
        _, done = compiled_on(folder)
        assert [each.how for each in done.pieces] == ["compiled"]
        _, done = compiled_on(folder)
        assert done.failed == 0
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
