"""Notice a result that comes back as an input, larger: every step then has a new shape.

That is what a key-value cache does that is extended by ``torch.cat``. Capturing it would record one
graph a step and replay none.

Steps without a forward context: which graph serves them, by what they are given.

There is one contract for all steps, a batch descriptor in a forward context, so one is made
from the concrete sizes. Shapes are not known beforehand, so their number is bounded.

Whether a step may have a graph, and of which kind: :class:`Admission`.

Everything that can be said of a call before anything runs, apart from what its graphs demand of
the inputs. The rule: a no is a :class:`~cgcompile.reasons.Fallback`.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.context import BatchDescriptor, ForwardContext
from cgcompile.descriptor import allows_full
from cgcompile.errors import DispatchError
from cgcompile.graphs.capture import why_never_captured, why_not_captured_yet, why_not_in
from cgcompile.modes import AttentionCGSupport
from cgcompile.passes.nodes import is_symbolic_number, symbols_of, tensors
from cgcompile.passes.split import SplitGraph, Value
from cgcompile.reasons import VARYING, Fallback, Ledger, Reason, varying_number
from cgcompile.runtime.inputs import Roles, full_support
from cgcompile.runtime.recording import Batch
from cgcompile.runtime.weight_sets import MOVED, Binding, Bindings, picker


class Growth:
    """Watches the results of plain steps of one split graph."""

    def __init__(self, split: SplitGraph) -> None:
        self._inputs = split.inputs
        self._grows = list(_growing(split))
        self._last: list[tuple[int, torch.Size]] = []  # what came out longer, by input

    def remember(self, result: Any) -> None:
        """Note the shapes of what the step returned, for the next call."""
        if self._grows:
            self._last = [(position, result[item].shape) for position, item in self._grows]

    def why(self, inputs: Sequence[Any]) -> Fallback | None:
        """Why a step should not be captured: the last result came back; else None."""
        for position, shape in self._last:
            if inputs[position].shape == shape:
                value = self._inputs[position]
                detail = (
                    f"{value.source or value.name} is the result of the last step and grows with "
                    "each. Keep it in a buffer of fixed size that the model writes in place: in "
                    "transformers a StaticCache (cache_implementation='static'), not a DynamicCache"
                )
                return Fallback(Reason.GROWING_STATE, detail)
        return None


def _growing(split: SplitGraph) -> list[tuple[int, int]]:
    """(input, item of the result) where the result is the input made longer in one dimension."""
    found = []
    items = split.result if isinstance(split.result, tuple) else ()
    for position, value in enumerate(split.inputs):
        if not isinstance(value.meta, torch.Tensor) or value.static:
            continue
        for item, ref in enumerate(items):
            made = split.values.get(getattr(ref, "name", ""))
            if made is not None and _is_longer(split, value.meta, made.meta):
                found.append((position, item))
    return found


def _is_longer(split: SplitGraph, before: torch.Tensor, after: object) -> bool:
    if not isinstance(after, torch.Tensor) or before.dim() != after.dim():
        return False
    if before.dtype != after.dtype:
        return False
    number = split.symbols.number
    differences = [number(b) - number(a) for a, b in zip(before.shape, after.shape, strict=True)]
    changed = [difference for difference in differences if difference != 0]
    return len(changed) == 1 and bool(changed[0].is_positive)


class AutoDispatch:
    """What one compiled graph does without a forward context.

    Args:
        split: the split graph.
        config: the settings.
        wanted: the CUDA graph mode of the settings.

    Attributes:
        mode: the runtime mode of all its steps; NONE if the settings leave none.
        written: positions of the inputs that are bound by address.
        growth: watches for results that come back larger.
    """

    def __init__(self, split: SplitGraph, config: CompilationConfig, wanted: CUDAGraphMode) -> None:
        self.growth = Growth(split)
        self._split = split
        self._config = config
        self._rows = _rows(split, config)
        self._read = Roles.of(split, CUDAGraphMode.FULL).read
        self._first = auto_mode(split, wanted)
        self.use(self._first)

    def reset(self) -> None:
        """Take the mode of the beginning again: all graphs have been dropped."""
        self.use(self._first)

    def use(self, mode: CUDAGraphMode) -> None:
        """Take ``mode`` from now on."""
        self.mode = mode
        none = mode is CUDAGraphMode.NONE
        roles = Roles.of(self._split, CUDAGraphMode.FULL if none else mode)
        self._numbers = picker(roles.numbers)
        self.written = roles.written

    def key(self, inputs: tuple[Any, ...]) -> Hashable:
        """What tells the steps of one set of weights apart: the numbers that graphs read."""
        return self._numbers(inputs)

    def descriptor(self, inputs: tuple[Any, ...]) -> BatchDescriptor:
        """The descriptor of a step, from its concrete sizes."""
        rows = 0
        if self._rows is not None:
            rows = inputs[self._rows]
        elif self._read:
            shape = inputs[self._read[0]].shape
            rows = shape[0] if shape else 0
        return BatchDescriptor(num_tokens=max(rows, 0), extra=("auto", self.key(inputs)))

    def why_still_warming(self, binding: Binding, warming: Fallback) -> Fallback:
        """What to say of a first call of a shape: ``warming``, or that shapes never come again."""
        once = len(binding.seen) - binding.captured
        if once <= 2 * self._config.max_captured_shapes:
            return warming
        detail = (
            f"{once} shapes were seen once: a number changes at every call, or sizes never repeat"
        )
        return Fallback(Reason.TOO_MANY_SHAPES, detail)

    def why_not(self, binding: Binding, inputs: tuple[Any, ...]) -> Fallback | None:
        """Why a shape that is not recorded will not be; None if it may be."""
        if self.mode is CUDAGraphMode.NONE:
            support = full_support(self._split).name
            detail = f"a boundary supports {support} only, and no piece may be captured"
            return Fallback(Reason.ATTENTION_SUPPORT, detail)
        sizes = self._config.cudagraph_capture_sizes
        if sizes is not None and self._rows is not None and inputs[self._rows] not in sizes:
            detail = f"{inputs[self._rows]} is not in cudagraph_capture_sizes"
            return Fallback(Reason.UNLISTED_SIZE, detail)
        grown = self.growth.why(inputs)
        if grown is not None:
            return grown
        if binding.captured >= self._config.max_captured_shapes:
            detail = (
                f"{binding.captured} shapes are captured (max_captured_shapes). Pad to fewer "
                "shapes, or keep what grows in a buffer of fixed size"
            )
            return Fallback(Reason.TOO_MANY_SHAPES, detail)
        return None


def auto_mode(split: SplitGraph, wanted: CUDAGraphMode) -> CUDAGraphMode:
    """The runtime mode of steps without a forward context; NONE if the settings leave none.

    FULL where every boundary allows it for any batch and no number is read by boundaries alone:
    such a number may change at each step, and a piecewise step takes it as it comes.
    """
    piecewise = wanted.has_mode(CUDAGraphMode.PIECEWISE)
    full = wanted.has_mode(CUDAGraphMode.FULL) and allows_full(full_support(split), None)
    captured = any(piece.capture for piece in split.pieces)
    if full and piecewise and captured:
        numbers = Roles.of(split, CUDAGraphMode.FULL).numbers
        live = set(numbers) - set(Roles.of(split, CUDAGraphMode.PIECEWISE).numbers)
        used = {name for piece in split.pieces for name in piece.inputs}
        full = not any(split.inputs[position].name in used for position in live)
    if full:
        return CUDAGraphMode.FULL
    return CUDAGraphMode.PIECEWISE if piecewise and captured else CUDAGraphMode.NONE


def _rows(split: SplitGraph, config: CompilationConfig) -> int | None:
    """The position of the number that counts the rows of a batch; None for a static graph."""
    dims = split.symbols.dims
    names = [name for name, dim in dims.items() if config.capture_dim in (None, dim)]
    places = [p for p, each in enumerate(split.inputs) if each.name in names[:1]]
    return places[0] if places else None


log = logging.getLogger(__name__)

FULL, PIECEWISE, NONE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE

_MOVING = 64  # bindings that were seen and never captured, before that is called a reason


class Admission:
    """Decides for one compiled graph.

    Args:
        config: the settings.
        support: how far the whole step can go into a FULL graph.
        roles: what the inputs are for, by runtime mode.
        auto: what happens without a forward context.
        inputs: of the graph.
        bindings: the sets of weights that were seen.
        ledger: where lesser modes are counted.

    Attributes:
        closed: whether captures have ended.
    """

    def __init__(
        self,
        config: CompilationConfig,
        support: AttentionCGSupport,
        roles: Mapping[CUDAGraphMode, Roles],
        auto: AutoDispatch,
        inputs: Sequence[Value],
        bindings: Bindings,
        ledger: Ledger,
    ) -> None:
        assert config.cudagraph_mode is not None
        self.closed = False
        self._config = config
        self._wanted = config.cudagraph_mode
        self._served = (self._wanted.decode_mode(), self._wanted.mixed_mode())
        self._support = support
        self._roles = roles
        self._auto = auto
        self._inputs = inputs
        sizes = symbols_of([tensors(value.meta) for value in inputs])
        self._arguments = frozenset(  # numbers that are no sizes of tensors
            position
            for position, value in enumerate(inputs)
            if is_symbolic_number(value.meta) and sizes.isdisjoint(symbols_of(value.meta))
        )
        self._bindings = bindings
        self._ledger = ledger

    def mode_for(self, context: ForwardContext) -> CUDAGraphMode | Fallback:
        """The mode of a step under a forward context, or why it has none."""
        mode = context.cudagraph_runtime_mode
        if mode is NONE or mode not in self._served or context.batch_descriptor is None:
            why = why_not_in(context, self._served, "the compiled model")
            assert why is not None
            return why
        if mode is FULL and not allows_full(self._support, context.batch_descriptor):
            detail = (
                f"a boundary supports {self._support.name} only, not {context.batch_descriptor}"
            )
            why = Fallback(Reason.ATTENTION_SUPPORT, detail)
            if self._config.strict or PIECEWISE not in self._served:
                return why
            self._ledger.degraded(why)
            return PIECEWISE
        return mode

    def key(
        self, mode: CUDAGraphMode, context: ForwardContext, inputs: tuple[Any, ...]
    ) -> Hashable:
        """What tells the steps of one set of weights under a caller's context apart."""
        key = (mode is FULL, context.batch_descriptor)
        if self._config.on_input_change != "recapture":
            return key
        roles = self._roles[mode]
        addresses = (inputs[place].data_ptr() for place in (*roles.read, *roles.written))
        numbers = (repr(inputs[place]) for place in roles.numbers)
        return (*key, *addresses, *numbers)

    def check_rows(self, descriptor: BatchDescriptor, inputs: tuple[Any, ...]) -> None:
        """Compare the rows of a descriptor with the sizes of the inputs; once for each capture.

        Coverage and padding are counted in these rows. They are right if an input has a dimension
        of them, or of the requests, or leading dimensions with this product ([2, 8] of 16 tokens).

        Raises:
            DispatchError: ``strict``, and no input has them. Otherwise that is a warning.
        """
        shapes = [
            tuple(inputs[place].shape)
            for place, value in enumerate(self._inputs)
            if isinstance(value.meta, torch.Tensor) and not value.static and value.meta.dim()
        ]
        sizes = {size for shape in shapes for size in (*shape, *accumulate(shape, mul))}
        if not sizes or not sizes.isdisjoint((descriptor.num_tokens, descriptor.num_reqs)):
            return
        texts = [str(list(shape)) for shape in dict.fromkeys(shapes)]
        error = DispatchError.no_such_rows(
            batch=descriptor, rows=descriptor.num_tokens, shapes=texts
        )
        if self._config.strict:
            raise error
        log.warning("%s", error)

    def why_not_now(
        self, binding: Binding, key: Hashable, batch: Batch, inputs: tuple[Any, ...]
    ) -> Fallback | None:
        """Why a step that is not recorded is not captured by this call."""
        why = why_never_captured(self.closed, batch.descriptor)
        why = why or self._why_over_limits(binding, batch, inputs)
        if why is not None:
            return why
        warmed = binding.count_warming(key)
        warming = None
        if warmed < max(self._config.num_warmups, binding.unsettled):
            detail = f"call {warmed + 1} of {self._config.num_warmups} before a capture"
            warming = self._why_still_warming(binding, Fallback(Reason.WARMING, detail), batch)
        return why_not_captured_yet(warming)

    def _why_over_limits(
        self, binding: Binding, batch: Batch, inputs: tuple[Any, ...]
    ) -> Fallback | None:
        """Return why one more step is too many; without a context, of an unlisted size too."""
        why = self._auto.why_not(binding, inputs) if batch.own_context else None
        if why is not None:
            return why
        limit = self._config.max_captured_shapes
        recaptures = not batch.own_context and self._config.on_input_change == "recapture"
        if recaptures and binding.captured >= limit:
            detail = f"{limit} steps are captured (max_captured_shapes); on_input_change"
            return Fallback(Reason.TOO_MANY_SHAPES, detail)
        limit = self._config.max_bindings
        if not binding.captured and self._bindings.captured >= limit:
            detail = f"{limit} sets of weights or written inputs have graphs (max_bindings)"
            return Fallback(Reason.TOO_MANY_BINDINGS, detail)
        return None

    def _why_still_warming(self, binding: Binding, warming: Fallback, batch: Batch) -> Fallback:
        """``warming``, or why it does not end: what must stay is another at every call."""
        if binding.moved_in_a_row >= MOVED:
            many = f"{binding.moved_in_a_row} calls in a row"
            detail = f"{self._moving('has other memory')} ({many})"
            return Fallback(Reason.TOO_MANY_BINDINGS, detail)
        idle = self._bindings.idle
        if idle > max(_MOVING, self._config.max_bindings):
            detail = f"{idle} sets of weights or written inputs were seen once: "
            detail += self._moving("is a new tensor")
            return Fallback(Reason.TOO_MANY_BINDINGS, detail)
        varying = self._why_varying(binding, batch)
        if varying is not None:
            return varying
        return self._auto.why_still_warming(binding, warming) if batch.own_context else warming

    def _why_varying(self, binding: Binding, batch: Batch) -> Fallback | None:
        """Return why no key repeats: a number that is not a size is another one at each call."""
        in_key = batch.own_context or self._config.on_input_change == "recapture"
        if binding.new_in_a_row <= VARYING or not in_key:
            return None
        if binding.varying is not None:  # with the same detail, which is logged once
            return binding.varying
        keys: list[Any] = list(binding.seen)[-VARYING:]
        numbers = self._roles[batch.mode].numbers  # the last items of each key
        for position, *values in zip(numbers, *(key[-len(numbers) :] for key in keys), strict=True):
            if position in self._arguments and len(set(values)) == len(values) == VARYING:
                value, advice = self._inputs[position], ", or let splitting ops alone read it"
                name = value.source or value.name
                binding.varying = varying_number(name, values, "graphs", advice)
                break
        return binding.varying

    def _moving(self, how: str) -> str:
        """What is not the same as in the call before, and what to do, in words."""
        replaced = self._bindings.replaced
        if not replaced:
            return "an input that the model writes lies elsewhere at every call. Pass the same one"
        first = self._inputs[replaced[0]]
        more = f" (and {len(replaced) - 1} more)" if len(replaced) > 1 else ""
        return (
            f"{first.source or first.name!r}{more} {how} at every call. Write into one that "
            "stays (copy_, add_), or pass it as an argument"
        )
