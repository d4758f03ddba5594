"""Whether a step may have a graph, of which mode, and under which key: :class:`Dispatch`.

It decides mode, key and eligibility of a call before it runs; guards are checked later. Without a
forward context, a step gets a synthetic batch descriptor from its concrete sizes; the number of
such shapes is bounded. The rule: a refusal is a
:class:`~cgcompile.reasons.RunPlain`.
"""

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import BatchDescriptor, ForwardContext
from cgcompile.descriptor import allows_full
from cgcompile.errors import DispatchError
from cgcompile.graphs.arena import takes_any_layout
from cgcompile.graphs.capture import capture_postponed
from cgcompile.graphs.steps import StepTable, check_context
from cgcompile.passes.nodes import is_symbolic_number, symbols_of, tensors
from cgcompile.passes.split import SplitGraph
from cgcompile.reasons import VARYING, Fallback, Reason, RunPlain, refuse_varying
from cgcompile.runtime.inputs import Roles, full_support
from cgcompile.runtime.recording import BatchKey
from cgcompile.runtime.weight_sets import MOVED, WeightSet, WeightSets, picker
from cgcompile.torch_compat import torch_settings

log = logging.getLogger(__name__)

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

_MOVING = 64  # weight sets that were seen and never captured, before that is a fallback


def auto_mode(split: SplitGraph, wanted: CUDAGraphMode) -> CUDAGraphMode:
    """Return the runtime mode of steps without a forward context; NONE if none is left."""
    # PIECEWISE where only eager pieces read a number: a FULL graph would hold its value.
    piecewise = wanted.has_mode(PIECEWISE) and any(piece.capture for piece in split.pieces)
    full = wanted.has_mode(FULL) and allows_full(full_support(split), None)
    if full and piecewise:
        live = set(Roles.of(split, FULL).numbers) - set(Roles.of(split, PIECEWISE).numbers)
        used = {name for piece in split.pieces for name in piece.inputs}
        full = not any(split.inputs[position].name in used for position in live)
    if full:
        return FULL
    return PIECEWISE if piecewise else NONE


class GrowingState:
    """Notices a result that comes back as an input, larger: every step then has a new shape."""

    # A key-value cache that is extended by ``torch.cat`` does that; no graph would be replayed.

    def __init__(self, split: SplitGraph) -> None:
        self._inputs = split.inputs
        results = split.result if isinstance(split.result, tuple) else ()
        self._grows = [  # (input, item of the result)
            (position, item)
            for position, value in enumerate(split.inputs)
            if isinstance(value.meta, torch.Tensor) and not value.static
            for item, ref in enumerate(results)
            if (result := split.values.get(getattr(ref, "name", ""))) is not None
            and _is_longer(split, value.meta, result.meta)
        ]
        self._last: list[tuple[int, torch.Size]] = []  # the shapes of the last results, by input

    def remember(self, result: Any) -> None:
        """Note the shapes of a result, for the next call."""
        if self._grows:
            self._last = [(position, result[item].shape) for position, item in self._grows]

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise RunPlain where the last result came back as an input."""
        for position, shape in self._last:
            if inputs[position].shape == shape:
                value = self._inputs[position]
                detail = (
                    f"{value.source or value.name} is the result of the last step and grows with "
                    "each. Keep it in a buffer of fixed size that the model writes in place: in "
                    "transformers a StaticCache (cache_implementation='static'), not a DynamicCache"
                )
                raise RunPlain(Fallback(Reason.GROWING_STATE, detail))


def _is_longer(split: SplitGraph, before: torch.Tensor, after: object) -> bool:
    """Return whether a result has the shape of an input, but longer in one dimension."""
    if not isinstance(after, torch.Tensor) or before.dim() != after.dim():
        return False
    number = split.symbols.number
    differences = [number(b) - number(a) for a, b in zip(before.shape, after.shape, strict=True)]
    changed = [difference for difference in differences if difference != 0]
    return before.dtype is after.dtype and len(changed) == 1 and bool(changed[0].is_positive)


def _dims_of_rows(meta: torch.Tensor) -> int:
    """Return how many leading dimensions may count rows; the last one may be features."""
    features = meta.dim() > 1 and meta.is_floating_point()
    return meta.dim() - (features and not isinstance(meta.shape[-1], torch.SymInt))


def _with_strides(
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]],
    restrided: Sequence[int],
    inputs: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Return the numbers of a key, behind the strides of inputs whose copies keep their layout."""
    tensors = (inputs[position] for position in restrided)
    fixed = (None if takes_any_layout(tensor) else tensor.stride() for tensor in tensors)
    return (*fixed, *pick(inputs))


