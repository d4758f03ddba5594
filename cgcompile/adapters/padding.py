"""The adapter of lengths: calls are padded, so that varying lengths share few graphs.

A length is the last size of a mask ``[rows, length]``: an input of that rank whose name ends in
"mask". Every input dimension of this size is padded with zeros to the next of ``pad_lengths``, and
results are cut to the length of the call. Zeros in the mask exclude the padding. The rule: a call
is padded only after a call of the same padded sizes, with at least two thirds as much padding, has
had the results of the unpadded call, whatever the inputs had in the padding. Calls 1, 2, 4, 8 and
so on of the same padded sizes are compared, so that a model whose results depend on the padding for
some contents alone is found; a difference ends the padding of all traces of the function.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch.nn.functional import pad

from cgcompile.adapters.adapter import Adapter, Prepared
from cgcompile.context import callers_context
from cgcompile.graphs.arena import address
from cgcompile.passes.nodes import is_symbolic_number, symbols_of
from cgcompile.passes.split import SplitGraph, Value
from cgcompile.reasons import Fallback, Reason, RunPlain
from cgcompile.runtime.compiled_graph import CompiledGraph

_Numbers = dict[sympy.Symbol, int]  # the sizes of a call

# Makes a padded input, whose begin is overwritten: (its position, the tensor, the padded shape).
_Fill = Callable[[int, torch.Tensor, Sequence[int]], torch.Tensor]


class _CannotPad(RunPlain):
    """A call cannot be padded."""

    def __init__(self, detail: str) -> None:
        super().__init__(Fallback(Reason.PADDING_REFUSED, detail))


def adapt_lengths(graph: CompiledGraph, lengths: Sequence[int]) -> list[Adapter]:
    """Return the adapter that pads calls of a graph; none where no size varies."""
    if not [*graph.split.symbols]:
        return []
    return [Adapter(_Padding(graph, lengths).prepare, graph)]


class _Padding:
    """Pads the inputs of calls, and cuts their results."""

    def __init__(self, graph: CompiledGraph, lengths: Sequence[int]) -> None:
        self._graph, self._split = graph, graph.split
        self._lengths = lengths
        # By padded sizes: calls so far, the number of the next call to compare, the most padding.
        self._calls: dict[tuple[int, ...], int] = {}
        self._next: dict[tuple[int, ...], int] = {}
        self._compared: dict[tuple[int, ...], int] = {}
        self._values: dict[int, torch.Tensor] = {}  # integers seen, by input position
        self._refused: dict[tuple[int, ...], str] = {}  # why not to pad to some sizes
        self._never = ""  # why not to pad this trace
        try:
            self._plan = _Plan(graph.split)
        except _CannotPad as error:
            self._never = error.why.detail

    def prepare(self, inputs: tuple[Any, ...]) -> Prepared:
        """Return the inputs padded, or unchanged if they cannot be padded, which is counted.

        Raises:
            DispatchError: ``strict``, and the step cannot be padded.
        """
        # Under a forward context the caller pads; padding without a graph only costs time.
        if callers_context() is not None or self._graph.why_without(inputs) is not None:
            return Prepared(inputs)
        try:
            return self._padded(inputs)
        except RunPlain as refusal:
            self._graph.degrade(refusal.why, "padding of the compiled step")
        return Prepared(inputs)

    def _padded(self, inputs: tuple[Any, ...]) -> Prepared:
        """Return the inputs padded, or unchanged at a padded length; else raise RunPlain."""
        self._check_not_refused(self._never)
        plan = self._plan
        real = {symbol: inputs[position] for symbol, position in plan.numbers.items()}
        sizes = plan.padded(real, self._lengths)
        if sizes == real:
            return Prepared(inputs)
        if self._is_due(real, sizes):
            if plan.is_constant(inputs):  # equal tokens show no difference
                return Prepared(inputs)
            self._compare(inputs, real, sizes)
        self._check_not_refused(self._never or self._refused.get(plan.key(sizes), ""))
        return Prepared(plan.pad(inputs, sizes), partial(plan.cut, real))

    def _check_not_refused(self, detail: str) -> None:
        """Raise RunPlain with ``detail``, if any, or because a call of any trace differed."""
        details = [*self._graph.differences, detail]
        if details[0]:
            raise _CannotPad(details[0])

    def _is_due(self, real: _Numbers, sizes: _Numbers) -> bool:
        """Count a call; return whether to compare it: by its number, or it has more padding."""
        # Half as much again: an error that grows with the padding shows before it is much larger.
        key = self._plan.key(sizes)
        if key in self._refused:
            return False
        calls = self._calls[key] = self._calls.get(key, 0) + 1
        more = 2 * self._plan.added(real, sizes) > 3 * self._compared.get(key, 0)
        return more or calls >= self._next.get(key, 1)

    def _compare(self, inputs: tuple[Any, ...], real: _Numbers, sizes: _Numbers) -> None:
        """Compare the results of a call without padding and with several paddings."""
        plan, key = self._plan, self._plan.key(sizes)
        refusal = plan.refusal(sizes)
        if refusal is not None:
            self._refused[key] = refusal
            return
        change = ", ".join(f"{real[symbol]} to {sizes[symbol]}" for symbol in plan.lengths)
        device = self._split.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            expected = self._graph.run_uncounted(inputs)
            shared = _shared(expected, inputs)
            if shared is not None:
                name = _name(self._split.result[shared])
                self._never = f"the result {name} is memory of an input"
                return
            try:
                for padded in self._fillings(inputs, sizes):
                    results = plan.cut(real, self._graph.run_uncounted(padded))
                    close = list(map(_is_close, expected, results))
                    if not all(close):
                        name = _name(self._split.result[close.index(False)])
                        self._graph.differences.append(
                            f"the result {name} differs where the length is padded from {change}: "
                            "something reads the padding, or draws random numbers"
                        )
                        return
            except Exception as error:
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                self._refused[key] = f"padded from {change} it raises {text}"
                return
        self._compared[key] = max(plan.added(real, sizes), self._compared.get(key, 0))
        self._next[key] = 2 * self._calls[key]

    def _fillings(self, inputs: tuple[Any, ...], sizes: _Numbers) -> Iterator[tuple[Any, ...]]:
        """Yield padded inputs: zeros, tokens of the same row, tokens of other rows and calls."""
        plan = self._plan
        yield plan.pad(inputs, sizes)
        yield plan.pad(inputs, sizes, lambda _, tensor, shape: _repeated(tensor, shape))
        for position, tensor in plan.integers(inputs):
            met = self._values.get(position, tensor.new_empty(0))
            self._values[position] = torch.unique(torch.cat([met, tensor.flatten()]))
        # A separate generator: the model draws the same random numbers as without padding.
        generator = torch.Generator().manual_seed(sum(self._calls.values()))
        yield plan.pad(inputs, sizes, partial(_foreign, self._values, generator))


class _Plan:
    """Which numbers and dimensions of the inputs and results of a graph are lengths."""

    def __init__(self, split: SplitGraph) -> None:
        self._split = split
        self._guards = [_current(split, guard) for guard, _ in split.symbols.guards()]
        values = list(enumerate(split.inputs))
        self.numbers = {  # the symbols, with the input that each is
            number: position
            for position, value in values
            if is_symbolic_number(value.meta)
            and (number := split.symbols.number(value.meta)).is_Symbol
        }
        masks = {position: self._length_of(value) for position, value in values}
        self._masks = {position for position, symbol in masks.items() if symbol is not None}
        self.lengths = tuple(dict.fromkeys(filter(None, masks.values())))
        if not self.lengths:
            raise _CannotPad(
                "no input [rows, length] has a name that ends in 'mask', with a length that "
                f"varies; the sizes are {', '.join(split.symbols.dims.values())}"
            )
        # Other numbers, such as a step counter, make no shapes.
        shapes = symbols_of([value.meta for value in split.inputs if _is_tensor(value)])
        with_length = [g.free_symbols for g in self._guards if g.free_symbols & {*self.lengths}]
        of_shapes = shapes.union(*with_length)
        self.of_shapes = [symbol for symbol in self.numbers if symbol in of_shapes]
        written = [_name(value) for value in split.inputs if value.mutated]
        if written:
            raise _CannotPad(f"the step may write {written[0]}, and a padded one would write more")
        dims = [(position, value, self._dims(value)) for position, value in values]
        self._sizes = [
            (position, symbols[None]) for position, _, symbols in dims if None in symbols
        ]
        padded = [each for each in dims if each[2] and None not in each[2]]
        for _, value, _ in padded:
            if not _is_contiguous(split, value.meta):
                raise _CannotPad(f"{_name(value)} is not contiguous")
        self._inputs = [(position, symbols) for position, _, symbols in padded]
        self._cuts = [(item, self._dims(value)) for item, value in enumerate(split.result)]
        if any(None in symbols for _, symbols in self._cuts):
            raise _CannotPad("a result is the length itself")

    def _length_of(self, value: Value) -> sympy.Symbol | None:
        """Return the symbol of the last dimension of a mask, else None."""
        if not (_is_tensor(value) and value.meta.dim() == 2 and _name(value).endswith("mask")):
            return None
        symbol = self._split.symbols.number(value.meta.shape[-1])
        return symbol if symbol in self.numbers else None

    def _dims(self, value: Any) -> dict[int | None, sympy.Symbol]:
        """Return the dimensions of a value that are lengths; of a number with the key None."""
        dims: dict[int | None, sympy.Symbol] = {}
        meta = value.meta if isinstance(value, Value) else value
        sizes = enumerate(meta.shape) if isinstance(meta, torch.Tensor) else [(None, meta)]
        for dim, size in sizes:
            if not is_symbolic_number(size):
                continue
            number = self._split.symbols.number(size)
            if number in self.lengths:
                dims[dim] = number
            elif number.free_symbols.intersection(self.lengths):
                text = self._split.symbols.pretty(number)
                raise _CannotPad(f"{_name(value)} has the size {text}, which is no length itself")
        return dims

    def key(self, sizes: _Numbers) -> tuple[int, ...]:
        """Return the sizes that make shapes."""
        return tuple(sizes[symbol] for symbol in self.of_shapes)

    def added(self, real: _Numbers, sizes: _Numbers) -> int:
        """Return how many positions are padded."""
        return max(sizes[symbol] - real[symbol] for symbol in self.lengths)

    def is_constant(self, inputs: tuple[Any, ...]) -> bool:
        """Return whether no padded input but masks has two different elements; synchronises."""
        contents = [inputs[position] for position, _ in self._inputs if position not in self._masks]
        return bool(contents) and not any(
            x.numel() and bool((x != x.flatten()[0]).any()) for x in contents
        )

    def padded(self, real: _Numbers, lengths: Sequence[int]) -> _Numbers:
        """Return the sizes at the next padded lengths; raise RunPlain above the last."""
        sizes = dict(real)
        for symbol in self.lengths:
            length = next((each for each in lengths if each >= real[symbol]), None)
            if length is None:
                longest = max(real[symbol] for symbol in self.lengths)
                detail = f"the length {longest} is above {lengths[-1]}, the last of pad_lengths"
                raise RunPlain(Fallback(Reason.OVERSIZE, detail))
            sizes[symbol] = length
        return sizes

    def refusal(self, sizes: _Numbers) -> str | None:
        """Return the first guard of the trace that fails for these sizes, as text, or None."""
        symbols = self._split.symbols
        for symbol in self.lengths:
            upper = symbols.bounds(symbol)[1]
            if sizes[symbol] > upper:
                return f"the model takes no length of {sizes[symbol]}: it is at most {upper}"
        broken = [guard for guard in self._guards if guard.subs(sizes) is sympy.false]
        lengths = [sizes[symbol] for symbol in self.lengths]
        return (
            f"{symbols.pretty(broken[0])} does not hold for lengths {lengths}" if broken else None
        )

    def integers(self, inputs: tuple[Any, ...]) -> list[tuple[int, torch.Tensor]]:
        """Return the padded inputs of integers, without masks."""
        padded = [(position, inputs[position]) for position, _ in self._inputs]
        return [
            (position, x)
            for position, x in padded
            if position not in self._masks and not (x.is_floating_point() or x.is_complex())
        ]

    def pad(
        self, inputs: tuple[Any, ...], sizes: _Numbers, fill: _Fill | None = None
    ) -> tuple[Any, ...]:
        """Return the inputs at padded sizes; the padding is zero, or filled by ``fill``."""
        result = list(inputs)
        for position, symbol in self._sizes:
            result[position] = sizes[symbol]
        for position, dims in self._inputs:
            tensor, amounts = inputs[position], []
            for dim in reversed(range(tensor.dim())):
                amounts += [0, sizes[dims[dim]] - tensor.shape[dim] if dim in dims else 0]
            result[position] = padded = pad(tensor, amounts)
            if fill is not None and position not in self._masks:
                result[position] = fill(position, tensor, padded.shape)
                result[position][tuple(map(slice, tensor.shape))] = tensor
        return tuple(result)

    def cut(self, real: _Numbers, results: Sequence[Any]) -> tuple[Any, ...]:
        """Return the results of a padded call, cut to the real lengths."""
        items = list(results)
        for item, dims in self._cuts:
            for dim, symbol in dims.items():
                items[item] = items[item].narrow(dim, 0, real[symbol])
            if dims:
                items[item] = items[item].clone()  # dense, as without padding
        return tuple(items)


def _repeated(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor that is repeated up to a shape."""
    for dim, size in enumerate(shape):
        index = torch.arange(size, device=tensor.device) % tensor.shape[dim]
        tensor = tensor.index_select(dim, index)
    return tensor


