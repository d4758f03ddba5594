"""Steps without a forward context: which graph serves them, by what they are given.

There is one contract for all steps, a batch descriptor in a forward context, so one is made
from the concrete sizes. Shapes are not known beforehand, so their number is bounded.
"""

from collections.abc import Hashable
from typing import Any

from cgcompile.boundaries import allows_full
from cgcompile.config import CompilationConfig, CUDAGraphMode
from cgcompile.forward_context import BatchDescriptor
from cgcompile.passes.split import SplitGraph
from cgcompile.piecewise.bindings import Binding, picker
from cgcompile.piecewise.growth import Growth
from cgcompile.piecewise.roles import Roles, full_support
from cgcompile.reasons import Reason, Why


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

    def why_still_warming(self, binding: Binding, warming: Why) -> Why:
        """What to say of a first call of a shape: ``warming``, or that shapes never come again."""
        once = len(binding.seen) - binding.captured
        if once <= 2 * self._config.max_captured_shapes:
            return warming
        detail = (
            f"{once} shapes were seen once: a number changes at every call, or sizes never repeat"
        )
        return Why(Reason.TOO_MANY_SHAPES, detail)

    def why_not(self, binding: Binding, inputs: tuple[Any, ...]) -> Why | None:
        """Why a shape that is not recorded will not be; None if it may be."""
        if self.mode is CUDAGraphMode.NONE:
            support = full_support(self._split).name
            detail = f"a boundary supports {support} only, and no piece may be captured"
            return Why(Reason.ATTENTION_SUPPORT, detail)
        sizes = self._config.cudagraph_capture_sizes
        if sizes is not None and self._rows is not None and inputs[self._rows] not in sizes:
            detail = f"{inputs[self._rows]} is not in cudagraph_capture_sizes"
            return Why(Reason.UNLISTED_SIZE, detail)
        grown = self.growth.why(inputs)
        if grown is not None:
            return grown
        if binding.captured >= self._config.max_captured_shapes:
            detail = (
                f"{binding.captured} shapes are captured (max_captured_shapes). Pad to fewer "
                "shapes, or keep what grows in a buffer of fixed size"
            )
            return Why(Reason.TOO_MANY_SHAPES, detail)
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
