"""Refuse a capture that replaces the memory of a tensor it did not create: :class:`SameStorages`.

``weight.data = ...``, ``weight.set_(...)`` and ``weight.t_()`` change the tensor object, once, when
Python runs. A replay does not repeat that, and reads the memory of the first step again.
"""

from collections.abc import Callable, Sequence

import torch

from cgcompile import compat
from cgcompile.errors import CaptureError
from cgcompile.graphs.modules import modules_of


class SameStorages:
    """Compare memory and layout of tensors before and after a capture, and restore them.

    Tensor subclasses are not compared. About 0.5 us a tensor.

    Args:
        what: what is captured, for messages.
        tensors: those that exist before the capture and after the step.
        name_of: returns the name of one of them, for messages.
    """

    def __init__(
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        self._what, self._name_of = what, name_of
        known = {id(tensor): tensor for tensor in tensors}
        plain = [tensor for tensor in known.values() if compat.is_plain_tensor(tensor)]
        # torch cannot compare the memory of quantized and nested tensors (is_set_to)
        self._tensors = [each for each in plain if not (each.is_quantized or each.is_nested)]
        self.accept()

    def accept(self) -> None:
        """Take the present memory as the one that tensors must have."""
        with compat.without_modes():
            self._before = [tensor.data for tensor in self._tensors]
        self._addresses = compat.Addresses(self._tensors, range(len(self._tensors)))

    @property
    def at_same_addresses(self) -> bool:
        """Whether all tensors are at the addresses where they were; layouts are not compared."""
        return self._addresses.hold(self._tensors)

    def check(self) -> None:
        """Compare, and restore what changed.

        Raises:
            CaptureError: a tensor has other memory, or another layout, than before.
        """
        changed = self.restore()
        if changed:
            name = self._name_of(changed[0])
            if len(changed) > 1:
                name += f" (and {len(changed) - 1} more)"
            raise CaptureError.replaces_memory(what=self._what, name=name)

    def restore(self) -> list[torch.Tensor]:
        """Give each tensor the memory and layout that it had; returns those that had others."""
        pairs = zip(self._tensors, self._before, strict=True)
        with compat.without_modes():
            changed = [(now, before) for now, before in pairs if not now.is_set_to(before)]
            for tensor, before in changed:
                tensor.data = before
        return [tensor for tensor, _ in changed]


def weights_of(runnable: object) -> list[torch.Tensor]:
    """The parameters and buffers of the modules that a runnable is or holds."""
    modules = [module for root in modules_of(runnable) for module in root.modules()]
    tables = [table for module in modules for table in (module._parameters, module._buffers)]
    return [weight for table in tables for weight in table.values() if weight is not None]


def weight_name(runnable: object, weight: torch.Tensor) -> str:
    """The name of a parameter or buffer, or its type if it is an argument."""
    for root in modules_of(runnable):
        for named in (root.named_parameters(), root.named_buffers()):
            for name, tensor in named:
                if tensor is weight:
                    return repr(name)
    return f"a tensor {tuple(weight.shape)} {weight.dtype}"
