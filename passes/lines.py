"""Which line of the user's code is running, or raised: :class:`Line`.

The innermost frame that is neither torch's, nor Python's own library, nor ours.
"""

import inspect
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from cgcompile import compat

_OURS = tuple({os.path.dirname(os.path.dirname(compat.__file__)), os.path.dirname(__file__)})
_SKIPPED = tuple(each + os.sep for each in (os.path.dirname(inspect.getfile(torch)), *_OURS))
_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")


class Line(NamedTuple):
    """One line of code.

    Attributes:
        file: the path.
        line: counted from 1.
        function: the name of the function that it is in.
        code: its text, in ASCII.
    """

    file: str
    line: int
    function: str
    code: str

    @property
    def where(self) -> str:
        """Such as ``model.py:41 in forward``."""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def is_users_file(file: str) -> bool:
    """Whether code of this file is the user's: of a model or of a library above torch."""
    if file.startswith(("<", *_SKIPPED)):
        return False
    below = file.removeprefix(_PYTHONS)
    return below == file or any(name in below for name in _PACKAGES)


def line_at(code: CodeType, number: int) -> Line:
    """The line of a code object."""
    text = linecache.getline(code.co_filename, number).strip()
    text = text.encode("ascii", "backslashreplace").decode()
    return Line(code.co_filename, number, code.co_name, text)


def running_line(frame: FrameType | None, until: CodeType) -> Line | None:
    """The user's line that a frame is in, or was called from; None if it is above ``until``."""
    while frame is not None and frame.f_code is not until:
        if is_users_file(frame.f_code.co_filename):
            return line_at(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def came_by_us(error: BaseException) -> bool:
    """Whether an error was raised by code of ours, or by what that called."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename.startswith(_SKIPPED[1:]) for frame, _ in frames)


def raised_at(error: BaseException, until: CodeType | None = None) -> Line | None:
    """The innermost user's line of a traceback.

    Args:
        error: with its traceback.
        until: what its callers did is left out; left out: the whole traceback.
    """
    found = None
    for code, number in _traced(error):
        if code is until:
            found = None
        elif is_users_file(code.co_filename):
            found = line_at(code, number)
    return found


def _traced(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno
        trace = trace.tb_next
