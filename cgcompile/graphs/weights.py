"""New values of weights, written where graphs read them."""

from collections.abc import Mapping
from typing import Any

import torch

from cgcompile.errors import WeightsError
from cgcompile.settings import checked
from cgcompile.torch_compat import torch_ops


@checked
def update_weights(module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """Write new values into the parameters and buffers of a module, in place.

    Graphs read weights where they were at capture, so the next replay reads the new values; it does
    not read tensors that replace the old ones. All values are checked before the first is written:
    a refused call changes nothing. Work of the current stream that reads the weights comes first.
    Values on the CPU are read before it returns.

    Args:
        module: a module, or what ``torch.compile`` made of it.
        state: new tensors by name, as ``state_dict()`` gives them, of a compiled module too; other
            names keep their values. Of equal shape; dtype and device are converted.

    Raises:
        WeightsError: a name that the module does not have, or another shape.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> address = model.weight.data_ptr()
        >>> cgcompile.update_weights(model, {"weight": torch.zeros(2, 2)})
        >>> model.weight.data_ptr() == address
        True
    """
    original = torch_ops.original_of(module)
    module = module if original is None else original
    state = {name.removeprefix("_orig_mod."): value for name, value in state.items()}
    own: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    own.update(module.named_buffers(remove_duplicate=False))
    for name, value in state.items():
        if name not in own:
            raise WeightsError.unknown(name=name, known=list(own))
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != tuple(own[name].shape):
            raise WeightsError.shape(
                name=name, found=str(shape), expected=str(tuple(own[name].shape))
            )
    for name, value in state.items():
        target = own[name]
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            target.copy_(value)
