"""How one setting is declared, read from text and checked; ``config.py`` has the settings.

A setting is a dataclass field whose metadata hold its parser and its documentation. A parser takes
whatever the user wrote, text included, and returns the value or raises ``ValueError`` with what was
expected.
"""

import enum
import json
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple, TypeVar

from cgcompile.errors import ConfigError

ENV_PREFIX = "CGCOMPILE_"

Parser = Callable[[Any], Any]
E_ = TypeVar("E_", bound=enum.Enum)


def enum_parser(kind: type[E_]) -> Parser:
    def parse(value: Any) -> E_:
        if isinstance(value, kind):
            return value
        if isinstance(value, str) and value.upper() in kind.__members__:
            return kind[value.upper()]
        raise ValueError("one of " + ", ".join(kind.__members__))

    return parse


def require(holds: bool, name: str, where: str, value: object, expected: str) -> None:
    """Refuse an argument of a constructor that does not hold what is asked of it.

    Raises:
        ConfigError: says what is expected.
    """
    if not holds:
        raise ConfigError.bad_value(name, where, value, expected)


def require_callable(name: str, where: str, value: object) -> None:
    """As :func:`require`, of a function."""
    require(callable(value), name, where, value, "something that can be called")


def require_kind(name: str, where: str, value: object, kind: type, *, maybe: bool = False) -> None:
    """As :func:`require`, of an object of a class; with ``maybe`` None will do."""
    holds = isinstance(value, kind) or (maybe and value is None)
    require(holds, name, where, value, kind.__name__ + (" or None" if maybe else ""))


def require_items(name: str, where: str, value: object, kind: type | None = None) -> None:
    """As :func:`require`, of a sequence or another iterable that is no text.

    ``kind``: of its items; it is gone through then.
    """
    what = "items" if kind is None else f"{kind.__name__} objects"
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    holds = several and (kind is None or all(isinstance(each, kind) for each in value))  # type: ignore[attr-defined]
    require(holds, name, where, value, f"a sequence of {what}")


def optional(parse: Parser) -> Parser:
    return lambda value: None if value is None or value == "" else parse(value)


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ValueError("a bool: 1, 0, true, false, yes, no, on or off")


