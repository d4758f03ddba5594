"""Small towers of ``transformers`` with random weights, and what the tests of them share."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from towers.patch_tower import PatchTower
from towers.qwen2_5_vl import Qwen25VLTower
from towers.qwen2_vl import Qwen2VLTower
from towers.qwen3_vl import Qwen3VLTower
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLModel,
    Qwen2VLConfig,
    Qwen2VLModel,
    Qwen3VLConfig,
    Qwen3VLModel,
)

import cgcompile
from cgcompile.encoder import EncoderCudaGraphManager

Grid = tuple[int, int, int]

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
}
COMMON = {"depth": 3, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
VISION = {
    "qwen2_vl": {**COMMON, "embed_dim": 64, "hidden_size": 32},
    "qwen2_5_vl": {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 60,
        "out_hidden_size": 32,
        "window_size": 24,  # 3 x 3 merged tokens
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        **COMMON,
        "hidden_size": 64,
        "intermediate_size": 60,
        "out_hidden_size": 32,
        "deepstack_visual_indexes": [0, 2],
        "num_position_embeddings": 36,
    },
}
MODELS = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLModel, Qwen2VLTower),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLModel, Qwen25VLTower),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLModel, Qwen3VLTower),
}
KINDS = tuple(MODELS)


def randomised(model: Any, device: str) -> Any:
    """Weights that matter: with those of a new model every attention is nearly even."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.15 if parameter.dim() > 1 else 0.05))
            if parameter.dim() == 1 and parameter is not None:
                parameter.add_(0.5)
    return model.eval().to(device)


def patch_tower(kind: str, device: str) -> tuple[PatchTower, Any]:
    """A tower on graphs, and a plain one with the same weights and transformers' own attention."""
    config, model, adapter = MODELS[kind]
    made = model(config(text_config=TEXT, vision_config=VISION[kind]))
    tower = randomised(made.visual, device)
    plain = deepcopy(tower)
    plain.set_attn_implementation("sdpa")
    return adapter(tower), plain


def images(grids: Sequence[Grid], device: str, video: bool = False) -> dict[str, Any]:
    """A call of random patches."""
    rows = sum(t * h * w for t, h, w in grids)
    pixels = torch.randn(rows, 3 * 2 * 4 * 4, device=device)
    if video:
        return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor(grids)}
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)}


def plain_results(plain: Any, call: dict[str, Any]) -> list[tuple[torch.Tensor, ...]]:
    """What the tower's own forward gives, for each item: the tokens and the deepstack features."""
    pixels, grids = call.values()
    with torch.inference_mode():
        found = plain(pixels, grid_thw=grids.to(pixels.device))
    counts = (grids.prod(1) // 4).tolist()
    results = (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))
    return list(zip(*(each.split(counts) for each in results), strict=True))


def manager(model: Any, device: str, budgets: Any, items: int = 8, **given: Any) -> Any:
    """A captured manager that poisons what nobody writes."""
    settings = cgcompile.CompilationConfig(
        capture_device="host" if device == "cpu" else "auto", poison=True
    )
    given = {"token_budgets": budgets, "max_batch_size": items, "config": settings, **given}
    made = EncoderCudaGraphManager(model, device=device, dtype=torch.float32, **given)
    assert made.capture().missing == ()
    return made


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Item by item; an item may be a tensor or several."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        mine = (mine,) if isinstance(mine, torch.Tensor) else mine
        theirs = (theirs,) if isinstance(theirs, torch.Tensor) else theirs
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one.shape == other.shape
            assert other.abs().max() > 1e-2
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
