"""What ops write and generators they draw from, put back after a call: :class:`Memory`."""

from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.host_rules import written


class Memory:
    """Keeps the bytes of storages before they are written. Copies what is written, nothing else.

    Args:
        known: tensors that are there before the call; what a call makes itself is not kept.
        alone: keep nothing but these: what a forward context leads to may be most of a GPU.
    """

    def __init__(self, known: list[torch.Tensor], *, alone: bool = False) -> None:
        self._alone = alone
        self._known = {_address(tensor) for tensor in known}
        self._made: set[int] = set()  # no memory from before can begin where this call allocates
        self._kept: dict[int, int] = {}  # by address: how many bytes from there on
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def made(self, results: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        """Note that an op returned these tensors, over memory of its own or of its arguments."""
        theirs = {_address(tensor) for tensor in given} | self._known
        self._made |= {_address(tensor) for tensor in results} - theirs

    def about_to_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the bytes of what an op will write, and the state of the generator it draws from."""
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.about_to_draw(kwargs["generator"])
        opaque = compat.compiled_region(func, args) is not None  # does not say what it writes
        given = compat.tree_tensors((args, kwargs))
        self.about_to_write(given if opaque else written(func, args, kwargs))

    def about_to_write(self, tensors: list[torch.Tensor]) -> None:
        """Keep the bytes of tensors, unless the call has made them itself."""
        for tensor in tensors:
            address = _address(tensor)
            if not address or address in self._made:
                continue
            if self._alone and address not in self._known:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() <= self._kept.get(address, 0):
                continue
            self._kept[address] = storage.nbytes()
            with torch.inference_mode(False), torch.no_grad():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(storage, 0, (storage.nbytes(),), (1,))
                self._before.append((whole, whole.clone()))

    def about_to_draw(self, generator: torch.Generator) -> None:
        """Keep the state of a random generator."""
        self._generators.setdefault(id(generator), (generator, generator.get_state()))

    def was_written(self, tensor: torch.Tensor) -> bool:
        """Whether the call has written the storage of a tensor."""
        return _address(tensor) in self._kept

    def put_back(self) -> None:
        """All kept bytes are again where they were, and generators draw again what they drew."""
        with torch.inference_mode(False), torch.no_grad():
            for whole, before in reversed(self._before):  # one may lie over an earlier one
                whole.copy_(before)
        for generator, state in self._generators.values():
            generator.set_state(state)
        self._before.clear()
        self._kept.clear()
        self._generators.clear()


def _address(tensor: torch.Tensor) -> int:
    """Where its storage begins; 0 for one without bytes."""
    if tensor.layout is not torch.strided or not compat.is_plain_tensor(tensor):
        return 0
    if tensor.device.type == "meta" or not tensor.untyped_storage().nbytes():
        return 0
    return tensor.untyped_storage().data_ptr()


class Keeping(compat.DispatchMode):
    """Inside, a memory is told of each op of this thread.

    Args:
        memory: what is told.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def on_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._memory.about_to_call(func, args, kwargs)
        made = func(*args, **kwargs)
        self._memory.made(compat.tree_tensors(made), compat.tree_tensors((args, kwargs)))
        return made
