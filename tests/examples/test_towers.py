"""Small towers of ``transformers`` with random weights: graphs give what their forward gives."""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from lib import encoders
from towers import varlen_attention
from towers.aligned import PatchProjection, align
from towers.dual_path import DeepseekOcr2Tower
from towers.fixed_items import audio_items, items_of, vision_items
from towers.qwen2_5_vl import Qwen25VLTower
from towers.qwen2_vl import Qwen2VLTower
from towers.qwen3_vl import Qwen3VLTower
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    DeepseekOcr2Config,
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    WhisperConfig,
)
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2Model
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from cgcompile.encoder import EncoderCudaGraphManager
from cgcompile.reasons import Reason

Grid = tuple[int, int, int]

TEXT = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8}
TEXT |= {"num_attention_heads": 2, "num_key_value_heads": 1}
COMMON: dict[str, Any] = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
LATER = {**COMMON, "hidden_size": 64, "intermediate_size": 60, "out_hidden_size": 32}
WINDOWS = {"window_size": 24, "fullatt_block_indexes": [1]}  # 3 x 3 merged tokens
DEEP = {"deepstack_visual_indexes": [0, 2], "num_position_embeddings": 36}
MODELS: dict[str, Any] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        Qwen2VLModel,
        Qwen2VLTower,
        {**COMMON, "embed_dim": 64, "hidden_size": 32},
    ),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen25VLTower, {**LATER, **WINDOWS}),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLModel, Qwen3VLTower, {**LATER, **DEEP}),
}
kinds = pytest.mark.parametrize("kind", MODELS)


