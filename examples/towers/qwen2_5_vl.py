"""Qwen2.5-VL: windows attend to themselves in most blocks, frames in a few.

The tower sorts its rows by windows and sorts them back at the end. A graph has room for as many
windows as any grids of its budget have; those that a call does not have are empty.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.vision_utils import get_vision_window_index

from cgcompile.encoder import PatchOffsets, PatchTable
from cgcompile.encoder.patches import Grid
from towers.patch_tower import PatchTower, most_frames, offsets, one_grid, remembered


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

        side = size // patch  # of a window, as the next one
        tokens: int = size // patch // merge

        def most(token_budget: int, max_items: int, max_frames: int) -> int:
            # n tokens of a frame are in at most (n + tokens - 1) / tokens windows: those of a line
            frames = most_frames(token_budget, max_items, max_frames)
            return (token_budget + (tokens - 1) * frames) // tokens

        super().__init__(
            tower,
            out_hidden_size=tower.config.out_hidden_size,
            tables={
                # padded rows stay where they are, so that the order is one of all rows
                "window_index": PatchTable(order, (), torch.int64, rows="tokens", tail="positions")
            },
            offsets={
                "cu_window_seqlens": PatchOffsets(
                    offsets(ends), most=most, longest_padding=side * side
                )
            },
            longest={"max_window_seqlen": ("cu_window_seqlens", side * side)},
            **options,
        )
