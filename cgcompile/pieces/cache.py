"""Look up a compiled piece by its cache key, else compile it, and keep the result.

What a piece depends on is a table of *facts*, named and in plain text; the key is their hash. Equal
facts mean that one artifact may be used in place of another, in this process and in any other one
(Note [Text of a graph]). A piece that is :class:`Unnameable` is compiled, without the caches of
torch, whose keys lack the same facts, and not kept. There are two levels: :class:`PieceCache`, of
one backend, and :class:`Store`, a folder that backends and processes share. Guards on sizes that
the compiler added are kept with an artifact and evaluated at each hit: where they do not hold, the
piece is compiled as the next *variant* of its key.

The rule: a store never fails its caller. What cannot be read is a miss, what cannot be written is
not kept, a damaged file is removed, and the log has a warning.

Note [Trust in a folder]. A payload is code: its readers unpickle or execute it. So a folder or file
is used only if it is owned by this user or by root, and writable by its owner alone; a file must
also be a regular one. Anything else is a miss, with one warning. The checksum detects damage, not
forgery: processes of this user, and root, can write entries that run as this user.

Note [Compiled one at a time]. Dynamo, functorch and Inductor keep their state in globals (tracing
context, configuration patches, the sizes that all pieces of a graph share), so two threads cannot
compile two pieces, and a new process would import torch for longer than most pieces take. Inductor
compiles the kernels of a piece in its own pool of processes, if that has started
(``Backend.anticipate``), while it lowers the rest. It waits for them at the end of each piece: the
module that it generates does so at its import, and no setting defers that.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from cgcompile.config import CompilationConfig
from cgcompile.passes.split import GraphText, Unnameable
from cgcompile.torch_compat import expressions, inductor
from cgcompile.version import __version__

log = logging.getLogger(__name__)

# ---------------------------------------------------------------- facts and keys

_FORMAT = 2  # version of the text of a graph


def _facts_of_process(config: CompilationConfig) -> dict[str, str]:
    """Return the facts that all pieces of one backend call share; raise Unnameable."""
    try:
        settings = inductor.compiler_settings(dict(config.inductor_options))
        uuids = "\n".join(str(entry.uuid()) for entry in config.piece_passes)
    except ValueError as error:
        raise Unnameable(str(error)) from None
    return {
        "cgcompile": f"{__version__}, format {_FORMAT}",
        "compiler": str(config.first_compiler),
        "passes": uuids,
        **inductor.versions(),
        **settings,
    }


def facts_of_piece(module: fx.GraphModule, fake_inputs: Sequence[Any]) -> dict[str, str]:
    """Return the facts of one piece; raise Unnameable if a part of it has no lasting text."""
    text = GraphText(lasting=True)
    graph = text.of(module, module.graph)
    return {
        "graph": graph,
        "sizes": "\n".join(_sizes(text, fake_inputs)),
        "machine": inductor.machine(list(text.devices)),
    }


def _sizes(text: GraphText, fake_inputs: Sequence[Any]) -> list[str]:
    """Return the ranges of all symbols, and the guards on them so far."""
    envs = [size.node.shape_env for size in fake_inputs if isinstance(size, torch.SymInt)]
    if text.symbols and not envs:
        raise Unnameable("a size of its tensors is not among its inputs")
    own = list(text.symbols)
    guards = sorted(inductor.SizeGuards(fake_inputs).known(), key=str)
    texts = sorted(text.expression(expressions.inclusive(guard)) for guard in guards)
    rows = []
    for symbol, name in text.symbols.items():
        lower, upper = expressions.Shapes(envs[0]).bounds(symbol)
        rows.append(f"{lower} <= {name} <= {upper}" + ("" if symbol in own else " elsewhere"))
    return rows + texts


def key_of(facts: Mapping[str, str]) -> str:
    """Return the key of these facts: equal for equal facts, in any order and any process."""
    text = json.dumps(dict(facts), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# ---------------------------------------------------------------- the folder

# A file: magic and format version | sha256 of all else | length of the header | header | payload
MAGIC = b"cgcompile cache 2\n"
LARGEST = 2**30  # bytes of an entry
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8
_HEADER = {"kind": str, "key": str, "facts": dict, "notes": dict, "created": float}
_SUFFIX = ".cgc"
_TEMPORARY = ".half-"
_TRIAL = 4096  # bytes
_WORK = "inductor-"  # prefix of the folders in a store's folder that hold Inductor's files


def cache_folder(config: CompilationConfig) -> Path | None:
    """Return the folder in which a configuration keeps artifacts; None for no cache."""
    # A home that cannot be determined (no ``HOME``, no entry in passwd) means no cache.
    if config.cache_dir == "off":
        return None
    folder = config.cache_dir
    if folder is None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
        folder = os.path.join(home, "cgcompile")
    try:
        return Path(folder).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no home, or no working directory
        log.warning("no cache: %s cannot be resolved (%s); set cache_dir", folder, error)
        return None


class _Untrusted(Exception):
    """The reason why a folder or file is not used; never reaches a caller of cgcompile."""


def _require_trusted(status: os.stat_result, file: bool = False) -> None:
    """Refuse special files, and paths of other users; see Note [Trust in a folder]."""
    if file and not stat.S_ISREG(status.st_mode):
        raise _Untrusted("it is no regular file")
    if status.st_uid not in (os.geteuid(), 0):
        raise _Untrusted(
            f"it is owned by user {status.st_uid}; expected user {os.geteuid()} or root: "
            "use a folder of your own"
        )
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared and not stat.S_ISLNK(status.st_mode):  # the mode of a link has no meaning
        mode = stat.S_IMODE(status.st_mode)
        raise _Untrusted(f"group or others may write to it (mode {mode:04o}): chmod go-w")
    if file and status.st_size > LARGEST:
        raise _Untrusted(f"it has {status.st_size} bytes, more than {LARGEST}")


@dataclass(frozen=True)
class Entry:
    """The content of one file."""

    kind: str  # kind of payload, such as "piece"
    key: str
    facts: Mapping[str, str]  # every part of the key, by name
    notes: Mapping[str, str]  # the source line, the seconds of the compilation, the guards
    created: float  # seconds since the epoch
    size: int  # bytes on disk
    payload: bytes = field(repr=False)


class Store:
    """A folder of checked files, one per entry, which many processes may use at once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._warned: set[str] = set()

    def entry(self, kind: str, key: str) -> Entry | None:
        """Return the entry with a key; None if there is none, or it is damaged or untrusted."""
        with self._failures_logged("cannot be read ({})"), suppress(FileNotFoundError):
            try:
                entry = parsed(self._read(self._path(kind, key).name))
                if (entry.kind, entry.key) == (kind, key):
                    return entry
                self.discard(kind, key, "it is another entry")
            except ValueError as error:
                self.discard(kind, key, str(error))
        return None

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder; raise _Untrusted if other users may write to it."""
        if self.folder.is_symlink():
            _require_trusted(self.folder.lstat())
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except ValueError as error:  # a null byte
            raise OSError(0, str(error)) from None
        try:
            _require_trusted(os.fstat(descriptor))
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, name: str) -> bytes:
        """Return the bytes of a file of the folder; raise as :meth:`_opened`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._opened() as folder:
            try:
                descriptor = os.open(name, flags, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise _Untrusted(f"{name} is no regular file") from None
                raise
            try:
                status = os.fstat(descriptor)
                _require_trusted(status, file=True)
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read(status.st_size)
            except _Untrusted as reason:
                raise _Untrusted(f"{name}: {reason}") from None
            finally:
                os.close(descriptor)

    def put(
        self,
        kind: str,
        key: str,
        payload: bytes,
        facts: Mapping[str, str],
        notes: Mapping[str, str] | None = None,
    ) -> bool:
        """Write an entry, in place of an earlier one; return whether that succeeded."""
        path = self._path(kind, key)
        data = packed(kind, key, payload, facts, notes or {})
        if len(data) > LARGEST:
            self._warn_once(f"keeps no entry of more than {LARGEST} bytes: {len(data)}")
            return False
        written = False
        with self._failures_logged("cannot be written ({}): nothing is kept"):
            self._make()
            with self._opened() as folder:
                _write(path.name, data, folder)
            written = True
        return written

    def _make(self) -> None:
        """Create the folder and missing parents, with access for this user only."""
        try:
            missing = [parent for parent in self.folder.parents if not parent.exists()]
            for folder in (*reversed(missing), self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except ValueError as error:  # a null byte
            raise OSError(0, str(error)) from None

    def work_folder(self, name: str) -> Path | None:
        """Create a subfolder for the files of a compiler; None if the cache cannot be used."""
        # A file is written there: permissions do not show a full or read-only disk.
        work, usable = Store(self.folder / (_WORK + name)), False
        with self._failures_logged("cannot be written ({}): nothing is kept"):
            self._make()
            with self._opened():
                work._make()
            with work._opened() as folder:
                trial = _TEMPORARY + secrets.token_hex(8)
                _write(trial, bytes(_TRIAL), folder)
                os.unlink(trial, dir_fd=folder)
            usable = True
        return work.folder if usable else None

    def discard(self, kind: str, key: str, reason: str) -> None:
        """Remove an entry that cannot be used."""
        path = self._path(kind, key)
        log.warning("%s: removed, it will be compiled again: %s", path, reason)
        _unlink(path)

    def entries(self) -> Iterator[Entry]:
        """Yield all undamaged entries, sorted by kind and key."""
        names: list[str] = []
        failures = self._failures_logged("cannot be read ({})")
        with failures, suppress(FileNotFoundError), self._opened() as folder:
            names = os.listdir(folder)
        for name in sorted(name for name in names if name.endswith(_SUFFIX)):
            try:
                yield parsed(self._read(name))
            except FileNotFoundError:  # another process removed it
                continue
            except (OSError, ValueError, _Untrusted) as error:
                log.warning("%s: not an entry: %s", self.folder / name, error)

    def remove(self, entry: Entry) -> bool:
        """Remove one entry; return whether that succeeded."""
        return _unlink(self._path(entry.kind, entry.key))

    def remove_rubbish(self) -> int:
        """Remove files that are damaged or half written; return how many."""
        whole = {self._path(entry.kind, entry.key) for entry in self.entries()}
        files = {*self.folder.glob(_TEMPORARY + "*"), *self.folder.glob("*" + _SUFFIX)}
        return sum(_unlink(path) for path in sorted(files - whole))

    def remove_work(self) -> int:
        """Remove Inductor's files, whose C++ is compiled again when needed; return how many."""
        folders = sorted(self.folder.glob(_WORK + "*"))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return sum(not folder.exists() for folder in folders)

    def _path(self, kind: str, key: str) -> Path:
        if not (re.fullmatch(r"\w+", kind) and re.fullmatch(r"\w+", key)):
            raise ValueError(f"kind {kind!r} and key {key!r} must be letters, digits, underscores")
        return self.folder / f"{kind}.{key}{_SUFFIX}"

    @contextmanager
    def _failures_logged(self, problem: str) -> Iterator[None]:
        """Log errors of the folder instead of raising them; ``problem`` describes an OSError."""
        try:
            yield
        except OSError as error:
            self._warn_once(problem.format(error.strerror))
        except _Untrusted as reason:
            self._warn_once(f"is not used: {reason}")

    def _warn_once(self, problem: str) -> None:
        if problem not in self._warned:
            self._warned.add(problem)
            text = f"cache folder {self.folder} {problem}"  # a path may not be decodable
            log.warning("%s", text.encode(errors="backslashreplace").decode())


def _trusted_folder(path: Path) -> Store:
    store = Store(path.absolute().parent)
    try:
        with store._opened():
            return store
    except _Untrusted as reason:
        raise PermissionError(f"its folder {store.folder}: {reason}") from None


def write_trusted(path: Path, data: bytes) -> None:
    """Write a file that :func:`trusted_bytes` reads; raises as that."""
    with _trusted_folder(path)._opened() as folder:
        _write(path.name, data, folder)


def trusted_bytes(path: Path) -> bytes:
    """Return the bytes of a file that was saved; see Note [Trust in a folder].

    Raises:
        PermissionError: another user could have written the file; the text is the reason.
        OSError: it cannot be read.
    """
    store = _trusted_folder(path)
    try:
        return store._read(path.name)
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, error.strerror, str(path)) from None
    except _Untrusted as reason:
        raise PermissionError(str(reason)) from None


def _write(name: str, data: bytes, folder: int) -> None:
    """Write a file atomically; a failure leaves the earlier file."""
    temporary = _TEMPORARY + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def packed(
    kind: str, key: str, payload: bytes, facts: Mapping[str, str], notes: Mapping[str, str]
) -> bytes:
    values = (kind, key, dict(facts), dict(notes), time.time())
    header = json.dumps(dict(zip(_HEADER, values, strict=True))).encode()
    body = len(header).to_bytes(_LENGTH, "big") + header + payload
    return MAGIC + hashlib.sha256(MAGIC + body).digest() + body


def parsed(data: bytes) -> Entry:
    """Return the entry in the bytes of a file; raise ValueError if they are damaged."""
    if not data.startswith(MAGIC):
        raise ValueError("it is no file of this version")
    body = data[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(MAGIC + body).digest() != data[len(MAGIC) : len(MAGIC) + _DIGEST]:
        raise ValueError("its checksum is wrong")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    try:
        header = json.loads(body[_LENGTH:end])
    except (ValueError, RecursionError):  # undamaged, but written by another program
        header = None
    if not _is_header(header):
        raise ValueError("its header is not one of ours")
    return Entry(size=len(data), payload=body[end:], **header)


def _is_header(header: Any) -> bool:
    if not isinstance(header, dict) or header.keys() != _HEADER.keys():
        return False
    tables = [header["facts"], header["notes"]]
    return all(isinstance(header[name], kind) for name, kind in _HEADER.items()) and all(
        isinstance(text, str) for table in tables for text in table.values()
    )


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


# ---------------------------------------------------------------- the record of a compilation

COMPILED, LOADED, SHARED, FAILED = "compiled", "loaded", "shared", "failed"


@dataclass(frozen=True)
class PieceOrigin:
    """Where the code of one distinct piece came from."""

    piece: str
    how: (
        str  # COMPILED, LOADED from disk, SHARED with an equal piece, or FAILED: it runs uncompiled
    )
    seconds: float
    key: str | None  # None if the piece has none
    uncached: str | None  # why it is not on disk; None if it is

    def __str__(self) -> str:
        text = f"{self.piece}  {self.how:8}  {self.seconds:.3f} s"
        return f"{text}  not kept: {self.uncached}" if self.uncached else text


@dataclass(frozen=True)
class Compilation:
    """The record of compiling the distinct pieces of one graph, in order; ``print`` it."""

    pieces: tuple[PieceOrigin, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """The number of pieces that were compiled."""
        return self._count(COMPILED)

    @property
    def loaded(self) -> int:
        """The number of pieces that were loaded from disk."""
        return self._count(LOADED)

    @property
    def shared(self) -> int:
        """The number of pieces that share the artifact of an equal piece."""
        return self._count(SHARED)

    @property
    def failed(self) -> int:
        """The number of pieces that run uncompiled, because their compiler raised."""
        return self._count(FAILED)

    @property
    def uncached(self) -> dict[str, str]:
        """Piece -> why it was not kept on disk."""
        return {piece.piece: piece.uncached for piece in self.pieces if piece.uncached is not None}

    def _count(self, how: str) -> int:
        return sum(piece.how == how for piece in self.pieces)

    def __str__(self) -> str:
        head = (
            f"{self.compiled} compiled, {self.loaded} loaded, {self.shared} shared, "
            f"{len(self.uncached)} not kept; {self.seconds:.3f} s"
        )
        return "\n".join([head, *map(str, self.pieces)])


# ---------------------------------------------------------------- lookup and compilation

Runnable = Callable[..., Sequence[Any]]
R_ = TypeVar("R_")
PieceCompiler = Callable[[fx.GraphModule, Sequence[Any]], Runnable]

KIND = "piece"
_VARIANTS = 4  # most artifacts of one key, which differ in their guards


class PieceCache:
    """The compiled pieces of one backend that are in use, and the folder that keeps them."""

    def __init__(self, config: CompilationConfig) -> None:
        folder = cache_folder(config)
        self.store = None if folder is None else Store(folder)
        self._live: dict[str, tuple[weakref.ref[Any], str]] = {}
        self._saved: dict[str, Entry] | None = None

    @property
    def keeps(self) -> bool:
        """Whether bytes of artifacts are of use: there is a folder, or a model is being saved."""
        return self.store is not None or self._saved is not None

    @contextmanager
    def saving(self, entries: dict[str, Entry]) -> Iterator[None]:
        """Look entries of a saved model up before those of the folder, and add what is used."""
        self._saved = entries
        try:
            yield
        finally:
            self._saved = None

    def entry(self, key: str) -> Entry | None:
        """Return the entry of a key: of the saved model, or of the folder."""
        saved = {} if self._saved is None else self._saved
        entry = saved.get(key)
        if entry is None and self.store is not None:
            entry = self.store.entry(KIND, key)
        if entry is not None:
            saved[key] = entry
        return entry

    def put(
        self, key: str, data: bytes, facts: Mapping[str, str], notes: Mapping[str, str]
    ) -> str | None:
        """Keep an entry; return why that failed, or None."""
        if self._saved is not None:
            self._saved[key] = parsed(packed(KIND, key, data, facts, notes))
        if self.store is None or self.store.put(KIND, key, data, facts, notes):
            return None
        return "the cache folder cannot be written"

    def discard(self, key: str, reason: str) -> None:
        """Remove an entry that cannot be used."""
        if self._saved is not None and self._saved.pop(key, None) is not None:
            log.warning("an entry of the saved model is compiled again: %s", reason)
        elif self.store is not None:
            self.store.discard(KIND, key, reason)

    def live(self, key: str) -> tuple[Runnable, str] | None:
        """Return the artifact of a key and its guards, if it is in use."""
        if self._saved is not None and self.entry(key) is None:
            return None  # a saved model needs its bytes
        reference, guards = self._live.get(key, (None, ""))
        run = None if reference is None else reference()
        return None if run is None else (run, guards)

    def remember(self, key: str, run: Runnable, guards: str) -> None:
        """Let equal pieces share ``run`` while it is in use."""
        self._live = {key: entry for key, entry in self._live.items() if entry[0]() is not None}
        self._live[key] = (weakref.ref(run), guards)


class Compiling:
    """Compile the pieces of one graph; inside, Inductor's files are in the cache folder."""

    # A compiler of the user's is neither kept nor shared: its changes cannot be detected.

    def __init__(
        self, cache: PieceCache, compiler: PieceCompiler, config: CompilationConfig
    ) -> None:
        self._cache = cache
        self._compiler = compiler
        self._patches = dict(config.inductor_options)
        self._compiles_with_inductor = config.first_compiler == "inductor"
        self._began = time.perf_counter()
        self._origins: list[PieceOrigin] = []
        self._facts: Mapping[str, str] = {}
        self._unnamed: str | None = None  # why no piece here has a key
        self._files = ExitStack()
        self._in_folder = False
        self._why_not_saved: str | None = None
        if not cache.keeps:
            self._why_not_saved = "caching is off"
        elif self._compiles_with_inductor:
            self._why_not_saved = inductor.why_not_saved(self._patches)
        else:
            self._why_not_saved = "only Inductor saves"
        if callable(config.first_compiler):
            self._unnamed = "the compiler is the user's"
        elif config.first_compiler not in ("inductor", "aot"):
            self._unnamed = f"compiler {config.first_compiler!r} has nothing to keep"
        else:
            try:
                self._facts = _facts_of_process(config)
            except Unnameable as reason:
                self._unnamed = str(reason)

    def __enter__(self) -> "Compiling":
        store = self._cache.store
        if store is not None and self._why_not_saved is None:
            # Homes are shared by machines: files are apart for each torch and processor.
            facts = {**inductor.versions(), "cpu": inductor.processor()}
            folder = store.work_folder(f"{__version__}-{key_of(facts)[:12]}")
            if folder is not None:
                self._files.enter_context(inductor.inductor_files_in(folder))
                self._in_folder = True
        return self

    def __exit__(self, *exception: Any) -> None:
        self._files.close()

    def make(
        self, module: fx.GraphModule, fake_inputs: Sequence[Any], piece: str, where: str
    ) -> Runnable:
        """Return the compiled form of a piece; its name and source line are for the record."""
        began = time.perf_counter()
        facts, unnamed = self._facts_of(module, fake_inputs)
        guards = inductor.SizeGuards(fake_inputs)
        key, run, how = self._find(facts, guards)
        if run is not None:
            self._note(piece, how, began, key, None)
            return run
        data = None
        if facts is None and self._compiles_with_inductor:
            run = self._attempt(
                lambda: inductor.compile_uncached(module, fake_inputs, self._patches)
            )
            uncached = self._why_not_saved or ""
        elif facts is None or self._why_not_saved is not None:
            run = self._attempt(lambda: self._compiler(module, fake_inputs))
            uncached = self._why_not_saved or ""
        else:
            run, data, uncached = self._attempt(
                lambda: inductor.compile_saveable(module, fake_inputs, self._patches)
            )
        if facts is not None and key is not None:
            notes = {"line": where, "seconds": f"{time.perf_counter() - began:.3f}"}
            uncached = self._keep(key, run, data, facts, notes, guards) or uncached
        self._note(piece, COMPILED, began, key, unnamed or uncached or None)
        return run

    def _attempt(self, action: Callable[[], R_]) -> R_:
        """Run a compilation; if the disk is full, run it again with torch's own folder."""
        try:
            return action()
        except Exception as error:
            if not self._in_folder or not inductor.is_disk_error(error):
                raise
            log.warning("the compiler cannot write to the cache folder, it uses torch's: %s", error)
        self._in_folder = False
        self._files.close()
        return action()

    def _facts_of(
        self, module: fx.GraphModule, fake_inputs: Sequence[Any]
    ) -> tuple[dict[str, str] | None, str | None]:
        """Return (facts, None) of a piece, or (None, why it has none)."""
        if self._unnamed is not None:
            return None, self._unnamed
        try:
            own = facts_of_piece(module, fake_inputs)
        except Unnameable as reason:
            return None, str(reason)
        except Exception as error:  # a value of a kind unknown here; the piece itself may be fine
            return None, f"it cannot be described ({type(error).__name__}: {error})"
        assert own.keys().isdisjoint(self._facts), "two facts have one name"
        return {**own, **self._facts}, None

    def _find(
        self, facts: dict[str, str] | None, guards: inductor.SizeGuards
    ) -> tuple[str | None, Runnable | None, str]:
        """Look up an artifact. On a miss, return the next unused key."""
        if facts is None:
            return None, None, ""
        key = ""
        for variant in range(_VARIANTS):
            facts["variant"] = str(variant)
            key = key_of(facts)
            live = self._cache.live(key)
            if live is not None:
                if guards.hold(live[1]):
                    return key, live[0], SHARED
                continue
            if self._why_not_saved is not None:
                break
            entry = self._cache.entry(key)
            if entry is None:
                break
            run, usable = self._load(entry, guards)
            if run is not None:
                return key, run, LOADED
            if not usable:
                break
        return key, None, ""

    def _load(self, entry: Entry, guards: inductor.SizeGuards) -> tuple[Runnable | None, bool]:
        """Return the artifact of an entry if its guards hold, and whether the entry is usable."""
        text = entry.notes.get("guards", "")
        try:
            if not guards.hold(text):
                return None, True
            run = self._attempt(lambda: inductor.load_artifact(entry.payload, self._patches))
        except Exception as error:  # the content of a file can raise anything
            if not inductor.is_disk_error(error):
                reason = f"torch cannot load it ({type(error).__name__}: {error})"
                self._cache.discard(entry.key, reason)
            return None, False
        self._cache.remember(entry.key, run, text)
        return run, True

    def _keep(
        self,
        key: str,
        run: Runnable,
        data: bytes | None,
        facts: Mapping[str, str],
        notes: Mapping[str, str],
        guards: inductor.SizeGuards,
    ) -> str | None:
        """Store an artifact; return why that failed, or None."""
        try:
            text = guards.added()
        except Exception as error:
            return f"its guards have no text ({type(error).__name__}: {error})"
        if text is None:
            return "the compiler fixed a size that other pieces share"
        self._cache.remember(key, run, text)
        return (
            None if data is None else self._cache.put(key, data, facts, {**notes, "guards": text})
        )

    def _note(
        self, piece: str, how: str, began: float, key: str | None, uncached: str | None
    ) -> None:
        origin = PieceOrigin(piece, how, time.perf_counter() - began, key, uncached)
        log.debug("%s", origin)
        self._origins.append(origin)

    def failed(self, piece: str, reason: str) -> None:
        """Record that a compiler raised, so that the piece runs uncompiled."""
        self._origins.append(PieceOrigin(piece, FAILED, 0.0, None, reason))

    def result(self) -> Compilation:
        """Return the record so far."""
        return Compilation(tuple(self._origins), time.perf_counter() - self._began)
