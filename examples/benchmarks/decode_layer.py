"""A bound for decode steps: one decoder layer in five Triton kernels, captured in a CUDA graph.

Run it on a machine with a Hopper GPU or newer::

    python examples/benchmarks/decode_layer.py --rows 8

The layers are those of the decoder of ``compare.py`` (hidden 2048, 16 heads, 8 of keys and values,
intermediate 5632, context 256, bfloat16). Each kernel lets the next one start early (programmatic
dependent launch) and loads a part of its weights into the L2 cache before it waits for its inputs:

1. norm, product with q, k and v, rotary embedding, write to the cache
2. attention over the cache, split over its positions
3. output product, residual
4. norm, product with gate and up, SiLU, product of both
5. product down, residual

A product reads weights [N, K] once, for at most 16 rows. The kernel that makes the input of a norm
writes the sums of squares of its tiles; the kernel with the norm adds them in a fixed order.

Prints microseconds of a layer with and without dependent launch, the largest error of the last
layer against float32 beside that of eager in bfloat16, and the bandwidth of a kernel that only
reads. Exits with 1 where the error is larger than that of eager.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

EPS = 1e-6
ROWS = 16  # of a tile of the tensor cores
RESIDUAL, GATED, QKV = 0, 1, 2  # what a product is followed by
Weights = dict[str, torch.Tensor]  # of a layer


@dataclass(frozen=True)
class Dims:
    """The sizes of a decoder; those of one token of ``rows`` sequences."""

    layers: int = 32
    hidden: int = 2048
    heads: int = 16
    kv_heads: int = 8
    size: int = 128
    intermediate: int = 5632
    context: int = 256


@dataclass(frozen=True)
class Tile:
    """How a product is computed: columns and depth of a tile, stages, warps, lines to prefetch."""

    columns: int = 16
    depth: int = 256
    stages: int = 4
    warps: int = 2
    lines: int = 4  # of 128 bytes, of each row of the weights


TILES = {"qkv": Tile(stages=3), "out": Tile(), "gate_up": Tile(32, 128), "down": Tile()}


# ---------------------------------------------------------------- a step


class HandWritten:
    """One step of all layers, over buffers of its own."""

    def __init__(
        self,
        dims: Dims,
        layers: Sequence[Weights],
        x: torch.Tensor,
        position: torch.Tensor,
        tiles: dict[str, Tile],
        dependent: bool,
        block: int = 64,
        split: int = 4,
    ) -> None:
        from rivals import layer_kernels  # which needs triton

        self.kernels: Any = layer_kernels
        self.dims, self.layers, self.x, self.position = dims, layers, x, position
        self.tiles, self.dependent, self.block, self.split = tiles, dependent, block, split
        self.cos, self.sin = angles(dims, position, x.dtype)
        rows, width = len(x), dims.heads * dims.size
        self.q, self.attended = x.new_zeros(rows, width), x.new_zeros(rows, width)
        self.middle, self.gated = torch.zeros_like(x), x.new_zeros(rows, dims.intermediate)
        self.results = [torch.zeros_like(x), torch.zeros_like(x)]
        like: dict[str, Any] = {"device": x.device, "dtype": torch.float32}
        self.first = torch.zeros(1, ROWS, **like)
        self.first[0, :rows] = x.float().square().sum(-1)
        self.of_out = torch.zeros(dims.hidden // tiles["out"].columns, ROWS, **like)
        self.of_down = torch.zeros(dims.hidden // tiles["down"].columns, ROWS, **like)
        parts = rows * dims.kv_heads * split * (dims.heads // dims.kv_heads)
        self.part = torch.zeros(parts * (dims.size + 2), **like)
        self.count = torch.zeros(rows * dims.kv_heads, device=x.device, dtype=torch.int32)

    def __call__(self) -> torch.Tensor:
        """Run all layers; return the rows after the last one."""
        x, squares = self.x, self.first
        for index, layer in enumerate(self.layers):
            result = self.results[index % 2]
            self._product("qkv", QKV, x, layer, "norm1", squares, None, self.q, None)
            self._attention(layer)
            self._product(
                "out", RESIDUAL, self.attended, layer, "", None, x, self.middle, self.of_out
            )
            self._product(
                "gate_up", GATED, self.middle, layer, "norm2", self.of_out, None, self.gated, None
            )
            self._product(
                "down", RESIDUAL, self.gated, layer, "", None, self.middle, result, self.of_down
            )
            x, squares = result, self.of_down
        return x

    def _launch(self) -> dict[str, Any]:
        return {"launch_pdl": True} if self.dependent else {}

    def _product(
        self,
        name: str,
        kind: int,
        x: torch.Tensor,
        layer: Weights,
        norm: str,
        squares: torch.Tensor | None,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        sums: torch.Tensor | None,
    ) -> None:
        """Launch one product; without a norm, residual or sums, its input stands for them."""
        dims, tile, weight = self.dims, self.tiles[name], layer[name]
        sources = 1 if squares is None else len(squares)
        columns = len(weight) if kind == RESIDUAL else len(weight) // 2
        self.kernels.project[(columns // tile.columns,)](
            x, weight, layer[norm] if norm else x, x if squares is None else squares,
            x if residual is None else residual, out, x if sums is None else sums,
            self.cos, self.sin, layer["keys"], layer["values"], self.position,
            len(x), out.shape[1], EPS, K=x.shape[1], KIND=kind, NORM=bool(norm),
            TILES=sources, PADDED=max(2, 1 << (sources - 1).bit_length()), COLUMNS=tile.columns,
            DEPTH=min(tile.depth, x.shape[1]), STAGES=tile.stages, LINES=tile.lines,
            HEADS=dims.heads, KV=dims.kv_heads, D=dims.size, CONTEXT=dims.context,
            DEPENDENT=self.dependent, num_warps=tile.warps, **self._launch(),
        )  # fmt: skip

    def _attention(self, layer: Weights) -> None:
        dims = self.dims
        self.kernels.attend[(len(self.x), dims.kv_heads, self.split)](
            self.q, layer["keys"], layer["values"], self.position, self.attended, self.part,
            self.count, dims.size**-0.5, HEADS=dims.heads, KV=dims.kv_heads, D=dims.size,
            CONTEXT=dims.context, BLOCK=self.block, SPLIT=self.split, DEPENDENT=self.dependent,
            num_warps=2, **self._launch(),
        )  # fmt: skip


def angles(
    dims: Dims, position: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the rotary embedding, [rows, size / 2] each."""
    step = torch.arange(0, dims.size, 2, device=position.device) / dims.size
    angle = position[:, None].float() * 10000.0**-step
    return angle.cos().to(dtype), angle.sin().to(dtype)


