"""Qwen2-VL: every frame attends to itself, in all blocks."""

from typing import Any

from towers.patch_tower import PatchTower


class Qwen2VLTower(PatchTower):
    """``Qwen2VisionTransformerPretrainedModel`` on graphs.

    Args:
        tower: the model.
        options: as those of :class:`PatchTower`.
    """

    def __init__(self, tower: Any, **options: Any) -> None:
        super().__init__(tower, out_hidden_size=tower.config.hidden_size, **options)
