"""Checks of arguments, and the parsers of settings.

The rule: a parser takes any value of a user, text included, and returns the setting or raises
``ValueError`` with the text of what is expected.
"""

import enum
import functools
import inspect
import json
import math
import operator
import re
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field, fields
from numbers import Real
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from cgcompile.errors import CGCompileError, ConfigError

ENV_PREFIX = "CGCOMPILE_"
AUTO = "auto"

Parser = Callable[[Any], Any]
E_ = TypeVar("E_", bound=enum.Enum)
F_ = TypeVar("F_", bound=Callable[..., Any])


def enum_parser(kind: type[E_]) -> Parser:
    def parse(value: Any) -> E_:
        if isinstance(value, kind):
            return value
        if isinstance(value, str) and value.upper() in kind.__members__:
            return kind[value.upper()]
        if value == "VLLM_COMPILE" and "PIECEWISE" in kind.__members__:
            raise ValueError("PIECEWISE, which is what vLLM calls VLLM_COMPILE")
        raise ValueError("one of " + ", ".join(kind.__members__))

    return parse


def require(holds: bool, name: str, where: str, value: object, expected: str) -> None:
    """Raise ConfigError with what is expected of an argument, unless ``holds``."""
    if not holds:
        raise ConfigError.bad_value(name=name, where=where, value=value, expected=expected)


def require_callable(name: str, where: str, value: object) -> None:
    """Like :func:`require`, for a callable."""
    require(callable(value), name, where, value, "something that can be called")


def require_kind(name: str, where: str, value: object, kind: type, *, maybe: bool = False) -> None:
    """Like :func:`require`, for an instance of a class; with ``maybe`` also None."""
    holds = isinstance(value, kind) or (maybe and value is None)
    require(holds, name, where, value, kind.__name__ + (" or None" if maybe else ""))


def require_items(name: str, where: str, value: object, kind: type | None = None) -> None:
    """Like :func:`require`, for an iterable other than text, with items of ``kind`` if given."""
    what = "items" if kind is None else f"{kind.__name__} objects"
    several = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    several = several and not _is_one_item(value)
    holds = several and (kind is None or all(isinstance(item, kind) for item in value))  # type: ignore[attr-defined]
    require(holds, name, where, value, f"a sequence of {what}")


# A table with a row for each number up to a size of a batch or a budget is at most so long.
LARGEST_TABLE = 2**20
# Rows that a buffer may have; sizes in bytes fit in 64 bits.
LARGEST_ROWS = 2**40


def whole(value: Any) -> int | None:
    """Return a whole number of any type (NumPy's too) as an int; None for anything else."""
    # Also None for a bool, and for a tensor: reading it would wait for its device.
    if type(value) is int:
        return value
    if isinstance(value, bool) or hasattr(value, "data_ptr"):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def is_whole(value: object, least: int = -(2**63), most: int = 2**63 - 1) -> bool:
    """Return whether a value is a whole number in a range, see :func:`whole`."""
    number = value if type(value) is int else whole(value)
    return number is not None and least <= number <= most


def require_whole(name: str, where: str, value: object, least: int, most: int) -> None:
    """Like :func:`require`, for a whole number in a range."""
    expected = f"a whole number from {least} to {most}"
    require(is_whole(value, least, most), name, where, value, expected)


def is_finite(value: object) -> bool:
    """Return whether a value is a finite number; a bool is not a number."""
    if isinstance(value, float):
        return math.isfinite(value)
    return is_whole(value) or (isinstance(value, Real) and math.isfinite(value))


def is_flag(value: object) -> bool:
    """Return whether a value is a bool of Python or NumPy."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))


def require_arguments(where: str, values: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first argument that does not match its annotation."""
    # A flag must be a bool, an ``int`` must have 64 bits, a ``float`` must be finite, and items
    # must match. Annotations that are text or a type variable match everything.
    for name, value in values.items():
        hint = hints.get(name, Any)
        if not _matches(value, hint):
            expected = _hint_text(hint)
            if isinstance(value, int) and not is_whole(value) and not isinstance(value, bool):
                expected += " of at most 64 bits"
            raise ConfigError.bad_value(name=name, where=where, value=value, expected=expected)


