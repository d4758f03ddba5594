"""Values of two runs compared: :class:`Difference`, :class:`Tolerance`."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile.graphs.copies import comparable, numbers_as_bytes
from cgcompile.graphs.guards import layout_text
from cgcompile.observe.opened import (
    Opened,
    alike,
    named_values,
    names_compared,
    uncompared,
    value_text,
)

# (relative, absolute): what other kernels for the same model may differ by. Others: not at all.
BY_DTYPE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-8),
    torch.float32: (1e-3, 1e-4),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
_NARROW = (0.2, 0.1)  # what has eight bits and less


@dataclass(frozen=True)
class Difference:
    """The first value in which a run differs from the plain one.

    Attributes:
        stage: since when it is wrong: ``tracing``, ``pass``, ``compilation``, ``replay``,
            ``padding`` or ``breakable``.
        inputs: which set of inputs, from 0; of a manager, which batch.
        piece: its name, such as ``piece_2``; ``the whole step`` of a FULL graph; ``the result``, or
            an eager break, of a wrapper; empty if unknown.
        op: the op, or the one that makes the value if the device does not let us look closer; empty
            if unknown.
        line: the user's line of it, as ``model.py:12 in forward: y = f(x)``.
        value: the name of the value in the piece, or its path in the result.
        rows: the first rows that differ, at most eight.
        padding_rows: those of them that are padding.
        largest: the largest absolute difference; NaN where that has no meaning.
        detail: in words.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: lists for tuples, None for NaN."""
        found: dict[str, Any] = plain(self)
        return found

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.piece, self.op)))
        rows = [f"wrong by {self.stage}, inputs {self.inputs}: {where or 'location unknown'}"]
        if self.line:
            rows.append(f"  at    {self.line}")
        rows.append(f"  value {self.value}: {self.detail}")
        if self.padding_rows:
            rows.append(f"  rows {list(self.padding_rows)} are padding")
        return "\n".join(rows)


def first_difference(
    piece: str,
    plain: Mapping[str, Any],
    replayed: Mapping[str, Any],
    rtol: float,
    atol: float,
) -> Difference | None:
    """Compare values of the same names; synchronises.

    Values without a usable ``==`` are no difference; see ``opened.uncompared``.

    Args:
        piece: the part of the step that has them.
        plain: as the plain step made them.
        replayed: as the replay made them.
        rtol: relative tolerance; 0 for bitwise.
        atol: absolute tolerance.
    """
    for name in names_compared(plain, replayed):
        expected: Any = plain[name]
        found: Any = replayed.get(name)
        tensor = isinstance(expected, torch.Tensor)
        same = _same_kind(found, expected) if tensor else alike(found, expected) is not False
        if name not in replayed or not same:
            now = value_text(found) if name in replayed else "nothing"
            text = f"{now} in the replay, {value_text(expected)} in the plain step"
            return Difference(piece=piece, value=name, detail=text)
        if tensor and not _close(found, expected, rtol, atol):
            return _of_numbers(piece, name, expected, found, rtol, atol)
    return None


def _same_kind(found: Any, expected: torch.Tensor) -> bool:
    kind = isinstance(found, torch.Tensor)
    return kind and (found.shape, found.dtype) == (expected.shape, expected.dtype)


def _close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> bool:
    if rtol == atol == 0.0:
        return torch.equal(numbers_as_bytes(found), numbers_as_bytes(expected))
    pair = comparable(found), comparable(expected)
    return torch.allclose(*pair, rtol=rtol, atol=atol, equal_nan=True)


def _of_numbers(
    piece: str, name: str, plain: torch.Tensor, found: torch.Tensor, rtol: float, atol: float
) -> Difference:
    wide = torch.complex128 if plain.dtype.is_complex else torch.float64
    found, plain = found.to(wide), plain.to(wide)
    wrong = ~torch.isclose(found, plain, rtol=rtol, atol=atol, equal_nan=True)
    if rtol == atol == 0.0 and not found.is_complex():
        wrong |= found.signbit() != plain.signbit()  # -0.0 is not 0.0
    largest = (found - plain).abs()[wrong].max().item() if wrong.any() else 0.0
    flat = wrong.reshape(wrong.shape[0], -1).any(1) if wrong.dim() else wrong.reshape(1)
    rows = tuple(flat.nonzero()[:8, 0].tolist())
    count, total = int(wrong.sum()), wrong.numel()
    text = f"{count} of {total} numbers differ, by up to {largest:.3g}, first in rows {list(rows)}"
    return Difference(piece=piece, value=name, rows=rows, largest=largest, detail=text)


@dataclass(frozen=True)
class Tolerance:
    """How much numbers may differ.

    Attributes:
        exact: not at all, where ``rtol`` and ``atol`` do not say otherwise.
        rtol: relative; None: by dtype.
        atol: absolute; None: by dtype.
    """

    exact: bool = False
    rtol: float | None = None
    atol: float | None = None

    def of(self, dtype: torch.dtype) -> tuple[float, float]:
        """(relative, absolute) for numbers of a dtype."""
        if self.rtol is not None or self.atol is not None:
            return self.rtol or 0.0, self.atol or 0.0
        number = dtype.to_real() if dtype.is_complex else dtype
        if self.exact or not number.is_floating_point:
            return 0.0, 0.0
        return BY_DTYPE.get(number, _NARROW)

    def first(
        self, where: str, plain: Mapping[str, Any], found: Mapping[str, Any]
    ) -> Difference | None:
        """The first value that differs; see :func:`first_difference`."""
        for name in names_compared(plain, found):
            value = plain[name]
            tensor = isinstance(value, torch.Tensor)
            rtol, atol = self.of(value.dtype) if tensor else (0.0, 0.0)
            difference = first_difference(where, {name: value}, found, rtol, atol)
            if difference is not None:
                return difference
        return None

    def __str__(self) -> str:
        if self.rtol is not None or self.atol is not None:
            return f"rtol={self.rtol or 0.0:g}, atol={self.atol or 0.0:g}"
        return "bitwise" if self.exact else "by dtype"


def uncomparable(
    plain: Mapping[str, Any], found: Mapping[str, Any], written: Collection[str]
) -> tuple[tuple[str, ...], bool]:
    """Return what of a result has no usable ``==``, in words, and whether that is all of it.

    Args:
        plain: what the plain step returned and wrote.
        found: likewise of another run.
        written: the names of what was written.
    """
    names = uncompared(plain, found)
    results = [n for n in plain if n not in written and not isinstance(plain[n], Opened)]
    said = tuple(f"{name} ({layout_text(plain[name])})" for name in names)
    return said, bool(names) and set(results) <= set(names)


def named(result: Any) -> dict[str, Any]:
    """The values in a result by their paths."""
    return named_values(result, "result")


def without_gradients() -> AbstractContextManager[Any]:
    """No gradients inside; inference mode stays as it is."""
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def plain(value: Any) -> Any:
    """A frozen value as dicts, lists, text and numbers; None for what JSON has no number for."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
