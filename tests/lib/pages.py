"""Sections and code blocks of Markdown, and the lines of a printed split without what differs by file."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def blocks(text: str) -> list[str]:
    """Return the Python blocks, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(text: str, title: str) -> str:
    """Return the section of the second level with this title."""
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def split_lines(lines: list[str]) -> list[str]:
    """Cut lines at ``...``, and leave out the names of files and the numbers of lines."""
    return [re.sub(r"\w+\.py:\d+", "", line).split("...")[0].rstrip(" ,") for line in lines]
