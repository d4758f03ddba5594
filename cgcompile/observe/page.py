"""One HTML page from plain data, with nothing around it: no network, no scripts, no other files.

``templates/`` has the pages and ``style.css``. The rule: a template gets what ``to_dict()`` of a
value gave, escapes all of it, and writes each number as ``<data value="...">`` with the exact one.
"""

import json
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from cgcompile.observe.charts import distinct, strip, times
from cgcompile.observe.text import human
from cgcompile.settings import checked, require, require_whole


class Shown:
    """A value that is plain data, and so JSON and a page.

    Attributes:
        template: of its page: ``overview``, ``explanation``, ...
    """

    template: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data: dicts by field name, lists, text, numbers, bools and None."""
        raise NotImplementedError

    @checked
    def to_json(self, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        if indent is not None:
            require_whole("indent", "to_json", indent, 0, 64)
        return json.dumps(self.to_dict(), indent=indent)

    @checked
    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write it as one page that needs nothing else.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written there.
        """
        return write_page(self.template, self.to_dict(), path)


def render(template: str, found: dict[str, Any]) -> str:
    """The page of one kind of value.

    Args:
        template: its name without the ending: ``overview``, ``explanation``, ...
        found: plain data.
    """
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    folder = files("cgcompile.observe") / "templates"
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
        "strip": strip,
        "times": times,
        "distinct": distinct,
        "percent": "{:.3f}%".format,
    }
    return environment.get_template(f"{template}.html").render(found=found)


def duration(seconds: float) -> str:
    """``1.2 ms``: a time for people, three digits or fewer before the unit."""
    if not seconds:
        return "0 s"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= size or unit == "us":
            found = seconds / size
            digits = 0 if abs(found) >= 100 else 1 if abs(found) >= 10 else 2
            return f"{found:.{digits}f} {unit}"
    raise AssertionError("the last unit takes all")


def write_page(template: str, found: dict[str, Any], path: str | PathLike[str]) -> Path:
    """Render a page into a file; the folders above it are made.

    Raises:
        OSError: it cannot be written there.
    """
    require("\0" not in str(path), "path", "to_html", path, "a path without null bytes")
    target = Path(path)
    text = render(template, found)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target
