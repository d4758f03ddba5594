"""Targets of the command line, and a parser of the pages that it writes."""

import functools
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from torch import nn

import cgcompile

HERE = Path(__file__)


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


# ---------------------------------------------------------------- targets


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


def miscompiled() -> Any:
    model, x = pair()

    def double(gm: Any, inputs: Any) -> Any:
        return lambda *args: tuple(output * 2 for output in gm(*args))

    return cgcompile.compile(model, compiler=double, capture_device="host"), (x,)


def sized(size: int, *, deep: bool = False) -> Any:
    return Net(), torch.randn(2, size, 8)


def with_two(function: Any) -> Any:
    @functools.wraps(function)
    def inner() -> Any:
        return function(2)

    return inner


@with_two
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


def without_inputs() -> Any:
    return Net(), ()


def alone() -> Any:
    return Net()


# ---------------------------------------------------------------- pages


class Page(HTMLParser):
    """A parsed page; each tag must be closed."""

    VOID = ("meta", "link", "br", "img", "wbr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[tuple[int, str]] = []  # (level, text)
        # By data-table, a further one with "#1" and so on: rows of (text, exact numbers)
        self.tables: dict[str, list[list[tuple[str, list[str]]]]] = {}
        self.captions: dict[str, str] = {}  # by the same names
        self.numbers: list[str] = []  # exact numbers of the page
        self.drawings: list[tuple[str, list[str]]] = []  # (label, titles)
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.text = ""  # outside of style
        self._open: list[str] = []
        self._table = ""
        self.feed(text)
        self.close()
        assert self._open == [], "tags that are never closed"

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "table":
            name = self._table = attributes["data-table"]
            count = sum(known.split("#")[0] == name for known in self.tables)
            self._table = f"{name}#{count}" if count else name
            self.tables[self._table] = []
        elif tag == "tr":
            self.tables[self._table].append([])
        elif tag in ("td", "th"):
            self.tables[self._table][-1].append(("", []))
        elif tag == "data":
            self.numbers.append(attributes["value"])
            if "tr" in self._open:
                self.tables[self._table][-1][-1][1].append(attributes["value"])
        elif tag == "svg" and attributes.get("role") == "img":
            self.drawings.append((attributes["aria-label"], []))
        elif tag in ("h1", "h2", "h3"):
            self.headings.append((int(tag[1]), ""))

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.text += data
        if "svg" in self._open and self._open[-1] == "title":
            self.drawings[-1][1].append(data)
        if "caption" in self._open:
            self.captions[self._table] = self.captions.get(self._table, "") + data
        if "td" in self._open or "th" in self._open:
            text, numbers = self.tables[self._table][-1][-1]
            self.tables[self._table][-1][-1] = (text + data, numbers)
        if {"h1", "h2", "h3"} & {*self._open}:
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    def rows(self, name: str) -> list[dict[str, tuple[str, list[str]]]]:
        """Return the rows of a table by column; white space as a browser shows it."""
        cells = [[(" ".join(text.split()), n) for text, n in row] for row in self.tables[name]]
        head, *rows = cells
        return [dict(zip([text for text, _ in head], row, strict=True)) for row in rows]
