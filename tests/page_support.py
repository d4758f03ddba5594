"""Reading a page: tables as rows of text and of exact numbers, headings, what is embedded."""

from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """A parsed page.

    Attributes:
        headings: (level, text) in order.
        tables: by ``data-table``: rows of cells; a cell is (text, [exact numbers as text]).
        captions: of the tables, by the same name; a name that occurs again has a number behind it.
        numbers: all exact numbers of the page, as text.
        drawings: for each drawing with a role, its label and its titles.
        tags: all tags with their attributes.
        text: all text outside of style.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[tuple[int, str]] = []
        self.tables: dict[str, list[list[tuple[str, list[str]]]]] = {}
        self.captions: dict[str, str] = {}
        self.numbers: list[str] = []
        self.drawings: list[tuple[str, list[str]]] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""
        self._open: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self._open == [], "tags that are never closed"

    VOID = ("meta", "link", "br", "img")

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            name = self._table = found["data-table"]
            count = sum(each.split("#")[0] == name for each in self.tables)
            self._table = f"{name}#{count}" if count else name
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append(("", []))
        elif tag == "data":
            self.numbers.append(found["value"])
            if self._table and "tr" in self._open:
                self.tables[self._table][-1][-1][1].append(found["value"])
        elif tag == "svg" and found.get("role") == "img":
            self.drawings.append((found["aria-label"], []))
        elif tag[0] == "h" and tag[1:].isdigit():
            self.headings.append((int(tag[1:]), ""))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag == "table":
            self._table = ""

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if self._open and self._open[-1] == "title" and "svg" in self._open:
            self.drawings[-1][1].append(data)
        if "caption" in self._open:
            self.captions[self._table] = self.captions.get(self._table, "") + data
        if self._table and self.tables[self._table] and self.tables[self._table][-1]:
            text, numbers = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = (text + data, numbers)
        if any(each[0] == "h" and each[1:].isdigit() for each in self._open):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    def rows(self, name: str) -> list[dict[str, tuple[str, list[str]]]]:
        """The rows of a table by the titles of their columns; white space as a browser shows it."""
        cells = [[(" ".join(text.split()), n) for text, n in row] for row in self.tables[name]]
        head, *rows = cells
        return [dict(zip([text for text, _ in head], row, strict=True)) for row in rows]
