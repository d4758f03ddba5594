"""How results become text, JSON and HTML: one way for each.

The rule: a result is a frozen dataclass of text, numbers and tuples or dicts of such. Its text is
ASCII. Its page needs no network, script or other file; templates escape all of it and write each
number exactly, as ``<data value="...">``.
"""

import json
import math
import textwrap
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from cgcompile.settings import checked, require, require_whole

WIDTH = 100  # columns of text


class Result:
    """A dataclass that prints, and that is JSON."""

    computed: ClassVar[tuple[str, ...]] = ()  # properties that are data beside the fields

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: dicts by field name, lists, text, numbers, bools and None."""
        data: dict[str, Any] = plain(self)
        return data

    @checked
    def to_json(self, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text."""
        if indent is not None:
            require_whole("indent", "to_json", indent, 0, 64)
        return json.dumps(self.to_dict(), indent=indent)


class Page(Result):
    """A result with an HTML page."""

    template: ClassVar[str]  # the name of its file in ``templates``

    @checked
    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the result as one page that needs nothing else, and create missing folders.

        Returns:
            The path of the page.

        Raises:
            OSError: the page cannot be written there.
        """
        require("\0" not in str(path), "path", "to_html", path, "a path without null bytes")
        target, text = Path(path), render(self.template, self.to_dict())
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
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


# ---------------------------------------------------------------- pages


def render(template: str, result: dict[str, Any]) -> str:
    """Return the page of one kind of result."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("cgcompile.debug") / "templates"
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "human": human,
        "duration": duration,
        "count": "{:,}".format,
        "share": "{:.1%}".format,
        "percent": "{:.3f}%".format,
    }
    return environment.get_template(f"{template}.html").render(found=result)
