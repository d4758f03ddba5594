"""Lines of users' code: the innermost frame outside of torch, Python's library and cgcompile."""

import inspect
import linecache
import os
import sysconfig
import traceback
from importlib.util import find_spec
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_passes = find_spec("cgcompile.passes")  # another folder in a clone; not imported here
_OURS = {os.path.dirname(__file__), *(_passes.submodule_search_locations or () if _passes else ())}
_SKIPPED = tuple(path + os.sep for path in (os.path.dirname(inspect.getfile(torch)), *_OURS))
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = ("site-packages", "dist-packages")


class Line(NamedTuple):
    """A line of the user's code; ``code`` is its text in ASCII."""

    file: str
    line: int
    function: str
    code: str

    @property
    def where(self) -> str:
        """Text such as ``model.py:41 in forward``."""
        return f"{os.path.basename(self.file)}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.where}: {self.code}" if self.code else self.where


def is_users_file(file: str) -> bool:
    """Return whether the user wrote this file: a model, or a library above torch."""
    if file.startswith(("<", *_SKIPPED)):
        return False
    below = file.removeprefix(_STDLIB)
    return below == file or any(name in below for name in _PACKAGES)


def line_at(code: CodeType, number: int) -> Line:
    """Return a line of a code object."""
    text = ascii_text(linecache.getline(code.co_filename, number).strip())
    return Line(code.co_filename, number, code.co_name, text)


def running_line(frame: FrameType | None, until: CodeType) -> Line | None:
    """Return the user's line that a frame runs or is called from, below ``until``; or None."""
    while frame is not None and frame.f_code is not until:
        if is_users_file(frame.f_code.co_filename):
            return line_at(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def came_by_us(error: BaseException) -> bool:
    """Return whether the traceback of an error passes through cgcompile's own code."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename.startswith(_SKIPPED[1:]) for frame, _ in frames)


def raised_at(error: BaseException, until: CodeType | None = None) -> Line | None:
    """Return the innermost user's line of a traceback, below the last frame of ``until``."""
    innermost = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if frame.f_code is until:
            innermost = None
        elif is_users_file(frame.f_code.co_filename):
            innermost = line_at(frame.f_code, number)
    return innermost


def ascii_text(text: str) -> str:
    """Return a text with other characters than ASCII escaped."""
    return text.encode("ascii", "backslashreplace").decode()
