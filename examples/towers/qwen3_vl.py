"""Qwen3-VL: learned positions interpolated to each grid, and features of several layers.

An item's result is a tuple: the tokens, then those of each deepstack layer, of the same rows.
"""

from typing import Any

import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from cgcompile.encoder import PatchTable
from cgcompile.encoder.patches import Grid
from towers.patch_tower import PatchTower, one_grid, remembered, table


class Qwen3VLTower(PatchTower):
    """``Qwen3VLVisionModel`` on graphs.

    Args:
        tower: the model.
        options: as those of :class:`PatchTower`.
    """

    def __init__(self, tower: Any, **options: Any) -> None:
        def interpolation(grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
            pair: tuple[torch.Tensor, torch.Tensor]
            pair = get_vision_interpolation_indices_and_weights(
                one_grid(grid),
                num_grid_per_side=tower.num_grid_per_side,
                mode=tower.interpolation_mode,
                align_corners=tower.interpolation_align_corners,
                spatial_merge_size=tower.spatial_merge_size,
            )
            return pair

        indices = remembered(lambda grid: interpolation(grid)[0].int())
        weights = remembered(lambda grid: interpolation(grid)[1])
        taps = indices((1, 2, 2)).shape[1]
        super().__init__(
            tower,
            out_hidden_size=tower.config.out_hidden_size,
            tables={
                "interp_indices": PatchTable(table(indices), (taps,), torch.int32),
                "interp_weights": PatchTable(table(weights), (taps,), torch.float32),
            },
            **options,
        )

    def results(self, output: Any) -> tuple[torch.Tensor, ...]:
        return (output.pooler_output, *output.deepstack_features)
