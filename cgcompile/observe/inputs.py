"""Sets of inputs: made by the caller, or the same tensors filled with other random numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cgcompile import compat
from cgcompile.settings import require, require_whole

MOST_SETS = 2**20

Call = tuple[tuple[Any, ...], dict[str, Any]]


class InputSets:
    """The arguments of several calls. Tensors of equal layout stay the same objects.

    Args:
        inputs: a tensor, a sequence of positional arguments, a mapping of keyword arguments, or a
            callable that makes one of these from the number of the set.
        seed: of the random numbers; what the caller's generators draw is not changed.

    Attributes:
        first: arguments of the first call.
    """

    def __init__(self, inputs: Any, seed: int = 0) -> None:
        self._make: Callable[[int], Any] | None = None
        if callable(inputs) and not isinstance(inputs, torch.Tensor):
            self._make = inputs
        self._seed = seed
        self.first = _call(inputs if self._make is None else self._make(0))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the first call."""
        return compat.tree_tensors(self.first)

    def fill(self, number: int) -> Call:
        """The arguments of a call; the tensors of the first one are filled, if they fit."""
        if number == 0:
            return self.first
        if self._make is None:
            generator = torch.Generator().manual_seed(self._seed + number)
            for tensor in self.tensors:
                refill(tensor, generator)
            return self.first
        made = _call(self._make(number))
        if _layouts(made) != _layouts(self.first):
            return made
        for tensor, new in zip(self.tensors, compat.tree_tensors(made), strict=True):
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(new)
        return self.first


def _call(inputs: Any) -> Call:
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        named = all(isinstance(name, str) for name in inputs)
        require(named, "inputs", "verify", inputs, "a mapping of arguments by name")
        return (), dict(inputs)
    expected = "a tensor, a sequence of arguments or a mapping of arguments by name"
    require(isinstance(inputs, Iterable), "inputs", "verify", inputs, expected)
    return tuple(inputs), {}


def require_comparison(
    where: str, sets: int, rtol: float | None, atol: float | None, seed: int
) -> None:
    """Refuse numbers that a comparison cannot use.

    Raises:
        ConfigError: names the number.
    """
    require_whole("sets", where, sets, 1, MOST_SETS)
    require_whole("seed", where, seed, -(2**63), 2**63 - 1)
    for name, value in (("rtol", rtol), ("atol", atol)):
        require(value is None or value >= 0, name, where, value, "at least 0, or None")


def _layouts(call: Call) -> list[Any]:
    """Equal for calls that differ in the numbers of their tensors alone."""
    return [
        (each.shape, each.stride(), each.dtype, each.device) if torch.is_tensor(each) else each
        for each in compat.tree_leaves(call)
    ]


def refill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Other numbers of the same kind: of equal mean and spread, or integers of the same range.

    Weights, and tensors whose elements share memory, stay as they are.
    """
    overlaps = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    if isinstance(tensor, torch.nn.Parameter) or overlaps or tensor.numel() == 0:
        return
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(alike(tensor, tuple(tensor.shape), generator))


def alike(tensor: torch.Tensor, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random numbers like those of ``tensor``, on the CPU: of its mean and spread, or its range."""
    shape, device = tuple(shape), "cpu"
    given = tensor.detach().cpu()
    if given.dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not given.dtype.is_floating_point and not given.dtype.is_complex:
        low, high = int(given.min()), int(given.max())
        return torch.randint(low, high + 1, shape, generator=generator, device=device).to(
            given.dtype
        )
    wide = given.to(torch.complex128 if given.dtype.is_complex else torch.float64)
    spread = float(wide.std(correction=0)) if wide.numel() > 1 else 1.0
    mean = wide.mean()
    made = torch.randn(shape, generator=generator, dtype=wide.dtype)
    if not torch.isfinite(torch.as_tensor(spread)) or spread == 0.0:
        spread, mean = 1.0, torch.zeros((), dtype=wide.dtype)
    return (made * spread + mean).to(given.dtype)


def rows_of(call: Call) -> int:
    """How many rows the batch has: the first dimension of the first tensor that has one; else 0."""
    return next((len(each) for each in compat.tree_tensors(call) if each.dim()), 0)


def padded(call: Call, size: int, tails: str, generator: torch.Generator) -> Call:
    """The same call with ``size`` rows; those behind the real ones are random, or NaN.

    Tensors whose first dimension is that of the batch are padded; integers stay in their range.
    """
    real = rows_of(call)

    def pad(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or len(leaf) != real:
            return leaf
        tail = alike(leaf, (size - real, *leaf.shape[1:]), generator).to(leaf.device)
        if tails == "nan" and tail.dtype.is_floating_point:
            tail.fill_(float("nan"))
        return torch.cat([leaf.detach(), tail])

    found: Call = compat.tree_map(pad, call)
    return found
