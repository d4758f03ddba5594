"""The adapter of tensor subclasses: a compiled graph takes the plain tensors inside of them.

At each call the plain tensors are read anew, so that one which was replaced is another weight. The
rule: a call whose subclasses are built in another way than those of the trace is not converted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from cgcompile.adapters.adapter import Adapter, Prepared
from cgcompile.graphs.contract import function_of
from cgcompile.graphs.steps import GRADIENTS
from cgcompile.passes.nodes import is_symbolic_number
from cgcompile.passes.subclasses import Input, Result, Unwrapped, unwrap_subclasses
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.torch_compat import dynamo, expressions, raw_memory, torch_ops


def adapt_subclasses(gm: fx.GraphModule) -> tuple[fx.GraphModule, list[Adapter]]:
    """Return the graph on plain tensors, and its adapter; the graph itself without subclasses."""
    unwrapped = unwrap_subclasses(gm)
    if unwrapped is None:
        return gm, []
    original = dynamo.with_checkpoints(gm).forward
    return unwrapped.graph, [Adapter(_Unwrapping(unwrapped).prepare, original)]


class _Unwrapping:
    """Reads the plain tensors of a call, and builds the subclasses among its results."""

    def __init__(self, unwrapped: Unwrapped) -> None:
        self._wrapped = [(n, each) for n, each in enumerate(unwrapped.inputs) if each.wrapper]
        self._dropped = [(n, each) for n, each in enumerate(unwrapped.inputs) if each.dropped]
        self._checked = [(n, each) for n, each in self._wrapped if not each.static]
        self._parts = _function([f"g[{n}].{path}" for n, x in self._wrapped for path in _paths(x)])
        self._inputs = _inputs_reader(unwrapped.inputs)
        # Compares the parts with those seen before.
        self._alike: Callable[..., bool] | None = None if self._wrapped else lambda: True
        results = unwrapped.results
        builds = any(each.wrapper or each.input is not None for each in results)
        self._results: Sequence[Result] = results if builds else ()
        self._symbols = unwrapped.symbols

    def prepare(self, inputs: tuple[Any, ...]) -> Prepared:
        """Return the plain tensors of a call; raise RunPlain where the trace had others."""
        needed = torch.is_grad_enabled() and any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in inputs
        )
        if needed or torch_ops.has_tangent(inputs):
            raise RunPlain(GRADIENTS)  # the plain tensors were traced without them
        for position, spec in self._dropped:
            _check_built(spec, inputs[position] is raw_memory.real_object(spec.fake))
        for position, spec in self._checked:
            assert spec.wrapper is not None
            _check_built(spec, spec.wrapper.fits(inputs[position]))
        parts = self._parts(*inputs)
        if self._alike is None or not self._alike(*parts):
            self._check_parts(inputs, parts)
        build = partial(self._built, inputs) if self._results else None
        return Prepared(self._inputs(*inputs), build)

    def _check_parts(self, inputs: tuple[Any, ...], parts: tuple[Any, ...]) -> None:
        """Compare the subclasses with those of the trace; remember their layouts if they agree."""
        # Sizes may vary as the trace allows: it admits new layouts, which a contract does not.
        layouts: list[tuple[list[int | None], list[int]]] = []
        for position, spec in self._wrapped:
            assert spec.wrapper is not None
            _check_built(spec, spec.wrapper.fits(inputs[position]))
            tensors = spec.wrapper.parts(inputs[position])
            for tensor, fake in zip(tensors, spec.fakes, strict=True):
                _check_built(spec, _like(tensor, fake))
                sizes = [None if is_symbolic_number(n) else int(n) for n in fake.shape]
                layouts.append((sizes, list(tensor.stride())))
        self._alike = raw_memory.alike(parts, layouts)

    def _built(self, inputs: tuple[Any, ...], result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the result with subclasses built from the plain tensors in it."""
        plain, results = iter(result), list[Any]()
        for spec in self._results:
            if spec.input is not None:
                results.append(inputs[spec.input])
            elif spec.wrapper is None:
                results.append(next(plain))
            else:
                size = [self._number(n, inputs) for n in spec.wrapper.size]
                stride = [self._number(n, inputs) for n in spec.wrapper.stride]
                results.append(spec.wrapper.build(plain, torch.Size(size), tuple(stride)))
        return tuple(results)

    def _number(self, number: Any, inputs: tuple[Any, ...]) -> int:
        """Return the value that a traced size has in a call."""
        if not is_symbolic_number(number):
            return int(number)
        numbers = {symbol: inputs[position] for symbol, position in self._symbols.items()}
        return int(expressions.evaluated(number.node.expr, numbers))


def _check_built(spec: Input, as_traced: bool) -> None:
    """Raise RunPlain where a subclass is not built as when it was traced."""
    if not as_traced:
        detail = f"{spec.path} is not built as when it was traced"
        raise RunPlain(Fallback(Reason.UNSUPPORTED_INPUT, detail))


def _like(tensor: torch.Tensor, fake: torch.Tensor) -> bool:
    """Return whether a plain tensor has the properties of one in the trace; sizes may vary."""
    if (tensor.dtype, tensor.device, tensor.dim()) != (fake.dtype, fake.device, fake.dim()):
        return False
    pairs = zip((*tensor.shape, *tensor.stride()), (*fake.shape, *fake.stride()), strict=True)
    return all(is_symbolic_number(known) or number == known for number, known in pairs)


def _inputs_reader(inputs: Sequence[Input]) -> Callable[..., tuple[Any, ...]]:
    """Return a function from the inputs to the inputs of the graph on plain tensors."""
    items: list[str] = []
    for position, spec in enumerate(inputs):
        if spec.wrapper is not None:
            items += [f"g[{position}].{path}" for path in _paths(spec)]
        elif not spec.dropped:
            items.append(f"g[{position}]")
    return _function(items)


def _paths(spec: Input) -> tuple[str, ...]:
    assert spec.wrapper is not None
    return spec.wrapper.paths


def _function(items: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
    """Return a function of the inputs ``g`` that evaluates expressions to a tuple."""
    text = "".join([f"{item}, " for item in items])
    return function_of(f"def parts(*g):\n    return ({text})\n", {})
