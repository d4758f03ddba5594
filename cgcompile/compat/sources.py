"""The Python source that FX keeps of each graph module. See ``cgcompile/compat/__init__.py``."""

import linecache
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.graph_module import _loader


@contextmanager
def new_sources() -> Iterator[set[str]]:
    """Collect the names of sources that FX generates meanwhile; complete at the end."""
    new: set[str] = set()
    before = set(_loader.eval_cache)
    yield new
    new |= set(_loader.eval_cache) - before


def drop_sources_with(owner: Any, names: Iterable[str]) -> None:
    """Drop sources when ``owner`` is freed. FX and ``linecache`` keep them for ever."""
    weakref.finalize(owner, _drop, tuple(names)).atexit = False


def _drop(names: tuple[str, ...]) -> None:
    for name in names:
        _loader.eval_cache.pop(name, None)
        linecache.cache.pop(name, None)
