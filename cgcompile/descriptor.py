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

    Example:
        >>> batch = cgcompile.BatchDescriptor(num_tokens=8, num_reqs=4, uniform=True)
        >>> batch.num_tokens // batch.num_reqs  # tokens of each request
        2
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
        if not (  # fast path: each step creates a descriptor
            type(num_tokens) is int
            and num_tokens >= 0
            and (num_reqs is None or (type(num_reqs) is int and num_reqs >= 1))
            and type(uniform) is type(has_lora) is bool
            and type(num_active_loras) is int
            and num_active_loras >= 0
            and (max_query_len is None or (type(max_query_len) is int and max_query_len >= 1))
        ):
            num_tokens = _count("num_tokens", num_tokens, 0)
            num_reqs = None if num_reqs is None else _count("num_reqs", num_reqs, 1)
            num_active_loras = _count("num_active_loras", num_active_loras, 0)
            if max_query_len is not None:
                max_query_len = _count("max_query_len", max_query_len, 1)
            for name, value in (("uniform", uniform), ("has_lora", has_lora)):
                if not is_flag(value):
                    raise BatchError.bad_value(
                        where="BatchDescriptor", name=name, value=value, expected="bool"
                    )
        if type(extra) is not tuple or extra:
            _check_extra(extra)
        if uniform and (num_reqs is None or num_tokens % num_reqs):
            raise BatchError.descriptor_not_uniform(num_tokens=num_tokens, num_reqs=num_reqs)
        if num_active_loras and not has_lora:
            expected = "0 where has_lora is False"
            raise BatchError.bad_value(
                where="BatchDescriptor",
                name="num_active_loras",
                value=num_active_loras,
                expected=expected,
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

    def __repr__(self) -> str:
        return f"BatchDescriptor({self})"

    @property
    def query_len(self) -> int | None:
        """The number of tokens of each request of a uniform batch; None for any other batch."""
        return self.num_tokens // self.num_reqs if self.uniform and self.num_reqs else None


def _count(name: str, value: Any, least: int) -> int:
    """Return a count as an int; it may be of another type of whole numbers."""
    number = whole(value)
    if number is None or number < least:
        optional = " or None" if name in ("num_reqs", "max_query_len") else ""
        expected = f"a whole number of at least {least}{optional}"
        raise BatchError.bad_value(
            where="BatchDescriptor", name=name, value=value, expected=expected
        )
    return number


def _check_extra(extra: Any) -> None:
    if not isinstance(extra, tuple):
        raise BatchError.bad_value(
            where="BatchDescriptor", name="extra", value=extra, expected="a tuple"
        )
    try:
        hash(extra)
    except TypeError:
        raise BatchError.bad_value(
            where="BatchDescriptor",
            name="extra",
            value=_kinds(extra),
            expected="a tuple of hashable values",
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
