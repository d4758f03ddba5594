"""Vision and audio towers of ``transformers``, random and small, on graphs that are derived."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from lib.encoders import config

from cgcompile.encoder import EncoderCudaGraphManager
from cgcompile.encoder.errors import EncoderError
from cgcompile.reasons import Reason

transformers = pytest.importorskip("transformers", minversion="5.0")

from towers.varlen_attention import ATTENTION  # noqa: E402
from transformers.models.whisper.modeling_whisper import WhisperEncoder  # noqa: E402

Grid = tuple[int, int, int]

TEXT = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
COMMON: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
LATER = {**COMMON, "hidden_size": 64, "intermediate_size": 60, "out_hidden_size": 32}
PATCHES: dict[str, dict[str, Any]] = {
    "Qwen2VL": {**COMMON, "embed_dim": 64, "hidden_size": 32},
    "Qwen2_5_VL": {**LATER, "window_size": 24, "fullatt_block_indexes": [1]},
    "Qwen3VL": {**LATER, "deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36},
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}
AUDIO = {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 10, "encoder_layers": 2}
AUDIO |= {"encoder_attention_heads": 4, "encoder_ffn_dim": 48}

EXAMPLES: tuple[Grid, ...] = ((1, 4, 6), (1, 2, 2), (1, 10, 14), (3, 4, 4))
# Grids that no example has: odd and even, narrow ones with windows of few tokens, a video, one
# that fills a budget.
MIXES: tuple[Sequence[Grid], ...] = (
    [(1, 6, 6)],
    [(1, 2, 2), (1, 14, 2), (1, 2, 18)],
    [(1, 12, 16), (1, 2, 4), (1, 8, 8), (12, 2, 2), (1, 6, 6)],
    [(2, 6, 4), (1, 12, 14)],
    [(1, 12, 16)],
)


def randomised(model: Any, device: str) -> Any:
    """Set weights that matter: with those of a new model every attention is nearly even."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.dim() > 1
            parameter.copy_(noise * 0.15 if matrix else noise * 0.05 + (parameter.dim() == 1) * 0.5)
    return model.eval().to(device)


def patch_tower(kind: str, device: str) -> Any:
    whole = getattr(transformers, f"{kind}Config")(text_config=TEXT, vision_config=PATCHES[kind])
    return randomised(getattr(transformers, f"{kind}Model")(whole).visual, device)


def images(*grids: Grid, device: str) -> dict[str, Any]:
    rows = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4, device=device)
    return {"hidden_states": rows, "grid_thw": torch.tensor(grids)}


def features(output: Any) -> tuple[torch.Tensor, ...]:
    return (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))


def expected_of(plain: Any, call: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
    """Return the results of each item, by the tower's own forward and SDPA."""
    rows, grids = call["hidden_states"], call["grid_thw"]
    with torch.inference_mode():
        outputs = features(plain(rows, grid_thw=grids.to(rows.device)))
    counts = (grids.prod(1) // 4).tolist()
    return list(zip(*(each.split(counts) for each in outputs), strict=True))


def assert_close(results: Any, expected: Any) -> None:
    for tensor in expected if isinstance(expected[0], torch.Tensor) else sum(expected, ()):
        assert tensor.abs().max() > 1e-2
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-4)


def settings(device: str) -> dict[str, Any]:
    return {"config": config(device, debug="poison")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATCHES)
def test_towers_of_patches(kind: str, device: str) -> None:
    """Images and videos of any size; the tower computes what depends on grids itself."""
    tower = patch_tower(kind, device)
    plain = deepcopy(tower)
    plain.set_attn_implementation("sdpa")
    tower.config._attn_implementation = ATTENTION
    encoder = EncoderCudaGraphManager.from_model(
        tower,
        [images(grid, device=device) for grid in EXAMPLES],
        output=features,
        token_budgets=[8, 24, 48],
        max_batch_size=8,
        **settings(device),
    )
    assert encoder.capture().missing == ()
    for grids in MIXES * 2:
        call = images(*grids, device=device)
        assert_close(encoder.execute(call), expected_of(plain, call))
    assert encoder.statistics.misses == 0
    assert encoder.statistics.hits == 2 * sum(map(len, MIXES))
    assert encoder.counters.replays >= 2 * len(MIXES)
    call = images((1, 6, 6), (1, 16, 14), device=device)
    assert_close(encoder.execute(call), expected_of(plain, call))
    assert encoder.statistics.reasons() == {Reason.OVERSIZE: 1}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PATCHES)