def randomised(model: Any, device: str) -> Any:
    """Set weights that matter: with those of a new model every attention is nearly even."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            matrix = parameter.dim() > 1
            parameter.copy_(noise * 0.15 if matrix else noise * 0.05 + (parameter.dim() == 1) * 0.5)
    return model.eval().to(device)


def patch_tower(kind: str, device: str) -> tuple[Any, Any]:
    """Return a tower for graphs, and a plain one with the same weights and SDPA attention."""
    config, model, adapter, vision = MODELS[kind]
    tower = randomised(model(config(text_config=TEXT, vision_config=vision)).visual, device)
    plain = deepcopy(tower)
    plain.set_attn_implementation("sdpa")
    return adapter(tower), plain


def images(grids: Sequence[Grid], device: str, video: bool = False) -> dict[str, Any]:
    """Return a call of random patches."""
    pixels = torch.randn(sum(t * h * w for t, h, w in grids), 3 * 2 * 4 * 4, device=device)
    if video:
        return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def plain_results(plain: Any, call: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
    """Return the tokens, and the deepstack features, of each item by the tower's own forward."""
    pixels, grids = call.values()
    with torch.inference_mode():
        output = plain(pixels, grid_thw=grids.to(pixels.device))
    counts = (grids.prod(1) // 4).tolist()
    results = (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
    return list(zip(*(result.split(counts) for result in results), strict=True))


def manager(model: Any, device: str, budgets: Any, items: int = 8) -> EncoderCudaGraphManager:
    """Return a captured manager that poisons unwritten memory."""
    settings = {
        "max_batch_size": items,
        "config": encoders.config(device, debug="poison"),
        "costs": None,
    }
    return encoders.manager(model, device, token_budgets=budgets, **settings)


def assert_close(results: Sequence[Any], expected: Sequence[Any]) -> None:
    """Compare item by item; an item is a tensor or several."""
    assert len(results) == len(expected)
    for mine, theirs in zip(results, expected, strict=True):
        tensors = (mine,) if isinstance(mine, torch.Tensor) else tuple(mine)
        others = (theirs,) if isinstance(theirs, torch.Tensor) else tuple(theirs)
        assert all(other.abs().max() > 1e-2 for other in others)
        torch.testing.assert_close(tensors, others, rtol=1e-4, atol=1e-4)


BUDGETS = [8, 24, 48]

# Odd and even, narrow ones with windows of few tokens, one that fills a budget
MIXES: tuple[list[Grid], ...] = (
    [(1, 4, 6)],
    [(1, 2, 2), (1, 14, 2), (1, 2, 18)],
    [(1, 6, 8), (1, 10, 14)],
    [(1, 12, 16), (1, 2, 4), (1, 8, 8), (1, 4, 4), (1, 6, 6)],
    [(1, 12, 16)],
)
VIDEOS: tuple[list[Grid], ...] = (
    [(3, 4, 6)],
    [(12, 2, 2), (2, 6, 4)],
    [(1, 8, 8), (2, 2, 10)],
)


@pytest.mark.slow
@kinds
def test_images_and_videos_equal_the_towers_own_forward(kind: str, device: str) -> None:
    """Results outlive later replays, and what is too large runs eager."""
    model, plain = patch_tower(kind, device)
    encoder = manager(model, device, BUDGETS)
    calls = [images(grids, device) for grids in MIXES * 2]
    calls += [images(grids, device, video=True) for grids in VIDEOS]
    results = [encoder.execute(call) for call in calls]
    for mine, call in zip(results, calls, strict=True):
        assert_close(mine, plain_results(plain, call))
    assert encoder.statistics.misses == 0
    assert encoder.statistics.hits == sum(map(len, [*MIXES * 2, *VIDEOS]))
    assert encoder.counters.replays >= len(calls)
    hits = encoder.statistics.hits
    call = images([(1, 6, 6), (1, 16, 14), (2, 10, 10)], device)
    assert_close(encoder.execute(call), plain_results(plain, call))
    assert encoder.statistics.hits == hits + 1
    assert encoder.statistics.reasons() == {Reason.OVERSIZE: 2}


@pytest.mark.slow
@kinds
def test_results_have_the_order_of_the_items(kind: str, device: str) -> None:
    model, plain = patch_tower(kind, device)
    encoder = manager(model, device, BUDGETS, items=2)
    call = images(MIXES[3], device)
    expected = plain_results(plain, call)
    for order in ([4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1], []):
        chosen = model.select_encoder_cudagraph_items(call, order)
        assert_close(encoder.execute(chosen), [expected[item] for item in order])
    assert encoder.statistics.misses == 0


@pytest.mark.slow
@kinds
def test_every_grid_has_room_for_its_windows(kind: str, device: str) -> None:
    """One budget, filled by each grid that fills it: the most windows are those of narrow ones."""
    model, plain = patch_tower(kind, device)
    encoder = manager(model, device, [24])
    heights = (1, 2, 3, 4, 6, 8, 12, 24)
    calls = [images([(1, 2 * height, 48 // height)], device) for height in heights]
    for call in (*calls, images([(24, 2, 2)], device, video=True)):
        assert_close(encoder.execute(call), plain_results(plain, call))
    assert encoder.statistics.misses == 0
    assert encoder.statistics.waste() == 0


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_windows_by_torchs_kernel(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision windows are not computed by the op of the examples."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    longest = []

    def counted(*inputs: Any, **named: Any) -> torch.Tensor:
        longest.append(inputs[5])
        result: torch.Tensor = kernel(*inputs, **named)
        return result

    kernel = varlen_attention.varlen_attn
    if not compiled:
        monkeypatch.setattr(varlen_attention, "varlen_attn", counted)
    model, plain = patch_tower("qwen2_5_vl", "cuda")
    model.tower.bfloat16()
    if compiled:
        for block in model.tower.blocks:
            block.compile(dynamic=True)
    encoder = EncoderCudaGraphManager(
        model,
        device="cuda",
        dtype=torch.bfloat16,
        token_budgets=[48, 96],
        max_batch_size=8,
        max_frames_per_batch=16,
        config=encoders.config("cuda", debug="poison"),
    )
    encoder.capture()
    assert compiled or set(longest) == {varlen_attention.SHORT}
    for grids in MIXES:
        call = images(grids, "cuda")
        for mine, theirs in zip(encoder.execute(call), plain_results(plain, call), strict=True):
            error = (mine.float() - theirs[0]).norm() / theirs[0].norm()
            assert error < 3e-2
    assert encoder.statistics.misses == 0


@pytest.mark.slow
def test_graphs_have_room_for_the_windows_of_all_grids() -> None:
    """And not for one of each token, where frames are few."""
    model, _ = patch_tower("qwen2_5_vl", "cpu")
    for frames, height, width in itertools.product((1, 2, 5), range(1, 14), range(1, 14)):
        grid = (frames, 2 * height, 2 * width)
        tokens = frames * height * width
        buffers = model.prepare_encoder_cudagraph_capture_inputs(
            tokens, 1, frames, torch.device("cpu"), torch.float32
        ).values
        windows = model.prepare_encoder_cudagraph_replay_buffers(images([grid], "cpu"), 1, frames)
        room = len(buffers["cu_window_seqlens"]) - 1 - -(-4 * tokens // 36)  # those of padding
        assert len(windows.values["cu_window_seqlens"]) - 1 <= room <= (tokens + 2 * frames) / 3
        room = len(buffers["cu_seqlens"]) - 1 - -(-4 * tokens // 1024)
        assert room == min(frames, tokens)


@pytest.mark.slow
@kinds
def test_an_aligned_tower_gives_the_same(
    kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By default convolutions alone may round to TF32, and `align` replaces one by a product.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model, plain = patch_tower(kind, device)
    columns = model.tower.patch_embed.proj.weight[0].numel()
    assert align(model.tower) is model.tower
    block = model.tower.blocks[0]
    if kind == "qwen2_5_vl":
        assert block.mlp.gate_proj.weight.shape == (64, 64)  # of 60
        assert block.mlp.down_proj.weight.shape == (64, 64)
    assert isinstance(model.tower.patch_embed.proj, PatchProjection)
    weights = [parameter.data_ptr() for parameter in model.tower.parameters()]
    align(model.tower)
    assert weights == [parameter.data_ptr() for parameter in model.tower.parameters()]
    adapter = MODELS[kind][2]
    again = adapter(model.tower)
    assert again.tower.patch_embed.proj.weight[0].numel() == columns
    encoder = manager(again, device, BUDGETS)
    for grids in MIXES:
        call = images(grids, device)
        assert_close(encoder.execute(call), plain_results(plain, call))
    assert encoder.statistics.misses == 0


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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tokens"), [("siglip", 16), ("clip", 17), ("whisper", 10)])
def test_items_of_one_size(kind: str, tokens: int, device: str) -> None:
    model = fixed(kind, device)
    encoder = manager(model, device, [tokens, 4 * tokens])
    shape = (8, 20) if kind == "whisper" else (3, 32, 32)
    for count in (1, 3, 4, 7):
        items = torch.randn(count, *shape, device=device)
        with torch.inference_mode():
            expected = model.tower(items).last_hidden_state
        assert_close(encoder.execute({model.key: items}), list(expected))
    assert encoder.execute({model.key: items[:0]}) == []
    assert (encoder.statistics.hits, encoder.statistics.misses) == (15, 0)


def test_a_budget_is_a_number_of_items() -> None:
    assert items_of(48, 16) == 3
    with pytest.raises(ValueError, match="40 is no multiple of 16"):
        items_of(40, 16)


def small_ocr(device: str) -> Any:
    """Return a model with patches of a quarter of the real side, and its own number of queries."""
    sam = {"hidden_size": 16, "output_channels": 8, "num_hidden_layers": 2, "image_size": 208}
    sam |= {"num_attention_heads": 2, "patch_size": 4, "window_size": 7, "mlp_dim": 16}
    sam |= {"global_attn_indexes": [], "downsample_channels": [8, 32]}
    encoder = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text = {"hidden_size": 24, "vocab_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "n_routed_experts": 2, "num_experts_per_tok": 1}
    text |= {"moe_intermediate_size": 8, "mlp_layer_types": ["dense"]}
    vision = {"sam_config": sam, "encoder_config": encoder}
    config = DeepseekOcr2Config(vision_config=vision, text_config=text, image_token_id=3)
    return randomised(DeepseekOcr2Model(config), device)


@pytest.mark.slow
def test_global_views_and_local_patches(device: str) -> None:
    """Patches have another size than views; images with none, and with more than a graph takes."""
    plain = small_ocr(device)
    model = DeepseekOcr2Tower(plain, global_size=208, local_size=96, most_items=2)
    encoder = manager(model, device, model.token_budgets(4), items=4)
    for counts in ([2, 0, 3], [0], [0, 1], [5, 1]):
        call = {
            "pixel_values": torch.randn(len(counts), 3, 208, 208, device=device),
            "pixel_values_local": torch.randn(sum(counts), 3, 96, 96, device=device),
            "num_local_patches": counts,
        }
        own = dict(call) if sum(counts) else {"pixel_values": call["pixel_values"]}
        with torch.inference_mode():
            expected = plain.get_image_features(**own).pooler_output
        assert_close(encoder.execute(call), list(expected))
    assert encoder.statistics.hits >= 7
    assert set(encoder.statistics.reasons()) == {Reason.OVERSIZE}
