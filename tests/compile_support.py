"""What the tests of ``cgcompile.compile`` share."""

from collections.abc import Callable
from typing import Any

import torch
from entry_support import assert_same

import cgcompile

GUARDS = ("keep", "shape", "none")
SHAPES = ("backed", "backed_size_oblivious", "unbacked")


def compiled(function: Any, **settings: Any) -> Any:
    """With uncompiled pieces, so that results are those of eager bit by bit."""
    return cgcompile.compile(function, **{"compiler": "eager", **settings})


def rows(size: int, *others: int) -> torch.Tensor:
    return torch.randn(size, *(others or (4,)))


def check(one: Callable[..., Any], eager: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """One call of each."""
    assert_same(one(*args, **kwargs), eager(*args, **kwargs))


def stale(one: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> bool:
    """Whether a call gives another result than eager."""
    return not torch.equal(one(*args), eager(*args))
