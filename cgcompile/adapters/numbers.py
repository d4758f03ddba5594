"""The adapter of Python numbers: a compiled graph takes the numbers of the caller as tensors.

The host computes at each call, in Python, what eager computes from them. The rule: a call with
numbers with which the graph would compute otherwise than eager is not converted; what raises in
Python raises as in eager.
"""

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import fx

from cgcompile.adapters.adapter import Adapter, Prepared
from cgcompile.passes.numbers import HostNumber, HostNumbers, Numbers
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.runtime.weight_sets import picker
from cgcompile.torch_compat import dynamo


def adapt_numbers(
    gm: fx.GraphModule, floats: Collection[fx.Node], *, folds: bool
) -> tuple[fx.GraphModule, list[Adapter]]:
    """Return the graph that takes numbers as tensors, and its adapter; the graph itself without.

    Args:
        gm: changed in place: other floats become constants if ``folds``.
        floats: nodes that read a Python float of the caller which varies.
        folds: whether pieces are compiled from the graph, which then takes no other float.
    """
    varying = Numbers(gm, floats)
    if folds:
        dynamo.make_floats_constant(gm, but=varying.tensors)
    numbers = varying.taken()
    if numbers is None:
        return gm, []
    original = dynamo.with_checkpoints(gm).forward
    return numbers.graph, [Adapter(_Computing(numbers).prepare, original)]


class _Computing:
    """Computes the numbers of a call on the host."""

    def __init__(self, numbers: HostNumbers) -> None:
        self._numbers, self._added = numbers.numbers, numbers.numbers[: numbers.num_added]
        self._compute, self._results = numbers.compute, numbers.results
        self._sources, self._inputs = picker(numbers.sources), picker(numbers.inputs)

    def prepare(self, inputs: tuple[Any, ...]) -> Prepared:
        """Return the inputs with the numbers as tensors; raise RunPlain where one cannot be."""
        try:
            computed = self._compute(*self._sources(inputs))
        except (ArithmeticError, ValueError) as error:  # raised by the original graph, too
            detail = f"a number made of the inputs raises {type(error).__name__}: {error}"
            raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail)) from error
        for number, known in zip(computed, self._numbers, strict=False):  # results are more
            if not _fits(number, known):
                raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, _why_not(number, known)))
        pairs = zip(computed, self._added, strict=False)
        tensors = tuple([torch.tensor(number, dtype=known.dtype) for number, known in pairs])
        insert = partial(self._inserted, computed) if self._results else None
        return Prepared(self._inputs(inputs + tensors), insert)

    def _inserted(self, computed: tuple[Any, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result with the numbers in it that the host has computed."""
        results = list(result)
        for item, number in zip(self._results, computed[len(self._numbers) :], strict=True):
            results.insert(item, number)
        return tuple(results)


def _fits(number: Any, known: HostNumber) -> bool:
    """Return whether ops compute with the tensor of a number as eager does with the number."""
    if type(number) is not known.kind:
        return False
    if known.kind is int:
        return bool(-(1 << 63) <= number < 1 << 63)
    return abs(number) <= known.limit or not math.isfinite(number)


def _why_not(number: Any, known: HostNumber) -> str:
    what = f"a number made of {known.of} is {number!r}"
    if type(number) is not known.kind:
        return f"{what}, no {known.kind.__name__} as when it was traced"
    return f"{what}, beyond {'int64' if known.kind is int else format(known.limit, '.4g')}"