def eager(
    dims: Dims, layers: Sequence[Weights], x: torch.Tensor, position: torch.Tensor, dtype: Any
) -> torch.Tensor:
    """The same step by torch's own ops in another dtype; caches stay as they are."""
    x, rows = x.to(dtype), torch.arange(len(x), device=x.device)
    cos, sin = (each[:, None] for each in angles(dims, position, dtype))

    def rotated(y: torch.Tensor) -> torch.Tensor:
        one, two = y.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    for layer in layers:
        own = {name: weight.to(dtype, copy=True) for name, weight in layer.items()}
        found = F.linear(F.rms_norm(x, (dims.hidden,), own["norm1"], EPS), own["qkv"])
        heads = found.unflatten(-1, (-1, dims.size))
        q, k, v = heads.split([dims.heads, dims.kv_heads, dims.kv_heads], 1)
        own["keys"][rows, position], own["values"][rows, position] = rotated(k), v
        keys, values = own["keys"].transpose(1, 2), own["values"].transpose(1, 2)
        inside = torch.arange(dims.context, device=x.device) <= position[:, None, None, None]
        attended = F.scaled_dot_product_attention(
            rotated(q)[:, :, None], keys, values, inside, enable_gqa=True
        )
        x = x + F.linear(attended[:, :, 0].flatten(1), own["out"])
        normed = F.rms_norm(x, (dims.hidden,), own["norm2"], EPS)
        gate, up = F.linear(normed, own["gate_up"]).chunk(2, -1)
        x = x + F.linear(F.silu(gate) * up, own["down"])
    return x


def make_layers(
    dims: Dims, rows: int, device: str, dtype: torch.dtype
) -> tuple[list[Weights], torch.Tensor, torch.Tensor]:
    """Random layers with caches, rows [rows, hidden], and the position of each row."""
    torch.manual_seed(0)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * scale).to(dtype)

    hidden, cache = dims.hidden, (rows, dims.context, dims.kv_heads, dims.size)
    layers = [
        {
            "norm1": drawn(hidden, scale=0.1) + 1,
            "norm2": drawn(hidden, scale=0.1) + 1,
            "qkv": drawn((dims.heads + 2 * dims.kv_heads) * dims.size, hidden, scale=hidden**-0.5),
            "out": drawn(hidden, dims.heads * dims.size, scale=hidden**-0.5),
            "gate_up": drawn(2 * dims.intermediate, hidden, scale=hidden**-0.5),
            "down": drawn(hidden, dims.intermediate, scale=dims.intermediate**-0.5),
            "keys": drawn(*cache),
            "values": drawn(*cache),
        }
        for _ in range(dims.layers)
    ]
    position = torch.arange(dims.context - 1, dims.context - 1 - rows, -1, device=device)
    return layers, drawn(rows, hidden), position


# ---------------------------------------------------------------- measurement


def replayed_us(function: Callable[[], Any]) -> float:
    """Capture a function and return the median microseconds of a replay."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        function()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            function()
    times: list[float] = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One decoder layer in five Triton kernels.")
    parser.add_argument("--rows", type=int, default=8, choices=range(1, ROWS + 1))
    args = parser.parse_args(argv)
    dims = Dims()
    layers, x, position = make_layers(dims, args.rows, "cuda", torch.bfloat16)
    memory = torch.ones(2**28, device="cuda")
    read = memory.nbytes / replayed_us(memory.sum) / 1e6
    products = ("qkv", "out", "gate_up", "down")
    weights = sum(layers[0][name].nbytes for name in products)
    least = (weights + layers[0]["keys"].nbytes * 2) / read / 1e6
    print(f"a sum reads {read:.2f} TB/s: at least {least:.1f} us for a layer")
    exact = eager(dims, layers, x, position, torch.float32)
    usual = float((eager(dims, layers, x, position, x.dtype).float() - exact).abs().max())
    good = True
    for dependent in (False, True):
        step = HandWritten(dims, layers, x, position, TILES, dependent)
        layer = replayed_us(step) / dims.layers
        error = float((step().float() - exact).abs().max())
        launch = "dependent launch" if dependent else "ordinary launch "
        print(f"{launch}  {layer:6.2f} us  error {error:.4f} (eager {usual:.4f})")
        good &= error <= usual
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
