"""How close is close enough: :class:`Tolerance`."""

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from cgcompile.graphs.guards import layout_text
from cgcompile.graphs.opened import Opened, named_values, names_compared, uncompared
from cgcompile.graphs.verify import Difference, first_difference

# (relative, absolute): what other kernels for the same model may differ by. Others: not at all.
BY_DTYPE: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-7, 1e-8),
    torch.float32: (1e-3, 1e-4),
    torch.float16: (1e-2, 1e-3),
    torch.bfloat16: (5e-2, 1e-2),
}
_NARROW = (0.2, 0.1)  # what has eight bits and less


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
        """The first value that differs; see :func:`~cgcompile.graphs.verify.first_difference`."""
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
    """What of a result nobody can compare, in words, and whether that is all there is of it.

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
