"""What the tests of faults share: marked lines, a step of one batch, the one thing that is said."""

import inspect
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from doctor_support import marked_line

from cgcompile import BatchDescriptor, CUDAGraphMode, set_forward_context
from cgcompile.debug import Diagnosis, compare, findings

ROWS = 6
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


def at(code: Any, marker: str) -> str:
    """``test_faults.py:41 in``, of the marked line of a class or function."""
    file = inspect.getsourcefile(code)
    assert file is not None
    return f"{Path(file).name}:{marked_line(code, marker)} in "


def step(mode: CUDAGraphMode = FULL, metadata: Any = None) -> AbstractContextManager[Any]:
    return set_forward_context(
        metadata, cudagraph_runtime_mode=mode, batch_descriptor=BatchDescriptor(ROWS)
    )


def only(verified: Any) -> compare.Difference:
    """The one difference, of something that was replayed."""
    assert (verified.ok, verified.replays >= 1) == (False, True), verified
    (difference,) = verified.differences
    return difference


def only_finding(error: BaseException) -> findings.Finding:
    """What an error says."""
    (finding,) = Diagnosis.of_error(error).findings
    return finding
