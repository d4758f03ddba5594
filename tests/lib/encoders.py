"""Small encoders of every kind, and calls for them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from cgcompile import CompilationConfig
from cgcompile.encoder import (
    Costs,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphManager,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
    PatchEncoder,
    PatchOffsets,
    PatchTable,
    SupportsEncoderCudaGraph,
)
from cgcompile.encoder.patches import Grid, frame_offsets
from cgcompile.graphs.device import capture_device
from cgcompile.graphs.pool import GraphPool
from cgcompile.torch_compat import torch_ops

C, D, H, MERGE = 3, 8, 6, 2
BUDGETS = (8, 16, 32, 64)


def config(device: str = "cpu", **more: Any) -> CompilationConfig:
    return CompilationConfig(capture_device="host" if device == "cpu" else "auto", **more)


# ------------------------------------------------------------------ a tower of patches


def positions(grids: Sequence[Grid]) -> torch.Tensor:
    """Return int64 [patches, 2]: row and column of each patch."""
    corners = [(y, x) for t, h, w in grids for _ in range(t) for y in range(h) for x in range(w)]
    return torch.tensor(corners, dtype=torch.int64).view(-1, 2)


def cells(grids: Sequence[Grid]) -> torch.Tensor:
    """Return int64 [tokens, 4]: the patches of each cell; odd grids leave some patches out."""
    rows, start = [], 0
    for t, h, w in grids:
        for _ in range(t):
            for y in range(0, h // 2 * 2, 2):
                for x in range(0, w // 2 * 2, 2):
                    corner = start + y * w + x
                    rows.append((corner, corner + 1, corner + w, corner + w + 1))
            start += h * w
    return torch.tensor(rows, dtype=torch.int64).view(-1, 4)


def scale(grids: Sequence[Grid]) -> torch.Tensor:
    """Return float32 [patches, 1], from the size of the image, as interpolation does."""
    values = [1.0 / (h + w) for t, h, w in grids for _ in range(t * h * w)]
    return torch.tensor(values).view(-1, 1)


class Tower(nn.Module):
    """Two layers of attention within frames, then 2 x 2 patches to a token.

    Like kernels with ragged sequences, attention leaves rows behind the last offset unwritten, and
    the next layer reads them with weight zero.
    """

    def __init__(self, deep: bool = False) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(C, D), nn.Embedding(64, D)
        self.layers = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(2))
        self.merge = nn.Linear(4 * D, H)
        self.deep = nn.Linear(4 * D, 2 * H) if deep else None

    def forward(self, buffers: dict[str, torch.Tensor]) -> Any:
        x = self.embed(buffers["pixel_values"]) + self.places(buffers["positions"]).sum(1)
        x = x * (1 + buffers["scale"])
        first = x = x + attend(self.layers[0](x), buffers["cu_seqlens"])
        x = x + attend(self.layers[1](x), buffers["cu_seqlens"])
        merged = self.merge(x[buffers["cells"]].flatten(1))
        if self.deep is None:
            return merged
        return {"tokens": merged, "deep": [self.deep(first[buffers["cells"]].flatten(1))]}


def attend(qkv: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    q, k, v = qkv.chunk(3, -1)
    rows = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
    owner = (rows[:, None] >= starts[None, 1:]).sum(1)
    scores = (q @ k.T).masked_fill(owner[:, None] != owner[None, :], float("-inf"))
    out = torch.full_like(q, float("nan"))  # unwritten memory
    return torch.where((rows < starts.max())[:, None], scores.softmax(-1) @ v, out)


TABLES = {
    "positions": PatchTable(positions, (2,), torch.int64),
    "scale": PatchTable(scale, (1,), torch.float32),
    "cells": PatchTable(cells, (4,), torch.int64, rows="tokens"),
}


def patches(device: str = "cpu", deep: bool = False, frames: int = 1, **more: Any) -> PatchEncoder:
    torch.manual_seed(1)
    tower = Tower(deep).to(device).eval()
    settings: dict[str, Any] = {
        "merge_size": MERGE,
        "in_features": C,
        "out_hidden_size": H,
        "tables": TABLES,
        "offsets": {"cu_seqlens": PatchOffsets(frame_offsets, longest_padding=16)},
        "tower": tower,
        "max_frames_per_video": frames,
    }
    attributes = {"budget_range": (8, 64), "odd_grids": True}
    attributes = {name: more.pop(name, value) for name, value in attributes.items()}
    encoder = PatchEncoder(tower, **{**settings, **more})
    for name, value in attributes.items():
        setattr(encoder, name, value)
    return encoder


def _call(grids: Sequence[Grid], pixels: str, grid: str, device: str) -> dict[str, Any]:
    rows = torch.randn(sum(t * h * w for t, h, w in grids), C, device=device)
    return {pixels: rows, grid: torch.tensor(grids, dtype=torch.int64).view(-1, 3)}


def images(*sizes: tuple[int, int], device: str = "cpu") -> dict[str, Any]:
    """Return a call of images of random content, (rows, columns) of patches each."""
    return _call([(1, h, w) for h, w in sizes], "pixel_values", "image_grid_thw", device)


def videos(*grids: Grid, device: str = "cpu") -> dict[str, Any]:
    """Return a call of videos of random content, (frames, rows, columns) each."""
    return _call(grids, "pixel_values_videos", "video_grid_thw", device)


# ------------------------------------------------------------------ the least of a protocol


class Rows(nn.Module):
    """The six mandatory methods: rows [n, C] to tokens [n, H]; lengths divide them among items."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(C, H)
        self.settings = settings
        self.calls: dict[str, int] = {}

    def count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        self.count("config")
        settings = {"modalities": ["image"], "buffer_keys": ["x"], "out_hidden_size": H}
        return EncoderCudaGraphConfig(**{**settings, **self.settings})

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        self.count("specs")
        frames = mm_kwargs.get("frames", [1] * len(mm_kwargs["lengths"]))
        return [
            EncoderItemSpec(n, n, frames=f)
            for n, f in zip(mm_kwargs["lengths"], frames, strict=True)
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        parts = mm_kwargs["x"].split(mm_kwargs["lengths"])
        lists = {key: [mm_kwargs[key][i] for i in indices] for key in mm_kwargs if key != "x"}
        return {"x": torch.cat([mm_kwargs["x"][:0], *[parts[i] for i in indices]]), **lists}

    def prepare_encoder_cudagraph_capture_inputs(
        self, budget: int, items: int, frames: int, device: torch.device, dtype: torch.dtype
    ) -> EncoderCudaGraphCaptureInputs:
        x = torch.randn(budget, C, device=device, dtype=dtype)
        return EncoderCudaGraphCaptureInputs({"x": x})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"x": mm_kwargs["x"]})

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor]) -> Any:
        self.count("forward")
        return self.linear(inputs.pop("x")).tanh()


