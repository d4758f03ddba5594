"""How results become text and JSON: one way for each. HTML is in ``pages``.

The rule: a result is a frozen dataclass of text, numbers and tuples or dicts of such. Its text is
ASCII.
"""

import errno
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from cgcompile.counts import text_table
from cgcompile.errors import ConfigError
from cgcompile.settings import checked, require, require_whole

WIDTH = 100  # columns of text


class Result:
    """A dataclass that prints, and that is JSON. Its ``repr`` is the first line of its text."""

    computed: ClassVar[tuple[str, ...]] = ()  # properties that are data beside the fields

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {str(self).partition(chr(10))[0]}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def to_dict(self) -> Any:
        """Return plain data: dicts by field name, lists, text, numbers, bools and None."""
        return plain(self)

    @checked
    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text."""
        if indent is not None:
            require_whole("indent", "to_json", indent, 0, 64)
        return json.dumps(self.to_dict(), indent=indent)


# What is wrong with a path itself; a disk that is full, say, is no fault of it.
_BAD_PATHS = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}


def written(path: str | PathLike[str], where: str, text: Callable[[], str]) -> Path:
    """Write a file, and create missing folders."""
    require("\0" not in str(path), "path", where, path, "a path without null bytes")
    target, content = Path(path), text()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        if error.errno not in _BAD_PATHS:
            raise
        expected = f"a file that can be written ({error.strerror})"
        raise ConfigError.bad_value(
            name="path", where=where, value=path, expected=expected
        ) from error
    return target


def plain(value: Any) -> Any:
    """Return a value as JSON types: enum members as text, inf and NaN as None.

    Fields that equality ignores are left out.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [*getattr(value, "computed", ()), *(f.name for f in fields(value) if f.compare)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {plain(name): plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    return value


# ---------------------------------------------------------------- text


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode()


def sentence(text: str) -> str:
    """Return a text with a capital letter in front and a full stop behind."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def table_lines(cells: Sequence[tuple[str, ...]], remarks: Sequence[Iterable[str]]) -> list[str]:
    """Return rows below a head, aligned, each followed by its remarks."""
    head, *rows = map(clipped, text_table(cells))
    lines = [head]
    for row, texts in zip(rows, remarks, strict=True):
        lines += [row, *(line for text in texts for line in wrapped("", text, 10))]
    return lines


def clipped(text: str) -> str:
    """Return the part of a line of text that fits into a row, in ASCII."""
    text = _ascii(text)
    return text if len(text) <= WIDTH else text[: WIDTH - 3] + "..."


def wrapped(label: str, text: str, columns: int = 6) -> list[str]:
    """Return a label and text over as many rows as it needs."""
    first, indent = f"{label:<{columns}}", " " * columns
    rows = textwrap.wrap(_ascii(text), WIDTH, initial_indent=first, subsequent_indent=indent)
    return rows or [first]


def human(number: int) -> str:
    """Return a number of bytes with a unit, such as ``1.5 GiB``."""
    for exponent, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if number >= 1 << exponent:
            return f"{number / (1 << exponent):.1f} {unit}"
    return f"{number} B"


def duration(seconds: float) -> str:
    """Return a time with a unit, such as ``1.2 ms``."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds * 1e6:.1f} us"