def _foreign(
    values: dict[int, torch.Tensor],
    generator: torch.Generator,
    position: int,
    tensor: torch.Tensor,
    shape: Sequence[int],
) -> torch.Tensor:
    """Return random values: integers that calls had, or floats out of range of this call."""
    if position in values:
        index = torch.randint(len(values[position]), tuple(shape), generator=generator)
        return values[position][index.to(tensor.device)]
    signs = 2 * torch.randint(2, tuple(shape), generator=generator).to(tensor.device) - 1
    largest = tensor.abs().nan_to_num(0, 0, 0).max()
    return (signs * 2 * largest).to(tensor.dtype)


def _is_tensor(value: Value) -> bool:
    return isinstance(value.meta, torch.Tensor)


def _name(value: Any) -> str:
    return str(getattr(value, "source", None) or getattr(value, "name", value))


def _current(split: SplitGraph, guard: sympy.Expr) -> sympy.Expr:
    return guard.xreplace({symbol: split.symbols.current(symbol) for symbol in guard.free_symbols})


def _is_contiguous(split: SplitGraph, tensor: torch.Tensor) -> bool:
    """Return whether a traced tensor is contiguous, without a guard on its sizes."""
    expected, number = sympy.Integer(1), split.symbols.number
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if number(stride) != expected and number(size) != 1:
            return False
        expected = expected * number(size)
    return True


def _shared(results: Sequence[Any], inputs: Sequence[Any]) -> int | None:
    """Return the index of a result in memory of an input, which a padded call would not be."""
    memory = {address(x) for x in inputs if isinstance(x, torch.Tensor)} - {0}
    aliases = [isinstance(x, torch.Tensor) and address(x) in memory for x in results]
    return aliases.index(True) if any(aliases) else None


def _is_close(expected: Any, actual: Any) -> bool:
    """Return whether two results differ by rounding at most, relative to each column's largest."""
    if not isinstance(expected, torch.Tensor):
        return bool(expected == actual)
    if not (expected.dtype.is_floating_point and expected.numel()):
        return torch.equal(expected, actual)
    columns = expected.shape[-1] if expected.dim() > 1 else 1
    numbers, others = (each.reshape(-1, columns).double() for each in (expected, actual))
    largest = numbers.nan_to_num(0, 0, 0).abs().amax(0)
    scale = largest.maximum(largest.median())  # a column of few numbers may be near 0 by chance
    tolerance = max(4 * torch.finfo(expected.dtype).eps, 1e-4) * scale
    same = (numbers == others) | (numbers.isnan() & others.isnan())
    return bool((same | ((numbers - others).abs() <= tolerance)).all())
