"""The contract of a captured step: what it read, and what must be equal before a replay.

A graph repeats addresses and host values, and a replay runs no Python. So a capture leaves a list
of :class:`Read`; a replay is right if all of them still hold. :meth:`Contract.holds` compares them
by generated text, nothing but comparisons; :meth:`Contract.first_change` finds the one that
differs, slowly and exactly. ``reads.py`` has the walker that finds what was read.
"""

import enum
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import torch

from cgcompile.errors import (
    AddressChangedError,
    GuardError,
    HostValueChangedError,
    with_article,
)
from cgcompile.torch_compat import raw_memory

# -------------------------------------------------------------- values and layouts

_BY_VALUE: tuple[type, ...] = (bool, int, float, complex, str, bytes, type(None), torch.Size)
_BY_VALUE += (torch.dtype, torch.device, torch.layout, torch.memory_format)


MISSING: Any = object()  # in place of a value that is not there


PLAIN_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))  # types without tensors inside


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return everything about a tensor that a graph repeats, but for its address."""
    try:
        return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    except RuntimeError:  # a nested tensor has no shape
        return tuple([part.shape for part in tensor.unbind()]), (), tensor.dtype, False, False


class Placed(NamedTuple):
    """The address and layout of a tensor."""

    address: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Placed":
        return cls(tensor.data_ptr(), layout_of(tensor))


def same_layout(leaf: Any, other: torch.Tensor) -> bool:
    """Return whether ``leaf`` is a tensor of the shape, strides, dtype and bits of ``other``."""
    return isinstance(leaf, torch.Tensor) and layout_of(leaf) == layout_of(other)


def layout_text(leaf: Any) -> str:
    """Return a value as messages show it: the layout of a tensor, a plain value, or a type."""
    if isinstance(leaf, (Placed, torch.Tensor)):
        layout = leaf.layout if isinstance(leaf, Placed) else layout_of(leaf)
        shape, stride, dtype, conjugate, negative = layout
        view = " conjugate" * conjugate + " negative" * negative
        return f"a{view} tensor {tuple(shape)} with strides {tuple(stride)} of {dtype}"
    if isinstance(leaf, _BY_VALUE):
        return repr(leaf)
    if leaf is MISSING:
        return "missing"
    if isinstance(leaf, type):
        return leaf.__name__
    return f"{with_article(type(leaf).__name__)} object"


def is_plain_value(leaf: Any) -> bool:
    """Return whether a leaf is a number, a text or the like, which can be compared."""
    return isinstance(leaf, _BY_VALUE)


def same_value(now: Any, before: Any) -> bool:
    """Return whether two host values are equal plain values, or the same object."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _BY_VALUE):
        return False
    if isinstance(now, (float, complex)):
        return repr(now) == repr(before)  # -0.0 is not 0.0, and a NaN is a NaN
    return bool(now == before)


def is_cpu_scalar(leaf: Any, tensor_type: str) -> bool:
    """Return whether a leaf is a 0-dim CPU tensor among tensors of another device type."""
    if tensor_type == "cpu" or not isinstance(leaf, torch.Tensor):
        return False
    return leaf.dim() == 0 and leaf.device.type == "cpu"


def host_number(leaf: Any, tensor_type: str) -> Any:
    """Return the number in a 0-dim CPU tensor among tensors of another device; else the leaf."""
    return leaf.item() if is_cpu_scalar(leaf, tensor_type) else leaf


