"""Which thread runs steps whose results are views: :class:`StepThread`.

Graphs of one pool write their results into the same memory at each replay. A step of a second
thread overwrites what the first one still reads, and no lock of this library can see that reading.
The rule: one thread, until the program declares that it locks steps and the reading of results.
"""

import threading
import weakref
from threading import get_ident

from cgcompile.errors import DispatchError
from cgcompile.locks import new_lock

# In place of an identifier:
ANY = 0  # any thread may run steps; false, for generated code
FREE = -1  # no thread has run one
ENDED = -2  # the thread that has run one is at its end


class StepThread:
    """The one thread whose steps return views of a memory; a step of another one is an error."""

    __slots__ = ("__weakref__", "_life", "_lock", "_name", "ident")

    def __init__(self) -> None:
        self.ident = FREE  # of the thread; or ANY, FREE, ENDED
        self._name = ""
        self._life: threading.local | None = None
        self._lock = new_lock()

    def admit(self, what: str, claim: bool = True) -> None:
        """Raise for a step of another thread; with ``claim`` this thread becomes the only one.

        Callers compare :attr:`ident` with the identifier of their thread first, which is faster.

        Raises:
            DispatchError: another thread has run steps.
        """
        with self._lock:
            if self.ident in (ANY, get_ident()):
                return
            if self.ident != FREE:
                here, ended = threading.current_thread().name, self.ident == ENDED
                raise DispatchError.other_thread(
                    what=what, here=here, before=self._name, ended=ended
                )
            if claim:
                self.ident, self._name = get_ident(), threading.current_thread().name
                self._life = threading.local()
                self._life.value = _Life(self)

    def is_other(self) -> bool:
        """Return whether results of steps of another thread may be in use."""
        return self.ident not in (ANY, FREE, get_ident())

    def allow(self) -> None:
        """Admit all threads from now on."""
        with self._lock:
            self.ident, self._life = ANY, None

    def release(self) -> None:
        """Let any thread be the only one: the memory of earlier results is released."""
        with self._lock:
            if self.ident != ANY:
                self.ident, self._life = FREE, None


class _Life:
    """A local of a thread: its end marks that of the thread, whose identifier is used again."""

    __slots__ = ("_ident", "_owner")

    def __init__(self, owner: StepThread) -> None:
        self._ident, self._owner = owner.ident, weakref.ref(owner)

    def __del__(self) -> None:
        owner = self._owner()
        if owner is not None and owner.ident == self._ident:
            owner.ident = ENDED
