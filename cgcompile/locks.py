"""Locks that a fork does not leave locked: :func:`new_lock`."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watched: list[bool] = []  # whether a fork calls _unlock


def new_lock(watch: bool = True) -> Any:
    """Return a new ``threading.RLock``; in a forked child no thread that is gone holds it.

    Args:
        watch: register what a fork calls, once a process; False where a module is imported.
    """
    lock = threading.RLock()
    if watch and not _watched:
        _watched.append(True)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_unlock)
    _locks.add(lock)
    return lock


def owns_lock(lock: Any) -> bool:
    """Whether this thread holds a lock of :func:`new_lock`."""
    return bool(lock._is_owned())


def _unlock() -> None:
    """In the child of a fork: only the thread that forked goes on."""
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()
