"""Compile a piece, unless an equal one exists: in this backend, or on disk.

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

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from cgcompile import compat
from cgcompile.config import CompilationConfig
from cgcompile.passes.printer import Unnameable
from cgcompile.piecewise.keys import facts_of_piece, facts_of_process
from cgcompile.piecewise.store import Store, cache_folder, key_of
from cgcompile.version import __version__

log = logging.getLogger(__name__)

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