def test_attention_that_splits_by_length(kind: str, device: str) -> None:
    """It reads offsets on the host: refused for several sizes, served for one."""
    tower = patch_tower(kind, device)
    tower.set_attn_implementation("sdpa")
    examples = [images(grid, device=device) for grid in EXAMPLES]
    with pytest.raises(EncoderError, match=r"(?s)blocks.0.attn.tolist\(\).*takes\s+offsets"):
        EncoderCudaGraphManager.from_model(tower, examples, output=features)
    one = {"output": features, "token_budgets": [24], **settings(device)}
    encoder = EncoderCudaGraphManager.from_model(tower, examples[:1], **one)
    assert encoder.capture().missing == ()
    for count in (1, 4, 3):
        call = images(*EXAMPLES[:1] * count, device=device)
        assert_close(encoder.execute(call), expected_of(tower, call))
    assert (encoder.statistics.hits, encoder.statistics.misses) == (8, 0)
    with pytest.raises(EncoderError, match="as of all examples"):
        encoder.execute(images((1, 6, 4), device=device))


def last(output: Any) -> torch.Tensor:
    return output.last_hidden_state


def siglip(device: str) -> Any:
    tower = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SMALL))
    return randomised(tower, device), {"pixel_values": (3, 16, 16)}, 16


def clip(device: str) -> Any:
    tower = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**SMALL))
    return randomised(tower, device), {"pixel_values": (3, 16, 16)}, 17


def whisper(device: str) -> Any:
    tower = randomised(WhisperEncoder(transformers.WhisperConfig(**AUDIO)), device)
    return tower, {"input_features": (8, 20)}, 10


def pixtral(device: str) -> Any:
    tower = transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**SMALL))
    return randomised(tower, device), {"pixel_values": (3, 16, 12)}, 12


@pytest.mark.slow
@pytest.mark.parametrize("build", [siglip, clip, whisper, pixtral])
def test_items_of_one_size(build: Callable[..., Any], device: str) -> None:
    tower, shapes, tokens = build(device)

    def call(items: int) -> dict[str, Any]:
        rows = {key: torch.randn(items, *shape, device=device) for key, shape in shapes.items()}
        return (
            {**rows, "image_sizes": torch.tensor([[16, 12]] * items)} if build is pixtral else rows
        )

    budgets = {"token_budgets": [tokens, 4 * tokens, 7 * tokens - 1], **settings(device)}
    encoder = EncoderCudaGraphManager.from_model(tower, [call(1)], output=last, **budgets)
    assert encoder.capture().missing == ()
    for items in (1, 3, 4, 6, 7):
        mixed = call(items)
        with torch.inference_mode():
            expected = tower(**mixed).last_hidden_state.reshape(items, tokens, -1)
        assert_close(encoder.execute(mixed), list(expected))
    assert (encoder.statistics.hits, encoder.statistics.misses) == (21, 0)
    assert encoder.execute(call(0)) == []


def test_one_row_for_each_item(device: str) -> None:
    tower, shapes, _ = siglip(device)
    rows = torch.randn(5, *shapes["pixel_values"], device=device)
    encoder = EncoderCudaGraphManager.from_model(
        tower,
        [{"pixel_values": rows[:1]}],
        output=lambda output: output.pooler_output,
        token_budgets=[8],
        **settings(device),
    )
    assert encoder.capture().missing == ()
    with torch.inference_mode():
        expected = tower(rows).pooler_output
    assert_close(encoder.execute({"pixel_values": rows}), list(expected.split(1)))
    assert encoder.statistics.hits == 5


def test_images_of_several_sizes_for_pixtral() -> None:
    """Its convolution takes images as they are, so a graph has one size of them."""
    tower, _, _ = pixtral("cpu")
    sizes = [(16, 12), (8, 16)]
    examples = [
        {"pixel_values": torch.randn(1, 3, *size), "image_sizes": torch.tensor([size])}
        for size in sizes
    ]
    with pytest.raises(
        EncoderError, match=r"(?s)a row of 'pixel_values'.*a manager for each shape"
    ):
        EncoderCudaGraphManager.from_model(tower, examples)
    padded = [{**one, "pixel_values": torch.randn(1, 3, 16, 16)} for one in examples]
    with pytest.raises(EncoderError, match=r"(?s)\[12, 8\] rows.*a manager for each size"):
        EncoderCudaGraphManager.from_model(tower, padded)
