"""Sphinx configuration: ``python -m sphinx -W -b html docs docs/_build``; needs no network."""

import importlib.metadata
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

project = "cgcompile"
author = "the cgcompile authors"
copyright = "2026, the cgcompile authors"  # noqa: A001  (Sphinx's name)
version = release = (ROOT / "cgcompile" / "version.py").read_text().split('"')[-2]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "tables",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
templates_path: list[str] = []
html_theme = "pydata_sphinx_theme"
html_static_path = ["_static"]
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
}
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "attrs_inline", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
nitpicky = False
