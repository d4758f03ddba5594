"""What was compiled, kept on disk: :class:`Store`, a folder of checked files.

An entry has a kind (``"piece"``, ``"trace"``, ...), a key, and *facts*: every part of the key by
name, in plain text, so that two entries can be compared (``cgcompile cache why``). The rule: a
store never fails its caller. What cannot be read is a miss, what cannot be written is not kept, and
a damaged file is removed; the log says so.

A payload may be unpickled by the one who gets it, so point a store at a folder that you trust.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cgcompile.config import CompilationConfig

log = logging.getLogger(__name__)

# Folders in a store's folder that belong to those who compile, such as Inductor's files.
WORK = "inductor-"

# magic and format version | sha256 of all that follows | length of the header | header | payload
MAGIC = b"cgcompile cache 1\n"
_DIGEST = hashlib.sha256().digest_size
_LENGTH = 8

OFF = "off"


def cache_folder(config: CompilationConfig) -> Path | None:
    """Where a configuration keeps what it compiles; None if it keeps nothing."""
    if config.cache_dir == OFF:
        return None
    if config.cache_dir is not None:
        return Path(config.cache_dir).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    return Path(home).expanduser().absolute() / "cgcompile"


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
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._tell_once(f"cannot be read ({error.strerror})")
            return None
        try:
            found = _parsed(data)
            if (found.kind, found.key) != (kind, key):
                raise ValueError("it is another entry")
        except ValueError as error:
            self.discard(kind, key, str(error))
            return None
        return found

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
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # In the same folder, so that the replacement is one step, for other processes as well.
            number, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
            with os.fdopen(number, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                _unlink(Path(temporary))
            self._tell_once(f"cannot be written ({error.strerror}): nothing is kept")
            return False
        return True

    def discard(self, kind: str, key: str, why: str) -> None:
        """Remove an entry that turned out to be no good."""
        log.warning("%s: removed, it will be made again: %s", self._path(kind, key), why)
        _unlink(self._path(kind, key))

    def entries(self) -> Iterator[Entry]:
        """All entries that are whole, sorted by kind and key."""
        for path in sorted(self.folder.glob("*" + _SUFFIX)):
            try:
                yield _parsed(path.read_bytes())
            except FileNotFoundError:  # another process was faster
                continue
            except (OSError, ValueError) as error:
                log.warning("%s: not an entry: %s", path, error)

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
            log.warning("cache folder %s %s", self.folder, what)


_SUFFIX = ".cgc"
_TEMPORARY = ".half-"


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
    return MAGIC + hashlib.sha256(body).digest() + body


def _parsed(data: bytes) -> Entry:
    """The entry in the bytes of a file.

    Raises:
        ValueError: says what is wrong with them.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it is no file of this version")
    body = data[len(MAGIC) + _DIGEST :]
    if hashlib.sha256(body).digest() != data[len(MAGIC) : len(MAGIC) + _DIGEST]:
        raise ValueError("its checksum is wrong")
    end = _LENGTH + int.from_bytes(body[:_LENGTH], "big")
    try:
        return Entry(size=len(data), payload=body[end:], **json.loads(body[_LENGTH:end]))
    except TypeError:  # whole, but written by another program
        raise ValueError("its header is not one of ours") from None


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
