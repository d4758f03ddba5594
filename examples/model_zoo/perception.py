"""Models of the zoo that see, hear or forecast, of transformers and timm."""

from typing import Any

import torch

from model_zoo.entries import (
    TOKENS,
    VOCABULARY,
    Entry,
    Inputs,
    both,
    from_config,
    from_timm,
    images,
    masked_text,
    normal,
    tokens,
)

NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEXT: dict[str, Any] = NARROW | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = NARROW | {"image_size": 32, "patch_size": 8}
SPEECH: dict[str, Any] = NARROW | {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 16,
}


def sees(name: str, model: str, structure: str, side: int = 32, **values: Any) -> Entry:
    """A model of images, of transformers."""
    make = from_config(model, name, **values)
    return Entry(name, "vision", structure, "transformers", make, images(side), {})


def timm(name: str, structure: str, side: int = 64, **values: Any) -> Entry:
    """A model of images, of timm."""
    make = from_timm(name, num_classes=10, **values)
    return Entry(f"timm {name}", "vision", structure, "timm", make, images(side, "x"), {})


def other(
    name: str,
    kind: str,
    model: str,
    structure: str,
    inputs: Inputs,
    *,
    settings: Any = None,
    **values: Any,
) -> Entry:
    """A model of transformers that takes something else."""
    make = from_config(model, name, **values)
    return Entry(name, kind, structure, "transformers", make, inputs, settings or {})


RESNET: dict[str, Any] = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 32],
    "depths": [1, 1],
    "layer_type": "basic",
    "out_features": ["stage2"],
}

SEEING = (
    sees("vit", "ViTForImageClassification", "class token", **VISION),
    sees("dinov2", "Dinov2Model", "layer scale, interpolated positions", **VISION),
    sees("beit", "BeitForImageClassification", "relative bias", **VISION,
         use_relative_position_bias=True, use_absolute_position_embeddings=False),
    sees("swin", "SwinForImageClassification", "shifted windows", image_size=32, patch_size=2,
         embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    sees("convnext", "ConvNextForImageClassification", "depthwise convolutions",
         hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
    sees("resnet", "ResNetForImageClassification", "batch norm", hidden_sizes=[16, 32],
         depths=[1, 1], embedding_size=16, layer_type="basic"),
    sees("mobilevit", "MobileViTForImageClassification", "convolutions and attention", 64,
         image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
         num_attention_heads=4),
    sees("segformer", "SegformerForSemanticSegmentation", "reduced keys, mask decoder", 64,
         depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 2, 4],
         decoder_hidden_size=16),
    sees("detr", "DetrForObjectDetection", "backbone, object queries", 64, use_timm_backbone=False,
         use_pretrained_backbone=False, backbone=None, backbone_config=RESNET, d_model=32,
         encoder_layers=2, decoder_layers=2, encoder_ffn_dim=64, decoder_ffn_dim=64,
         encoder_attention_heads=4, decoder_attention_heads=4, num_queries=8),
    sees("yolos", "YolosForObjectDetection", "detection tokens", **VISION | {"image_size": [
         32, 32]}, num_detection_tokens=6),
    sees("dpt", "DPTForDepthEstimation", "depth from reassembled tokens", **VISION | {
         "num_hidden_layers": 4}, backbone_out_indices=[0, 1, 2, 3], fusion_hidden_size=16,
         neck_hidden_sizes=[8, 8, 16, 16], is_hybrid=False),
    timm("test_vit", "plain vision transformer", 160),
    timm("deit_tiny_distilled_patch16_224", "distillation token", img_size=64, depth=2,
         embed_dim=48),
    timm("test_resnet", "residual convolutions"),
    timm("test_efficientnet", "inverted residuals, squeeze and excite"),
    timm("test_convnext", "depthwise convolutions"),
    timm("test_byobnet", "bottlenecks, attention over channels"),
    timm("test_nfnet", "no norms, standardised weights"),
    timm("maxvit_nano_rw_256", "windows and grids", img_size=64, depths=(1, 1), embed_dim=(32, 64),
         block_type=("M", "M"), stem_width=16),
    timm("test_mambaout", "gated convolutions"),
    timm("mobilenetv3_small_050", "hard swish"),
    timm("mixer_s32_224", "MLP over patches", img_size=64),
    timm("eva02_tiny_patch14_224", "rotary, SwiGLU", 56, img_size=56, depth=2, embed_dim=48,
         num_heads=4),
)  # fmt: skip

HEARING = (
    other("wav2vec2", "audio", "Wav2Vec2ForCTC", "strided convolutions",
          normal("input_values", 800), **SPEECH),
    other("hubert", "audio", "HubertForCTC", "convolutions in position",
          normal("input_values", 800), **SPEECH),
    other("wavlm", "audio", "WavLMForCTC", "gated relative bias", normal("input_values", 800),
          **SPEECH, num_buckets=8, max_bucket_distance=16),
    other("audio-spectrogram-transformer", "audio", "ASTForAudioClassification",
          "spectrogram patches", normal("input_values", 32, 16), **NARROW, patch_size=8,
          frequency_stride=8, time_stride=8, max_length=32, num_mel_bins=16),
    other("whisper", "audio", "WhisperForConditionalGeneration", "convolutions, cross attention",
          both(normal("input_features", 16, 40),
               lambda size: {"decoder_input_ids": tokens(size, 6)}),
          settings={"use_cache": False}, d_model=32, encoder_layers=2, decoder_layers=2,
          encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
          decoder_ffn_dim=64, num_mel_bins=16, max_source_positions=20, max_target_positions=16,
          vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2,
          decoder_start_token_id=1, suppress_tokens=[], begin_suppress_tokens=[]),
)  # fmt: skip


def patches(size: int) -> dict[str, torch.Tensor]:
    """Flattened patches of images, 4 by 4 each, and their grids."""
    grids = torch.tensor([[1, 4, 4]]).expand(size, 3).contiguous()
    return {"hidden_states": torch.randn(size * 16, 3 * 2 * 4 * 4), "grid_thw": grids}


def qwen2_vl_tower() -> torch.nn.Module:
    """The vision tower of Qwen2-VL, which has no name of its own in transformers."""
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import (
        Qwen2VisionTransformerPretrainedModel,
    )

    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=32, hidden_size=32, num_heads=4, patch_size=4, spatial_merge_size=2
    )
    tower: torch.nn.Module = Qwen2VisionTransformerPretrainedModel(config)
    return tower.eval()


