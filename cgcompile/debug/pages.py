"""How results become pages of HTML.

The rule: a page needs no network, script or other file; templates escape all of it and write each
number exactly, as ``<data value="...">``.
"""

from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

import cgcompile.debug.drawing as drawing
from cgcompile.debug.output import Result, duration, human, written
from cgcompile.settings import checked


class Page(Result):
    """A result with an HTML page."""

    template: ClassVar[str]  # the name of its file in ``templates``

    @checked
    def to_html(self, path: str | PathLike[str]) -> Path:
        """Write the result as one self-contained page, and create missing folders.

        Returns:
            The path of the page.

        Raises:
            ConfigError: the path is that of a folder, is below a file, or is too long.
            OSError: the page cannot be written there for another reason.
        """
        return written(path, "to_html", lambda: render(self.template, self.to_dict()))


def render(template: str, result: dict[str, Any]) -> str:
    """Return the page of one kind of result."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    folder = files("cgcompile.debug") / "templates"
    environment = Environment(
        autoescape=True,
        loader=FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def drawn(name: str, *args: Any) -> Markup:
        return Markup(getattr(drawing, f"{name}_svg")(*args))

    environment.globals |= {"drawn": drawn, "hatch": Markup(drawing.HATCH)}
    environment.filters |= {
        "human": human,
        "duration": duration,
        "count": "{:,}".format,
        "counted": lambda number, noun: f"{number:,} {noun}{'s' * (number != 1)}",
        "share": "{:.1%}".format,
        "percent": "{:.3f}%".format,
    }
    return environment.get_template(f"{template}.html").render(found=result)
