"""Trace a call for a look: :class:`Look`. Nothing is run, compiled or kept."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, TypeVar

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.tracing.dynamic_dims import Found, bind_arguments, check_dims, with_two_rows
from cgcompile.tracing.trace_cache import Rules, Traces

T_ = TypeVar("T_")


class Look(Traces):
    """One function, whose calls are traced as :func:`cgcompile.compile` would, and forgotten.

    Args:
        called: module, bound method or function.
        dims: which dimensions vary, by the name of the parameter.
        rules: what a trace may assume of sizes; its guards do not matter here.
    """

    def __init__(self, called: Any, dims: Mapping[str, Any] | None, rules: Rules) -> None:
        super().__init__(called, _nothing, dims, rules)

    def at(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        use: Callable[[fx.GraphModule, list[Any]], T_],
    ) -> T_ | None:
        """Trace a call and give the graph to ``use``, while Dynamo's context of it is there.

        The model, the arguments and the globals of the function are as before afterwards; tensors
        that the function finds elsewhere may keep a mark of Dynamo's.

        Args:
            args: of the call.
            kwargs: of the call.
            use: takes the pre-grad graph and what it was traced with; it may change the graph.

        Returns:
            What ``use`` returned; None if the call computes nothing with tensors.

        Raises:
            CannotTrace: the call does not become one graph.
            TraceError: dimensions that vary were misnamed, or fixed by the model.
            ArgumentsError: the function does not take these arguments.
        """
        bind_arguments(self.name, self._signature, args, kwargs, self._bound)
        if self._bound is not None:
            args = (self._bound, *args)
        dims = self._dims.found(self._named(args, kwargs))
        small = [each for each in dims if each.size < 2 and self._rules.shapes != "unbacked"]
        tensors = [*_tensors_of(self._bound), *compat.tree_tensors((args, kwargs))]
        with torch.no_grad(), compat.without_traces_left(self._called, tensors):
            if small:  # torch would take a size of 0 or 1 for a constant
                with suppress(compat.CannotTrace):
                    larger = with_two_rows(args, kwargs, dims)
                    return self._seen(*larger, use)
            kept = [each for each in dims if each not in small]
            return self._seen(args, kwargs, kept, use)

    def _seen(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[Found],
        use: Callable[[fx.GraphModule, list[Any]], T_],
    ) -> T_ | None:
        called = self._function if self._bound is not None else self._called
        with (
            self._tracing(dims),
            closing(compat.trace_call(called, args, kwargs, freeze=False)) as trace,
        ):
            check_dims(self.name, dims, trace.sizes)
            if trace.graph is None:
                return None
            with trace.compiling():
                found = use(trace.graph, trace.inputs)
            check_dims(self.name, dims, trace.sizes)
            return found


def _nothing(*_: Any) -> Callable[..., Any]:
    raise AssertionError("a look compiles nothing")


def _tensors_of(bound: Any) -> list[torch.Tensor]:
    """The tensors that the attributes of a module and of its parts hold."""
    if not isinstance(bound, torch.nn.Module):
        return []
    return [each for module in bound.modules() for each in compat.tree_tensors(vars(module))]
