"""Sphinx configuration: ``python -m sphinx -W -b html docs docs/_build``; needs no network."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

project = "cgcompile"
author = "the cgcompile authors"
copyright = "2026, the cgcompile authors"
version = release = (ROOT / "cgcompile" / "version.py").read_text().split('"')[-2]

extensions = [
    "myst_parser",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
templates_path: list[str] = []
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
}
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "attrs_inline", "deflist"]
myst_heading_anchors = 3
