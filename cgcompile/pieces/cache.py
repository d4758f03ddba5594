"""What a compilation leaves in torch's structured trace, where one is written.

``TORCH_TRACE=folder python serve.py``, then ``tlparse folder``: beside torch's own artifacts there
are ``cgcompile_split`` (as text and as data) and ``cgcompile_code``; and of run time, from
``graphs/timeline.py``, ``cgcompile_capture``, ``cgcompile_sequence`` and ``cgcompile_refusal``.
Without a trace nothing here is computed.

What a compiled piece depends on, as named facts in plain text: :func:`facts_of_piece`.

Equal facts mean that one may be used in place of the other, in this process and in any other one;
see Note [Text of a graph]. A piece that is :class:`Unnameable` is compiled all the same, and not
kept.

What was compiled, kept on disk: :class:`Store`, a folder of checked files.

An entry has a kind (``"piece"``), a key, and *facts*: every part of the key by name, in plain text,
so that two entries can be compared (``cgcompile cache why``). The rule: a store never fails its
caller. What cannot be read is a miss, what cannot be written is not kept, and a damaged file is
removed; the log says so.

Note [Trust in a folder]. A payload is code: its readers unpickle or execute it. So a folder or file
is used only if it is owned by this user or by root, and writable by its owner alone; a file must
also be a regular one. Anything else is refused with one warning, and is a miss. The checksum finds
damage, not forgery: processes of this user, and root, can write entries that run as this user.

Compile a piece, unless an equal one exists: in this backend, or on disk.

:class:`PieceCache` belongs to a :class:`~cgcompile.Backend` and lives as long; two backends share
through the folder. What a piece depends on is in ``keys.py``. Guards on sizes that the compiler
added are kept beside the result and asked again, as guards of the graph at hand: a result whose
guards do not hold is no hit, and the piece is compiled as the next *variant* of its key.

Note [Compiled one at a time]. Dynamo, functorch and Inductor keep what they are doing in globals
(tracing context, configuration patches, the sizes that all pieces of a graph share), so two pieces
cannot be compiled by two threads, and a process of its own would import torch for longer than most
pieces take. Inductor compiles the kernels of each piece in its own pool of processes, if that has
started (``Backend.anticipate``), while it lowers the rest of the piece. At its end it waits for
them: the module that it generates does so when it is imported, and no setting puts that off.
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.passes.pieces import Piece
from cgcompile.passes.printer import GraphText, Unnameable
from cgcompile.passes.split import SplitGraph
from cgcompile.version import __version__


def trace_split(split: SplitGraph) -> None:
    """Write down a split, before its pieces are compiled."""
    compat.trace_artifact("cgcompile_split", split.text)
    compat.trace_artifact("cgcompile_split_data", lambda: split_data(split))


def trace_code(source: str, artifacts: str, compilation: object) -> None:
    """Write down what was made of a split.

    Args:
        source: the generated Python that runs the pieces.
        artifacts: which artifacts of each piece serve which sizes.
        compilation: which pieces were compiled, loaded or shared.
    """
    compat.trace_artifact("cgcompile_code", lambda: source)
    compat.trace_artifact("cgcompile_compilation", lambda: f"{compilation}\n\n{artifacts}\n")


def split_data(split: SplitGraph) -> dict[str, Any]:
    """A split as plain data."""
    return {
        "device": str(split.device),
        "sizes": {name: str(dim) for name, dim in split.symbols.dims.items()},
        "crossing_bytes": split.symbols.pretty(split.crossing_bytes()),
        "graph_break": split.graph_break,
        "pieces": [_piece_data(piece) for piece in split.pieces],
    }


def _piece_data(piece: Piece) -> dict[str, Any]:
    return {
        "name": piece.name,
        "captured": piece.capture,
        "compiled": piece.compiled,
        "same_as": f"piece_{piece.same_as}",
        "support": piece.support.name,
        "num_ops": piece.num_ops,
        "why": [{"reason": why.reason.value, "detail": why.detail} for why in piece.why],
        "lines": [{"where": where, "code": code} for where, code in piece.lines],
        "inputs": list(piece.inputs),
        "outputs": list(piece.outputs),
    }


_FORMAT = 2  # of the text of a graph


def facts_of_process(compiler: str, patches: Mapping[str, Any], passes: Iterable[Any]) -> Any:
    """The facts that all pieces of one backend call share.

    Args:
        compiler: the name of one of our own compilers.
        patches: the user's Inductor settings.
        passes: the user's passes over pieces.

    Raises:
        Unnameable: a setting or pass has no text that would tell it from another one.
    """
    try:
        settings = compat.compiler_settings(patches)
        uuids = "\n".join(str(each.uuid()) for each in passes)
    except ValueError as error:
        raise Unnameable(str(error)) from None
    return {
        "cgcompile": f"{__version__}, format {_FORMAT}",
        "compiler": compiler,
        "passes": uuids,
        **compat.versions(),
        **settings,
    }


def facts_of_piece(module: fx.GraphModule, fake_inputs: Sequence[Any]) -> dict[str, str]:
    """The facts of one piece.

    Raises:
        Unnameable: something in it cannot be told to another process; says what.
    """
    text = GraphText(lasting=True)
    graph = text.of(module, module.graph)
    return {
        "graph": graph,
        "sizes": "\n".join(_sizes(text, fake_inputs)),
        "machine": compat.machine(list(text.devices)),
    }


def _sizes(text: GraphText, fake_inputs: Sequence[Any]) -> list[str]:
    """The ranges of all symbols, and what is already known of them."""
    shapes = compat.Shapes.of(each for each in fake_inputs if isinstance(each, torch.SymInt))
    if text.symbols and shapes is None:
        raise Unnameable("a size of its tensors is not among its inputs")
    own = list(text.symbols)
    guards = sorted(compat.SizeGuards(fake_inputs).known(), key=str)
    texts = sorted(text.expression(guard) for guard in guards)
    rows = []
    for symbol, name in text.symbols.items():
        assert shapes is not None
        least, most = shapes.bounds(symbol)
        rows.append(f"{least} <= {name} <= {most}" + ("" if symbol in own else " elsewhere"))
    return rows + texts


log = logging.getLogger(__name__)

# Folders in a store's folder that belong to those who compile, such as Inductor's files.
WORK = "inductor-"

# magic and format version | sha256 of all else | length of the header | header | payload
MAGIC = b"cgcompile cache 2\n"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8
LARGEST = 2**30  # bytes of an entry

OFF = "off"


def cache_folder(config: CompilationConfig) -> Path | None:
    """Return where a configuration keeps what it compiles; None if it keeps nothing.

    A home that cannot be determined (no ``HOME``, no entry in passwd) means no cache.
    """
    if config.cache_dir == OFF:
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


class Refused(Exception):
    """Why a folder or file is not used; never seen by a caller of cgcompile."""


def require_trusted(status: os.stat_result) -> None:
    """Refuse what others own or may write. See Note [Trust in a folder].

    Raises:
        Refused: names the owner or the mode, and the command that mends it.
    """
    if status.st_uid not in (os.geteuid(), 0):
        raise Refused(
            f"it is owned by user {status.st_uid}; expected user {os.geteuid()} or root: "
            "use a folder of your own"
        )
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if shared and not stat.S_ISLNK(status.st_mode):  # the mode of a link means nothing
        mode = stat.S_IMODE(status.st_mode)
        raise Refused(f"group or others may write to it (mode {mode:04o}): chmod go-w")


def key_of(facts: Mapping[str, str]) -> str:
    """The key that these facts make: equal for equal facts, in any order and any process."""
    text = json.dumps(dict(facts), sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Entry:
    """What one file says.

    Attributes:
        kind: what it is.
        key: what it is found by.
        facts: every part of the key, by name.
        notes: what else is known: where it is from, how long it took, what it needs.
        created: when it was written, in seconds since the epoch.
        size: bytes on disk.
        payload: what was kept.
    """

    kind: str
    key: str
    facts: Mapping[str, str]
    notes: Mapping[str, str]
    created: float
    size: int
    payload: bytes = field(repr=False)


class Store:
    """A folder of entries, which many processes may use at once.

    Args:
        folder: it is made when something is put; files in it that are not entries are left alone.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._told: set[str] = set()

    def get(self, kind: str, key: str) -> bytes | None:
        """The payload kept under a key; None if there is none, or none that is whole."""
        found = self.entry(kind, key)
        return None if found is None else found.payload

    def entry(self, kind: str, key: str) -> Entry | None:
        """All that is kept under a key; None if there is none, or none that is whole."""
        path = self._path(kind, key)
        try:
            found = _parsed(self._read(path.name))
            if (found.kind, found.key) != (kind, key):
                raise ValueError("it is another entry")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell_once(f"cannot be read ({error.strerror})")
            return None
        except Refused as why:
            self._tell_once(f"is not used: {why}")
            return None
        except ValueError as error:
            self.discard(kind, key, str(error))
            return None
        return found

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the folder for what is read from it, if it can be trusted.

        Raises:
            OSError: there is none, or it cannot be read.
            Refused: others may write to it.
        """
        if self.folder.is_symlink():
            require_trusted(self.folder.lstat())
        try:
            number = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except ValueError as error:  # a null byte
            raise OSError(0, str(error)) from None
        try:
            require_trusted(os.fstat(number))
            yield number
        finally:
            os.close(number)

    def _read(self, name: str) -> bytes:
        """The bytes of a file of the folder; raises as :meth:`_opened`."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with self._opened() as folder:
            try:
                number = os.open(name, flags, dir_fd=folder)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO):
                    raise Refused(f"{name} is no regular file") from None
                raise
            try:
                status = os.fstat(number)
                _require_plain(name, status)
                with open(number, "rb", closefd=False) as file:
                    return file.read(status.st_size)
            finally:
                os.close(number)

    def put(
        self,
        kind: str,
        key: str,
        payload: bytes,
        facts: Mapping[str, str],
        notes: Mapping[str, str] | None = None,
    ) -> bool:
        """Keep a payload, in place of what was there.

        Args:
            kind: letters, digits and underscores.
            key: what it is found by, such as :func:`key_of` of the facts.
            payload: what to keep.
            facts: every part of the key, by name.
            notes: what else to remember.

        Returns:
            Whether it was written. If not, the log says why, once.
        """
        path = self._path(kind, key)
        data = _packed(kind, key, payload, facts, notes or {})
        if len(data) > LARGEST:
            self._tell_once(f"keeps no entry of more than {LARGEST} bytes: {len(data)}")
            return False
        try:
            self._make()
            with self._opened() as folder:
                _write(path.name, data, folder)
        except OSError as error:
            self._tell_once(f"cannot be written ({error.strerror}): nothing is kept")
            return False
        except Refused as why:
            self._tell_once(f"is not used: {why}")
            return False
        return True

    def _make(self) -> None:
        """Make the folder, and parents that are missing, for this user alone."""
        try:
            missing = [parent for parent in self.folder.parents if not parent.exists()]
            for folder in (*reversed(missing), self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except ValueError as error:  # a null byte
            raise OSError(0, str(error)) from None

    def work_folder(self, name: str) -> Path | None:
        """A folder in this one for the files of a compiler; None, and a warning, if unusable.

        Whether it can be written is tried: permissions say nothing of a full or read-only disk.
        """
        work = Store(self.folder / (WORK + name))
        try:
            self._make()
            with self._opened():
                work._make()
            with work._opened() as folder:
                trial = _TEMPORARY + secrets.token_hex(8)
                _write(trial, bytes(_TRIAL), folder)
                os.unlink(trial, dir_fd=folder)
        except OSError as error:
            self._tell_once(f"cannot be written ({error.strerror}): nothing is kept")
            return None
        except Refused as why:
            self._tell_once(f"is not used: {why}")
            return None
        return work.folder

    def discard(self, kind: str, key: str, why: str) -> None:
        """Remove an entry that turned out to be no good."""
        log.warning("%s: removed, it will be made again: %s", self._path(kind, key), why)
        _unlink(self._path(kind, key))

    def entries(self) -> Iterator[Entry]:
        """All entries that are whole, sorted by kind and key."""
        try:
            with self._opened() as folder:
                names = os.listdir(folder)
        except FileNotFoundError:
            return
        except (OSError, Refused) as error:
            self._tell_once(f"is not used: {error}")
            return
        for name in sorted(file for file in names if file.endswith(_SUFFIX)):
            try:
                yield _parsed(self._read(name))
            except FileNotFoundError:  # another process was faster
                continue
            except (OSError, ValueError, Refused) as error:
                log.warning("%s: not an entry: %s", self.folder / name, error)

    def remove(self, entry: Entry) -> bool:
        """Remove one entry.

        Returns:
            Whether it was there and could be removed.
        """
        return _unlink(self._path(entry.kind, entry.key))

    def remove_rubbish(self) -> int:
        """Remove files that processes left half written, and files that are not whole.

        Returns:
            How many.
        """
        whole = {self._path(each.kind, each.key) for each in self.entries()}
        found = {*self.folder.glob(_TEMPORARY + "*"), *self.folder.glob("*" + _SUFFIX)}
        return sum(_unlink(path) for path in sorted(found - whole))

    def remove_work(self) -> int:
        """Remove the folders of those who compile. What loads from them compiles C++ again.

        Returns:
            How many.
        """
        folders = sorted(self.folder.glob(WORK + "*"))
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        return sum(not folder.exists() for folder in folders)

    def _path(self, kind: str, key: str) -> Path:
        if not (re.fullmatch(r"\w+", kind) and re.fullmatch(r"\w+", key)):
            raise ValueError(f"kind {kind!r} and key {key!r} must be letters, digits, underscores")
        return self.folder / f"{kind}.{key}{_SUFFIX}"

    def _tell_once(self, what: str) -> None:
        if what not in self._told:
            self._told.add(what)
            text = f"cache folder {self.folder} {what}"  # a path may hold what no encoding has
            log.warning("%s", text.encode(errors="backslashreplace").decode())


_SUFFIX = ".cgc"
_TEMPORARY = ".half-"
_TRIAL = 4096  # bytes
_HEADER = {"kind": str, "key": str, "facts": dict, "notes": dict, "created": float}


def _require_plain(name: str, status: os.stat_result) -> None:
    """As :func:`require_trusted`, of a file, which must be a regular one of bounded size."""
    try:
        if not stat.S_ISREG(status.st_mode):
            raise Refused("it is no regular file")
        require_trusted(status)
        if status.st_size > LARGEST:
            raise Refused(f"it has {status.st_size} bytes, more than {LARGEST}")
    except Refused as why:
        raise Refused(f"{name}: {why}") from None


def _write(name: str, data: bytes, folder: int) -> None:
    """Write a file in one step, for other processes as well; a failure leaves what was there."""
    temporary = _TEMPORARY + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(number, "wb") as file:
            file.write(data)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _packed(
    kind: str, key: str, payload: bytes, facts: Mapping[str, str], notes: Mapping[str, str]
) -> bytes:
    described = {
        "kind": kind,
        "key": key,
        "facts": dict(facts),
        "notes": dict(notes),
        "created": time.time(),
    }
    header = json.dumps(described).encode()
    body = len(header).to_bytes(_LENGTH, "big") + header + payload
    return MAGIC + hashlib.sha256(MAGIC + body).digest() + body


def _parsed(data: bytes) -> Entry:
    """The entry in the bytes of a file.

    Raises:
        ValueError: says what is wrong with them.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is no file of this version")
    body = data[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(MAGIC + body).digest() != data[len(MAGIC) : len(MAGIC) + _DIGEST]:
        raise ValueError("its checksum is wrong")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    try:
        header = json.loads(body[_LENGTH:end])
    except (ValueError, RecursionError):  # whole, but written by another program
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


Runnable = Callable[..., Sequence[Any]]
R_ = TypeVar("R_")
PieceCompiler = Callable[[fx.GraphModule, Sequence[Any]], Runnable]

KIND = "piece"
_VARIANTS = 4  # results of one key that differ in their guards

COMPILED, LOADED, SHARED, FAILED = "compiled", "loaded", "shared", "failed"


@dataclass(frozen=True)
class PieceOrigin:
    """Where the code of one distinct piece came from.

    Attributes:
        piece: its name in the split.
        how: ``"compiled"`` now, ``"loaded"`` from disk, ``"shared"`` with an equal piece that this
            backend has, or ``"failed"``: it runs uncompiled.
        seconds: what that took.
        key: what it is kept under; None if it has no key.
        uncached: why it was not kept for other processes; None if it was, or is there.
    """

    piece: str
    how: str
    seconds: float
    key: str | None
    uncached: str | None

    def __str__(self) -> str:
        text = f"{self.piece}  {self.how:8}  {self.seconds:.3f} s"
        return f"{text}  not kept: {self.uncached}" if self.uncached else text


@dataclass(frozen=True)
class Compilation:
    """What compiling the pieces of one graph did; ``print`` it.

    Attributes:
        pieces: one row per compiled distinct piece, in order.
        seconds: all of it.
    """

    pieces: tuple[PieceOrigin, ...]
    seconds: float

    @property
    def compiled(self) -> int:
        """How many pieces were compiled."""
        return self._count(COMPILED)

    @property
    def loaded(self) -> int:
        """How many were loaded from disk."""
        return self._count(LOADED)

    @property
    def shared(self) -> int:
        """How many use what the backend had compiled or loaded for an equal piece."""
        return self._count(SHARED)

    @property
    def failed(self) -> int:
        """How many run uncompiled because their compiler raised (``on_compile_error``)."""
        return self._count(FAILED)

    @property
    def uncached(self) -> dict[str, str]:
        """Piece -> why it was not kept on disk."""
        return {each.piece: each.uncached for each in self.pieces if each.uncached is not None}

    def _count(self, how: str) -> int:
        return sum(each.how == how for each in self.pieces)

    def __str__(self) -> str:
        head = (
            f"{self.compiled} compiled, {self.loaded} loaded, {self.shared} shared, "
            f"{len(self.uncached)} not kept; {self.seconds:.3f} s"
        )
        return "\n".join([head, *map(str, self.pieces)])


class PieceCache:
    """The compiled pieces of one backend, and the folder where they are kept.

    Args:
        config: the settings of the backend.
    """

    def __init__(self, config: CompilationConfig) -> None:
        folder = cache_folder(config)
        self.store = None if folder is None else Store(folder)
        self._made: dict[str, tuple[weakref.ref[Any], str]] = {}

    def find(self, key: str, guards: compat.SizeGuards) -> Runnable | None:
        """What was compiled under a key and still lives, if its guards hold."""
        reference, text = self._made.get(key, (None, ""))
        found = None if reference is None else reference()
        return found if found is not None and guards.hold(text) else None

    def has(self, key: str) -> bool:
        """Whether what was compiled under a key still lives."""
        return key in self._made and self._made[key][0]() is not None

    def remember(self, key: str, made: Runnable, guards: str) -> None:
        """Let equal pieces use ``made`` while it lives."""
        self._made = {k: v for k, v in self._made.items() if v[0]() is not None}
        self._made[key] = (weakref.ref(made), guards)


class Compiling:
    """Compiles the pieces of one graph; made by :func:`compiling`.

    Args:
        cache: what the backend has.
        compiler: what compiles a piece.
        name: the compiler's name; what the user brought is neither kept nor shared, because nothing
            tells when it changes.
        patches: the user's Inductor settings.
        passes: the user's passes over pieces.
    """

    def __init__(
        self,
        cache: PieceCache,
        compiler: PieceCompiler,
        name: str | None,
        patches: Mapping[str, Any],
        passes: Sequence[Any],
    ) -> None:
        self._cache = cache
        self._compiler = compiler
        self._patches = patches
        self._why_not_saved = _why_not_saved(cache, name, patches)
        self._began = time.perf_counter()
        self._origins: list[PieceOrigin] = []
        self._facts: Mapping[str, str] = {}
        self._unnamed: str | None = None  # why no piece here has a key
        self.files = ExitStack()  # while it is open, Inductor's files are in the cache folder
        self._in_folder = False
        if name not in ("inductor", "aot"):
            self._unnamed = f"compiler {name!r} has nothing to keep"
            self._unnamed = self._unnamed if name else "the compiler is the user's"
            return
        try:
            self._facts = facts_of_process(name, patches, passes)
        except Unnameable as why:
            self._unnamed = str(why)

    def open_files(self) -> None:
        """Let Inductor keep its files in the cache folder until ``files`` is closed."""
        store = self._cache.store
        if store is None or self._why_not_saved is not None:
            return
        folder = store.work_folder(_inductor_folder())
        if folder is not None:
            self.files.enter_context(compat.inductor_files_in(folder))
            self._in_folder = True

    def make(
        self, module: fx.GraphModule, fake_inputs: Sequence[Any], piece: str, where: str
    ) -> Runnable:
        """The compiled form of one piece: shared, loaded or compiled.

        Args:
            module: the piece; it is not changed.
            fake_inputs: the values that it was traced with.
            piece: its name, for the record.
            where: the user's line, for the record.

        Returns:
            A callable that other pieces may have got as well.

        Raises:
            BaseException: what the compiler raises.
        """
        began = time.perf_counter()
        facts, unnamed = self._facts_of(module, fake_inputs)
        guards = compat.SizeGuards(fake_inputs)
        key, found, how = self._find(facts, guards)
        if found is not None:
            self._note(piece, how, began, key, None)
            return found
        if facts is None or self._why_not_saved is not None:
            made = self._attempt(lambda: self._compiler(module, fake_inputs))
            data = None
            why = self._why_not_saved or ""
        else:
            made, data, why = self._attempt(
                lambda: compat.compile_saveable(module, fake_inputs, self._patches)
            )
        if facts is not None and key is not None:
            why = self._keep(key, made, data, facts, guards, why, where, began)
        self._note(piece, COMPILED, began, key, unnamed or why or None)
        return made

    def _attempt(self, action: Callable[[], R_]) -> R_:
        """Run what writes a compiler's files; a second time elsewhere if the folder is full."""
        try:
            return action()
        except Exception as error:
            if not self._in_folder or not compat.is_disk_error(error):
                raise
            log.warning("the compiler cannot write to the cache folder, it uses torch's: %s", error)
        self._in_folder = False
        self.files.close()
        return action()

    def _facts_of(
        self, module: fx.GraphModule, fake_inputs: Sequence[Any]
    ) -> tuple[dict[str, str] | None, str | None]:
        if self._unnamed is not None:
            return None, self._unnamed
        try:
            own = facts_of_piece(module, fake_inputs)
        except Unnameable as why:
            return None, str(why)
        except Exception as error:  # a value of a kind unknown here; the piece itself may be fine
            return None, f"it cannot be described ({type(error).__name__}: {error})"
        assert own.keys().isdisjoint(self._facts), "a fact would hide another one"
        return {**own, **self._facts}, None

    def _find(
        self, facts: dict[str, str] | None, guards: compat.SizeGuards
    ) -> tuple[str | None, Runnable | None, str]:
        """(key, what there is, where from); the key is that of the first free variant."""
        if facts is None:
            return None, None, ""
        key = ""
        for variant in range(_VARIANTS):
            facts["variant"] = str(variant)
            key = key_of(facts)
            found = self._cache.find(key, guards)
            if found is not None:
                return key, found, SHARED
            found, exists = self._load(key, guards)
            if found is not None:
                return key, found, LOADED
            if not exists and not self._cache.has(key):
                break
        return key, None, ""

    def _load(self, key: str, guards: compat.SizeGuards) -> tuple[Runnable | None, bool]:
        """What is kept under a key if its guards hold, and whether there is anything whole."""
        store = self._cache.store
        if store is None or self._why_not_saved is not None:
            return None, False
        entry = store.entry(KIND, key)
        if entry is None:
            return None, False
        text = entry.notes.get("guards", "")
        try:
            if not guards.hold(text):
                return None, True
            made = self._attempt(lambda: compat.load_artifact(entry.payload, self._patches))
        except Exception as error:  # written by whatever made the file
            if compat.is_disk_error(error):
                return None, False
            store.discard(KIND, key, f"torch cannot load it ({type(error).__name__}: {error})")
            return None, False
        self._cache.remember(key, made, text)
        return made, True

    def _keep(
        self,
        key: str,
        made: Runnable,
        data: bytes | None,
        facts: Mapping[str, str],
        guards: compat.SizeGuards,
        why: str,
        where: str,
        began: float,
    ) -> str:
        """Keep what was compiled; returns why it is not on disk, or nothing."""
        try:
            text = guards.added()
        except Exception as error:
            return f"its guards have no text ({type(error).__name__}: {error})"
        if text is None:
            return "the compiler fixed a size that other pieces share"
        self._cache.remember(key, made, text)
        if data is None or self._cache.store is None:
            return why
        seconds = f"{time.perf_counter() - began:.3f}"
        notes = {"line": where, "guards": text, "seconds": seconds}
        written = self._cache.store.put(KIND, key, data, facts, notes)
        return "" if written else "the cache folder cannot be written"

    def _note(
        self, piece: str, how: str, began: float, key: str | None, uncached: str | None
    ) -> None:
        origin = PieceOrigin(piece, how, time.perf_counter() - began, key, uncached)
        log.debug("%s", origin)
        self._origins.append(origin)

    def failed(self, piece: str, why: str) -> None:
        """A compiler raised, and the piece runs uncompiled."""
        self._origins.append(PieceOrigin(piece, FAILED, 0.0, None, why))

    def result(self) -> Compilation:
        """What was done so far."""
        return Compilation(tuple(self._origins), time.perf_counter() - self._began)


def _why_not_saved(cache: PieceCache, name: str | None, patches: Mapping[str, Any]) -> str | None:
    if cache.store is None:
        return "caching is off"
    return "only Inductor saves" if name != "inductor" else compat.why_not_saved(patches)


@contextmanager
def compiling(
    cache: PieceCache, compiler: PieceCompiler, config: CompilationConfig
) -> Iterator[Compiling]:
    """A block that compiles the pieces of one graph.

    Args:
        cache: what the backend has.
        compiler: what compiles a piece.
        config: the settings of the backend.
    """
    name = config.compiler if isinstance(config.compiler, str) else None
    patches = dict(config.inductor_options)
    work = Compiling(cache, compiler, name, patches, config.piece_passes)
    with work.files:
        work.open_files()
        yield work


def _inductor_folder() -> str:
    """Inductor's files are apart for each torch and processor: homes are shared by machines."""
    facts = {**compat.versions(), "cpu": compat.processor()}
    return f"{__version__}-{key_of(facts)[:12]}"
