"""Code that the user takes out of the graphs: :func:`eager_region`.

Dynamo marks the nodes that it traces inside. Where it breaks the graph inside, it gives up the
whole frame, and the region is entered in Python: then the calls inside have to run eager.
"""

from contextlib import AbstractContextManager
from typing import Any

from torch.compiler import is_dynamo_compiling

from cgcompile import compat
from cgcompile.boundaries import REGION_MARK
from cgcompile.errors import CaptureError
from cgcompile.forward_context import EagerRegion
from cgcompile.graphs.capture import captured_here
from cgcompile.reasons import Reason, Why

IN_REGION = Why(Reason.EAGER_REGION, "called inside of cgcompile.eager_region()")


def eager_region() -> AbstractContextManager[Any]:
    """Context manager for model code: run what is inside eager, as one boundary.

    In traced code it marks the nodes of the graph. Elsewhere compiled models, wrappers and managers
    that are called inside run without graphs, uncompiled where they can, in this thread or task.

    Raises:
        CaptureError: cgcompile captures this code itself, not a trace of it.
    """
    if is_dynamo_compiling():
        return compat.annotate(REGION_MARK)
    if captured_here():
        raise CaptureError.region_inside()
    return EagerRegion()