def checked(function: F_, but: Collection[str] = (), last: bool = False) -> F_:
    """Decorate a function to check its arguments, see :func:`require_arguments`."""
    # It costs some microseconds: not for functions that a step calls.
    signature = inspect.signature(function)
    hints = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.annotation is not parameter.empty and name not in but
    }
    method = function.__name__ if "self" in signature.parameters else "__init__"
    qualname = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the argument
        # A method is named after the class of the object, which may inherit it.
        where = qualname if method == "__init__" else f"{type(args[0]).__name__}.{method}"
        values = {name: bound[name] for name in bound if name in hints}
        if not last:
            require_arguments(where, values, hints)
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if last and not isinstance(error, CGCompileError):
                require_arguments(where, values, hints)
            raise
        if last:
            require_arguments(where, values, hints)
        return result

    return cast(F_, call)


def checked_but(*names: str) -> Callable[[F_], F_]:
    """Like :func:`checked`, without parameters that the function checks itself."""
    return lambda function: checked(function, names)


def checked_last(function: F_) -> F_:
    """Like :func:`checked`, for a function without effects whose own errors come first."""
    return checked(function, last=True)


# Packages between a user and a setting: torch.compile(options=...), dataclasses.replace().
_NOT_USERS = {"cgcompile", "torch", "dataclasses", "contextlib"}


