"""What a caller says of one batch, checked. Plain Python; contradictions raise ``BatchError``."""

from collections.abc import Collection, Sequence, Sized
from typing import Any

from cgcompile.errors import BatchError
from cgcompile.modes import CUDAGraphMode
from cgcompile.serving.planning import FULL, NONE, PIECEWISE
from cgcompile.settings import is_flag, is_whole, require, require_arguments, require_items


def _is_sized(items: Any) -> bool:
    """Whether something has a length; a tensor of one number has none."""
    return isinstance(items, Sized) and getattr(items, "ndim", 1) > 0


def is_uniform_decode(query_lens: Collection[int], is_prefilling: Collection[bool]) -> bool:
    """Whether a batch is uniform decode, as ``dispatch`` understands it.

    Args:
        query_lens: tokens of each request in this step.
        is_prefilling: of each request, whether it still works on its prompt. The last chunk of a
            prompt counts as well, though as short as a decode step: its kernels are others.

    Returns:
        True if there is a request, none is in prefill, and all have the same number of tokens.

    Raises:
        BatchError: the two speak of different numbers of requests.
    """
    for name, items in (("query_lens", query_lens), ("is_prefilling", is_prefilling)):
        require(_is_sized(items), name, "is_uniform_decode", items, "a collection")
    if len(query_lens) != len(is_prefilling):
        raise BatchError.lengths_differ(lengths=len(query_lens), flags=len(is_prefilling))
    try:
        return len(set(query_lens)) == 1 and not any(is_prefilling)
    except (RuntimeError, TypeError):
        values = {"query_lens": query_lens, "is_prefilling": is_prefilling}
        hints = {"query_lens": Collection[int], "is_prefilling": Collection[bool]}
        require_arguments("is_uniform_decode", values, hints)
        raise


# Types of (num_tokens, num_reqs, max_query_len, num_active_loras), and of two flags, that need no
# look at the values: one is asked for at each step.
PLAIN_COUNTS = {
    (int, reqs, query_len, int) for reqs in (int, type(None)) for query_len in (int, type(None))
}
PLAIN_FLAGS = (bool, bool)


def check_numbers(
    num_tokens: Any,
    num_reqs: Any,
    max_query_len: Any,
    num_active_loras: Any = 0,
    uniform_decode: Any = False,
    has_lora: Any = False,
    extra: Any = (),
) -> None:
    """Raise unless what describes a batch is of the right kind; integers of NumPy are.

    Raises:
        BatchError: names the first argument that is not.
    """
    for name, value in (("num_tokens", num_tokens), ("num_active_loras", num_active_loras)):
        if not is_whole(value):
            raise BatchError.field(name=name, value=value, expected="a whole number")
    for name, value in (("num_reqs", num_reqs), ("max_query_len", max_query_len)):
        if value is not None and not is_whole(value):
            raise BatchError.field(name=name, value=value, expected="a whole number or None")
    for name, value in (("uniform_decode", uniform_decode), ("has_lora", has_lora)):
        if not is_flag(value):
            raise BatchError.field(name=name, value=value, expected="bool")
    if not isinstance(extra, tuple):
        raise BatchError.field(
            name="extra", value=extra, expected="a tuple: one hashable value per axis"
        )


def check_empty(num_tokens: int, num_reqs: int | None) -> None:
    """Raise unless a batch for which one of the two is not positive is an empty one."""
    if num_tokens < 0:
        raise BatchError.field(name="num_tokens", value=num_tokens, expected="at least 0")
    if num_reqs is not None and (num_reqs < 0 or (num_tokens and not num_reqs)):
        expected = "at least 1 for a batch with tokens, and never less than 0"
        raise BatchError.field(name="num_reqs", value=num_reqs, expected=expected)


def uniform_numbers(
    num_tokens: int, num_reqs: int | None, max_query_len: int | None, known: Sequence[int]
) -> tuple[int, int]:
    """Query length and requests of a uniform batch; ``known`` lengths help if there is but one."""
    if num_reqs is not None:
        query_len = num_tokens // num_reqs
    elif max_query_len is not None:
        query_len = max_query_len
    elif len(known) == 1:
        query_len = known[0]
    else:
        raise BatchError.which_query_len(num_tokens=num_tokens, known=known)
    reqs = num_tokens // query_len if query_len > 0 else 0
    wrong = max_query_len is not None and max_query_len != query_len
    if wrong or reqs * query_len != num_tokens or (num_reqs is not None and reqs != num_reqs):
        raise BatchError.not_uniform(
            num_tokens=num_tokens, num_reqs=num_reqs, max_query_len=max_query_len
        )
    return query_len, reqs


def allowed_modes(
    valid: Collection[CUDAGraphMode] | None, invalid: Collection[CUDAGraphMode] | None
) -> tuple[bool, bool]:
    """Whether FULL, and whether PIECEWISE, is allowed. By identity: enums are slow to hash."""
    for name, modes in (("valid_modes", valid), ("invalid_modes", invalid)):
        if modes is not None and type(modes) not in (tuple, set, frozenset, list):
            require_items(name, "dispatch", modes)
    full = piecewise = valid is None
    for mode in valid or ():
        if mode is FULL:
            full = True
        elif mode is PIECEWISE:
            piecewise = True
        else:
            _check_none("valid_modes", mode)
    for mode in invalid or ():
        if mode is FULL:
            full = False
        elif mode is PIECEWISE:
            piecewise = False
        else:
            _check_none("invalid_modes", mode)
    return full, piecewise


def _check_none(name: str, mode: CUDAGraphMode) -> None:
    if mode is not NONE:
        raise BatchError.field(
            name=name, value=mode, expected="runtime modes: NONE, PIECEWISE, FULL"
        )