def named_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a call, with their names in messages."""
    yield from ((f"input {position}", value) for position, value in enumerate(args))
    yield from ((f"input {name!r}", value) for name, value in kwargs.items())


class Change(NamedTuple):
    """A value that differs; if ``moved``, by the address of a tensor (now None: it is gone)."""

    path: str
    before: Any
    after: Any
    moved: bool = False

    def error(
        self, what: str, batch: object, subject: str = "argument", remedy: str = ""
    ) -> GuardError:
        """Return what to raise before a replay; ``remedy`` drops graphs of state and weights."""
        path, before, now, moved = self
        shown = str(batch)
        if subject == "weight":
            if moved:
                return AddressChangedError.weight(what=what, batch=shown, path=path, remedy=remedy)
            if isinstance(before, str):  # a layout
                return HostValueChangedError.weight(
                    what=what, batch=shown, path=path, now=now, before=before, remedy=remedy
                )
            return HostValueChangedError.cpu_scalar(
                what=what, batch=shown, path=path, now=now, before=before
            )
        if subject == "state":
            if moved:
                return AddressChangedError.state(
                    what=what, batch=shown, path=path, now=now, before=before, remedy=remedy
                )
            return HostValueChangedError.state(
                what=what, batch=shown, path=path, now=now, before=before, remedy=remedy
            )
        if subject == "metadata":
            if moved:
                return AddressChangedError.metadata(
                    what=what, batch=shown, path=path, now=now, before=before
                )
            return HostValueChangedError.metadata(
                what=what, batch=shown, path=path, now=now, before=before
            )
        if subject == "loop":
            if moved:
                return AddressChangedError.moved_in_loop(
                    what=what, batch=shown, path=path, now=now, before=before
                )
            return HostValueChangedError.changed_in_loop(
                what=what, batch=shown, path=path, now=now, before=before
            )
        if moved and subject == "input":
            return AddressChangedError.moved(
                what=what, batch=shown, path=path, now=now, before=before
            )
        if moved:
            return AddressChangedError.moved_in_wrapper(
                what=what, batch=shown, path=path, now=now, before=before
            )
        return HostValueChangedError.changed(
            what=what, batch=shown, path=path, now=now, before=before
        )


class Layouts:
    """The layouts of tensors; compared at once, 0.06 us for each."""

    # Torch's guards compare in C++, and dispatch keys and ``requires_grad`` as well: where those
    # differ, as in another mode, layouts are compared in Python, and the guards are made anew.

    def __init__(
        self, tensors: Sequence[torch.Tensor], known: list[tuple[Any, ...]] | None = None
    ) -> None:
        now = [*map(layout_of, tensors)]
        self.known, self.alike = known or now, _never
        if now == self.known:
            self._follow(tensors)

    def _follow(self, tensors: Sequence[torch.Tensor]) -> None:
        is_nested = any([tensor.is_nested for tensor in tensors])  # it ends the process in guards
        self.alike = _never if is_nested else raw_memory.alike(tensors)

    def hold(self, *tensors: torch.Tensor) -> bool:
        """Return whether each tensor has the layout that it had, where ``alike`` is false."""
        if [*map(layout_of, tensors)] != self.known:
            return False
        self._follow(tensors)
        return True


def _never(*tensors: torch.Tensor) -> bool:
    return False


def has_address(tensor: torch.Tensor) -> bool:
    try:
        tensor.data_ptr()
    except RuntimeError:  # sparse, fake, a subclass without memory of its own
        return False
    return True


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors inside of a tensor subclass that torch can take apart."""
    if not raw_memory.is_wrapper(tensor):
        return []
    try:
        return raw_memory.Wrapper.of(tensor).parts(tensor)
    except raw_memory.CannotUnwrap:
        return []


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have one address and one layout, and so have those in them."""
    plain = type(one) in PLAIN_TENSORS and type(other) in PLAIN_TENSORS
    inner, others = ([], []) if plain else (inner_tensors(one), inner_tensors(other))
    if inner or others:
        same = raw_memory.Wrapper.of(one).fits(other) if inner and others else False
        return same and all(same_memory(*pair) for pair in zip(inner, others, strict=True))
    return has_address(one) and has_address(other) and Placed.of(one) == Placed.of(other)


# -------------------------------------------------------------- contracts


class Kind(enum.Enum):
    """What of a value must be equal before a replay."""

    ADDRESS = "address"  # a tensor: its address, shape, strides, dtype and bits
    VALUE = "value"  # an equal plain value
    IDENTITY = "identity"  # the same object
    STRUCTURE = "structure"  # how a tensor subclass is built, or what a set holds
    PLACE = "place"  # the same address, in any layout; for a weight the same object


class Read(NamedTuple):
    """One value that a captured step read."""

    path: str  # for messages, such as ``attn_metadata['slots']``
    expression: str  # over the parameters of the contract
    kind: Kind
    expected: Any  # a Placed, a plain value, an object, a Wrapper, a frozenset, or a place

    def change(self, now: Any, address_first: bool = False) -> "Change | None":
        """Return how a value differs from the captured one, exactly; None if it does not."""
        before = self.expected
        if self.kind is Kind.ADDRESS:
            placed = isinstance(now, torch.Tensor) and has_address(now) and Placed.of(now)
            if placed == before:
                return None
            address = placed.address if placed else None
            if address != before.address and (
                address_first or (placed and placed.layout == before.layout)
            ):
                return Change(self.path, before.address, address, moved=True)
        elif self.kind is Kind.VALUE:
            if same_value(now, before):
                return None
        elif self.kind is Kind.IDENTITY:
            if now is before:
                return None
        elif self.kind is Kind.PLACE:
            return None if now == before else Change(self.path, before, now, moved=True)
        elif now == before if isinstance(before, frozenset) else before.fits(now):
            return None
        elif address_first and isinstance(before, frozenset):
            gone = before.difference(now if isinstance(now, (set, frozenset)) else ())
            tensors = [item for item in gone if isinstance(item, torch.Tensor)]
            if tensors:
                return Change(self.path, tensors[0].data_ptr(), None, moved=True)
        else:
            other = f"{with_article(type(now).__name__)} that is built otherwise"
            return Change(self.path, "as when captured", other)
        texts = layout_text(before), layout_text(now)
        other = f"another {type(now).__name__} object"
        return Change(self.path, texts[0], other if texts[0] == texts[1] else texts[1])


class Reads:
    """Collects what a step read, and writes the lines that compare it."""

    def __init__(self) -> None:
        self.rows: list[Read] = []
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}  # what lines and expressions refer to
        self.held: list[torch.UntypedStorage] = []  # memory that a graph may read
        self._laid_out: dict[int, tuple[str, torch.Tensor, tuple[Any, ...]]] = {}

    def bound(self, prefix: str, value: Any) -> str:
        """Return a new name of a value."""
        name = f"{prefix}_{len(self.names)}"
        self.names[name] = value
        return name

    def unless(self, condition: str) -> None:
        """Let the comparison fail where a condition is true."""
        self.lines += [f"if {condition}:", "    return False"]

    def tensor(self, path: str, expression: str, tensor: torch.Tensor, local: str = "") -> None:
        """Compare a tensor by address and layout; ``local`` is its expression in the lines."""
        placed = Placed.of(tensor)
        self.rows.append(Read(path, expression, Kind.ADDRESS, placed))
        if raw_memory.is_plain_tensor(tensor):
            self.held.append(tensor.untyped_storage())
        now = f"t{len(self.lines)}"
        address = (
            f"({now} := {local or expression}).data_ptr() != {self.bound('at', placed.address)}"
        )
        shape, stride, dtype, conjugate, negative = placed.layout
        if tensor.is_nested:
            self.names["layout"] = layout_of
            self.unless(f"{address} or layout({now}) != {self.bound('layout', placed.layout)}")
            return
        parts = [
            address,
            f"{now}.shape != {self.bound('shape', shape)}",
            f"{now}.stride() != {self.bound('stride', stride)}",
            f"{now}.dtype is not {self.bound('dtype', dtype)}",
        ]
        if dtype.is_floating_point or dtype.is_complex:  # no other dtype has these bits
            parts += [f"{now}.is_conj() is not {conjugate}", f"{now}.is_neg() is not {negative}"]
        self.unless(" or ".join(parts))

    def address(self, path: str, expression: str, address: int) -> None:
        """Compare where a tensor begins, in any layout."""
        at = f"{expression}.data_ptr()"
        self.rows.append(Read(path, at, Kind.PLACE, address))
        self.unless(f"{at} != {self.bound('at', address)}")

    def layout(self, local: str, tensor: torch.Tensor, layout: tuple[Any, ...]) -> None:
        """Let :meth:`layouts` compare a tensor, which a line has assigned to ``local``."""
        self._laid_out[id(tensor)] = local, tensor, layout

    def layouts(self) -> None:
        """Compare the noted tensors by layout, all at once."""
        if self._laid_out:
            variables, tensors, known = zip(*self._laid_out.values(), strict=True)
            name, now = self.bound("layouts", Layouts(tensors, [*known])), ", ".join(variables)
            self.unless(f"not ({name}.alike({now}) or {name}.hold({now}))")
            self._laid_out = {}

    def value(self, path: str, expression: str, value: Any, local: str = "") -> None:
        """Compare a plain value."""
        self.rows.append(Read(path, expression, Kind.VALUE, value))
        now, known = f"t{len(self.lines)}", self.bound("is", value)
        differs = f"{now} != {known}"
        if isinstance(value, (float, complex)):  # -0.0 is not 0.0, and a NaN is a NaN
            differs = f"repr({now}) != {self.bound('text', repr(value))}"
        kind = f"type({now}) is not {self.bound('type', type(value))}"
        self.unless(f"({now} := {local or expression}) is not {known} and ({kind} or {differs})")

    def identity(self, path: str, expression: str, value: Any, local: str = "") -> None:
        """Compare an object by identity."""
        self.rows.append(Read(path, expression, Kind.IDENTITY, value))
        self.unless(f"{local or expression} is not {self.bound('is', value)}")

    def form(self, path: str, expression: str, container: Any, local: str) -> list[Read]:
        """Compare the type of a container, and its length or keys, which get the last rows."""
        has_keys, kind = isinstance(container, dict), self.bound("type", type(container))
        read, size = ("tuple", tuple(container)) if has_keys else ("len", len(container))
        now = f"{read}({local}) != {self.bound('size', size)}"
        self.unless(f"type({local}) is not {kind} or {now}")
        self.rows.append(
            Read(f"the type of {path}", f"type({expression})", Kind.IDENTITY, type(container))
        )
        if has_keys:
            names = f"str([*{expression}])"
            return [Read(f"list({path})", names, Kind.VALUE, str([*container]))]
        return [Read(f"len({path})", f"len({expression})", Kind.VALUE, size)]

    def members(self, path: str, expression: str, value: Any, local: str = "") -> None:
        """Compare what a set holds."""
        members = frozenset(value)
        self.rows.append(Read(path, expression, Kind.STRUCTURE, members))
        self.unless(f"{local or expression} != {self.bound('is', members)}")

    def wrapper(self, path: str, expression: str, tensor: Any, local: str = "") -> None:
        """Compare a tensor subclass: how it is built, and the tensors inside of it."""
        built = raw_memory.Wrapper.of(tensor)
        self.rows.append(Read(path, expression, Kind.STRUCTURE, built))
        local = local or expression
        self.unless(f"not {self.bound('fits', built.fits)}({local})")
        for name, part in zip(built.paths, built.parts(tensor), strict=True):
            self.tensor(f"{path}.{name}", f"{expression}.{name}", part, f"{local}.{name}")


class Contract:
    """What a captured step read. ``holds(...)`` returns whether all of it is as it was.

    ``parameters`` are the names of the values that both methods take, such as ``"context"``.
    """

    holds: Callable[..., bool]  # generated; False also where a value cannot be read

    def __init__(
        self, parameters: str, reads: Reads, subject: str, rest: Any = None, remedy: str = ""
    ) -> None:
        self._subject, self._remedy = subject, remedy  # in errors
        self._rest: Callable[[], Change | None] | None = rest  # finds a change that no row shows
        self._parameters = [name.strip() for name in parameters.split(",") if name]
        self._names, self.rows, self.held = reads.names, tuple(reads.rows), reads.held
        body = textwrap.indent("\n".join(reads.lines), " " * 8)
        source = (
            f"def holds({parameters}):\n    try:\n{body or '        pass'}\n"
            "    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):\n"
            "        return False\n"
            "    return True\n"
        )
        self.holds = function_of(source, self._names)

    def check(self, what: str, batch: object, *values: Any) -> None:
        """Raise AddressChangedError or HostValueChangedError where a read differs."""
        if not self.holds(*values):
            change = self.first_change(*values)
            if change is not None:  # None: only which places share an object has changed
                raise change.error(what, batch, self._subject, self._remedy)

    def first_change(self, *values: Any) -> "Change | None":
        """Return the first read that differs, or None."""
        scope = {**self._names, **dict(zip(self._parameters, values, strict=True))}
        for row in self.rows:
            try:
                now = eval(row.expression, scope)
            except Exception:  # of a user's property, too
                now = MISSING
            change = row.change(now, self._subject in ("metadata", "input"))
            if change is not None:
                return change
        return None if self._rest is None else self._rest()


# -------------------------------------------------------------- functions of text


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