def warn_of_earlier(text: str) -> None:
    """Log a FutureWarning at the line of the user that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, FutureWarning, stacklevel=level)


Moved = Callable[[dict[str, Any], Any], Callable[[Any], None] | None]


def takes_earlier(**earlier: tuple[str, Any, Moved]) -> Callable[[F_], F_]:
    """Decorate a constructor to take arguments of earlier names, with a FutureWarning.

    Args:
        earlier: by name, what replaces it, its default, and a function that moves its value into
            the arguments, by name, or returns what is called with the new object.
    """

    def decorate(function: F_) -> F_:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            values = {name: kwargs.pop(name) for name in earlier if name in kwargs}
            if not values:
                return function(*args, **kwargs)
            arguments = signature.bind_partial(*args, **kwargs).arguments
            then = []
            for name, value in values.items():
                instead, default, move = earlier[name]
                text = "leave it out, as that is the default" if value is default else instead
                warn_of_earlier(f"argument {name} is deprecated: {text}")
                then.append(move(arguments, value))
            instance = arguments.pop("self")
            function(instance, **arguments)
            for finish in then:
                if finish is not None:
                    finish(instance)

        vars(call)["earlier"] = earlier
        return cast(F_, call)

    return decorate


def require_fields(record: Any, *, but: Iterable[str] = ()) -> None:
    """Check the fields of a dataclass as :func:`checked` does, without those in ``but``."""
    hints = {spec.name: spec.type for spec in fields(record) if spec.name not in but}
    values = {name: getattr(record, name) for name in hints}
    require_arguments(type(record).__name__, values, hints)


def _matches(value: Any, hint: Any) -> bool:
    if hint is Any or hint is object or isinstance(hint, (str, TypeVar)):
        return True
    if hint is None or hint is type(None):
        return value is None
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, part) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if Callable in (origin, hint):
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if origin is not None:
        return _matches_container(value, origin, parts)
    if hint in _NUMBERS:
        return _NUMBERS[hint](value)
    try:
        if not isinstance(value, hint):
            return False
    except TypeError:  # a protocol without isinstance
        return True
    # The fields of a named tuple are checked here; other classes check their own.
    fields_of = getattr(hint, "__annotations__", {}) if hasattr(hint, "_fields") else {}
    return all(_matches(getattr(value, name), kind) for name, kind in fields_of.items())


_NUMBERS: dict[Any, Callable[[object], bool]] = {int: is_whole, float: is_finite, bool: is_flag}


def _is_one_item(value: object) -> bool:
    """Return whether a value that can be iterated is no list of items: a tensor, an op of torch."""
    return hasattr(value, "data_ptr") or hasattr(value, "overloads")


def _matches_container(value: Any, origin: Any, parts: tuple[Any, ...]) -> bool:
    if isinstance(value, (str, bytes)) or _is_one_item(value):
        return False  # not a list of items
    if not isinstance(value, Sequence if origin in (tuple, list) else origin):
        return False
    if origin is tuple and parts[-1:] != (Ellipsis,):
        return len(value) == len(parts) and all(map(_matches, value, parts))
    if isinstance(value, Mapping) and len(parts) == 2:
        rows = value.items()
        return all(_matches(key, parts[0]) and _matches(item, parts[1]) for key, item in rows)
    if not isinstance(value, Collection) or parts[:1] in ((), (Any,)):
        return True  # iterating would exhaust an iterator
    return all(_matches(item, parts[0]) for item in value)


def _hint_text(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_hint_text, get_args(hint)))
    if hint is type(None):
        return "None"
    if hint is float:
        return "a finite float"
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(\w+\.)+", "", text)


# ---------------------------------------------------------------- parsers


def optional(parse: Parser) -> Parser:
    return lambda value: None if value is None or value == "" else parse(value)


# What stands for True and False in text.
SWITCH = dict.fromkeys(("1", "true", "yes", "on"), True)
SWITCH |= dict.fromkeys(("0", "false", "no", "off"), False)


def parse_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in SWITCH:
        return SWITCH[text]
    raise ValueError("a bool: 1, 0, true, false, yes, no, on or off")


def parse_switch(value: Any) -> bool | str:
    """Parse what is on where the device can run it (``auto``), on, or off."""
    return AUTO if value == AUTO else parse_bool(value)


KERNELS = ("small_batch", "decode_attention")


def kernel_switches(value: Any) -> dict[str, bool | str]:
    """Return ``auto``, True or False for each kernel of the setting ``kernels``."""
    items = [str(item) for item in items_of(value)]
    if len(items) == 1 and (items[0] == AUTO or items[0].lower() in SWITCH):
        return dict.fromkeys(KERNELS, parse_switch(items[0]))
    if not items or not {item.removeprefix("-") for item in items} <= {AUTO, *KERNELS}:
        names = ", ".join(KERNELS)
        raise ValueError(
            f"'auto', True, False, or names of {names}; '-{KERNELS[0]}' for all but that"
        )
    named = {item for item in items if not item.startswith("-")}
    rest: bool | str = AUTO if AUTO in named or not named else False
    switches = {name: name in named or rest for name in KERNELS}
    return {name: f"-{name}" not in items and switch for name, switch in switches.items()}


def kernels_of(switches: Mapping[str, bool | str]) -> bool | str | tuple[str, ...]:
    """Return the value of the setting ``kernels`` that stands for some switches."""
    values = {*switches.values()}
    if len(values) == 1:
        return values.pop()
    named = tuple(name for name, switch in switches.items() if switch is True)
    if AUTO not in values:
        return named
    return (AUTO, *named, *(f"-{name}" for name, switch in switches.items() if switch is False))


def parse_kernels(value: Any) -> bool | str | tuple[str, ...]:
    return kernels_of(kernel_switches(value))


def parse_parts(*known: str) -> Parser:
    """Return a parser of a set of names: those named, all but ``-name``, all (True), or none."""

    def parse(value: Any) -> tuple[str, ...]:
        items = items_of(value)
        if len(items) == 1 and str(items[0]).lower() in SWITCH:
            return known if parse_bool(items[0]) else ()
        left_out = {item.removeprefix("-") for item in map(str, items) if item.startswith("-")}
        named = {item for item in items if not str(item).startswith("-")}
        if not {*named, *left_out} <= {*known} or value == "":
            names = ", ".join(known)
            raise ValueError(f"True, False, or names of {names}; '-{known[0]}' for all but that")
        taken = named or (known if left_out else ())
        return tuple(name for name in known if name in taken and name not in left_out)

    return parse


def one_of(*known: str) -> Parser:
    def parse(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return value
        raise ValueError("one of " + ", ".join(known))

    return parse


def _number(value: Any) -> int | None:
    """Return a whole number, also of text; None for anything else."""
    try:
        return int(value) if isinstance(value, str) else whole(value)
    except ValueError:
        return None


def parse_count(least: int) -> Parser:
    def parse(value: Any) -> int:
        number = _number(value)
        if number is None or number < least:
            raise ValueError(f"a whole number of at least {least}")
        return number

    return parse


def parse_text(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    raise ValueError("a non-empty text")


def items_of(value: Any) -> tuple[Any, ...]:
    """Return items; torch.compile options are scalars, so a list may be text such as '1,2,4'."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, Sequence):
        return tuple(value)
    return (value,)


