"""Other packages that capture piece by piece. See ``cgcompile/compat/__init__.py``."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_PACKAGE, _VARIABLE = "piecewise_cuda_graphs", "_current_piecewise_graph_ctx"


@contextmanager
def listen_to_no_graph(listener: Any) -> Iterator[None]:
    """Within it, ``no_graph`` of Meta's ``piecewise-cuda-graphs`` tells ``listener`` of its breaks.

    Nothing happens where that package was not imported by someone. Tried on its version 0.1.0.
    """
    variable = getattr(sys.modules.get(_PACKAGE), _VARIABLE, None)
    if not isinstance(variable, ContextVar):
        yield
        return
    token = variable.set(listener)
    try:
        yield
    finally:
        variable.reset(token)
