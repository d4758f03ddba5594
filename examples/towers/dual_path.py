"""DeepSeek-OCR 2: a global view of each image, and local patches of another size, any number.

The same tower runs on both, with other shapes and other learned queries, so each has graphs of its
own; an image without patches takes the global path alone. An item's result is what the model makes
of it: the tokens of its patches, those of the global view, and a separator.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch

from cgcompile.encoder import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)
from cgcompile.encoder.protocol import DEFAULT, GLOBAL, LOCAL
from towers.fixed_items import items_of

PIXELS = "pixel_values"
INPUTS = {GLOBAL: "pixel_values", LOCAL: "pixel_values_local"}
COUNTS = "num_local_patches"


class DeepseekOcr2Tower(SupportsEncoderCudaGraph):
    """Vision tower and projector of ``DeepseekOcr2Model`` on graphs.

    A call is what ``get_image_features`` takes: ``pixel_values`` [items, 3, G, G],
    ``pixel_values_local`` [patches, 3, L, L] or None, ``num_local_patches``: one for each item.
    Budgets of a path are multiples of its tokens.

    Args:
        model: with ``vision_tower``, ``multi_modal_projector`` and ``view_separator``.
        global_size: G, in pixels.
        local_size: L, in pixels.
        most_items: budgets that are inferred go up to this many global views.
    """

    def __init__(
        self, model: Any, *, global_size: int = 1024, local_size: int = 768, most_items: int = 8
    ) -> None:
        self.tower = model.vision_tower
        self.projector = model.multi_modal_projector
        self._separator = model.view_separator
        self._sizes = {GLOBAL: global_size, LOCAL: local_size}
        self._tokens = {
            GLOBAL: self.tower.query_1024_resolution.num_embeddings,
            LOCAL: self.tower.query_768_resolution.num_embeddings,
        }
        self._most = most_items
        self._config = EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=[PIXELS],
            out_hidden_size=self.projector.out_features,
            max_frames_per_video=0,
            enable_dual_path_graph=True,
            global_token_per_image=self._tokens[GLOBAL],
            local_token_per_patch=self._tokens[LOCAL],
        )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def token_budgets(self, most_patches: int) -> dict[str, list[int]]:
        """Budgets of both paths: 1, 2, 4, ... views or patches."""
        most = {GLOBAL: self._most, LOCAL: most_patches}
        return {
            path: [tokens << power for power in range(most[path].bit_length())]
            for path, tokens in self._tokens.items()
        }

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        whole = self._tokens[GLOBAL]
        return [
            EncoderItemSpec(
                input_size=whole + patches * self._tokens[LOCAL],
                output_tokens=whole + patches * self._tokens[LOCAL] + 1,
                global_output_tokens=whole,
                local_output_tokens=patches * self._tokens[LOCAL],
            )
            for patches in map(int, mm_kwargs[COUNTS])
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        views, patches = mm_kwargs[INPUTS[GLOBAL]], mm_kwargs[INPUTS[LOCAL]]
        counts = [int(count) for count in mm_kwargs[COUNTS]]
        ends = list(accumulate(counts))
        chosen = None
        if patches is not None:
            parts = [patches[ends[index] - counts[index] : ends[index]] for index in indices]
            chosen = torch.cat(parts) if parts else patches[:0]
        return {
            **mm_kwargs,
            INPUTS[GLOBAL]: torch.stack([views[i] for i in indices]) if indices else views[:0],
            INPUTS[LOCAL]: chosen,
            COUNTS: [counts[index] for index in indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> EncoderCudaGraphCaptureInputs:
        side = self._sizes[path]
        size = (items_of(token_budget, self._tokens[path]), 3, side, side)
        return EncoderCudaGraphCaptureInputs(
            {PIXELS: torch.zeros(size, dtype=dtype, device=device)}
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({PIXELS: mm_kwargs[INPUTS[path]]})

    def encoder_cudagraph_forward(
        self,
        inputs: dict[str, torch.Tensor],
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        pixels = inputs[PIXELS]
        # The tower makes indices on the default device: a copy from the CPU is no part of a graph.
        with pixels.device:
            features: torch.Tensor = self.projector(self.tower(pixels).last_hidden_state)
        return features.flatten(0, 1)

    def postprocess_encoder_output(
        self,
        output: Any,
        indices: list[int],
        per_item_out_tokens: Any,
        dest: dict[int, Any],
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        separator = self._separator[None]
        views = output[GLOBAL].split(per_item_out_tokens[GLOBAL])
        patches = [views[0][:0]] * len(indices)
        if LOCAL in output:
            patches = output[LOCAL].split(per_item_out_tokens[LOCAL])
        for index, view, local in zip(indices, views, patches, strict=True):
            dest[index] = torch.cat((local, view, separator))
