"""Derive the protocol of an encoder from runs on example items: :class:`DerivedEncoder`.

The tower runs on each example alone and on several together. From these runs follow the rows of its
results, which host values (:mod:`~cgcompile.encoder.lifting`) are tables by row, offsets or
constants, and how those of several items are joined. What does not follow is an error. The rule:
all that is derived is compared with eager runs before anything is captured, and each budget again.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import accumulate, chain, zip_longest
from typing import Any, NamedTuple

import torch

from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.graphs import GraphInputs
from cgcompile.encoder.lifting import HostTrace, LiftedRun, Site
from cgcompile.encoder.patches import offset_buffer, positions_tail
from cgcompile.encoder.protocol import (
    OFFSETS,
    PATCHES,
    TOKENS,
    ZEROS,
    EncoderBuffer,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)
from cgcompile.graphs.capture import inside_capture
from cgcompile.graphs.reads import modules_of
from cgcompile.settings import require, require_arguments
from cgcompile.torch_compat import torch_ops

ITEMS, CONSTANT, TABLE = "items", "constant", "table"
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2}
_LOWEST = 3e-2  # tolerance for bfloat16 and lower precision
_REMEMBERED = 512  # items whose host values are kept
_LONGEST = 1024  # rows of a padding sequence
_MOST = 16  # times the largest example: the largest budget
_PACKED = 3  # items that are compared together on each budget
_NEAR_ZERO = 100  # an item whose numbers are smaller by this than those of others is compared less

Key = tuple[Any, ...]
"""The host inputs of one item."""

Sizes = Mapping[str, Sequence[int]]
"""By unit the numbers of some items: PATCHES, TOKENS, ITEMS."""


class HostValue(NamedTuple):
    """How the host values of items become a buffer."""

    name: str
    kind: str  # TABLE, OFFSETS or CONSTANT
    like: torch.Tensor  # the value of one item
    unit: str = PATCHES  # what its rows, or its last entry, count
    shift: str = ""  # the unit of earlier items, which is added
    permutes: bool = False  # a permutation of all rows
    longest: int = _LONGEST  # rows of a padding sequence

    def fits(self, value: torch.Tensor, size: int) -> bool:
        """Return whether a value fits one item of a size in its unit."""
        if self.kind == CONSTANT:
            return _same(value, self.like)
        if value.dtype != self.like.dtype or value.shape[1:] != self.like.shape[1:]:
            return False
        if self.kind == TABLE:
            right = value.dim() > 0 and len(value) == size
            return right and (not self.permutes or _is_permutation(value))
        if not _is_indices(value) or len(value) < 2 or int(value[0]) or int(value[-1]) != size:
            return False
        return bool((value.diff() >= 0).all())

    def joined(self, values: Sequence[torch.Tensor], sizes: Sizes) -> torch.Tensor:
        """Return the value of several items."""
        if self.shift:
            before = accumulate(sizes[self.shift], initial=0)
            values = [value + count for value, count in zip(values, before, strict=False)]
        if self.kind == OFFSETS:
            starts = torch.zeros(1, dtype=self.like.dtype)
            return torch.cat([starts, *[value[1:] for value in values]])
        return self.like if self.kind == CONSTANT else torch.cat(list(values))


def derive_value(
    name: str,
    alone: Sequence[torch.Tensor],
    together: Sequence[tuple[Sequence[int], torch.Tensor]],
    sizes: Sizes,
) -> HostValue:
    """Derive the rule of a value from runs of single items and of several items."""
    first, rules = alone[0], [HostValue(name, CONSTANT, alone[0])]
    shifts, longest = [""], _LONGEST
    if not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool):
        shifts += [PATCHES, TOKENS]
    if all(_is_indices(value) and len(value) > 1 for value in alone):
        longest = max(1, min(longest, max(int(value.diff().max()) for value in alone)))
    permutes = all(map(_is_permutation, (*alone, *[value for _, value in together])))
    for unit in (PATCHES, TOKENS, ITEMS):
        rules.append(HostValue(name, OFFSETS, first, unit, unit, longest=longest))
        rules += [HostValue(name, TABLE, first, unit, shift, permutes) for shift in shifts]
    for rule in rules:
        if all(map(rule.fits, alone, sizes[rule.unit])):
            for order, value in together:
                parts = {unit: [counts[i] for i in order] for unit, counts in sizes.items()}
                if not _same(rule.joined([alone[i] for i in order], parts), value):
                    break
            else:
                return rule
    shapes, counts = [list(value.shape) for value in alone], (sizes[PATCHES], sizes[TOKENS])
    raise EncoderError.derive_value(name=name, found=shapes, rows=counts[0], tokens=counts[1])


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _is_indices(value: torch.Tensor) -> bool:
    return value.dim() == 1 and value.dtype in (torch.int32, torch.int64)


def _is_permutation(value: torch.Tensor) -> bool:
    return _is_indices(value) and sorted(value.tolist()) == list(range(len(value)))


# ---------------------------------------------------------------- inputs


class Inputs:
    """The inputs of a tower: rows [n, ...], host inputs with one entry for each item, constants."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        self.rows: list[str] = []
        self.hosts: list[str] = []
        self.constants: dict[str, Any] = {}
        first = examples[0]
        floating = [name for name in first if _has_rows(first[name])]
        if not floating:
            self._refuse("an example", list(first), "an input of floating point among them")
        for example in examples:
            if example.keys() != first.keys():
                self._refuse("an example", list(example), f"the inputs {list(first)}")
        # Several numbers in each: an input of one number by item may come first.
        several = [
            name for name in floating if any(len(example[name]) != 1 for example in examples)
        ]
        rows = [len(example[(several or floating)[0]]) for example in examples]
        for name in first:
            self._add(name, [example[name] for example in examples], rows)

    @staticmethod
    def _refuse(name: str, value: object, expected: str) -> None:
        raise EncoderError.derive_input(name=name, found=value, expected=expected)

    def _add(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Classify one input."""
        first = values[0]
        listed = isinstance(first, (list, tuple)) or (
            isinstance(first, torch.Tensor) and first.dim() > 0
        )
        lengths = list(map(len, values)) if listed else []
        ones = [1] * len(values)
        if lengths == ones and (rows != ones or not _has_rows(first)):
            self.hosts.append(name)
        elif listed and isinstance(first, torch.Tensor):
            if lengths != list(rows):
                self._refuse(
                    f"input {name!r}",
                    f"of {lengths} rows",
                    f"{list(rows)} rows, or one entry in each",
                )
            for value in values:
                if value.shape[1:] != first.shape[1:]:
                    one, other = list(first.shape[1:]), list(value.shape[1:])
                    raise EncoderError.derive_shapes(name=name, one=one, other=other)
            self.rows.append(name)
        elif not all(_equal(value, first) for value in values):
            self._refuse(
                f"input {name!r}",
                repr(first),
                "a tensor or list of one entry for the item, or the same in all examples",
            )
        else:
            self.constants[name] = first

    def keys(self, call: Mapping[str, Any]) -> list[Key]:
        """Return the host inputs of each item; reads tensors on the host."""
        for name in (*self.rows, *self.hosts):
            if call.get(name) is None:
                raise EncoderError.no_input(name=name, known=list(call))
        known = [*self.rows, *self.hosts, *self.constants]
        for name in call:
            if name not in known:
                text, expected = "is no input of the examples", f"of {known} alone"
                raise EncoderError.derive_call(name=name, found=text, expected=expected)
        for name, value in self.constants.items():
            if not _equal(call.get(name, value), value):
                text = f"is {call[name]!r}"
                raise EncoderError.derive_call(name=name, found=text, expected=repr(value))
        columns = [_hashable(call[name]) for name in self.hosts]
        for name, column in zip(self.hosts, columns, strict=True):
            if len(column) != len(columns[0]):
                text, expected = f"has {len(column)} entries", f"{len(columns[0])}"
                raise EncoderError.derive_call(name=name, found=text, expected=expected)
        return list(zip(*columns, strict=True))

    def on_host(self, call: Mapping[str, Any], indices: Sequence[int] | None) -> dict[str, Any]:
        """Return the host inputs of some items or all, tensors on the CPU."""
        moved = {name: _moved(call[name], torch.device("cpu")) for name in self.hosts}
        return {n: v if indices is None else _picked(v, indices) for n, v in moved.items()}

    def joined(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the call of several items."""
        joined: dict[str, Any] = {}
        for name in (*self.rows, *self.hosts):
            values = [call[name] for call in calls]
            tensors = isinstance(values[0], torch.Tensor)
            joined[name] = torch.cat(values) if tensors else list(chain.from_iterable(values))
        return joined


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _equal(one: Any, other: Any) -> bool:
    """Return whether two constants are equal; arrays and tensors also by dtype."""
    if one is other:
        return True
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if hasattr(one, "tolist") or hasattr(other, "tolist"):
        alike = getattr(one, "dtype", None) == getattr(other, "dtype", None)
        return alike and bool(one.tolist() == other.tolist())
    return bool(one == other)


def _hashable(value: Any) -> Key:
    """Return the entries of a host input."""
    entries = value.tolist() if isinstance(value, torch.Tensor) else value
    nested = (list, tuple, torch.Tensor)
    return tuple(_hashable(each) if isinstance(each, nested) else each for each in entries)


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _picked(value: Any, indices: Sequence[int]) -> Any:
    """Return the entries of a host input of some items."""
    if isinstance(value, torch.Tensor):
        return value[list(indices)]
    return [value[index] for index in indices]


# ---------------------------------------------------------------- results


def rows_of_results(
    alone: Sequence[Any], together: Sequence[Any], orders: Sequence[Sequence[int]]
) -> tuple[int, list[int]]:
    """Return how many dimensions behind the first are of rows too, and the rows of each item."""
    leaves = [leaf for tree in (alone[0], together[0]) for leaf in torch_ops.tree_leaves(tree)]
    if not all(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in leaves):
        raise EncoderError.derive_output(found=[type(leaf).__name__ for leaf in leaves])
    for depth in reversed(range(max(leaf.dim() for leaf in leaves))):
        trees = [torch_ops.tree_leaves(tree) for tree in (*alone, *together)]
        counts = [{len(_flattened(leaf, depth)) for leaf in tree} for tree in trees]
        if all(len(lengths) == 1 for lengths in counts):
            rows = [lengths.pop() for lengths in counts]
            if rows[len(alone) :] == [sum(rows[i] for i in order) for order in orders]:
                return depth, rows[: len(alone)]
    raise EncoderError.derive_output(found=f"shapes {[list(leaf.shape) for leaf in leaves]}")


def _flattened(leaf: torch.Tensor, depth: int) -> torch.Tensor:
    return leaf.flatten(0, max(min(depth, leaf.dim() - 2), 0))


def _difference(actual: torch.Tensor, expected: Sequence[torch.Tensor]) -> float:
    """Return the largest difference of an item, relative to the largest number of that item."""
    # An item that is near 0 by chance differs by rounding: the others limit how small its scale is.
    largest = torch.stack([rows.abs().max() for rows in expected])
    scales = largest.maximum(largest.max() / _NEAR_ZERO).clamp(min=1e-6).unbind()
    worst = 0.0
    for rows, scale in zip(expected, scales, strict=True):
        own, actual = actual[: len(rows)], actual[len(rows) :]
        if own.shape != rows.shape:
            return math.inf
        worst = max(worst, float(((own - rows).abs().max() / scale).nan_to_num(nan=math.inf)))
    return worst


def _with_other_numbers(rows: Mapping[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    """Return the rows of an item in another order, floats with other numbers in their range."""
    # In their range, as a tower may index with them, or take a logarithm.
    generator = torch.Generator().manual_seed(number)
    order = torch.randperm(len(next(iter(rows.values()))), generator=generator)
    return {
        name: _other_floats(value, number, generator) if value.is_floating_point() else value
        for name, value in ((name, value[order.to(value.device)]) for name, value in rows.items())
    }


def _other_floats(value: torch.Tensor, number: int, generator: torch.Generator) -> torch.Tensor:
    """Return numbers that are nearer to 0, for an even ``number`` of the range turned round."""
    factors = torch.rand(value.shape, generator=generator).to(value)
    low, high = value.min(), value.max()
    if low == high:  # zeros, or a mask of ones
        return value + factors
    nearest = torch.zeros_like(low).clamp(low, high)
    if number % 2 == 0:
        lowest, highest = value.aminmax(dim=0) if len(value) > 1 else (low, high)
        value, factors = lowest + highest - value, 1 - factors / 2
    return nearest + factors * (value - nearest)


# ---------------------------------------------------------------- the encoder


class Item(NamedTuple):
    """The rows and the lifted values of one item."""

    rows: int
    values: Sequence[torch.Tensor] = ()  # lifted, in order


class DerivedEncoder(SupportsEncoderCudaGraph):
    """The protocol of a tower, derived from example items; see ``from_model`` of the manager."""

    def __init__(
        self,
        tower: Callable[..., Any],
        examples: Sequence[Mapping[str, Any]],
        output: Callable[[Any], Any] | None,
        modality: str,
        tolerance: float | None,
    ) -> None:
        self.tower, self._output = tower, output
        self._inputs = Inputs(examples)
        weights = chain.from_iterable(module.parameters() for module in modules_of(tower))
        rows = examples[0][self._inputs.rows[0]]
        like = next((tensor for tensor in weights if tensor.is_floating_point()), rows)
        self.device, self.dtype = like.device, like.dtype
        self._values: list[HostValue] = []
        self._bounds: dict[Site, str] = {}  # the unit of numbers that modules get
        self._known: dict[Key, Item] = {}
        self._constant: dict[int, HostTrace] = {}  # number of equal items -> trace
        self._compared: set[tuple[Any, ...]] = set()  # sizes of buffers that were compared
        if tolerance is None:
            tolerance = _TOLERANCES.get(self.dtype, _LOWEST)
        self._tolerance = tolerance
        with torch.inference_mode(False), torch.no_grad():
            alone = [self._moved(example) for example in examples]
            count = len(alone)
            orders = [
                tuple(range(count)),
                (*reversed(range(count)), *[0] * max(1, _PACKED - count)),
            ]
            self._derive(alone, orders)
            self._config = self._new_config(modality)
            self._check(alone, [*[(i,) for i in range(len(alone))], *orders])

    def __repr__(self) -> str:
        names = [f"{name}: rows" for name in self._inputs.rows]
        for value in self._values:
            what = "permutation" if value.permutes else value.kind
            names.append(f"{value.name}: {what}" + f" by {value.unit}" * (value.kind != CONSTANT))
        kind = "one size" if self._fixed else "any size"
        text = f"items of {kind}, {self._ratio} tokens a row; {', '.join(names)}"
        return f"<{type(self).__name__} of {type(self.tower).__name__}: {text}>"

    def _moved(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with its tensors where the tower is, rows of its dtype."""
        rows = {n: _moved(call[n], self.device, self.dtype) for n in self._inputs.rows}
        return rows | {n: _moved(call[n], self.device) for n in self._inputs.hosts}

    def _rows(self, call: Mapping[str, Any]) -> dict[str, Any]:
        return {name: call[name] for name in self._inputs.rows}

    def _sizes(self, rows: Sequence[int]) -> Sizes:
        tokens = [int(count * self._ratio) for count in rows]
        return {PATCHES: rows, TOKENS: tokens, ITEMS: [1] * len(rows)}

    def _result(self, output: Any) -> Any:
        """Return the tensors of the tower's output that are the result."""
        if self._output is not None:
            try:
                return self._output(output)
            except (TypeError, ValueError) as error:
                text = f"{type(output).__name__}, on which output= failed: {error}"
                raise EncoderError.derive_output(found=text) from error
        leaves = torch_ops.tree_leaves(output)
        if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor):
            names = output if isinstance(output, Mapping) else [type(leaf) for leaf in leaves]
            raise EncoderError.derive_output(found=", ".join(map(str, names)))
        return leaves[0]

    def _flat(self, output: Any) -> Any:
        """Return the result as tensors [tokens, ...]."""
        return torch_ops.tree_map(lambda leaf: _flattened(leaf, self._depth), self._result(output))

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], **_: Any) -> Any:
        return self._flat(self.tower(**self._inputs.constants, **self._moved(mm_kwargs)))

    # -------------------------------------------------------------- derivation

    def _derive(self, alone: Sequence[dict[str, Any]], orders: Sequence[tuple[int, ...]]) -> None:
        """Derive the rows of results, and host values where sizes differ."""
        together = [self._inputs.joined([alone[i] for i in order]) for order in orders]
        keys = [(*self._inputs.keys(call), ())[0] for call in alone]
        rows = [len(call[self._inputs.rows[0]]) for call in alone]
        self._fixed = len(set(keys)) == 1 == len(set(rows))
        self._small = small = min(range(len(alone)), key=rows.__getitem__)
        self._item, self._key, self._example = Item(rows[small]), keys[small], alone[small]
        results = [
            self._result(self.tower(**self._inputs.constants, **call))
            for call in (*alone, *together)
        ]
        count = len(alone)
        self._depth, tokens = rows_of_results(results[:count], results[count:], orders)
        self._ratio = Fraction(tokens[0], rows[0])
        if self._sizes(rows)[TOKENS] != tokens:
            raise EncoderError.derive_ratio(rows=rows, tokens=tokens)
        self._columns = torch_ops.tree_leaves(results[0])[0].shape[-1]
        self._range = (min(tokens), _MOST * max(tokens))
        if self._fixed:
            return
        traces = [self._traced(call) for call in (*alone, *together)]
        self._template = traces[small]
        self._derive_values(traces[:count], list(zip(orders, traces[count:], strict=True)), rows)
        self._derive_bounds([self._again(self._inputs.on_host(call, None)) for call in alone])
        again = [self._again(self._inputs.on_host(call, None)) for call in alone]
        self._template.calls, self._template.inner = again[small].calls, again[small].inner
        for key, trace, other, number in zip(keys, again, traces, rows, strict=False):
            self._check_calls(trace, key)
            for rule, value, repeated in zip(self._values, other.values, trace.values, strict=True):
                if not _same(value, repeated):
                    raise EncoderError.derive_size(name=rule.name, found=list(value.shape))
            if not self._inputs.hosts or self._rows_of(trace.values, key) != number:
                raise EncoderError.derive_rows(rows=rows)
            self._known[key] = Item(number, trace.values)

    def _derive_values(
        self,
        alone: Sequence[HostTrace],
        together: Sequence[tuple[Sequence[int], HostTrace]],
        rows: Sequence[int],
    ) -> None:
        """Derive the rules of all host values."""
        names: list[str] = []
        for name in self._template.names:
            used = sum(other.split("#")[0] == name for other in (*names, *self._inputs.rows))
            names.append(f"{name}#{used + 1}" if used else name)
        for trace in (*alone, *[trace for _, trace in together]):
            if len(trace.values) != len(names):
                text = f"{len(trace.values)} host values"
                raise EncoderError.derive_order(found=text, expected=", ".join(names))
        for number, name in enumerate(names):
            values = [trace.values[number] for trace in alone]
            packs = [(order, trace.values[number]) for order, trace in together]
            self._values.append(derive_value(name, values, packs, self._sizes(rows)))
        self._lifted = [value.to(self.device) for value in self._template.values]

    def _derive_bounds(self, traces: Sequence[HostTrace]) -> None:
        """Find the numbers of modules that are the longest sequence of an item."""
        offsets = [n for n, value in enumerate(self._values) if value.kind == OFFSETS]
        for index, calls in enumerate(zip(*[trace.calls for trace in traces], strict=False)):
            if len({(where, len(numbers)) for where, numbers in calls}) > 1:
                return  # refused later
            if index not in traces[0].modules:
                continue
            for position, column in enumerate(zip(*[numbers for _, numbers in calls], strict=True)):
                for number in offsets if len(set(column)) > 1 else ():
                    longest = [int(trace.values[number].diff().max()) for trace in traces]
                    if longest == list(column):
                        self._bounds[index, position] = self._values[number].unit

    def _run(self, trace: HostTrace, rows: dict[str, Any], **options: Any) -> Any:
        """Run the tower on a trace."""
        counts = self._sizes([len(next(iter(rows.values())))])
        bounds = {site: counts[unit][0] for site, unit in self._bounds.items()}
        run = LiftedRun(trace, self.device, lifts=not self._fixed, bounds=bounds, **options)
        return run.of(self.tower, {**self._inputs.constants, **rows})

    def _traced(self, call: Mapping[str, Any]) -> HostTrace:
        trace = HostTrace(self._inputs.on_host(call, None))
        self._run(trace, self._rows(call))
        return trace

    def _again(self, hosts: dict[str, Any]) -> HostTrace:
        """Run the host ops of other items, and the device ops of the smallest example."""
        trace = HostTrace(hosts)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._run(trace, self._rows(self._example), buffers=self._lifted)
        except EncoderError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EncoderError.derive_run(found=hosts, error=text) from error
        return trace

    def _check_calls(self, trace: HostTrace, key: Key) -> None:
        """Raise if the tower calls other ops for an item than for the smallest example."""
        known, end = self._template, ("nothing", ())
        outer = zip_longest(trace.calls, known.calls, fillvalue=end)
        inner = zip_longest(trace.inner, known.inner, fillvalue=end)
        for (where, numbers), (other, expected) in chain(outer, inner):
            if where != other or len(numbers) != len(expected):
                raise EncoderError.derive_calls(key=key, found=where, expected=other)
            for mine, own in zip(numbers, expected, strict=True):
                if mine != own:
                    raise EncoderError.derive_number(key=key, where=where, found=mine, expected=own)

    def _rows_of(self, values: Sequence[torch.Tensor], key: Key) -> int:
        """Return the rows of an item: from a table, offsets, or the product of an input."""
        for rule, value in zip(self._values, values, strict=True):
            if rule.kind != CONSTANT and rule.unit != ITEMS:
                count = int(value[-1]) if rule.kind == OFFSETS else len(value)
                return count if rule.unit == PATCHES else int(count / self._ratio)
        numbers = key[0] if isinstance(key[0], tuple) else (key[0],)
        return math.prod(numbers) if all(isinstance(each, int) for each in numbers) else 0

    def _check(self, alone: Sequence[dict[str, Any]], orders: Sequence[tuple[int, ...]]) -> None:
        """Compare padded and unpadded buffers with eager runs of single items."""
        for order in orders:
            calls, expected = self._eager([alone[i] for i in order])
            tokens = sum(len(leaves[0]) for leaves in expected)
            for padding in (0, self._range[1] // _MOST):
                size = tokens + padding, len(order) + 1, self.device, self.dtype
                self._compare(calls, expected, size, order)

    def _check_size(self, size: tuple[int, int, torch.device, torch.dtype]) -> None:
        """Compare items on a budget with eager runs: calls of ops may depend on the rows."""
        with torch.inference_mode(False), torch.no_grad():
            tokens = self._sizes([self._item.rows])[TOKENS][0]
            if size[0] < tokens and not self._fixed:
                raise EncoderError.derive_budget(budget=size[0], tokens=tokens)
            count = max(1, min(size[0] // tokens, size[1], _PACKED))
            calls, expected = self._eager([self._example] * count)
            self._compare(calls, expected, size, (self._small,) * count)

    def _eager(
        self, calls: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[list[torch.Tensor]]]:
        """Return calls of one item with different numbers, and their eager results."""
        # Equal items would hide what a tower computes across items, such as a scale of all rows.
        varied, expected = [], []
        for position, call in enumerate(calls):
            first = 2 * position + position % 2
            for number in (first, first ^ 1) if position else ():
                other = call | _with_other_numbers(self._rows(call), number)
                with suppress(Exception):  # the tower may refuse such numbers
                    results = torch_ops.tree_leaves(self.encoder_eager_forward(other))
                    if all(bool(leaf.isfinite().all()) for leaf in results):
                        break
            else:
                other, results = call, torch_ops.tree_leaves(self.encoder_eager_forward(call))
            varied.append(other)
            expected.append(results)
        return varied, expected

    def _compare(
        self,
        calls: Sequence[dict[str, Any]],
        expected: Sequence[Sequence[torch.Tensor]],
        size: tuple[int, int, torch.device, torch.dtype],
        items: Sequence[int],
    ) -> None:
        """Raise if buffers of a budget, for some items and padding, give other results."""
        budget, call = size[0], self._inputs.joined(calls)
        inputs = GraphInputs(self._config, self._buffers(*size), budget)
        inputs.write(self.prepare_encoder_cudagraph_replay_buffers(call, size[1], 0), poison=True)
        results = torch_ops.tree_leaves(self.encoder_cudagraph_forward(dict(inputs.values)))
        worst = max(map(_difference, results, zip(*expected, strict=True)))
        if not worst <= self._tolerance:
            tail, most = (
                max(budget - sum(len(leaves[0]) for leaves in expected), 0),
                self._tolerance,
            )
            raise EncoderError.derive_result(
                items=items, budget=budget, tail=tail, found=worst, most=most
            )

    # -------------------------------------------------------------- the protocol

    def _new_config(self, modality: str) -> EncoderCudaGraphConfig:
        values = [value for value in self._values if value.kind != CONSTANT]
        rules = dict.fromkeys(self._inputs.rows, EncoderBuffer(PATCHES))
        for value in values:
            tail = positions_tail if value.permutes else ZEROS
            longest = value.longest if value.kind == OFFSETS else None
            unit = None if value.unit == ITEMS else value.unit
            rules[value.name] = EncoderBuffer(
                unit, OFFSETS if value.kind == OFFSETS else tail, longest
            )
        return EncoderCudaGraphConfig(
            modalities=[modality],
            buffer_keys=[*self._inputs.rows, *[value.name for value in values]],
            out_hidden_size=self._columns,
            max_frames_per_video=0,
            padding_logics=rules,
        )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        return self._range

    def _items(self, call: Mapping[str, Any]) -> list[Item]:
        """Return the items of a call; new ones run the tower on the smallest example."""
        keys, rows = self._inputs.keys(call), len(call[self._inputs.rows[0]])
        if not self._inputs.hosts:
            keys = [self._key] * (rows // self._item.rows)
        items = [self._item_of(index, key, call) for index, key in enumerate(keys)]
        expected = sum(item.rows for item in items)
        for name in self._inputs.rows:
            if len(call[name]) != expected:
                text, count = f"has {len(call[name])} rows", f"{expected}, those of its items"
                raise EncoderError.derive_call(name=name, found=text, expected=count)
        return items

    def _item_of(self, index: int, key: Key, call: Mapping[str, Any]) -> Item:
        if self._fixed:
            if key != self._key:
                text, expected = f"is {key!r}", f"{self._key!r}, as of all examples"
                raise EncoderError.derive_call(name=f"item {index}", found=text, expected=expected)
            return self._item
        item = self._known.get(key)
        if item is None:
            trace = self._again(self._inputs.on_host(call, [index]))
            self._check_calls(trace, key)
            item = Item(self._rows_of(trace.values, key), trace.values)
            if (item.rows * self._ratio).denominator > 1:
                text, expected = f"has {item.rows} rows", f"a multiple of {1 / self._ratio}"
                raise EncoderError.derive_call(name=f"item {index}", found=text, expected=expected)
            sizes = self._sizes([item.rows])
            for rule, value in zip(self._values, trace.values, strict=True):
                if not rule.fits(value, sizes[rule.unit][0]):
                    raise EncoderError.derive_new(
                        key=key, name=rule.name, what=rule.kind, found=list(value.shape)
                    )
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = item
        return item

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        sizes = self._sizes([item.rows for item in self._items(mm_kwargs)])
        return list(map(EncoderItemSpec, sizes[PATCHES], sizes[TOKENS]))

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        counts = [item.rows for item in self._items(mm_kwargs)]
        selected = dict(mm_kwargs)
        for name in self._inputs.rows:
            parts = mm_kwargs[name].split(counts)
            chosen = [parts[index] for index in indices]
            selected[name] = torch.cat(chosen) if chosen else mm_kwargs[name][:0]
        return selected | {n: _picked(mm_kwargs[n], indices) for n in self._inputs.hosts}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        **_: Any,
    ) -> EncoderCudaGraphCaptureInputs:
        size = token_budget, max_batch_size, device, dtype
        if size not in self._compared and not inside_capture():
            self._check_size(size)
            self._compared.add(size)
        return self._buffers(*size)

    def _buffers(
        self, token_budget: int, max_batch_size: int, device: torch.device, dtype: torch.dtype
    ) -> EncoderCudaGraphCaptureInputs:
        rows = math.ceil(token_budget / self._ratio)
        rows += -rows % self._item.rows if self._fixed else 0
        length = {PATCHES: rows, TOKENS: int(rows * self._ratio), ITEMS: max_batch_size}
        values = {}
        for name in self._inputs.rows:
            like = self._example[name]
            kind = dtype if like.is_floating_point() else like.dtype
            values[name] = torch.zeros(rows, *like.shape[1:], dtype=kind, device=device)
        for value in self._values:
            total, kind = length[value.unit], value.like.dtype
            if value.kind == OFFSETS:  # room for a sequence of each token
                most = min(total, length[TOKENS])
                values[value.name] = offset_buffer(total, most, value.longest, kind, device)
            elif value.kind == TABLE:
                table = torch.zeros(total, *value.like.shape[1:], dtype=kind, device=device)
                if value.permutes:
                    positions_tail(table, table[:0])
                values[value.name] = table
        items = rows // self._item.rows
        if self._fixed and self._inputs.hosts and items not in self._constant:
            trace = HostTrace(self._inputs.on_host(self._example, [0] * items))
            with torch.inference_mode(False), torch.no_grad():
                self._run(trace, {n: _moved(v, self.device, self.dtype) for n, v in values.items()})
            self._constant[items] = trace
        return EncoderCudaGraphCaptureInputs(values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, **_: Any
    ) -> EncoderCudaGraphReplayBuffers:
        items = self._items(mm_kwargs)
        sizes = self._sizes([item.rows for item in items])
        values = self._rows(mm_kwargs)
        for number, rule in enumerate(self._values):
            if rule.kind != CONSTANT:
                value = rule.joined([item.values[number] for item in items], sizes)
                # A copy from pinned memory waits for nothing.
                values[rule.name] = value.pin_memory() if self.device.type == "cuda" else value
        return EncoderCudaGraphReplayBuffers(values)

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **_: Any) -> Any:
        rows = self._rows(inputs)
        if not self._inputs.hosts:
            return self._flat(self.tower(**self._inputs.constants, **rows))
        if self._fixed:
            items = len(next(iter(rows.values()))) // self._item.rows
            return self._flat(self._run(self._constant[items], rows))
        buffers = [
            self._lifted[number] if rule.kind == CONSTANT else inputs[rule.name]
            for number, rule in enumerate(self._values)
        ]
        trace = self._template
        return self._flat(self._run(trace, rows, buffers=buffers, deep=trace.leaks))


class CombiningEncoder(DerivedEncoder):
    """Results of items are made from the rows of graphs: ``combine(rows, call of the item)``."""

    def __init__(self, combine: Callable[[Any, dict[str, Any]], Any], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._combine = combine

    def postprocess_encoder_output(
        self,
        output: Any,
        indices: list[int],
        per_item_out_tokens: Any,
        dest: dict[int, Any],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        parts: dict[int, Any] = {}
        places = list(range(len(indices)))
        super().postprocess_encoder_output(output, places, per_item_out_tokens, parts, clone)
        for position, index in enumerate(indices):
            item = self.select_encoder_cudagraph_items(batch_mm_kwargs or {}, [position])
            dest[index] = self._combine(parts[position], item)


def derived_encoder(
    tower: Callable[..., Any],
    examples: Sequence[Mapping[str, Any]],
    output: Callable[[Any], Any] | None,
    combine: Callable[[Any, dict[str, Any]], Any] | None,
    modality: str,
    tolerance: float | None,
) -> DerivedEncoder:
    """Return the encoder of ``from_model``."""
    values: dict[str, Any] = {"tower": tower, "output": output, "combine": combine}
    values |= {"modality": modality, "tolerance": tolerance, "example_items": examples}
    hints: dict[str, Any] = {"tower": Callable, "example_items": Sequence, "modality": str}
    hints |= dict.fromkeys(("output", "combine"), Callable | None) | {"tolerance": float | None}
    require_arguments("from_model", values, hints)
    examples = list(examples)
    alike = bool(examples) and all(isinstance(example, Mapping) for example in examples)
    expected = "at least one mapping from names to the inputs of one item"
    require(alike, "example_items", "from_model", examples, expected)
    arguments = tower, examples, output, modality, tolerance
    return DerivedEncoder(*arguments) if combine is None else CombiningEncoder(combine, *arguments)
