"""One trace of a function, compiled: :class:`Variant`. ``variants.py`` keeps those of one."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cgcompile import compat
from cgcompile.entry import CompiledGraph
from cgcompile.piecewise.frozen import Frozen
from cgcompile.tracing.shortcut import Shortcut

SHAPES = ("backed", "backed_size_oblivious", "unbacked")
GUARDS = ("keep", "shape", "none")


@dataclass(frozen=True)
class Rules:
    """How calls are traced and told apart.

    Attributes:
        guards: which of Dynamo's assumptions are looked at in each call.
        check_guards: look at all of them, and raise where one that was dropped fails.
        shapes: what a trace may assume of a dynamic size.
    """

    guards: str = "keep"
    check_guards: bool = False
    shapes: str = "backed_size_oblivious"


@dataclass(frozen=True)
class Start:
    """What the start of one trace took.

    Attributes:
        tracing: seconds of Dynamo.
        compiling: seconds of splitting the graph and of compiling pieces, or reading them.
    """

    tracing: float
    compiling: float

    def __str__(self) -> str:
        return f"traced in {self.tracing:.2f} s, compiled in {self.compiling:.2f} s"


class Variant:
    """One trace, compiled.

    Args:
        trace: what Dynamo found.
        compiled: the compiled graph; None if there is nothing to compute.
        fits: whether a call is like the traced one, by its arguments.
        rules: how calls are told apart.
        start: what its start took.
        bound: whether tensors of modules are bound, where there are any.

    Attributes:
        compiled: the compiled graph.
        start: what its start took.
        fits: whether a call is like the traced one, by its arguments and autocast.
        proven: whether a call has run to its end: only then is it known what it replaces.
        repeated: whether it has served another call than the one that was traced.
        trusted: whether it is, and nothing but ``fits`` is looked at.
        frozen: the tensors that are bound, not looked up.
        is_free: whether nothing but ``fits`` is looked at.
        shortcut: makes short ways of its calls; None if it has none.
    """

    def __init__(
        self,
        trace: compat.Trace,
        compiled: Callable[..., Any] | None,
        fits: Callable[[tuple[Any, ...], dict[str, Any]], bool],
        rules: Rules,
        start: Start,
        bound: bool,
    ) -> None:
        self.compiled = compiled
        self.fits = fits
        self.frozen = trace.frozen
        self.start = start
        self.proven = self.trusted = self.repeated = False
        self.number = 0  # of all traces of the function
        self.numbers: tuple[Any, ...] = ()  # the numbers among the arguments that were traced
        self.guards = self.dropped = None
        if rules.guards != "none" or not bound:
            self.guards = trace.guards(sizes_only=rules.guards != "keep")
        if rules.check_guards and rules.guards != "keep":
            self.dropped = trace.guards(sizes_only=False)
        run: Callable[..., Any] | None = compiled
        if compiled is not None and trace.frozen:
            tensors = tuple(each.tensor for each in trace.frozen)
            # Other views of the same memory, so that ``weight.data = ...`` makes them stale, and
            # never wrong in type or freed. Gradients need the parameters themselves.
            held = tuple(_held(tensor) for tensor in tensors)
            if isinstance(compiled, CompiledGraph):
                compiled.freeze(tensors, held)
                run = compiled.__call__  # a method costs less to call than an object
            else:
                run = _completed(compiled, tensors, held)
        self.run = trace.function(run)
        self.shortcut: Shortcut | None = None
        self.is_free = self.guards is None and self.dropped is None
        if isinstance(compiled, CompiledGraph) and self.is_free and trace.python.is_plain:
            around = partial(trace.python.function, trace.original)  # the trace itself must go
            self.shortcut = Shortcut(compiled, fits.text, around)  # type: ignore[attr-defined]
        self._references: Sequence[weakref.ref[Any]] = getattr(fits, "references", ())

    @property
    def is_alive(self) -> bool:
        """Whether all objects that a call must pass, or guards compare, are still there."""
        if self.guards is not None and not self.guards.is_alive:
            return False
        return all(reference() is not None for reference in self._references)

    def moved(self, names: Mapping[str, Any], globals_: Mapping[str, Any]) -> str | None:
        """The first frozen tensor that is another one now, as Python; None if all are there."""
        for each in self.frozen:
            try:
                now = eval(each.where, {"L": names, "G": globals_})
            except (AttributeError, LookupError, TypeError):
                now = None
            if now is not each.tensor:
                return each.where
        return None


def _completed(
    compiled: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    held: tuple[torch.Tensor, ...],
) -> Callable[..., Any]:
    """The compiled graph as a function of its other inputs alone."""
    frozen = Frozen(len(tensors))
    frozen.bind(tensors, held)
    return lambda *inputs: frozen.put_back(compiled(*inputs, *frozen.now))


def _held(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return tensor.detach() if type(tensor) in (torch.Tensor, torch.nn.Parameter) else tensor
