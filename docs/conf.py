"""Sphinx configuration: ``python -m sphinx -W -b html docs docs/build``; needs no network."""

import importlib
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "cgcompile"
author = "the cgcompile authors"
copyright = "2026, the cgcompile authors"
version = release = importlib.import_module("cgcompile").__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["build"]
templates_path: list[str] = []
html_theme = "pydata_sphinx_theme"
html_title = "cgcompile"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "header_links_before_dropdown": 7,
}
html_show_sourcelink = False
html_sidebars: dict[str, list[str]] = {
    page: [] for page in ("index", "start", "coming_from", "performance", "inside")
}

myst_enable_extensions = ["colon_fence", "attrs_inline", "deflist"]
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
napoleon_use_ivar = True
napoleon_numpy_docstring = False


class FromCode(SphinxDirective):
    """``.. from-code:: settings``: a page of ``tables.py``, parsed as reStructuredText."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        pages = importlib.import_module("tables").PAGES  # the folder is on the path by now
        pages = {**pages, "figures": importlib.import_module("pictures").table}
        text = "\n".join(pages[self.arguments[0]]())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class Picture(SphinxDirective):
    """``picture``: one of the drawings of ``pictures.py``, in the colors of the page."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        pictures, name = importlib.import_module("pictures"), self.arguments[0]
        first = name in pictures.MEASURED and not self.env.temp_data.get("styled")
        self.env.temp_data["styled"] = first or self.env.temp_data.get("styled")
        drawing = (pictures.head() if first else "") + pictures.inline(name)
        return [nodes.raw("", f'<div class="picture">{drawing}</div>', format="html")]


def skip_tuple_fields(app: Sphinx, what: str, name: str, obj: Any, *_: Any) -> bool | None:
    """Leave out the fields of named tuples, which their class describes."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def keep_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Keep napoleon from reading the text before a colon as the type of an attribute."""
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]


def setup(app: Sphinx) -> None:
    app.add_directive("from-code", FromCode)
    app.add_directive("picture", Picture)
    app.add_object_type("reason", "reason", objname="reason", indextemplate="pair: %s; reason")
    app.connect("autodoc-skip-member", skip_tuple_fields)
    app.connect("autodoc-process-docstring", keep_colons, priority=400)