class Dispatch:
    """Dispatches the calls of one compiled graph, which has the ``roles`` by runtime mode."""

    def __init__(
        self,
        split: SplitGraph,
        config: CompilationConfig,
        roles: Mapping[CUDAGraphMode, Roles],
        steps: StepTable,
    ) -> None:
        wanted = config.cudagraph_mode
        assert wanted is not None
        self.growth = GrowingState(split)
        self._settings: tuple[Any, ...] | None = None  # torch settings of the first step
        self._config, self._roles, self._steps = config, roles, steps
        self._inputs = split.inputs
        # Positions and fake values of the inputs that may have rows.
        self._with_rows = [
            (position, value.meta)
            for position, value in enumerate(split.inputs)
            if isinstance(value.meta, torch.Tensor) and not value.static and value.meta.dim()
        ]
        self._support = full_support(split)
        self._served = (wanted.decode_mode(), wanted.mixed_mode())
        captured = any(piece.capture for piece in split.pieces)
        self.has_pieces = captured and wanted.has_mode(PIECEWISE)
        sizes = symbols_of([tensors(value.meta) for value in split.inputs])
        self._arguments = frozenset(  # numbers that are no sizes of tensors
            position
            for position, value in enumerate(split.inputs)
            if is_symbolic_number(value.meta) and sizes.isdisjoint(symbols_of(value.meta))
        )
        dims, arguments = split.symbols.dims.items(), self._arguments
        rows = [name for name, dim in dims if config.capture_dim in (None, dim)]
        of_rows = {p for p, value in enumerate(split.inputs) if value.name in rows}
        chosen = of_rows if config.capture_dim is not None else of_rows - arguments
        self._rows = min(chosen, default=None)  # position of the number that counts the rows
        self.initial_mode = auto_mode(split, wanted)  # again after all graphs were dropped
        self.use(self.initial_mode)

    def use(self, mode: CUDAGraphMode) -> None:
        """Set the mode of all steps without a forward context."""
        self.mode = mode
        roles = self._roles[FULL if mode is NONE else mode]
        self._numbers = picker(roles.numbers)
        if roles.restrided:
            self._numbers = partial(_with_strides, self._numbers, roles.restrided)
        self.mutated = roles.mutated  # inputs of these steps that are bound by address

    # -------------------------------------------------------------- the mode and the key

    def mode_for(self, context: ForwardContext | None) -> CUDAGraphMode:
        """Return the mode of a step; raise RunPlain where it has none."""
        if context is None:
            return self.mode
        mode = context.cudagraph_runtime_mode
        if mode is NONE or mode not in self._served or context.batch_descriptor is None:
            check_context(context, self._served, "the compiled model")
        if mode is FULL and not allows_full(self._support, context.batch_descriptor):
            detail = (
                f"a boundary supports {self._support.name} only, not {context.batch_descriptor}"
            )
            fallback = Fallback(Reason.ATTENTION_SUPPORT, detail)
            if PIECEWISE not in self._served:
                raise RunPlain(fallback)
            self._steps.degrade(fallback)
            return PIECEWISE
        return mode

    def key(
        self, mode: CUDAGraphMode, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> Hashable:
        """Return the key of a step within its weight set; numbers come last."""
        key = self._numbers(inputs) if context is None else (mode is FULL, context.batch_descriptor)
        if context is not None and self._config.on_input_change == "recapture":
            roles = self._roles[mode]
            addresses = (inputs[position].data_ptr() for position in (*roles.read, *roles.mutated))
            numbers = (repr(inputs[position]) for position in (*roles.strides, *roles.numbers))
            key = (*key, *addresses, *numbers)
        settings = torch_settings.kernel_settings()
        if settings == self._settings:  # nearly always
            return key
        if self._settings is None:
            self._settings = settings
            return key
        return (settings, *key)

    def batch(
        self, mode: CUDAGraphMode, context: ForwardContext | None, inputs: tuple[Any, ...]
    ) -> BatchKey:
        """Return the batch of a step; without a context, from its concrete sizes."""
        copies = context is None or self._config.on_input_change == "copy"
        if context is not None:
            assert context.batch_descriptor is not None
            return BatchKey(mode, context.batch_descriptor, own_context=False, copies=copies)
        rows = 0
        if self._rows is not None:
            rows = inputs[self._rows]
        elif self._roles[FULL].read:
            shape = inputs[self._roles[FULL].read[0]].shape
            rows = shape[0] if shape else 0
        extra = ("auto", self._numbers(inputs))
        descriptor = BatchDescriptor(num_tokens=max(rows, 0), extra=extra)
        return BatchKey(mode, descriptor, own_context=True, copies=copies)

    def check_rows(self, descriptor: BatchDescriptor, inputs: tuple[Any, ...]) -> None:
        """Warn, or raise if ``strict``, where no input has the rows of a descriptor."""
        # Of the tokens, of the requests, or leading dimensions with that product ([2, 8] of 16).
        values = [(meta, tuple(inputs[position].shape)) for position, meta in self._with_rows]
        shapes = [shape for _, shape in values]
        sizes = {size for meta, shape in values for size in shape[: _dims_of_rows(meta)]}
        sizes |= {size for shape in shapes for size in accumulate(shape, mul)}
        if not sizes or not sizes.isdisjoint((descriptor.num_tokens, descriptor.num_reqs)):
            return
        texts = [str(list(shape)) for shape in dict.fromkeys(shapes)]
        error = DispatchError.no_such_rows(
            batch=descriptor, rows=descriptor.num_tokens, shapes=texts
        )
        if self._config.strict:
            raise error
        log.warning("%s", error)

    # -------------------------------------------------------------- may a step be captured

    def check_due(
        self,
        sets: WeightSets,
        weight_set: WeightSet,
        key: Hashable,
        batch: BatchKey,
        inputs: tuple[Any, ...],
    ) -> None:
        """Raise RunPlain where a step exceeds the limits, or is not warm; count its warm-up."""
        if batch.own_context:
            self._check_shape(weight_set, inputs)
        self._check_limits(sets, weight_set, batch)
        warmed = weight_set.count_warming(key)
        if warmed >= max(self._config.num_warmups, weight_set.unsettled) or capture_postponed():
            return
        self._check_settling(sets, weight_set, batch)
        detail = f"call {warmed + 1} of {self._config.num_warmups} before a capture"
        detail += self._what_is_new(weight_set, batch) if warmed == 0 else ""
        raise RunPlain(Fallback(Reason.WARMING, detail))

    def _check_shape(self, weight_set: WeightSet, inputs: tuple[Any, ...]) -> None:
        """Raise RunPlain where a shape without a context is never captured."""
        if self.mode is NONE:
            detail = f"a boundary supports {self._support.name} only, and no piece may be captured"
            raise RunPlain(Fallback(Reason.ATTENTION_SUPPORT, detail))
        sizes = self._config.cudagraph_capture_sizes
        if sizes is not None and self._rows is not None and inputs[self._rows] not in sizes:
            detail = f"{inputs[self._rows]} is not in cudagraph_capture_sizes"
            raise RunPlain(Fallback(Reason.UNLISTED_SIZE, detail))
        self.growth.check(inputs)
        if weight_set.captured >= self._config.max_captured_shapes:
            detail = (
                f"{weight_set.captured} shapes are captured (max_captured_shapes). Pad to fewer "
                "shapes, or keep what grows in a buffer of fixed size"
            )
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))

    def _check_limits(self, sets: WeightSets, weight_set: WeightSet, batch: BatchKey) -> None:
        """Raise RunPlain where one more recorded step is too many."""
        limit = self._config.max_captured_shapes
        recaptures = not batch.own_context and self._config.on_input_change == "recapture"
        if recaptures and weight_set.captured >= limit:
            detail = f"{limit} steps are captured (max_captured_shapes); on_input_change"
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))
        limit = self._config.max_weight_sets
        if not weight_set.captured and sets.captured >= limit:
            detail = f"{limit} sets of weights or written inputs have graphs (max_weight_sets)"
            raise RunPlain(Fallback(Reason.TOO_MANY_WEIGHT_SETS, detail))

    def _check_settling(self, sets: WeightSets, weight_set: WeightSet, batch: BatchKey) -> None:
        """Raise RunPlain where warming does not end: weights, inputs or shapes do not last."""
        if weight_set.moved_in_a_row >= MOVED:
            detail = self._moving(sets, "has other memory")
            detail += f" ({weight_set.moved_in_a_row} calls in a row)"
            raise RunPlain(Fallback(Reason.TOO_MANY_WEIGHT_SETS, detail))
        idle = sets.idle
        if idle > max(_MOVING, self._config.max_weight_sets):
            detail = f"{idle} sets of weights or written inputs were seen once: "
            detail += self._moving(sets, "is a new tensor")
            raise RunPlain(Fallback(Reason.TOO_MANY_WEIGHT_SETS, detail))
        self._check_varying(weight_set, batch)
        once = len(weight_set.seen) - weight_set.captured
        if batch.own_context and once > 2 * self._config.max_captured_shapes:
            detail = (
                f"{once} shapes were seen once: a number changes at every call, or sizes never "
                "repeat"
            )
            raise RunPlain(Fallback(Reason.TOO_MANY_SHAPES, detail))

    def _moving(self, sets: WeightSets, how: str) -> str:
        """Describe the difference from the call before, and what to do."""
        if not sets.replaced:
            return "an input that the model writes moves at every call. Pass the same one"
        first, count = self._inputs[sets.replaced[0]], len(sets.replaced)
        more = f" (and {count - 1} more)" if count > 1 else ""
        return (
            f"{first.source or first.name!r}{more} {how} at every call. Write into one that "
            "stays (copy_, add_), or pass it as an argument"
        )

    def _what_is_new(self, weight_set: WeightSet, batch: BatchKey) -> str:
        """Describe the size, stride or number that differs from the call before."""
        numbers = self._roles[batch.mode].numbers
        in_key = batch.own_context or self._config.on_input_change == "recapture"
        keys: list[Any] = list(weight_set.seen)[-2:]  # the last key is this call's
        if not (numbers and in_key and len(keys) == 2):
            return ""
        before, now = (key[-len(numbers) :] for key in keys)
        texts = [
            f"{self._inputs[p].source or self._inputs[p].name} is {new}, was {old}"
            for p, old, new in zip(numbers, before, now, strict=True)
            if new != old
        ]
        return f": {', '.join(texts)}" if texts else ""

    def _check_varying(self, weight_set: WeightSet, batch: BatchKey) -> None:
        """Raise RunPlain where no key repeats, as a number that is not a size always differs."""
        in_key = batch.own_context or self._config.on_input_change == "recapture"
        numbers = self._roles[batch.mode].numbers
        if weight_set.new_in_a_row <= VARYING or not in_key or not numbers:
            return
        keys: list[Any] = list(weight_set.seen)[-VARYING:]
        columns = zip(*(key[-len(numbers) :] for key in keys), strict=True)
        for position, values in zip(numbers, columns, strict=True):
            if weight_set.varying is not None:  # with the same detail, which is logged once
                break
            if position in self._arguments and len(set(values)) == len(values) == VARYING:
                value = self._inputs[position]
                weight_set.varying = value.source or value.name, values
        if weight_set.varying is not None:
            refuse_varying(*weight_set.varying, "graphs", ", or let splitting ops alone read it")
