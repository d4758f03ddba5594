"""Derive the protocol of an encoder from runs on example items: :class:`DerivedEncoder`.

The tower runs on each example alone and on all of them together. From these runs follow the rows of
its results, and which host values (see :mod:`~cgcompile.encoder.lifting`) are tables by row,
offsets or constants, and how those of several items are joined. What does not follow is an error.
The rule: all that is derived is compared with eager runs before anything is captured.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch

from cgcompile import torch_compat as compat
from cgcompile.encoder.graphs import GraphInputs
from cgcompile.encoder.lifting import HostTrace, run_lifted
from cgcompile.encoder.patches import offset_buffer, positions_tail
from cgcompile.encoder.protocol import (
    PATCHES,
    TOKENS,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)
from cgcompile.errors import EncoderError
from cgcompile.graphs.guards import modules_of

ITEMS, CONSTANT, OFFSETS, TABLE = "items", "constant", "offsets", "table"
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_REMEMBERED = 512  # items whose host values are kept
_LONGEST = 1024  # rows of a padding sequence

Key = tuple[Any, ...]
"""The host inputs of one item."""


class HostValue(NamedTuple):
    """How a host value of several items becomes a buffer."""

    name: str
    kind: str  # TABLE, OFFSETS or CONSTANT
    like: torch.Tensor  # the value of one item
    unit: str = PATCHES  # what its rows, or its last entry, count
    shift: str = ""  # the unit of earlier items that is added to a table
    permutes: bool = False  # a permutation of all rows
    longest: int = _LONGEST  # rows of a padding sequence

    def fits(self, value: torch.Tensor, sizes: Mapping[str, int]) -> bool:
        """Return whether the rule holds for the value of one item."""
        if self.kind == CONSTANT:
            return _same(value, self.like)
        if value.dtype != self.like.dtype or value.shape[1:] != self.like.shape[1:]:
            return False
        if self.kind == OFFSETS:
            return _is_offsets(value, sizes[self.unit])
        right = value.dim() > 0 and len(value) == sizes[self.unit]
        return right and (not self.permutes or _is_permutation(value))

    def joined(
        self, values: Sequence[torch.Tensor], sizes: Mapping[str, Sequence[int]], order: Any = None
    ) -> torch.Tensor:
        """Return the value of several items; ``order``: their indices in ``sizes``."""
        shift = self.unit if self.kind == OFFSETS else self.shift
        if shift:
            counts = sizes[shift] if order is None else [sizes[shift][index] for index in order]
            before = accumulate(counts, initial=0)
            values = [value + count for value, count in zip(values, before, strict=False)]
        if self.kind == OFFSETS:
            starts = torch.zeros(1, dtype=self.like.dtype)
            return torch.cat([starts, *[value[1:] for value in values]])
        return torch.cat(list(values))


def derive_value(
    name: str,
    alone: Sequence[torch.Tensor],
    together: Sequence[tuple[Sequence[int], torch.Tensor]],
    sizes: Mapping[str, Sequence[int]],
) -> HostValue:
    """Return the rule of a value from those of items alone, and of some together, by their indices."""
    first, packs = alone[0], [value for _, value in together]
    integral = not (first.is_floating_point() or first.is_complex() or first.dtype == torch.bool)
    longest = _LONGEST
    if integral and all(value.dim() == 1 and len(value) > 1 for value in alone):
        longest = max(1, min(longest, max(int(value.diff().max()) for value in alone)))
    permutes = all(map(_is_permutation, (*alone, *packs)))
    rules = [HostValue(name, CONSTANT, first)] if all(_same(first, v) for v in packs) else []
    for unit in (PATCHES, TOKENS, ITEMS):
        rules.append(HostValue(name, OFFSETS, first, unit, longest=longest))
        shifts = ("", PATCHES, TOKENS) if integral else ("",)
        rules += [HostValue(name, TABLE, first, unit, shift, permutes) for shift in shifts]
    each = [{unit: counts[i] for unit, counts in sizes.items()} for i in range(len(alone))]
    for rule in rules:
        if all(map(rule.fits, alone, each)) and all(
            rule.kind == CONSTANT or _same(rule.joined([alone[i] for i in order], sizes, order), v)
            for order, v in together
        ):
            return rule
    shapes = [list(value.shape) for value in alone]
    raise EncoderError.derive_value(
        name=name, found=shapes, rows=sizes[PATCHES], tokens=sizes[TOKENS]
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _is_offsets(value: torch.Tensor, rows: int) -> bool:
    if value.dim() != 1 or value.is_floating_point() or len(value) < 2 or value.dtype == torch.bool:
        return False
    return int(value[0]) == 0 and int(value[-1]) == rows and bool((value.diff() >= 0).all())


def _is_permutation(value: torch.Tensor) -> bool:
    if value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        return False
    return sorted(value.tolist()) == list(range(len(value)))


# ---------------------------------------------------------------- inputs


class Inputs:
    """The inputs of a tower: rows [n, ...], host inputs with one entry for each item, constants."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        first = examples[0]
        self.rows: list[str] = []
        self.hosts: list[str] = []
        self.constants: dict[str, Any] = {}
        for number, example in enumerate(examples):
            if example.keys() != first.keys():
                raise EncoderError.derive_keys(
                    item=number, found=list(example), expected=list(first)
                )
        floating = [name for name, value in first.items() if _is_rows(value)]
        if not floating:
            raise EncoderError.derive_no_rows(known=list(first))
        for name in first:
            values = [example[name] for example in examples]
            lengths = [len(example[floating[0]]) for example in examples]
            self._add(name, values, lengths)

    def _add(self, name: str, values: Sequence[Any], rows: Sequence[int]) -> None:
        """Classify one input."""
        first = values[0]
        if isinstance(first, torch.Tensor) and first.dim():
            lengths = list(map(len, values))
            if not _is_rows(first) and lengths == [1] * len(values):
                self.hosts.append(name)
                return
            if lengths != list(rows):
                raise EncoderError.derive_lengths(name=name, found=lengths, expected=rows)
            for value in values:
                if value.shape[1:] != first.shape[1:]:
                    sizes = [list(each.shape[1:]) for each in (first, value)]
                    raise EncoderError.derive_shapes(name=name, one=sizes[0], other=sizes[1])
            self.rows.append(name)
        elif isinstance(first, (list, tuple)) and all(len(value) == 1 for value in values):
            self.hosts.append(name)
        elif isinstance(first, torch.Tensor) or any(value != first for value in values):
            raise EncoderError.derive_input(name=name, found=first)
        else:
            self.constants[name] = first

    def keys(self, call: Mapping[str, Any]) -> list[Key]:
        """Return the host inputs of each item; reads tensors on the host."""
        for name in (*self.rows, *self.hosts):
            if call.get(name) is None:
                raise EncoderError.no_input(name=name, known=list(call))
        for name, value in self.constants.items():
            if call.get(name, value) != value:
                raise EncoderError.derive_constant(name=name, found=call[name], expected=value)
        columns = [_frozen(call[name]) for name in self.hosts]
        if len({len(column) for column in columns}) > 1:
            lengths = {name: len(call[name]) for name in self.hosts}
            raise EncoderError.derive_items(found=lengths)
        return list(zip(*columns, strict=True))

    def on_host(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the host inputs, tensors on the CPU."""
        return {name: _moved(call[name], torch.device("cpu")) for name in self.hosts}

    def joined(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the call of several items."""
        joined: dict[str, Any] = {}
        for name in (*self.rows, *self.hosts):
            values = [call[name] for call in calls]
            if isinstance(values[0], torch.Tensor):
                joined[name] = torch.cat(values)
            else:
                joined[name] = type(values[0])(chain.from_iterable(values))
        return {**self.constants, **joined}


def _is_rows(value: Any) -> bool:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return bool(floating and value.dim())


def _frozen(value: Any) -> Key:
    """Return the entries of a host input, hashable."""
    entries = value.tolist() if isinstance(value, torch.Tensor) else value
    return tuple(
        _frozen(entry) if isinstance(entry, (list, tuple, torch.Tensor)) else entry
        for entry in (entries if isinstance(entries, (list, tuple)) else [entries])
    )


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(device, dtype if value.is_floating_point() else None)


def _picked(value: Any, indices: Sequence[int]) -> Any:
    """Return the entries of a host input of some items."""
    if isinstance(value, torch.Tensor):
        return value[list(indices)]
    return type(value)(value[index] for index in indices)


# ---------------------------------------------------------------- the encoder


class Item(NamedTuple):
    """What is known of one item."""

    rows: int
    values: Sequence[torch.Tensor]  # lifted, in order


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
        self._bounds: dict[tuple[int, int], str] = {}
        self._known: dict[Key, Item] = {}
        self._constant: dict[int, HostTrace] = {}  # by number of items
        self._most: dict[str, str] = {}
        with torch.inference_mode(False), torch.no_grad():
            alone = [self._moved(example) for example in examples]
            self._derive(alone)
            self._config = self._new_config(modality)
            self._check(alone, _TOLERANCES[self.dtype] if tolerance is None else tolerance)

    def __repr__(self) -> str:
        names = [f"{name}: rows" for name in self._inputs.rows]
        for value in self._values:
            what = "permutation" if value.permutes else value.kind
            names.append(f"{value.name}: {what}" + f" by {value.unit}" * (value.kind != CONSTANT))
        kind = "items of one size" if self._fixed else "items of any size"
        text = f"{kind}, {self._ratio} tokens a row; {', '.join(names)}"
        return f"<{type(self).__name__} of {type(self.tower).__name__}: {text}>"

    def _moved(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with its tensors where the tower is, rows of its dtype."""
        inputs = (*self._inputs.rows, *self._inputs.hosts)
        return {name: _moved(call[name], self.device, self.dtype) for name in inputs}

    def _rows(self, call: Mapping[str, Any]) -> dict[str, Any]:
        return {name: call[name] for name in self._inputs.rows}

    def _result(self, output: Any) -> Any:
        """Return the tensors of the tower's output that are the result."""
        if self._output is not None:
            return self._output(output)
        leaves = compat.tree_leaves(output)
        if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor):
            named = output.items() if isinstance(output, Mapping) else enumerate(leaves)
            raise EncoderError.derive_output(found=[str(name) for name, _ in named])
        return leaves[0]

    def _flat(self, output: Any) -> Any:
        """Return the result as tensors [tokens, ...]."""
        return compat.tree_map(lambda leaf: _flattened(leaf, self._depth), self._result(output))

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], **_: Any) -> Any:
        return self._flat(self.tower(**self._inputs.constants, **self._moved(mm_kwargs)))

    # -------------------------------------------------------------- derivation

    def _derive(self, alone: Sequence[dict[str, Any]]) -> None:
        orders = [tuple(range(len(alone))), (*reversed(range(len(alone))), 0)]
        together = [self._inputs.joined([alone[i] for i in order]) for order in orders]
        keys = [(*self._inputs.keys(call), ())[0] for call in alone]
        rows = [len(call[self._inputs.rows[0]]) for call in alone]
        self._fixed = len(set(keys)) == 1 == len(set(rows))
        self._item_rows, self._key = rows[0], keys[0]
        self._hosts, self._examples = self._inputs.on_host(alone[0]), self._rows(alone[0])
        constants = self._inputs.constants
        results, packs = (
            [self._result(self.tower(**{**call, **constants})) for call in calls]
            for calls in (alone, together)
        )
        self._depth, tokens = _rows_of_results(results, packs, orders)
        self._ratio = Fraction(tokens[0], rows[0])
        if any(count != n * self._ratio for count, n in zip(tokens, rows, strict=True)):
            raise EncoderError.derive_ratio(rows=rows, tokens=tokens)
        self.columns = compat.tree_leaves(results[0])[0].shape[-1]
        self._range = (min(tokens), 16 * max(tokens))
        if self._fixed:
            return
        if not self._inputs.hosts:
            raise EncoderError.derive_no_counts(rows=rows)
        sizes = {PATCHES: rows, TOKENS: tokens, ITEMS: [1] * len(rows)}
        self._derive_values(alone, list(zip(orders, together, strict=True)), keys, sizes)

    def _derive_values(
        self,
        alone: Sequence[dict[str, Any]],
        together: Sequence[tuple[Sequence[int], dict[str, Any]]],
        keys: Sequence[Key],
        sizes: Mapping[str, Sequence[int]],
    ) -> None:
        """Find the rules of all host values, and what takes the place of numbers."""
        traces = [self._traced(self._inputs.on_host(call), self._rows(call)) for call in alone]
        packs = [
            (order, self._traced(self._inputs.on_host(call), self._rows(call)).values)
            for order, call in together
        ]
        small = min(range(len(alone)), key=sizes[PATCHES].__getitem__)
        self._small, self._template = self._rows(alone[small]), traces[small]
        names = _unique(self._template.names, self._inputs.rows)
        for values in (*[trace.values for trace in traces], *[values for _, values in packs]):
            if len(values) != len(names):
                raise EncoderError.derive_count(found=len(values), names=names)
        for number, name in enumerate(names):
            mine = [trace.values[number] for trace in traces]
            others = [(order, values[number]) for order, values in packs]
            rule = derive_value(name, mine, others, sizes)
            self._values.append(rule)
            if rule.kind == OFFSETS:
                few = all(len(v) - 1 <= n for v, n in zip(mine, sizes[TOKENS], strict=True))
                self._most[name] = TOKENS if few else rule.unit
        self._lifted = [value.to(self.device) for value in self._template.values]
        again = [self._again(self._inputs.on_host(call)) for call in alone]
        for trace, other in zip(traces, again, strict=True):
            for name, value, found in zip(names, trace.values, other.values, strict=False):
                if not _same(value, found):
                    raise EncoderError.derive_size(name=name, found=list(value.shape))
        self._derive_bounds(again)
        again = [self._again(self._inputs.on_host(call)) for call in alone]
        self._template.calls = again[small].calls
        self._stop = max(again[small].last, *[call for call, _ in self._bounds], 0)
        for key, trace, count in zip(keys, again, sizes[PATCHES], strict=True):
            self._check_calls(trace, key)
            if self._rows_of(trace.values, key) != count:
                raise EncoderError.derive_rows(found=key, expected=count)
            self._known[key] = Item(count, trace.values)

    def _derive_bounds(self, traces: Sequence[HostTrace]) -> None:
        """Find the numbers of modules that are the longest sequence of an item."""
        offsets = [n for n, value in enumerate(self._values) if value.kind == OFFSETS]
        for index, calls in enumerate(zip(*[trace.calls for trace in traces], strict=False)):
            if len({(where, len(numbers)) for where, numbers in calls}) > 1:
                return  # the calls differ, which is refused later
            if index not in traces[0].entries:
                continue
            for position, found in enumerate(zip(*[numbers for _, numbers in calls], strict=True)):
                if len(set(found)) == 1:
                    continue
                for number in offsets:
                    longest = [int(trace.values[number].diff().max()) for trace in traces]
                    if longest == list(found):
                        self._bounds[index, position] = self._values[number].unit
                        break

    def _traced(
        self,
        hosts: dict[str, Any],
        rows: dict[str, Any],
        buffers: Any = None,
        stop: int | None = None,
    ) -> HostTrace:
        """Run host ops and those of the device; return what was computed."""
        trace = HostTrace(hosts)
        with torch.inference_mode(False), torch.no_grad():
            named = {**self._inputs.constants, **rows}
            bounds = self._numbers(len(next(iter(rows.values()))))
            run_lifted(
                self.tower,
                named,
                trace,
                self.device,
                lifts=not self._fixed,
                buffers=buffers,
                bounds=bounds,
                stop=stop,
            )
        return trace

    def _again(self, hosts: dict[str, Any], stop: int | None = None) -> HostTrace:
        """Run host ops of other inputs, and those of the device on the smallest example."""
        try:
            return self._traced(hosts, self._small, self._lifted, stop)
        except EncoderError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise EncoderError.derive_run(found=hosts, error=text) from error

    def _numbers(self, rows: int) -> dict[tuple[int, int], int]:
        sizes = {PATCHES: rows, TOKENS: int(rows * self._ratio)}
        return {where: sizes[unit] for where, unit in self._bounds.items()}

    def _check_calls(self, trace: HostTrace, key: Key) -> None:
        """Raise if the tower calls other ops for an item than for the smallest example."""
        if trace.calls == self._template.calls[: len(trace.calls)]:
            return
        pairs = zip((*trace.calls, ("its end", ())), (*self._template.calls, ("its end", ())))
        (where, found), (other, expected) = next(pair for pair in pairs if pair[0] != pair[1])
        if where == other:
            pairs = zip(found, expected, strict=False)
            found, expected = next(pair for pair in pairs if pair[0] != pair[1])
            raise EncoderError.derive_number(key=key, where=where, found=found, expected=expected)
        raise EncoderError.derive_calls(key=key, found=where, expected=other)

    def _rows_of(self, values: Sequence[torch.Tensor], key: Key) -> int:
        """Return the rows of an item: those of a table or offsets, or the product of an input."""
        for rule, value in zip(self._values, values, strict=True):
            if rule.kind != CONSTANT and rule.unit != ITEMS:
                count = int(value[-1]) if rule.kind == OFFSETS else len(value)
                return count if rule.unit == PATCHES else int(count / self._ratio)
        return math.prod(key[0]) if isinstance(key[0], tuple) else int(key[0])

    def _check(self, alone: Sequence[dict[str, Any]], tolerance: float) -> None:
        """Compare buffers with and without padding with eager runs of items alone."""
        results = [self.encoder_eager_forward(call) for call in alone]
        orders = [*[(i,) for i in range(len(alone))], tuple(range(len(alone)))]
        orders.append((*reversed(range(len(alone))), 0))
        for order in orders:
            call = self._inputs.joined([alone[i] for i in order])
            columns = zip(*[compat.tree_leaves(results[i]) for i in order], strict=True)
            expected = [torch.cat(leaves) for leaves in columns]
            for padding in (0, self._range[1] // 16):
                budget = len(expected[0]) + padding
                buffers = self.prepare_encoder_cudagraph_capture_inputs(
                    budget, len(order) + 1, 0, self.device, self.dtype
                )
                inputs = GraphInputs(self._config, buffers, budget)
                inputs.write(
                    self.prepare_encoder_cudagraph_replay_buffers(call, len(order), 0), poison=True
                )
                found = compat.tree_leaves(self.encoder_cudagraph_forward(dict(inputs.values)))
                worst = max(map(_difference, found, expected))
                if not worst <= tolerance:
                    raise EncoderError.derive_result(
                        items=order, budget=budget, padding=padding, found=worst, most=tolerance
                    )

    # -------------------------------------------------------------- the protocol

    def _new_config(self, modality: str) -> EncoderCudaGraphConfig:
        values = [value for value in self._values if value.kind != CONSTANT]
        units = {value.name: value.unit for value in values if value.unit != ITEMS}
        return EncoderCudaGraphConfig(
            modalities=[modality],
            buffer_keys=[*self._inputs.rows, *[value.name for value in values]],
            out_hidden_size=self.columns,
            max_frames_per_video=0,
            padding_logics={value.name: positions_tail for value in values if value.permutes},
            offset_keys={v.name: v.longest for v in values if v.kind == OFFSETS},
            buffer_rows={**dict.fromkeys(self._inputs.rows, PATCHES), **units},
        )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        return self._range

    def _items(self, call: Mapping[str, Any]) -> list[Item]:
        """Return the items of a call; new ones run the tower on the smallest example."""
        keys = self._inputs.keys(call)
        rows = len(call[self._inputs.rows[0]])
        if self._fixed:
            for item, key in enumerate(keys):
                if key != self._key:
                    raise EncoderError.derive_other(item=item, found=key, expected=self._key)
            items = [Item(self._item_rows, ())] * (
                len(keys) if self._inputs.hosts else rows // self._item_rows
            )
        else:
            items = [self._item(index, key, call) for index, key in enumerate(keys)]
        expected = sum(item.rows for item in items)
        for name in self._inputs.rows:
            if len(call[name]) != expected:
                found = len(call[name])
                raise EncoderError.derive_call_rows(name=name, found=found, expected=expected)
        return items

    def _item(self, index: int, key: Key, call: Mapping[str, Any]) -> Item:
        item = self._known.get(key)
        if item is None:
            hosts = {name: _picked(call[name], [index]) for name in self._inputs.hosts}
            trace = self._again(self._inputs.on_host(hosts), self._stop)
            self._check_calls(trace, key)
            rows = self._rows_of(trace.values, key)
            sizes = {PATCHES: rows, TOKENS: int(rows * self._ratio), ITEMS: 1}
            for rule, value in zip(self._values, trace.values, strict=True):
                if not rule.fits(value, sizes):
                    raise EncoderError.derive_new(
                        key=key, name=rule.name, kind=rule.kind, found=list(value.shape)
                    )
            item = Item(rows, trace.values)
            while len(self._known) >= _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = item
        return item

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        counts = [item.rows for item in self._items(mm_kwargs)]
        return [EncoderItemSpec(rows, int(rows * self._ratio)) for rows in counts]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        counts = [item.rows for item in self._items(mm_kwargs)]
        selected = dict(mm_kwargs)
        for name in self._inputs.rows:
            parts = mm_kwargs[name].split(counts)
            chosen = [parts[index] for index in indices]
            selected[name] = torch.cat(chosen) if chosen else mm_kwargs[name][:0]
        for name in self._inputs.hosts:
            selected[name] = _picked(mm_kwargs[name], indices)
        return selected

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        **_: Any,
    ) -> EncoderCudaGraphCaptureInputs:
        rows = math.ceil(token_budget / self._ratio)
        if self._fixed:
            rows += -rows % self._item_rows
            self._trace_constants(rows // self._item_rows)
        length = {PATCHES: rows, TOKENS: int(rows * self._ratio), ITEMS: max_batch_size}
        values = {}
        for name in self._inputs.rows:
            like = self._examples[name]
            kind = dtype if like.is_floating_point() else like.dtype
            values[name] = torch.zeros(rows, *like.shape[1:], dtype=kind, device=device)
        for value in self._values:
            if value.kind == OFFSETS:
                most, total = length[self._most[value.name]], length[value.unit]
                values[value.name] = offset_buffer(
                    total, most, value.longest, value.like.dtype, device
                )
            elif value.kind == TABLE:
                shape = (length[value.unit], *value.like.shape[1:])
                values[value.name] = torch.zeros(shape, dtype=value.like.dtype, device=device)
                if value.permutes:
                    positions_tail(values[value.name], values[value.name][:0])
        return EncoderCudaGraphCaptureInputs(values)

    def _trace_constants(self, items: int) -> None:
        """Compute the host values of so many items, which are constants of a graph."""
        if self._inputs.hosts and items not in self._constant:
            hosts = {name: _picked(value, [0] * items) for name, value in self._hosts.items()}
            rows = {
                name: value.new_zeros(items * self._item_rows, *value.shape[1:])
                for name, value in self._examples.items()
            }
            self._constant[items] = self._traced(hosts, rows)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], max_batch_size: int, max_frames_per_batch: int, **_: Any
    ) -> EncoderCudaGraphReplayBuffers:
        items = self._items(mm_kwargs)
        counts = [item.rows for item in items]
        tokens = [int(rows * self._ratio) for rows in counts]
        sizes = {PATCHES: counts, TOKENS: tokens, ITEMS: [1] * len(items)}
        values = {name: mm_kwargs[name] for name in self._inputs.rows}
        for number, rule in enumerate(self._values):
            if rule.kind != CONSTANT:
                value = rule.joined([item.values[number] for item in items], sizes)
                # A copy from pinned memory waits for nothing.
                values[rule.name] = value.pin_memory() if self.device.type == "cuda" else value
        return EncoderCudaGraphReplayBuffers(values)

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **_: Any) -> Any:
        rows = self._rows(inputs)
        named = {**self._inputs.constants, **rows}
        if not self._inputs.hosts:
            return self._flat(self.tower(**named))
        count = len(next(iter(rows.values())))
        if self._fixed:
            trace = self._constant[count // self._item_rows]
            return self._flat(run_lifted(self.tower, named, trace, self.device, lifts=False))
        buffers = [
            self._lifted[number] if rule.kind == CONSTANT else inputs[rule.name]
            for number, rule in enumerate(self._values)
        ]
        bounds = self._numbers(count)
        output = run_lifted(
            self.tower, named, self._template, self.device, buffers=buffers, bounds=bounds
        )
        return self._flat(output)


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
        for place, index in enumerate(indices):
            item = self.select_encoder_cudagraph_items(batch_mm_kwargs or {}, [place])
            dest[index] = self._combine(parts[place], item)


def _flattened(leaf: torch.Tensor, depth: int) -> torch.Tensor:
    return leaf.flatten(0, max(min(depth, leaf.dim() - 2), 0))


def _unique(names: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return names, each once, with a number behind those that are taken."""
    found: list[str] = []
    for name in names:
        used = sum(other.split(" ")[0] == name for other in (*found, *taken))
        found.append(f"{name} {used + 1}" if used else name)
    return found


def _rows_of_results(
    alone: Sequence[Any], together: Sequence[Any], orders: Sequence[Sequence[int]]
) -> tuple[int, list[int]]:
    """Return the last dimension that is one of rows, and the rows of each item."""
    leaves = compat.tree_leaves(alone[0])
    for leaf in leaves or [None]:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            raise EncoderError.derive_output(found=[type(leaf).__name__])
    for depth in reversed(range(max(leaf.dim() for leaf in leaves))):
        counts = [{len(_flattened(x, depth)) for x in compat.tree_leaves(tree)} for tree in alone]
        packs = [{len(_flattened(x, depth)) for x in compat.tree_leaves(tree)} for tree in together]
        if any(len(found) > 1 for found in (*counts, *packs)):
            continue
        rows = [found.pop() for found in counts]
        sums = [sum(rows[i] for i in order) for order in orders]
        if sums == [found.pop() for found in packs]:
            return depth, rows
    shapes = [list(leaf.shape) for tree in (alone[0], together[0]) for leaf in compat.tree_leaves(tree)]
    raise EncoderError.derive_result_rows(found=shapes)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest number."""
    rows = found[: len(expected)]
    if rows.shape != expected.shape:
        return math.inf
    scale = expected.abs().max().clamp(min=1e-6)
    return float(((rows - expected).abs().max() / scale).nan_to_num(nan=math.inf))