def parse_sizes(value: Any) -> tuple[int, ...]:
    sizes = {_number(item) or 0 for item in items_of(value)}
    if min(sizes, default=0) <= 0:
        raise ValueError("positive whole numbers, as a sequence or as text '1,2,4'")
    return tuple(sorted(sizes))


def sizes_given(name: str, where: str, value: Any) -> tuple[int, ...]:
    """Return the sizes in an argument, each once and in their order; raises ConfigError."""
    items = items_of(value)
    known = parsed(name, where, value, parse_sizes) if items else ()
    if known:
        require_whole(name, where, max(known), 1, LARGEST_TABLE)
    return tuple(sorted(known, key=[int(item) for item in items].index))


ALL_CAPTURE_SIZES = "cudagraph_capture_sizes"


UP_TO = "<="  # in front of the end of a range of sizes


def parse_compile_sizes(value: Any) -> tuple[int | str, ...]:
    """Parse sizes, ends of ranges such as ``"<=32"``, and the name of all capture sizes."""
    numbers, ends, names = [], list[str](), list[str]()
    for item in items_of(value):
        if isinstance(item, str) and item.startswith(UP_TO):
            ends.append(item.removeprefix(UP_TO))
        elif item == ALL_CAPTURE_SIZES:
            names = [item]
        else:
            numbers.append(item)
    if not (names or numbers or ends):
        raise ValueError(_COMPILE_SIZES)
    try:
        sizes, spans = (parse_sizes(items) if items else () for items in (numbers, ends))
    except ValueError:
        raise ValueError(_COMPILE_SIZES) from None
    return (*names, *sizes, *(f"{UP_TO}{end}" for end in spans))


_COMPILE_SIZES = (
    "positive whole numbers, ends of ranges such as '<=32', or 'cudagraph_capture_sizes', as a "
    "sequence or as text '1,2,<=32'"
)


def ends_of(sizes: Sequence[int | str] | None) -> tuple[int, ...]:
    """Return the ends of ranges among the items of ``compile_sizes``."""
    texts = (item for item in sizes or () if isinstance(item, str))
    return tuple(int(item.removeprefix(UP_TO)) for item in texts if item.startswith(UP_TO))


def sizes_meant(
    listed: Sequence[int | str], captured: Sequence[int] | None, *, pads: bool
) -> tuple[int, ...]:
    """Return the sizes of ``compile_sizes``, where steps are padded to ``captured`` if ``pads``."""
    # Raises ConfigError if padding would change one of them, or if it names missing capture sizes.
    if captured is None and ALL_CAPTURE_SIZES in listed:
        raise ConfigError.impossible(
            what=f"compile_sizes = {tuple(listed)!r} without cudagraph_capture_sizes",
            because="the text stands for the sizes of that setting",
            instead="Give cudagraph_capture_sizes, or list the sizes.",
        )
    numbers = [size for size in listed if isinstance(size, int)]
    for size in numbers:
        padded = next((larger for larger in captured or () if larger >= size), size)
        if pads and padded != size:
            raise ConfigError.padded_away(size=size, padded=padded)
    alias = captured if captured is not None and ALL_CAPTURE_SIZES in listed else ()
    return tuple(sorted({*numbers, *alias}))


