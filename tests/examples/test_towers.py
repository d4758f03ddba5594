"""Towers of transformers on graphs give what their own forward gives."""

from typing import Any

import pytest
import torch
from lib.towers import (
    KINDS,
    assert_close,
    images,
    manager,
    patch_tower,
    plain_results,
    randomised,
)
from towers.dual_path import DeepseekOcr2Tower
from towers.fixed_items import audio_items, items_of, vision_items
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    DeepseekOcr2Config,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2Model
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cgcompile.reasons import Reason

BUDGETS = [8, 24, 48]

# Odd and even, narrow ones with windows of few tokens, one that fills a budget
MIXES = (
    [(1, 4, 6)],
    [(1, 2, 2), (1, 14, 2), (1, 2, 18)],
    [(1, 6, 8), (1, 10, 14)],
    [(1, 12, 16), (1, 2, 4), (1, 8, 8), (1, 4, 4), (1, 6, 6)],
    [(1, 12, 16)],
)


@pytest.mark.parametrize("kind", KINDS)
def test_images_equal_the_towers_own_forward(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    made = manager(model, device, BUDGETS)
    for _ in range(2):
        for grids in MIXES:
            call = images(grids, device)
            assert_close(made.execute(call), plain_results(plain, call))
    assert made.statistics.misses == 0
    assert made.statistics.hits == 2 * sum(map(len, MIXES))
    assert made.counters.replays >= 2 * len(MIXES)


@pytest.mark.parametrize("kind", KINDS)
def test_videos_share_the_graphs_of_images(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    made = manager(model, device, BUDGETS)
    for grids in ([(3, 4, 6)], [(12, 2, 2), (2, 6, 4)], [(1, 8, 8), (2, 2, 10)]):
        call = images(grids, device, video=True)
        assert_close(made.execute(call), plain_results(plain, call))
    assert made.statistics.misses == 0


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_of_items_is_the_order_of_results(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    made = manager(model, device, BUDGETS, items=2)
    call = images(MIXES[3], device)
    expected = plain_results(plain, call)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1], []):
        chosen = model.select_encoder_cudagraph_items(call, order)
        assert_close(made.execute(chosen), [expected[item] for item in order])
    assert made.statistics.misses == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_too_large_runs_eager(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    made = manager(model, device, BUDGETS)
    call = images([(1, 6, 6), (1, 16, 14), (2, 10, 10)], device)
    assert_close(made.execute(call), plain_results(plain, call))
    assert made.statistics.hits == 1
    assert made.statistics.reasons() == {Reason.OVERSIZE: 2}


@pytest.mark.parametrize("kind", KINDS)
def test_results_outlive_later_replays(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    made = manager(model, device, BUDGETS)
    calls = [images([(1, 4, 6), (1, 6, 6)], device) for _ in range(3)]
    found = [made.execute(call) for call in calls]
    for mine, call in zip(found, calls, strict=True):
        assert_close(mine, plain_results(plain, call))


@pytest.mark.parametrize("kind", KINDS)
def test_every_grid_has_room_for_its_windows(kind: str, device: str) -> None:
    """One budget, filled by each grid that fills it: the most windows are those of narrow ones."""
    model, plain = patch_tower(kind, device)
    made = manager(model, device, [24])
    for height in (1, 2, 3, 4, 6, 8, 12, 24):
        call = images([(1, 2 * height, 48 // height)], device)
        assert_close(made.execute(call), plain_results(plain, call))
    call = images([(24, 2, 2)], device, video=True)
    assert_close(made.execute(call), plain_results(plain, call))
    assert made.statistics.misses == 0
    assert made.statistics.waste() == 0


# ---------------------------------------------------------------- other kinds


def fixed(kind: str, device: str) -> Any:
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    if kind == "siglip":
        return vision_items(randomised(SiglipVisionModel(SiglipVisionConfig(**small)), device))
    if kind == "clip":
        return vision_items(randomised(CLIPVisionModel(CLIPVisionConfig(**small)), device))
    layers = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    config = WhisperConfig(d_model=32, num_mel_bins=8, max_source_positions=10, **layers)
    return audio_items(randomised(WhisperEncoder(config), device))


@pytest.mark.parametrize(("kind", "tokens"), [("siglip", 16), ("clip", 17), ("whisper", 10)])
def test_items_of_one_size(kind: str, tokens: int, device: str) -> None:
    model = fixed(kind, device)
    made = manager(model, device, [tokens, 4 * tokens])
    shape = (8, 20) if kind == "whisper" else (3, 32, 32)
    for count in (1, 3, 4, 7):
        items = torch.randn(count, *shape, device=device)
        with torch.inference_mode():
            expected = model.tower(items).last_hidden_state
        assert_close(made.execute({model.key: items}), list(expected))
    assert made.execute({model.key: items[:0]}) == []
    assert (made.statistics.hits, made.statistics.misses) == (15, 0)


def test_a_budget_is_a_number_of_items() -> None:
    assert items_of(48, 16) == 3
    with pytest.raises(ValueError, match="40 is no multiple of 16"):
        items_of(40, 16)


def small_ocr(device: str) -> Any:
    """Patches of a quarter of the real side; the numbers of queries are the model's own."""
    sam = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "image_size": 208}
    sam |= {"num_attention_heads": 2, "patch_size": 4, "window_size": 7, "mlp_dim": 16}
    sam |= {"global_attn_indexes": [], "downsample_channels": [8, 32]}
    encoder = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"hidden_size": 24, "vocab_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    text |= {"moe_intermediate_size": 8, "mlp_layer_types": ["dense"]}
    config = DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config=text,
        image_token_id=3,
    )
    return randomised(DeepseekOcr2Model(config), device)


def test_global_views_and_local_patches(device: str) -> None:
    """Patches are of a size of their own; images with none, and with more than a graph takes."""
    plain = small_ocr(device)
    model = DeepseekOcr2Tower(plain, global_size=208, local_size=96, most_items=2)
    made = manager(model, device, model.token_budgets(4), items=4)
    for counts in ([2, 0, 3], [0], [0, 1], [5, 1]):
        call = {
            "pixel_values": torch.randn(len(counts), 3, 208, 208, device=device),
            "pixel_values_local": torch.randn(sum(counts), 3, 96, 96, device=device),
            "num_local_patches": counts,
        }
        own = dict(call) if sum(counts) else {"pixel_values": call["pixel_values"]}
        with torch.inference_mode():
            expected = plain.get_image_features(**own).pooler_output
        assert_close(made.execute(call), list(expected))
    assert made.statistics.hits >= 7
    assert set(made.statistics.reasons()) == {Reason.OVERSIZE}