def rows(*lengths: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    return {"x": torch.randn(sum(lengths), C, device=device), "lengths": list(lengths), **more}


class DualPath(SupportsEncoderCudaGraph):
    """One global image for each item, and any number of local patches."""

    GLOBAL, LOCAL = 4, 3

    def __init__(self, device: str = "cpu") -> None:
        torch.manual_seed(3)
        self.towers = nn.ModuleDict({p: nn.Linear(C, H) for p in ("global", "local")}).to(device)
        self.ran: list[tuple[str, str]] = []

    def get_encoder_cudagraph_config(self) -> EncoderCudaGraphConfig:
        return EncoderCudaGraphConfig(
            modalities=["image"],
            buffer_keys=["x"],
            out_hidden_size=H,
            enable_dual_path_graph=True,
            global_token_per_image=self.GLOBAL,
            local_token_per_patch=self.LOCAL,
        )

    def get_encoder_cudagraph_budget_range(self, settings: Any) -> tuple[int, int]:
        return 4, 16

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[EncoderItemSpec]:
        locals_ = [count * self.LOCAL for count in mm_kwargs["counts"]]
        totals = [self.GLOBAL + local for local in locals_]
        return [
            EncoderItemSpec(total, total, self.GLOBAL, local)
            for total, local in zip(totals, locals_, strict=True)
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        counts = mm_kwargs["counts"]
        local = mm_kwargs["local"].split([n * self.LOCAL for n in counts])
        whole = mm_kwargs["global"].split(self.GLOBAL)
        return {
            "counts": [counts[i] for i in indices],
            "local": torch.cat([mm_kwargs["local"][:0], *[local[i] for i in indices]]),
            "global": torch.cat([mm_kwargs["global"][:0], *[whole[i] for i in indices]]),
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        **_: Any,
    ) -> EncoderCudaGraphCaptureInputs:
        x = torch.ones(token_budget, C, device=device, dtype=dtype)
        return EncoderCudaGraphCaptureInputs({"x": x})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: Any, max_batch_size: int, max_frames_per_batch: int, **named: Any
    ) -> EncoderCudaGraphReplayBuffers:
        return EncoderCudaGraphReplayBuffers({"x": mm_kwargs[named["path"]]})

    def encoder_cudagraph_forward(self, inputs: dict[str, torch.Tensor], **named: Any) -> Any:
        return self.towers[named["path"]](inputs["x"])

    def encoder_eager_forward(self, mm_kwargs: dict[str, Any], *, path: str = "default") -> Any:
        self.ran.append(("eager", path))
        return self.towers[path](mm_kwargs[path])


class Merges(DualPath):
    """Joins the parts itself: the local ones, a row of ones, the global one."""

    def postprocess_encoder_output(
        self, output: Any, indices: Any, per_item_out_tokens: Any, dest: Any, *_: Any, **named: Any
    ) -> None:
        assert not named["clone"]
        assert len(named["batch_mm_kwargs"]["counts"]) == len(indices)
        whole = output["global"].split(per_item_out_tokens["global"])
        local = [whole[0][:0]] * len(indices)
        if "local" in output:
            local = output["local"].split(per_item_out_tokens["local"])
        for index, one, two in zip(indices, whole, local, strict=True):
            dest[index] = torch.cat([two, two.new_ones(1, H), one])


def dual(*counts: int, device: str = "cpu") -> dict[str, Any]:
    return {
        "counts": list(counts),
        "local": torch.randn(sum(counts) * DualPath.LOCAL, C, device=device),
        "global": torch.randn(len(counts) * DualPath.GLOBAL, C, device=device),
    }


# ------------------------------------------------------------------ managers


# Replays are always cheaper: what runs eager does so for another reason.
GRAPHS = Costs(fixed=1.0, eager_fixed=1e6)


def manager(
    model: Any = None,
    device: str = "cpu",
    captured: bool = True,
    inference_mode: bool = True,
    **more: Any,
) -> EncoderCudaGraphManager:
    """Return a manager of ``model``, by default a tower of patches, whose graphs are captured."""
    settings = {"token_budgets": BUDGETS, "costs": GRAPHS, "config": config(device), **more}
    if model is None:
        model = patches(device)
    elif isinstance(model, nn.Module):
        model = model.to(device)
    encoder = EncoderCudaGraphManager(model, device=device, dtype=torch.float32, **settings)
    if not inference_mode:
        encoder.allow_gradients()
    if captured:
        assert encoder.capture().missing == ()
    return encoder


def counts(encoder: EncoderCudaGraphManager) -> tuple[int, int]:
    """Return hits and misses."""
    return encoder.statistics.hits, encoder.statistics.misses


def new_pool(device: str = "cpu") -> GraphPool:
    """Return an empty pool."""
    capturing = capture_device(torch.device(device), "host")
    assert capturing is not None
    return GraphPool(capturing)


def one_by_one(model: Any, call: dict[str, Any]) -> list[Any]:
    """Run each item eager, alone."""
    eager = getattr(model, "encoder_eager_forward", None)
    results = []
    with torch.inference_mode():
        for item in range(len(model.get_encoder_cudagraph_item_specs(call))):
            alone = model.select_encoder_cudagraph_items(call, [item])
            if eager is not None:
                results.append(eager(alone))
            else:
                values = model.prepare_encoder_cudagraph_replay_buffers(alone, 1, 1).values
                results.append(model.encoder_cudagraph_forward(dict(values)))
    return results


def close(results: Any, expected: Any) -> None:
    """Compare, but for the order of sums: other sizes take other kernels."""
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


def check(encoder: EncoderCudaGraphManager, model: Any, call: dict[str, Any]) -> list[Any]:
    """Execute a call, and compare each item with its eager run alone."""
    results = encoder.execute(call)
    close(results, one_by_one(model, call))
    for leaf in torch_ops.tree_leaves(results):
        assert leaf.isfinite().all()
        assert leaf.any() or not leaf.numel()
    return results
