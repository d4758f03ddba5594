"""The root of all errors, and what messages share. See ``cgcompile/errors/__init__.py``."""

import difflib
from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "(none)"


def close(name: str, known: Iterable[str]) -> str:
    """`` Did you mean 'a' or 'b'?``, or nothing if no known name is near."""
    near = difflib.get_close_matches(str(name), list(map(str, known)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


_LONGEST = 400


def shown(value: object) -> str:
    """The text of a value in a message, of bounded length.

    A tensor is described, not printed: printing runs ops, which a capture would record or refuse.
    """
    if hasattr(value, "data_ptr") and hasattr(value, "shape"):
        kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
        return f"a {type(value).__name__} {list(value.shape)} of {kind}"
    try:
        text = repr(value)
    except Exception:  # of a number with too many digits, or the code of a user
        return with_article(type(value).__name__)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def with_article(name: str) -> str:
    """``a Linear``, ``an Attention``: a kind of thing."""
    return f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}"


class CGCompileError(Exception):
    """The root: ``except CGCompileError`` catches whatever cgcompile itself refuses."""