def one_of(*known: str) -> Parser:
    def parse(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        raise ValueError("one of " + ", ".join(known))

    return parse


def whole(value: Any) -> int | None:
    """Return a whole number of any type (NumPy's too) as an int; None for anything else.

    A bool is none, and neither is a tensor: reading it would wait for its device.
    """
    if type(value) is int:
        return value
    if isinstance(value, bool) or hasattr(value, "untyped_storage"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def parse_count(least: int) -> Parser:
    def parse(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else whole(value)
        except ValueError:
            number = None
        if number is None or number < least:
            raise ValueError(f"a whole number of at least {least}")
        return number

    return parse


def parse_text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("a non-empty text")


def items_of(value: Any) -> tuple[Any, ...]:
    """torch.compile types option values as scalars, so a list may come as text: '1,2,4'."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence):
        return tuple(value)
    return (value,)


def parse_sizes(value: Any) -> tuple[int, ...]:
    expected = "positive whole numbers, as a sequence or as text '1,2,4'"
    items = items_of(value)
    try:
        sizes = [int(item) if isinstance(item, str) else whole(item) or 0 for item in items]
    except ValueError:
        raise ValueError(expected) from None
    if not sizes or min(sizes) <= 0:
        raise ValueError(expected)
    return tuple(sorted(set(sizes)))


def sizes_given(name: str, where: str, value: Any) -> tuple[int, ...]:
    """Sizes that a user gave to a function, each once and in their order; may be none.

    Raises:
        ConfigError: something that ``parse_sizes`` does not take.
    """
    items = items_of(value)
    known = parsed(name, where, value, parse_sizes) if items else ()
    return tuple(sorted(known, key=[int(each) for each in items].index))


ALL_CAPTURE_SIZES = "cudagraph_capture_sizes"


def parse_compile_sizes(value: Any) -> tuple[int | str, ...]:
    """As ``parse_sizes``; one of the items may name the setting whose sizes are meant as well."""
    items = items_of(value)
    if ALL_CAPTURE_SIZES not in items:
        return parse_sizes(items)
    numbers = [item for item in items if item != ALL_CAPTURE_SIZES]
    return (ALL_CAPTURE_SIZES, *(parse_sizes(numbers) if numbers else ()))


def sizes_meant(
    listed: Sequence[int | str], captured: Sequence[int] | None, *, pads: bool
) -> tuple[int, ...]:
    """The sizes that ``compile_sizes`` stands for, in order, each once.

    Args:
        listed: that setting.
        captured: ``cudagraph_capture_sizes``, in order; None if there are none.
        pads: steps are padded to these.

    Raises:
        ConfigError: padding would change one of them, or it names sizes that are not given.
    """
    if captured is None and ALL_CAPTURE_SIZES in listed:
        raise ConfigError.impossible(
            f"compile_sizes = {tuple(listed)!r} without cudagraph_capture_sizes",
            "the text stands for the sizes of that setting",
            "Give cudagraph_capture_sizes, or list the sizes.",
        )
    numbers = [each for each in listed if isinstance(each, int)]
    for size in numbers:
        sizes = captured if pads and captured is not None else ()
        padded = next((each for each in sizes if each >= size), size)
        if padded != size:
            raise ConfigError.padded_away(size, padded)
    alias = captured if captured is not None and ALL_CAPTURE_SIZES in listed else ()
    return tuple(sorted({*numbers, *alias}))


def parse_endpoints(value: Any) -> tuple[int, ...]:
    items = items_of(value)
    sizes = parse_sizes(items)
    if [int(item) for item in items] != list(sizes):
        raise ValueError("increasing whole numbers, as a sequence or as text '32,512'")
    return sizes


def parse_ops(value: Any) -> tuple[Any, ...]:
    """Whether a name is that of an op is asked later: what registers it may not be imported yet."""
    for each in items_of(value):
        entry = hasattr(each, "target") and hasattr(each, "predicate")
        if not (isinstance(each, str) or callable(each) or entry):
            raise ValueError(f"names, ops, functions or SplittingOp objects, not {each!r}")
    return items_of(value)


def parse_passes(value: Any) -> tuple[Any, ...]:
    for each in items_of(value):
        named = isinstance(getattr(each, "name", None), str)
        if not (callable(each) and named and callable(getattr(each, "uuid", None))):
            raise ValueError(
                f"objects with a name, uuid() and __call__(gm) -> gm, not {each!r}; wrap a plain "
                "function: cgcompile.passes.FunctionPass(name, function)"
            )
    return items_of(value)


def parse_names(value: Any) -> tuple[str, ...]:
    names = items_of(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("names, as a sequence or as text 'one,other'")
    return tuple(dict.fromkeys(names))


def parse_compiler(value: Any) -> Any:
    if callable(value) or value in COMPILERS:
        return value
    raise ValueError(f"one of {', '.join(COMPILERS)}, or a callable (gm, fake_inputs) -> callable")


def parse_mapping(value: Any) -> tuple[tuple[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"a mapping, or one as JSON text ({error})") from None
    if isinstance(value, tuple) and all(isinstance(pair, tuple) for pair in value):
        value = dict(value)
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a mapping from names to values, or one as JSON text")
    return tuple(sorted(value.items()))


COMPILERS = ("inductor", "aot", "eager")


PIECES, GRAPHS = "pieces", "graphs"  # what a setting may need, or would be ignored


class Origins(NamedTuple):
    """Where settings come from.

    Attributes:
        names: ``environment`` and the like, by setting.
        values: what the settings are.
    """

    names: dict[str, str]
    values: dict[str, Any]

    @classmethod
    def of(
        cls, values: dict[str, Any], given: Mapping[str, str], start: "Origins | None"
    ) -> "Origins":
        """Those of all settings.

        Args:
            values: of all settings.
            given: the origins of those that somebody gave.
            start: of the settings that these were made from; what is equal keeps its origin.
        """
        found = {
            name: "environment" if ENV_PREFIX + name.upper() in os.environ else "default"
            for name in values
        }
        found |= given
        if start is not None:
            found |= {n: start.names[n] for n in values if start.values[n] == values[n]}
        return cls(found, values)


def setting(name: str, default: Any, parse: Parser, doc: str, needs: str | None = None) -> Any:
    """A field whose default is the environment variable, where there is one."""

    def from_environment() -> Any:
        text = os.environ.get(ENV_PREFIX + name.upper())
        return default if text is None else parsed(name, ENV_PREFIX + name.upper(), text, parse)

    metadata = {"parse": parse, "doc": doc, "default": default, "needs": needs}
    return field(default_factory=from_environment, metadata=metadata)


def parsed(name: str, where: str, value: Any, parse: Parser) -> Any:
    """What a parser makes of a value.

    Raises:
        ConfigError: it refuses it.
    """
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ConfigError.bad_value(name, where, value, str(error)) from None
