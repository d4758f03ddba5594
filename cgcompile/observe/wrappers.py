"""Where a step of a wrapper differs from the plain one: :func:`wrapper_place`."""

from collections.abc import Sequence

import torch

from cgcompile import compat
from cgcompile.errors import CGCompileError
from cgcompile.forward_context import callers_context
from cgcompile.graphs.verify import put_back, verify_wrapper
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.comparing import Tolerance, without_gradients
from cgcompile.observe.inputs import Call
from cgcompile.observe.locate import Place


def wrapper_place(
    wrapper: CUDAGraphWrapper, call: Call, tolerance: Tolerance, kept: Sequence[torch.Tensor]
) -> Place:
    """Return the first eager break whose arguments differ, or the result.

    In the forward context of the step.

    Args:
        wrapper: whose step it is.
        call: the arguments of the step; their tensors are put back.
        tolerance: how close numbers must be.
        kept: what else the step writes, to be put back as well.
    """
    context = callers_context()
    descriptor = None if context is None else context.batch_descriptor
    mode = wrapper.runtime_mode if context is None else context.cudagraph_runtime_mode
    if descriptor is None or wrapper.entry_of(mode, descriptor) is None:
        return Place(detail="no graph serves the step")
    args, kwargs = call
    tensors = compat.tree_tensors(call)
    dtypes = [each.dtype for each in tensors if each.is_floating_point()]
    rtol, atol = tolerance.of(dtypes[0]) if dtypes else (0.0, 0.0)
    try:
        with without_gradients(), put_back([*tensors, *kept]):
            found = verify_wrapper(wrapper, *args, rtol=rtol, atol=atol, **kwargs)
    except CGCompileError as error:
        return Place(detail=str(error).splitlines()[0])
    return Place() if found is None else Place(found.where, detail=f"{found.what}: {found.detail}")
