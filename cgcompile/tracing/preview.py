"""Preview the trace of a call: :class:`Preview`. Nothing is run, compiled or kept."""

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any, TypeVar

import torch
from torch import fx

from cgcompile.torch_compat import dynamo, torch_ops
from cgcompile.tracing.dynamic_dims import TensorDim, bind_arguments, check_dims, with_two_rows
from cgcompile.tracing.trace_cache import Rules, Traces

T_ = TypeVar("T_")
Use = Callable[[fx.GraphModule, list[Any]], T_]


class Preview(Traces):
    """Traces calls of one function as :func:`cgcompile.compile` does, and keeps no trace."""

    def __init__(self, called: Any, dims: Mapping[str, Any] | None, rules: Rules) -> None:
        super().__init__(called, _refuse, dims, rules)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], use: Use[T_]) -> T_ | None:
        """Trace a call and pass its graph and inputs to ``use`` in the context of the trace."""
        # Returns the result of ``use``, or None for a call without ops on tensors. Restores
        # the model, the arguments and the globals of the function; tensors that the function reads
        # from elsewhere may keep a mark of Dynamo's.
        bind_arguments(self.name, self._signature, args, kwargs, self._bound)
        tensors = torch_ops.tree_tensors((args, kwargs))
        if isinstance(self._bound, torch.nn.Module):
            for module in self._bound.modules():
                tensors += torch_ops.tree_tensors(vars(module))
        if self._bound is not None:
            args = (self._bound, *args)
        dims = self._dims.of_call(self._named(args, kwargs))
        unbacked = self._rules.shapes == "unbacked"
        kept = [dim for dim in dims if dim.size > 1 or unbacked]
        with torch.no_grad(), dynamo.without_traces_left(self._called, tensors):
            if len(kept) < len(dims):  # torch would treat a size of 0 or 1 as a constant
                with suppress(dynamo.CannotTrace):
                    return self._preview(*with_two_rows(args, kwargs, dims), use)
            return self._preview(args, kwargs, kept, use)

    def _preview(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], dims: list[TensorDim], use: Use[T_]
    ) -> T_ | None:
        called = self._function if self._bound is not None else self._called
        with (
            self.tracing(dims),
            closing(dynamo.trace_call(called, args, kwargs, freeze=False)) as trace,
        ):
            check_dims(self.name, dims, trace.sizes)
            if trace.graph is None:
                return None
            with trace.compiling():
                result = use(trace.graph, trace.inputs)
            check_dims(self.name, dims, trace.sizes)
            return result


def _refuse(*_: Any) -> Callable[..., Any]:
    raise AssertionError("a preview compiles nothing")
