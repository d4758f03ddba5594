"""Qwen2.5-VL: windows attend to themselves in most blocks, frames in a few.

The tower sorts its rows by windows and sorts them back at the end. A graph has room for a window
of each token, which no grid exceeds; those that a call does not have are empty.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.vision_utils import get_vision_window_index

from cgcompile.encoder import PatchOffsets, PatchTable
from cgcompile.encoder.patches import Grid
from towers.patch_tower import PatchTower, offsets, one_for_each_token, one_grid, remembered


class Qwen25VLTower(PatchTower):
    """``Qwen2_5_VisionTransformerPretrainedModel`` on graphs.

    Args:
        tower: the model.
        options: as those of :class:`PatchTower`.
    """

    def __init__(self, tower: Any, **options: Any) -> None:
        merge, size, patch = tower.spatial_merge_size, tower.window_size, tower.patch_size

        def windows(grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
            pair: tuple[torch.Tensor, torch.Tensor]
            pair = get_vision_window_index(one_grid(grid), merge, size, patch)
            return pair

        index = remembered(lambda grid: windows(grid)[0])
        ends = remembered(lambda grid: windows(grid)[1])

        def order(grids: Sequence[Grid]) -> torch.Tensor:
            parts, before = [], 0
            for grid in grids:
                parts.append(index(grid) + before)
                before += len(parts[-1])
            return torch.cat(parts)

        side = size // patch
        super().__init__(
            tower,
            out_hidden_size=tower.config.out_hidden_size,
            tables={
                # padded rows stay where they are, so that the order is one of all rows
                "window_index": PatchTable(order, (), torch.int64, rows="tokens", tail="positions")
            },
            offsets={
                "cu_window_seqlens": PatchOffsets(
                    offsets(ends), most=one_for_each_token, longest_padding=side * side
                )
            },
            longest=("max_seqlen", "max_window_seqlen"),
            **options,
        )
