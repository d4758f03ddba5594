"""What commands of the command line look at, and how their pages are read."""

import functools
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.cli import main

HERE = Path(__file__)


def runner(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """(status, what was printed, what was said of errors) of a command on a function here."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(command: str, function: str, *words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([command, f"{HERE}:{function}", *words])
        printed = capsys.readouterr()
        return status, printed.out.rstrip("\n"), printed.err.replace(str(HERE), "FILE").rstrip("\n")

    return run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v)) * scale


class Reads(Net):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()


def pair() -> Any:
    torch.manual_seed(0)
    return Net().eval(), torch.randn(2, 4, 8)


def triple() -> Any:
    model, x = pair()
    return model, (x,), {"scale": 2.0}


def named() -> Any:
    model, x = pair()
    return {"model": model, "args": (x,), "kwargs": {"scale": 3.0}}


def reads() -> Any:
    return Reads().eval(), (torch.randn(2, 4, 8),)


def ran() -> Any:
    """A compiled model that has run, alone."""
    model, x = pair()
    compiled = cgcompile.compile(model, compiler="eager", capture_device="host")
    with torch.inference_mode():
        for _ in range(3):
            compiled(x)
    return compiled


def wrong() -> Any:
    """What is compiled is not what is called: graphs hold another model."""
    model, x = pair()

    def miscompile(gm: Any, inputs: Any) -> Any:
        return lambda *given: tuple(each * 2 for each in gm(*given))

    return cgcompile.compile(model, compiler=miscompile, capture_device="host"), (x,)


def sized(size: int, *, deep: bool = False) -> Any:
    return Net(), torch.randn(2, size, 8)


def given(function: Any) -> Any:
    @functools.wraps(function)
    def inner() -> Any:
        return function(2)

    return inner


@given
def decorated(size: int) -> Any:
    return sized(size)


net = Net()


def confuses() -> Any:
    return sized()  # type: ignore[call-arg]


def number() -> Any:
    return 3


def four() -> Any:
    return 1, 2, 3, 4


def raises() -> Any:
    raise RuntimeError("boo")


def leaves() -> Any:
    sys.exit(5)


def misses() -> Any:
    model, _ = pair()
    return model, ()


def alone() -> Any:
    return Net()


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
