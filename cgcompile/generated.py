"""Functions that are made of text: the checks before a replay, and the steps of split graphs."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any


@lru_cache(maxsize=512)
def _code(source: str, file: str) -> CodeType:
    return compile(source, file, "exec")


def function_of(
    source: str, names: Mapping[str, Any], file: str = "<cgcompile checks>"
) -> Callable[..., Any]:
    """Return the function that a text defines over ``names``; its docstring is the text."""
    namespace = dict(names)
    exec(_code(source, file), namespace)
    name = source[len("def ") : source.index("(")]
    function: Callable[..., Any] = namespace.pop(name)  # else a cycle keeps what is bound
    function.__doc__ = source
    return function
