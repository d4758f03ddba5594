"""Other packages that capture piece by piece."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PACKAGE, _VARIABLE = "piecewise_cuda_graphs", "_current_piecewise_graph_ctx"


@contextmanager
def listen_to_no_graph(listener: Any) -> Iterator[None]:
    """Let ``no_graph`` of Meta's ``piecewise-cuda-graphs`` call ``listener`` at its breaks."""
    # The listener has ``_end_segment()``, ``_insert_eager(fn, args, kwargs)`` and
    # ``_begin_segment()``. No effect if that package is not imported. Tried on its version 0.1.0.
    variable = getattr(sys.modules.get(_PACKAGE), _VARIABLE, None)
    if not isinstance(variable, ContextVar):
        yield
        return
    token = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(token)
