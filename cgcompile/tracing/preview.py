"""Preview the trace of a call: :class:`Look`. Nothing is run, compiled or kept."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, TypeVar

import torch
from torch import fx

from cgcompile import torch_compat as compat
from cgcompile.tracing.dynamic_dims import TensorDim, bind_arguments, check_dims, with_two_rows
from cgcompile.tracing.trace_cache import Rules, Traces

T_ = TypeVar("T_")


class Look(Traces):
    """Trace calls of one function as :func:`cgcompile.compile` does, and keep no trace."""

    def __init__(self, called: Any, dims: Mapping[str, Any] | None, rules: Rules) -> None:
        super().__init__(called, _nothing, dims, rules)

    def at(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        use: Callable[[fx.GraphModule, list[Any]], T_],
    ) -> T_ | None:
        """Trace a call and pass its graph and inputs to ``use`` in the context of the trace.

        Returns the result of ``use``, or None if the call computes nothing with tensors. Restores
        the model, the arguments and the globals of the function; tensors that the function reads
        from elsewhere may keep a mark of Dynamo's.
        """
        bind_arguments(self.name, self._signature, args, kwargs, self._bound)
        if self._bound is not None:
            args = (self._bound, *args)
        dims = self._dims.of_call(self._named(args, kwargs))
        small = [each for each in dims if each.size < 2 and self._rules.shapes != "unbacked"]
        tensors = [*_tensors_of(self._bound), *compat.tree_tensors((args, kwargs))]
        with torch.no_grad(), compat.without_traces_left(self._called, tensors):
            if small:  # torch would treat a size of 0 or 1 as a constant
                with suppress(compat.CannotTrace):
                    larger = with_two_rows(args, kwargs, dims)
                    return self._preview(*larger, use)
            kept = [each for each in dims if each not in small]
            return self._preview(args, kwargs, kept, use)

    def _preview(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        dims: list[TensorDim],
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
                result = use(trace.graph, trace.inputs)
            check_dims(self.name, dims, trace.sizes)
            return result


def _nothing(*_: Any) -> Callable[..., Any]:
    raise AssertionError("a preview compiles nothing")


def _tensors_of(bound: Any) -> list[torch.Tensor]:
    """Return the tensors in the attributes of a module and of its submodules."""
    if not isinstance(bound, torch.nn.Module):
        return []
    return [each for module in bound.modules() for each in compat.tree_tensors(vars(module))]
