"""Locks that are free in a forked child, whichever thread held them: :func:`new_lock`."""

import os
import threading
import weakref
from typing import Any

_locks: "weakref.WeakSet[Any]" = weakref.WeakSet()
_watched: list[bool] = []  # not empty once the fork hook is registered


def new_lock(watch: bool = True) -> Any:
    """Return a new ``threading.RLock`` that is free in a forked child."""
    # ``watch`` registers the fork hook, once per process; False for locks created at import.
    lock = threading.RLock()
    if watch and not _watched:
        _watched.append(True)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_unlock)
    _locks.add(lock)
    return lock


def owns_lock(lock: Any) -> bool:
    """Return whether this thread holds a lock of :func:`new_lock`."""
    return bool(lock._is_owned())


def _unlock() -> None:
    """Free all locks except those of the forking thread, the only thread of a child."""
    for lock in list(_locks):
        if not lock._is_owned():
            lock._at_fork_reinit()
