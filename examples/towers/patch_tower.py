"""What the towers of Qwen's vision models have in common: :class:`PatchTower`.

``transformers`` lets the caller compute whatever depends on grids: the forward of these towers
takes ``position_ids``, ``cu_seqlens`` and the like by name and does not look at ``grid_thw`` then.
So the whole forward is recorded, as it is; what it would have computed from the grids becomes
buffers. The attention must take offsets from the device: ``transformers``' SDPA path reads them on
the host.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.vision_utils import get_vision_position_ids

from cgcompile.encoder import EncoderCudaGraphReplayBuffers, PatchEncoder, PatchOffsets, PatchTable
from cgcompile.encoder.patches import PIXELS, Grid, frame_offsets
from towers.varlen_attention import ATTENTION, for_attention

INPUTS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
SIZES = 512  # how many grids are remembered: images of a size that was seen cost the host little

ANY_FRAMES = 1024  # of a video; max_frames_per_batch of a manager limits those of a replay

ByGrid = Callable[[Grid], torch.Tensor]


def remembered(make: ByGrid) -> ByGrid:
    """The same for a grid that was seen before."""
    return lru_cache(SIZES)(make)


def one_grid(grid: Grid) -> torch.Tensor:
    """As the functions of ``transformers`` take it."""
    return torch.tensor([grid])


def table(make: ByGrid) -> Callable[[Sequence[Grid]], torch.Tensor]:
    """Rows of several grids one after the other."""

    def rows_of(grids: Sequence[Grid]) -> torch.Tensor:
        return torch.cat([make(grid) for grid in grids])

    return rows_of


def offsets(make: ByGrid) -> Callable[[Sequence[Grid]], torch.Tensor]:
    """Offsets of several grids, each given from 0 on."""

    def offsets_of(grids: Sequence[Grid]) -> torch.Tensor:
        parts, end = [torch.zeros(1, dtype=torch.int32)], 0
        for grid in grids:
            parts.append(make(grid)[1:] + end)
            end += grid[0] * grid[1] * grid[2]
        return torch.cat(parts)

    return offsets_of


class PatchTower(PatchEncoder):
    """A vision tower of ``transformers`` that takes patches and grids, on graphs.

    The tower stays as it is but for its attention, which is set for good.

    Args:
        tower: the vision model.
        out_hidden_size: columns of its result.
        tables: what its forward takes for each patch or token, besides ``position_ids``.
        offsets: what it takes as offsets, besides ``cu_seqlens``.
        longest: for each argument that is the longest sequence of offsets the name of these, and
            its limit; besides ``max_seqlen`` of ``cu_seqlens``, which has none.
        attention: :data:`ATTENTION`, or another one that takes offsets and is installed, such as
            ``"flash_attention_2"``.
        budget_range: (least, most) output tokens.
    """

    def __init__(
        self,
        tower: Any,
        *,
        out_hidden_size: int,
        tables: Mapping[str, PatchTable] | None = None,
        offsets: Mapping[str, PatchOffsets] | None = None,
        longest: Mapping[str, tuple[str, int | None]] | None = None,
        attention: str = ATTENTION,
        budget_range: tuple[int, int] = (64, 4096),
    ) -> None:
        # Not set_attn_implementation(): it would look for a package of every name with "flash".
        tower.config._attn_implementation = attention
        self._pins = tower.device.type == "cuda"
        merge = tower.spatial_merge_size
        self._longest = {"max_seqlen": ("cu_seqlens", None), **(longest or {})}
        self._prepares = attention == ATTENTION
        positions = remembered(lambda grid: get_vision_position_ids(one_grid(grid), merge).int())
        frames = PatchOffsets(frame_offsets, most=most_frames)
        super().__init__(
            self.run,
            tower=tower,
            merge_size=merge,
            in_features=tower.patch_embed.proj.weight[0].numel(),
            out_hidden_size=out_hidden_size,
            tables={
                "position_ids": PatchTable(table(positions), (2,), torch.int32),
                **(tables or {}),
            },
            offsets={"cu_seqlens": frames, **(offsets or {})},
            max_frames_per_video=ANY_FRAMES,
            inputs=INPUTS,
        )
        self.budget_range = budget_range

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], *limits: Any, **named: Any
    ) -> EncoderCudaGraphReplayBuffers:
        buffers = super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, *limits, **named)
        if self._pins:  # a copy from pinned memory waits for nothing
            values = buffers.values
            buffers.values = {key: _pinned(each) for key, each in values.items()}
        return buffers

    def run(self, buffers: dict[str, torch.Tensor]) -> Any:
        """The tower's own forward, on buffers alone."""
        tower: Any = self.tower
        named: dict[str, Any] = dict(buffers)
        pixels = named.pop(PIXELS)
        for name, (key, limit) in self._longest.items():
            named[name] = longest = min(limit or len(pixels), len(pixels))
            if self._prepares:
                named[key] = for_attention(named[key], len(pixels), longest, tower.dtype)
        return self.results(tower(pixels, grid_thw=None, **named))

    def results(self, output: Any) -> Any:
        """What the caller gets of the tower's output."""
        return output.pooler_output


def _pinned(value: torch.Tensor | None) -> torch.Tensor | None:
    return value.pin_memory() if value is not None and value.device.type == "cpu" else value


def most_frames(token_budget: int, max_items: int, max_frames: int) -> int:
    """How many frames there can be: none is shorter than a token."""
    return min(token_budget, max_frames)
