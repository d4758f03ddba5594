"""The batch descriptor: the key of every captured graph. Plain Python, needs no torch."""

from typing import Any, NamedTuple

from cgcompile.errors import BatchError
from cgcompile.modes import AttentionCGSupport
from cgcompile.settings import is_flag, whole


class _Fields(NamedTuple):
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
    max_query_len: int | None = None
    extra: tuple[Any, ...] = ()


class BatchDescriptor(_Fields):
    """What a captured graph was captured for: the key of every graph. Immutable and hashable.

    Attributes:
        num_tokens: rows of the batch, padded; at least 0.
        num_reqs: requests in the batch, padded; None where the graph does not depend on it.
        uniform: all requests have the same query length, ``num_tokens // num_reqs`` exactly.
        has_lora: LoRA adapters are active.
        num_active_loras: how many; 0 without LoRA.
        max_query_len: the longest query the graph was captured for; None if it does not matter.
        extra: further key axes of the user's own (a ``max_seqlen`` bucket, a kernel id); hashable.

    Raises:
        BatchError: a field is out of range, or ``uniform`` does not divide.
    """

    __slots__ = ()

    def __new__(
        cls,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
        extra: tuple[Any, ...] = (),
    ) -> "BatchDescriptor":
        counts = (num_tokens, num_reqs, num_active_loras, max_query_len)
        if not _plainly_right(*counts):  # a step creates one: names are for errors only
            num_tokens, num_reqs, num_active_loras, max_query_len = _checked_counts(*counts)
        if type(extra) is not tuple or extra:
            _check_extra(extra)
        flags: Any = type(uniform), type(has_lora)
        if flags != _FLAGS:
            _check_flags(uniform, has_lora)
        if uniform and (num_reqs is None or num_tokens % num_reqs):
            raise BatchError.descriptor_not_uniform(num_tokens=num_tokens, num_reqs=num_reqs)
        if num_active_loras and not has_lora:
            expected = "0 where has_lora is False"
            raise BatchError.descriptor_field(
                name="num_active_loras", value=num_active_loras, expected=expected
            )
        fields = (num_tokens, num_reqs, uniform, has_lora, num_active_loras, max_query_len, extra)
        return tuple.__new__(cls, fields)

    @classmethod
    def _make(cls, iterable: Any) -> "BatchDescriptor":  # type: ignore[override]
        return cls(*iterable)  # so that _replace() validates too

    def __str__(self) -> str:
        """Return the fields that differ from defaults, such as ``num_tokens=64, num_reqs=8``."""
        defaults, fields = self._field_defaults, zip(self._fields, self, strict=True)
        rows = [(k, v) for k, v in fields if k not in defaults or v != defaults[k]]
        return ", ".join([f"{name}={value!r}" for name, value in rows])

    @property
    def query_len(self) -> int | None:
        """The number of tokens of each request of a uniform batch; None for any other batch."""
        return self.num_tokens // self.num_reqs if self.uniform and self.num_reqs else None


_FLAGS = (bool, bool)


def _plainly_right(
    num_tokens: Any, num_reqs: Any, num_active_loras: Any, max_query_len: Any
) -> bool:
    return (
        type(num_tokens) is int
        and num_tokens >= 0
        and (num_reqs is None or (type(num_reqs) is int and num_reqs >= 1))
        and type(num_active_loras) is int
        and num_active_loras >= 0
        and (max_query_len is None or (type(max_query_len) is int and max_query_len >= 1))
    )


def _checked_counts(
    num_tokens: Any, num_reqs: Any, num_active_loras: Any, max_query_len: Any
) -> tuple[Any, ...]:
    """Return the counts as ints; they may be of other types of whole numbers."""
    counts = (
        ("num_tokens", num_tokens, 0),
        ("num_reqs", num_reqs, 1),
        ("num_active_loras", num_active_loras, 0),
        ("max_query_len", max_query_len, 1),
    )
    numbers = []
    for name, value, least in counts:
        optional = name in ("num_reqs", "max_query_len")
        number = whole(value)
        numbers.append(number)
        if value is None and optional:
            continue
        if number is None or number < least:
            expected = f"a whole number of at least {least}" + (" or None" if optional else "")
            raise BatchError.descriptor_field(name=name, value=value, expected=expected)
    return tuple(numbers)


def _check_flags(uniform: Any, has_lora: Any) -> None:
    for name, value in (("uniform", uniform), ("has_lora", has_lora)):
        if not is_flag(value):
            raise BatchError.descriptor_field(name=name, value=value, expected="bool")


def _check_extra(extra: Any) -> None:
    if not isinstance(extra, tuple):
        raise BatchError.descriptor_field(name="extra", value=extra, expected="a tuple")
    try:
        hash(extra)
    except TypeError:
        raise BatchError.descriptor_field(
            name="extra", value=_kinds(extra), expected="a tuple of hashable values"
        ) from None


def allows_full(support: AttentionCGSupport, descriptor: BatchDescriptor | None) -> bool:
    """Return whether ops of this support may be in the FULL graph of a batch; None: any batch."""
    if support is AttentionCGSupport.ALWAYS:
        return True
    if descriptor is None or not descriptor.uniform:
        return False
    if support is AttentionCGSupport.UNIFORM_BATCH:
        return True
    single = descriptor.query_len == 1
    return support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE and single


def _kinds(extra: Any) -> Any:
    """Return the types of unhashable values, for a message."""
    if isinstance(extra, tuple):
        return tuple(map(_kinds, extra))
    return extra if isinstance(extra, (int, float, str, type(None))) else type(extra)