def parse_endpoints(value: Any) -> tuple[int, ...]:
    sizes = parse_sizes(value)
    if tuple(map(_number, items_of(value))) != sizes:
        raise ValueError("increasing whole numbers, as a sequence or as text '32,512'")
    return sizes


NO_BUILTIN = "-builtin"  # among splitting ops


def parse_ops(value: Any) -> tuple[Any, ...]:
    """Check types only: the module that registers a named op may not be imported yet."""
    for op in items_of(value):
        entry = hasattr(op, "target") and hasattr(op, "predicate")
        left_out = isinstance(op, str) and op.startswith("-") and op != NO_BUILTIN
        if left_out or not (isinstance(op, str) or callable(op) or entry):
            expected = f"names, ops, functions or SplittingOp objects, or {NO_BUILTIN!r}"
            raise ValueError(f"{expected}, not {op!r}")
    return items_of(value)


def parse_passes(value: Any) -> tuple[Any, ...]:
    for item in items_of(value):
        named = isinstance(getattr(item, "name", None), str)
        if not (callable(item) and named and callable(getattr(item, "uuid", None))):
            raise ValueError(
                f"objects with a name, uuid() and __call__(gm) -> gm, not {item!r}; wrap a plain "
                "function: cgcompile.passes.FunctionPass(name, function)"
            )
    return items_of(value)


SPLIT = "split"  # among passes: those after it run over pieces


def parse_pipeline(value: Any) -> tuple[Any, ...]:
    """Parse passes, ``"split"`` between them, and names of passes to leave out: ``"-name"``."""
    items, left_out = list[Any](), list[str]()
    for item in items_of(value):
        if not isinstance(item, str):
            items += parse_passes((item,))
        elif item == SPLIT and SPLIT not in items:
            items.append(item)
        elif item[:1] == "-" and item[1:]:
            left_out.append(item)
        else:
            raise ValueError(
                f"passes, {SPLIT!r} once, and names of passes to leave out such as "
                f"'-eliminate_clones'; not {item!r}"
            )
    if items[-1:] == [SPLIT]:
        del items[-1]
    return (*items, *dict.fromkeys(left_out))


def parse_names(value: Any) -> tuple[str, ...]:
    names = items_of(value)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError("names, as a sequence or as text 'one,other'")
    return tuple(dict.fromkeys(names))


def parse_compiler(value: Any) -> Any:
    first, *others = items_of(value) or ("",)
    if (callable(first) or first in COMPILERS) and others in ([], ["eager"]) and first != "eager":
        return (first, *others) if others else first
    if (first, others) == ("eager", []):
        return first
    names = ", ".join(COMPILERS)
    raise ValueError(
        f"one of {names}, or a callable (gm, fake_inputs) -> callable; with 'eager' behind it for "
        "pieces where it raises"
    )


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

UNSET: Any = object()  # a setting without an argument


def setting(default: Any, parse: Parser, needs: str | None = None) -> Any:
    """Declare a setting with its parser; without what it ``needs`` it has no effect."""
    metadata = {"parse": parse, "default": default, "needs": needs}
    return field(default_factory=lambda: UNSET, metadata=metadata)


def parsed(name: str, where: str, value: Any, parse: Parser) -> Any:
    """Parse a value; raises ConfigError where the parser rejects it."""
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ConfigError.bad_value(
            name=name, where=where, value=value, expected=str(error)
        ) from None
