"""Run a step of a model so that nothing of it stays: :class:`Undone`."""

from typing import Any

import torch

from cgcompile import compat
from cgcompile.graphs.memory import Keeping, Memory
from cgcompile.graphs.state import State
from cgcompile.graphs.transparent import Transparent


class Undone:
    """Context manager: what runs inside leaves a model and its arguments as they were.

    Put back are the attributes, containers and tensors that both lead to (see
    :class:`~cgcompile.graphs.state.State`), and of tensors the bytes that ops of this thread have
    written. Copied is what is written, nothing else. Not seen is what compiled code and kernels
    write that torch does not know.

    Args:
        model: a module, a function or a method.
        args: of the call.
        kwargs: of the call.
        uncompiled: let the compiled parts of the model run uncompiled, so that their ops are seen.

    Attributes:
        written: tensors that were written, by path; known at the end.
    """

    def __init__(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, uncompiled: bool = False
    ) -> None:
        self._state = State.of(model, (args, kwargs))
        self._memory = Memory(self._state.tensors, alone=True)
        self._keeping = Keeping(self._memory)
        self._uncompiled = uncompiled
        self.written: dict[str, torch.Tensor] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that the model and its arguments lead to."""
        return self._state.tensors

    def __enter__(self) -> "Undone":
        if self._uncompiled:
            uncompile_parts(self._state)
        self._keeping.switch_on()
        return self

    def __exit__(self, *error: object) -> None:
        self._keeping.switch_off()
        self.written = {
            path: each
            for path, (_, each) in self._state.values.items()
            if isinstance(each, torch.Tensor) and self._memory.was_written(each)
        }
        try:
            self._state.put_back()
        finally:
            self._memory.put_back()


def uncompile_parts(state: State) -> None:
    """Put originals in the place of compiled and wrapped parts, until the state is put back.

    A part is what an attribute of a module holds; a function that is compiled where it is defined
    is none.
    """
    for module in state.modules:
        for name, part in list(module.__dict__.items()):
            original = compat.compiled_from(part)
            if isinstance(part, Transparent):
                original = part.unwrap()
            if original is not None:
                module.__dict__[name] = original