TOGETHER = (
    other("clip", "multimodal", "CLIPModel", "two towers, similarities",
          both(masked_text, images(32)), text_config=TEXT, vision_config=VISION,
          projection_dim=16),
    other("siglip", "multimodal", "SiglipModel", "two towers, pooling by attention",
          both(masked_text, images(32)), text_config=TEXT, vision_config=VISION),
    other("blip", "multimodal", "BlipForImageTextRetrieval", "text attends to the image",
          both(masked_text, images(32)), text_config=TEXT | {"encoder_hidden_size": 32},
          vision_config=VISION, projection_dim=16, image_text_hidden_size=16),
    Entry("qwen2_vl_vision", "multimodal", "images as patches with grids", "transformers",
          qwen2_vl_tower, patches, {}),
    other("qwen2_vl_text", "multimodal", "Qwen2VLTextModel", "rotary of three axes",
          both(masked_text, lambda size: {"position_ids": tokens(size, TOKENS).expand(
              3, size, TOKENS).contiguous()}),
          settings={"use_cache": False}, **TEXT, num_key_value_heads=2,
          rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}),
    other("visual_bert", "multimodal", "VisualBertModel", "one encoder of text and regions",
          both(masked_text, normal("visual_embeds", 4, 16)), **TEXT, visual_embedding_dim=16),
    other("layoutlm", "multimodal", "LayoutLMModel", "text with boxes", both(
          masked_text, lambda size: {"bbox": tokens(size).sort(-1).values[..., None].expand(
              size, TOKENS, 4).contiguous()}), **TEXT, max_2d_position_embeddings=128),
)  # fmt: skip

HISTORY = 16
TIMES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": HISTORY,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
}
FORECAST = both(
    normal("past_values", HISTORY + 3),
    normal("past_time_features", HISTORY + 3, 2),
    lambda size: {"past_observed_mask": (torch.rand(size, HISTORY + 3) < 0.8).float()},
    normal("future_values", 4),
    normal("future_time_features", 4, 2),
)
FORECASTING = (
    other("patchtst", "time series", "PatchTSTForPrediction", "patches of channels",
          normal("past_values", HISTORY, 3), num_input_channels=3, context_length=HISTORY,
          patch_length=4, patch_stride=4, num_hidden_layers=2, d_model=32, ffn_dim=64,
          num_attention_heads=4, prediction_length=4),
    other("patchtsmixer", "time series", "PatchTSMixerForPrediction", "MLP over patches",
          normal("past_values", HISTORY, 3), num_input_channels=3, context_length=HISTORY,
          patch_length=4, patch_stride=4, num_layers=2, d_model=16, prediction_length=4),
    other("decision_transformer", "time series", "DecisionTransformerModel",
          "states, actions, returns",
          both(normal("states", 5, 6), normal("actions", 5, 3), normal("rewards", 5, 1),
               normal("returns_to_go", 5, 1),
               lambda size: {"timesteps": tokens(size, 5) % 16}),
          state_dim=6, act_dim=3, hidden_size=32, max_ep_len=16, n_layer=2, n_head=4,
          n_positions=64),
    other("time_series_transformer", "time series", "TimeSeriesTransformerModel", "lags",
          FORECAST, settings={"use_cache": False}, **TIMES),
)  # fmt: skip
