"""Encoders whose items all have one size: SigLIP and CLIP vision towers, Whisper's audio encoder.

Nothing depends on the host here, and padding is whole items: a budget of tokens is a number of
items. Attention is within an item, so that items of zeros at the end change nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cgcompile.encoder import (
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    SupportsEncoderCudaGraph,
)
from cgcompile.encoder.protocol import DEFAULT


def items_of(token_budget: int, tokens: int) -> int:
    """How many items fill a budget.

    Raises:
        ValueError: no whole number of them does.
    """
    if token_budget % tokens or not token_budget:
        raise ValueError(f"a budget of {token_budget} is no multiple of {tokens} tokens an item")
    return token_budget // tokens


class FixedItems(SupportsEncoderCudaGraph):
    """An encoder of ``transformers`` on graphs, whose ``last_hidden_state`` is the result.

    A call is ``{name: [items, *shape]}``, where the tower sets the name (``pixel_values`` or
    ``input_features``). Budgets are multiples of ``tokens``.

    Args:
        tower: the model.
        shape: of one item.
        tokens: rows of its result.
        hidden_size: columns.
        modality: what items are.
        most_items: budgets go up to this many.
    """

    def __init__(
        self,
        tower: Any,
        *,
        shape: Sequence[int],
        tokens: int,
        hidden_size: int,
        modality: str = "image",
        most_items: int = 16,
    ) -> None:
        self.tower = tower
        self.key = str(tower.main_input_name)
        self._shape, self._tokens, self._most = tuple(shape), tokens, most_items
        self._config = EncoderCudaGraphConfig(
            modalities=[modality],
            buffer_keys=[self.key],
            out_hidden_size=hidden_size,
            max_frames_per_video=0,
        )

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return self._config

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        return self._tokens, self._tokens * self._most

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        return [EncoderItemSpec(self._tokens, self._tokens)] * len(mm_kwargs[self.key])

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        items = mm_kwargs[self.key]
        chosen = torch.stack([items[index] for index in indices]) if indices else items[:0]
        return {**mm_kwargs, self.key: chosen}

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
        size = (items_of(token_budget, self._tokens), *self._shape)
        return EncoderCudaGraphCaptureInputs(
            {self.key: torch.zeros(size, dtype=dtype, device=device)}
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
        return EncoderCudaGraphReplayBuffers({self.key: mm_kwargs[self.key]})

    def encoder_cudagraph_forward(
        self,
        inputs: dict[str, torch.Tensor],
        *,
        path: str = DEFAULT,
        axes: Mapping[str, int] | None = None,
    ) -> torch.Tensor:
        features: torch.Tensor = self.tower(inputs[self.key]).last_hidden_state
        return features.flatten(0, 1)


def vision_items(tower: Any, **options: Any) -> FixedItems:
    """A SigLIP or CLIP vision tower, for images of the size that it is configured for.

    Args:
        tower: ``SiglipVisionModel`` or ``CLIPVisionModel``.
        options: as those of :class:`FixedItems`.
    """
    config = tower.config
    side = config.image_size
    return FixedItems(
        tower,
        shape=(config.num_channels, side, side),
        tokens=tower.embeddings.position_embedding.num_embeddings,  # CLIP has one of the class too
        hidden_size=config.hidden_size,
        **options,
    )


def audio_items(encoder: Any, **options: Any) -> FixedItems:
    """Whisper's encoder, for log-mel features of 30 seconds.

    Args:
        encoder: ``WhisperEncoder``.
        options: as those of :class:`FixedItems`.
    """
    config = encoder.config
    steps = config.max_source_positions
    return FixedItems(
        encoder,
        shape=(config.num_mel_bins, steps * encoder.conv1.stride[0] * encoder.conv2.stride[0]),
        tokens=steps,
        hidden_size=config.d_model,
        modality="audio",
        **options,
    )
