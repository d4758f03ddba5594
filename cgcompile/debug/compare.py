"""Compare two runs of a step: values by their paths, tolerances, and sets of inputs.

The leaves of results are compared, with dataclasses and plain objects opened, as each run makes new
objects. A value without fields and without a usable ``==`` is neither equal nor different; it is
reported as not compared.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from cgcompile.debug.output import Result
from cgcompile.debug.restore import copies
from cgcompile.graphs.arena import comparable, numbers_as_bytes
from cgcompile.graphs.contract import is_plain_value, layout_text, same_value
from cgcompile.graphs.reads import attributes_of
from cgcompile.settings import require, require_whole
from cgcompile.torch_compat import torch_ops

_DEEPEST = 16  # objects in objects
_CLOSED: tuple[type, ...] = (torch.Tensor, torch.nn.Module, type, ModuleType, Enum)
_CLOSED += (FunctionType, MethodType, BuiltinFunctionType)  # attributes of code are no results


class Opened(NamedTuple):
    """An object whose fields are values of their own."""

    value: Any
    names: tuple[str, ...]
    inside: tuple[str, ...]

    def __str__(self) -> str:
        return f"{layout_text(self.value)} with {', '.join(self.names)}"


def named_values(value: Any, top: str = "") -> dict[str, Any]:
    """Return the leaves of a value by their paths, such as ``['k'].scores[0]``.

    Containers of pytree, dataclasses and plain objects are opened. Each opened object comes before
    its fields, as an :class:`Opened`.
    """
    result: dict[str, Any] = {}
    for path, leaf in torch_ops.tree_paths(value):
        _open(leaf, path or top, (), result)
    return result


def _open(leaf: Any, here: str, around: tuple[Any, ...], result: dict[str, Any]) -> None:
    result[here] = leaf
    levels = [len(around) - index for index, outer in enumerate(around) if outer is leaf]
    if levels:
        result[here] = f"the object {levels[0]} levels up"
        return
    is_whole = is_plain_value(leaf) or isinstance(leaf, _CLOSED)
    fields = {} if is_whole or len(around) == _DEEPEST else attributes_of(leaf)
    if not fields:
        return
    inside: dict[str, Any] = {}
    for name, value in fields.items():
        for path, inner in torch_ops.tree_paths(value):
            _open(inner, f"{here}.{name}{path}", (*around, leaf), inside)
    result[here] = Opened(leaf, tuple(sorted(fields)), tuple(inside))
    result |= inside


def names_compared(plain: Mapping[str, Any], result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names to compare; an object that both runs returned is equal to itself."""
    same_object: set[str] = set()
    for name, value in plain.items():
        other = result.get(name)
        if isinstance(value, Opened) and isinstance(other, Opened) and value.value is other.value:
            same_object.update(value.inside)
        elif name not in same_object:
            yield name


def alike(result: Any, expected: Any) -> bool | None:
    """Return whether two values that are no tensors are equal; None if that is unknown."""
    if isinstance(result, Opened) and isinstance(expected, Opened):
        return type(result.value) is type(expected.value) and result.names == expected.names
    if same_value(result, expected):
        return True
    if type(result) is not type(expected) or is_plain_value(expected):
        return False
    own: Any = type(expected).__eq__
    if callable(expected) or own is object.__eq__:
        return None
    try:
        same = result == expected
    except Exception:  # of the user's code
        return None
    return same if isinstance(same, bool) else None


