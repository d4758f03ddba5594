"""What was compiled, kept on disk: :class:`Store`, a folder of checked files.

An entry has a kind (``"piece"``), a key, and *facts*: every part of the key by name, in plain text,
so that two entries can be compared (``cgcompile cache why``). The rule: a store never fails its
caller. What cannot be read is a miss, what cannot be written is not kept, and a damaged file is
removed; the log says so.

Note [Trust in a folder]. A payload is code: its readers unpickle or execute it. So a folder or file
is used only if it is owned by this user or by root, and writable by its owner alone; a file must
also be a regular one. Anything else is refused with one warning, and is a miss. The checksum finds
damage, not forgery: processes of this user, and root, can write entries that run as this user.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cgcompile.config import CompilationConfig

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
