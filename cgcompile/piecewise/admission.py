"""Whether a step may have a graph, and of which kind: :class:`Admission`.

Everything that can be said of a call before anything runs, apart from what its graphs demand of
the inputs. The rule: a no is a :class:`~cgcompile.reasons.Why`.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import Any

import torch

from cgcompile.boundaries import AttentionCGSupport, allows_full
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.errors import DispatchError
from cgcompile.forward_context import BatchDescriptor, ForwardContext
from cgcompile.graphs.capture import capture_allowed, capture_postponed, captured_elsewhere
from cgcompile.passes.nodes import is_symbolic_number, symbols_of, tensors
from cgcompile.passes.pieces import Value
from cgcompile.piecewise.auto import AutoDispatch
from cgcompile.piecewise.bindings import MOVED, Binding, Bindings
from cgcompile.piecewise.recording import Batch
from cgcompile.piecewise.roles import Roles
from cgcompile.reasons import VARYING, Ledger, Reason, Why, varying_number

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

    def mode_for(self, context: ForwardContext) -> CUDAGraphMode | Why:
        """The mode of a step under a forward context, or why it has none."""
        mode = context.cudagraph_runtime_mode
        if mode is NONE:
            return Why(Reason.MODE_NONE, "the forward context says NONE")
        if context.batch_descriptor is None:
            raise DispatchError.no_descriptor(what="the compiled model", mode=mode.name)
        if mode not in self._served:
            detail = f"the context says {mode.name}, cudagraph_mode is {self._wanted.name}"
            return Why(Reason.OTHER_MODE, detail)
        if mode is FULL and not allows_full(self._support, context.batch_descriptor):
            detail = (
                f"a boundary supports {self._support.name} only, not {context.batch_descriptor}"
            )
            why = Why(Reason.ATTENTION_SUPPORT, detail)
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
    ) -> Why | None:
        """Why a step that is not recorded is not captured by this call."""
        if self.closed or not capture_allowed():
            detail = f"no graph for {batch.descriptor}, and capture is closed"
            return Why(Reason.CAPTURE_FORBIDDEN, detail)
        if batch.own_context:
            why = self._auto.why_not(binding, inputs)
            if why is not None:
                return why
        elif self._config.on_input_change == "recapture":
            most = self._config.max_captured_shapes
            if binding.captured >= most:
                detail = f"{most} steps are captured (max_captured_shapes); on_input_change"
                return Why(Reason.TOO_MANY_SHAPES, detail)
        most = self._config.max_bindings
        if not binding.captured and self._bindings.captured >= most:
            detail = f"{most} sets of weights or written inputs have graphs (max_bindings)"
            return Why(Reason.TOO_MANY_BINDINGS, detail)
        warmed = binding.count_warming(key)
        if capture_postponed():
            return Why(Reason.WARMING, "a bulk capture runs all batches plain first")
        if warmed < max(self._config.num_warmups, binding.unsettled):
            detail = f"call {warmed + 1} of {self._config.num_warmups} before a capture"
            warming = Why(Reason.WARMING, detail)
            return self._why_still_warming(binding, warming, batch)
        if captured_elsewhere():
            return Why(Reason.CAPTURE_BUSY, "another thread is capturing")
        return None

    def _why_still_warming(self, binding: Binding, warming: Why, batch: Batch) -> Why:
        """``warming``, or why it does not end: what must stay is another at every call."""
        if binding.moved_in_a_row >= MOVED:
            many = f"{binding.moved_in_a_row} calls in a row"
            detail = f"{self._moving('has other memory')} ({many})"
            return Why(Reason.TOO_MANY_BINDINGS, detail)
        idle = self._bindings.idle
        if idle > max(_MOVING, self._config.max_bindings):
            detail = f"{idle} sets of weights or written inputs were seen once: "
            detail += self._moving("is a new tensor")
            return Why(Reason.TOO_MANY_BINDINGS, detail)
        varying = self._why_varying(binding, batch)
        if varying is not None:
            return varying
        return self._auto.why_still_warming(binding, warming) if batch.own_context else warming

    def _why_varying(self, binding: Binding, batch: Batch) -> Why | None:
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