def uncompared(plain: Mapping[str, Any], result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of objects without fields and without an ``==`` of their own."""
    names = [name for name in names_compared(plain, result) if name in result]
    others = [name for name in names if not isinstance(plain[name], torch.Tensor)]
    return tuple(name for name in others if alike(result[name], plain[name]) is None)


# (relative, absolute): what other kernels for the same model may differ by. Others: not at all.
_BY_DTYPE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-8),
    torch.float32: (1e-3, 1e-4),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
_NARROW = (0.2, 0.1)  # floats of eight bits and less


@dataclass(frozen=True)
class Difference(Result):
    """The first value in which a run differs from the plain one.

    Attributes:
        stage: since when it is wrong: ``tracing``, ``pass``, ``compilation``, ``replay``,
            ``padding``, or ``grouping`` of items of an encoder.
        inputs: which set of inputs, from 0; of a manager, which batch.
        piece: its name, such as ``piece_2``; ``the whole step`` of a FULL graph; ``the result``, or
            an eager break, of a wrapper; empty if unknown.
        op: the op that makes the value; empty if unknown.
        line: the user's line of it, as ``model.py:12 in forward: y = f(x)``.
        value: the name of the value in the piece, or its path in the result.
        rows: the first rows that differ, at most eight.
        padding_rows: those of them that are padding.
        largest: the largest absolute difference; NaN where that has no meaning.
        detail: in words.
        pieces: with ``verify(bisect=True)`` the smallest set of pieces that are wrong together: two
            where one overwrites a result of the other. Without it: ``piece``.
        culprit: with ``verify(bisect=True)`` the name of the pass, if a pass makes it wrong.

    Example:
        >>> from cgcompile.debug.compare import Difference
        >>> difference = Difference(stage="replay", piece="piece_2", rows=(3,))
        >>> difference.piece
        'piece_2'
    """

    stage: str = ""
    inputs: int = 0
    piece: str = ""
    op: str = ""
    line: str = ""
    value: str = ""
    rows: tuple[int, ...] = ()
    padding_rows: tuple[int, ...] = ()
    largest: float = math.nan
    detail: str = ""
    pieces: tuple[str, ...] = ()
    culprit: str = ""

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.piece, self.op)))
        rows = [f"wrong by {self.stage}, inputs {self.inputs}: {where or 'location unknown'}"]
        if self.line:
            rows.append(f"  at    {self.line}")
        rows.append(f"  value {self.value}: {self.detail}")
        if self.padding_rows:
            rows.append(f"  rows {list(self.padding_rows)} are padding")
        if len(self.pieces) > 1:
            rows.append(f"  wrong together: {', '.join(self.pieces)}")
        return "\n".join(rows)


@dataclass(frozen=True)
class Tolerance:
    """How much numbers may differ."""

    exact: bool = False
    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return (relative, absolute) for numbers of a dtype."""
        if self.rtol is not None or self.atol is not None:
            return self.rtol or 0.0, self.atol or 0.0
        number = dtype.to_real() if dtype.is_complex else dtype
        if self.exact or not number.is_floating_point:
            return 0.0, 0.0
        return _BY_DTYPE.get(number, _NARROW)

    def first(
        self, piece: str, expected: Mapping[str, Any], actual: Mapping[str, Any]
    ) -> Difference | None:
        """Return the first value of a piece, or of the result, that differs; synchronises."""
        for name in names_compared(expected, actual):
            plain, replayed = expected[name], actual.get(name)
            if not isinstance(plain, torch.Tensor):
                same = alike(replayed, plain) is not False
            elif isinstance(replayed, torch.Tensor):
                same = (replayed.shape, replayed.dtype) == (plain.shape, plain.dtype)
            else:
                same = False
            if name not in actual or not same:
                after = _value_text(replayed) if name in actual else "nothing"
                text = f"{after} in the replay, {_value_text(plain)} in the plain step"
                return Difference(piece=piece, value=name, detail=text)
            if isinstance(plain, torch.Tensor):
                bounds = self.of(plain.dtype)
                if not _close(replayed, plain, *bounds):
                    return _of_numbers(piece, name, plain, replayed, *bounds)
        return None

    def __str__(self) -> str:
        if self.rtol is not None or self.atol is not None:
            return f"rtol={self.rtol or 0.0:g}, atol={self.atol or 0.0:g}"
        return "bitwise" if self.exact else "by dtype"


def _value_text(value: Any) -> str:
    return str(value) if isinstance(value, Opened) else layout_text(value)


def _close(result: Any, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    if rtol == atol == 0.0:
        return torch.equal(numbers_as_bytes(result), numbers_as_bytes(expected))
    pair = comparable(result), comparable(expected)
    return torch.allclose(*pair, rtol=rtol, atol=atol, equal_nan=True)


def _of_numbers(
    piece: str, name: str, plain: torch.Tensor, result: Any, rtol: float, atol: float
) -> Difference:
    wide = torch.complex128 if plain.dtype.is_complex else torch.float64
    result, plain = result.to(wide), plain.to(wide)
    wrong = ~torch.isclose(result, plain, rtol=rtol, atol=atol, equal_nan=True)
    if rtol == atol == 0.0 and not result.is_complex():
        wrong |= result.signbit() != plain.signbit()  # -0.0 is not 0.0
    largest = (result - plain).abs()[wrong].max().item() if wrong.any() else 0.0
    flat = wrong.reshape(wrong.shape[0], -1).any(1) if wrong.dim() else wrong.reshape(1)
    rows = tuple(flat.nonzero()[:8, 0].tolist())
    count, total = int(wrong.sum()), wrong.numel()
    text = f"{count} of {total} numbers differ, by up to {largest:.3g}, first in rows {list(rows)}"
    return Difference(piece=piece, value=name, rows=rows, largest=largest, detail=text)


def copied(result: Any) -> dict[str, Any]:
    """Return copies of the values in a result by their paths."""
    return copies(named_values(result, "result"))


# ---------------------------------------------------------------- inputs

Call = tuple[tuple[Any, ...], dict[str, Any]]
_MOST_SETS = 2**20


class InputSets:
    """The arguments of several calls. Tensors of equal layout stay the same objects."""

    def __init__(self, call: Call, prepare: Callable[[], Any] | None = None, seed: int = 0) -> None:
        self._prepare, self._seed = prepare, seed
        self.first = call if prepare is None else prepared(prepare)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the first call."""
        return torch_ops.tree_tensors(self.first)

    def fill(self, number: int) -> Call:
        """Return the arguments of a call; the tensors of the first one are filled, if they fit."""
        if number == 0:
            return self.first
        if self._prepare is None:
            generator = torch.Generator().manual_seed(self._seed + number)
            for tensor in self.tensors:
                _refill(tensor, generator)
            return self.first
        call = prepared(self._prepare)
        if _layouts(call) != _layouts(self.first):
            return call
        for tensor, new in zip(self.tensors, torch_ops.tree_tensors(call), strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(new)
        return self.first


def prepared(prepare: Callable[[], Any]) -> Call:
    """Return what a function makes as inputs: a tuple, a dict, both, or one argument."""
    inputs = prepare()
    if isinstance(inputs, dict):
        return (), inputs
    if not isinstance(inputs, tuple):
        return (inputs,), {}
    both = len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict)
    return (inputs[0], inputs[1]) if both else (inputs, {})


def require_prepare(
    where: str, prepare: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a ``prepare`` that is no function, or that is passed with arguments."""
    expected = "a function that makes the inputs of a call"
    require(prepare is None or callable(prepare), "prepare", where, prepare, expected)
    alone = prepare is None or not (args or kwargs)
    require(alone, "prepare", where, prepare, "None where the arguments are given")


def require_comparison(
    where: str, sets: int, rtol: float | None, atol: float | None, seed: int
) -> None:
    """Refuse numbers that a comparison cannot use."""
    require_whole("sets", where, sets, 1, _MOST_SETS)
    require_whole("seed", where, seed, -(2**63), 2**63 - 1)
    for name, value in (("rtol", rtol), ("atol", atol)):
        require(value is None or value >= 0, name, where, value, "at least 0, or None")


def _layouts(call: Call) -> list[Any]:
    """Return a list that is equal for calls that differ only in the elements of tensors."""
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if torch.is_tensor(leaf) else leaf
        for leaf in torch_ops.tree_leaves(call)
    ]


def _refill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor with other random numbers; not weights, nor elements that share memory."""
    overlaps = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if isinstance(tensor, torch.nn.Parameter) or overlaps or tensor.numel() == 0:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(_random_like(tensor, tuple(tensor.shape), generator))


def _random_like(
    tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Return random numbers on the CPU, of the mean and spread of ``tensor``, or of its range."""
    numbers, shape = tensor.detach().cpu(), tuple(shape)
    if not numbers.dtype.is_floating_point and not numbers.dtype.is_complex:
        is_bool = numbers.dtype is torch.bool
        low, high = (0, 1) if is_bool else (int(numbers.min()), int(numbers.max()))
        drawn = torch.randint(low, high + 1, shape, generator=generator)
        return drawn.to(numbers.dtype)
    wide = numbers.to(torch.complex128 if numbers.dtype.is_complex else torch.float64)
    spread = float(wide.std(correction=0)) if wide.numel() > 1 else 1.0
    mean = wide.mean()
    if not math.isfinite(spread) or spread == 0.0:
        spread, mean = 1.0, torch.zeros((), dtype=wide.dtype)
    drawn = torch.randn(shape, generator=generator, dtype=wide.dtype)
    return (drawn * spread + mean).to(numbers.dtype)


def rows_of(call: Call) -> int:
    """Return the rows of the batch: the first dimension of the first tensor that has one; or 0."""
    return next((len(tensor) for tensor in torch_ops.tree_tensors(call) if tensor.dim()), 0)


def padded(call: Call, size: int, tails: str, generator: torch.Generator) -> Call:
    """Return the call with ``size`` rows, of which the padding rows are random, or NaN.

    Tensors whose first dimension is that of the batch are padded; integers stay in their range.
    """
    real = rows_of(call)

    def pad(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != real:
            return leaf
        tail = _random_like(leaf, (size - real, *leaf.shape[1:]), generator).to(leaf.device)
        if tails == "nan" and tail.dtype.is_floating_point:
            tail.fill_(float("nan"))
        return torch.cat([leaf.detach(), tail])

    result: Call = torch_ops.tree_map(pad, call)
    return result
