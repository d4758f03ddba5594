"""Which line stores an attribute, read from the bytecode of what ran: :func:`store_line`."""

import dis
import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

import torch

from cgcompile.graphs.state import Place
from cgcompile.passes.lines import Line, is_users_file, line_at

_WRITES = ("STORE_ATTR", "DELETE_ATTR")
_READS = ("LOAD_ATTR", "LOAD_METHOD")


def store_line(place: Place, ran: Iterable[CodeType]) -> Line | None:
    """The line that puts a new value into a place; None if it is not found.

    Args:
        place: an attribute, or an item of a container that is one.
        ran: the code that has run; if unknown, the methods of the owner are read.
    """
    known = list(ran)
    own = [code for code in _methods(type(place.owner)) if code in known or not known]
    others = sorted((c for c in known if is_users_file(c.co_filename)), key=_position)
    for lines in (_writes, _moves, _reads):  # an item is put into a container that is read
        for code in (*own, *others):
            for number in lines(code, place.attribute):
                return line_at(code, number)
    return None


def forward_line(model: Any) -> Line | None:
    """The line in which the function that a call of a model runs begins, if it is the user's."""
    function = model.forward if isinstance(model, torch.nn.Module) else model
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not is_users_file(code.co_filename):
        return None
    return line_at(code, code.co_firstlineno)


def _position(code: CodeType) -> tuple[str, int]:
    return code.co_filename, code.co_firstlineno


def _methods(kind: type) -> Iterator[CodeType]:
    """The code of the methods of a class and its bases, constructors left out."""
    for each in kind.__mro__:
        for name, member in vars(each).items():
            function = member.fget if isinstance(member, property) else member
            code = getattr(inspect.unwrap(function), "__code__", None) if function else None
            if (
                isinstance(code, CodeType)
                and name != "__init__"
                and is_users_file(code.co_filename)
            ):
                yield code


def _writes(code: CodeType, attribute: str) -> Iterator[int]:
    yield from _lines(code, attribute, _WRITES)


def _reads(code: CodeType, attribute: str) -> Iterator[int]:
    yield from _lines(code, attribute, _READS)


def _moves(code: CodeType, attribute: str) -> Iterator[int]:
    """The lines that give other memory to the tensor that an attribute holds."""
    movers = {*_lines(code, "data", _WRITES), *_lines(code, "set_", _READS)}
    yield from (number for number in _reads(code, attribute) if number in movers)


def _lines(code: CodeType, attribute: str, names: tuple[str, ...]) -> Iterator[int]:
    """The lines of a code object that do one of these things with an attribute."""
    line = code.co_firstlineno
    for start in dis.get_instructions(code):
        begins = start.starts_line
        if start.positions is not None and start.positions.lineno is not None:
            line = start.positions.lineno
        elif isinstance(begins, int) and not isinstance(begins, bool):
            line = begins
        if start.opname in names and start.argval == attribute:
            yield line
