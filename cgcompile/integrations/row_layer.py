"""A layer of a static cache whose rows have different lengths; its import needs transformers."""

from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from cgcompile.integrations.decode_inputs import NotHeld


class RowLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """A static layer that writes where a tensor says, which all layers of a cache share.

    Masks and positions are arguments of the model: the layer has no length that would be right for
    all rows.

    Args:
        max_cache_len: how many positions there are.
        positions: ``[rows, tokens]``, where the next update writes.
    """

    is_compileable = False  # else transformers makes a mask from its length

    def __init__(self, max_cache_len: int, positions: torch.Tensor) -> None:
        super().__init__(max_cache_len)
        self.positions = positions

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values ``[rows, heads, tokens, size]``; return those of all positions."""
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        if len(key_states) == 1:  # the form that kernels of cgcompile replace
            keys.index_copy_(2, self.positions[0], key_states)
            values.index_copy_(2, self.positions[0], value_states)
        else:
            index = self.positions[:, None, :, None]
            keys.scatter_(2, index.expand(key_states.shape), key_states)
            values.scatter_(2, index.expand(value_states.shape), value_states)
        return keys, values

    def get_seq_length(self) -> int:
        raise NotHeld("a draft for a model that reads the length of its cache")
