"""The op ``cgcompile::small_linear``: linear layers of at most 16 rows, with what is around them.

For rows x [..., K] it computes, in this order::

    x = x / sqrt(mean(x * x) + eps) * (norm + offset)    with a norm [K]
    y = x @ weight.T * scale + bias                      for each weight [N, K], bias [N] or None
    y = activation(y0) * y1                              with an activation
    y = y + residual                                     with a residual [..., N]

With an activation there are two weights of one shape, or one weight whose halves are the two.
Weights of int8 or float8 have a scale for each row; the others have none. Weights and norm are
``constant`` if no node of the model's graph writes them.

On an NVIDIA GPU of compute capability 9.0 or newer one Triton kernel computes all of it, and reads
each weight once; it starts before the kernel in front of it has ended (programmatic dependent
launch). A kernel without tensor cores computes products of one row; in a CUDA graph it begins to
read constant weights before the kernel in front of it has ended. Elsewhere, and for inputs that the
kernels do not take (:func:`takes`), torch's ops compute it.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from cgcompile.kernels import (
    ROWS,
    SHARED_MEMORY,
    multiprocessors,
    power_of_two,
    registered,
    start,
    stays_constant,
    why_unsupported,
)

ACTIVATIONS = ("", "silu", "gelu_tanh")
DTYPES = (torch.bfloat16, torch.float16)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)  # of weights: all numbers are exact in DTYPES
SCALES = (torch.float32, *DTYPES)
_SCHEMA = (
    "small_linear(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor? norm, float eps, "
    "float offset, Tensor? residual, str activation, Tensor[]? scales=None, "
    "bool constant=False) -> Tensor[]"
)


class Tile(NamedTuple):
    """How a product is computed: columns and depth of a tile, stages, parts, lines to prefetch."""

    columns: int
    depth: int
    stages: int  # of loads into shared memory; 0: into registers, by the kernel for one row
    parts: int  # of the depth of a tile, each with a warp and a sum of its own
    lines: int  # of 128 bytes of each row of a weight, loaded into the L2 cache before the inputs


def tile_for(
    rows: int, columns: int, depth: int, gated: bool, normed: bool, processors: int, size: int = 2
) -> Tile:
    """Return the tile of a product.

    Args:
        rows: as :func:`rows_of_tile` returns.
        columns: rows of all weights, or with an activation of one.
        depth: length of a row.
        gated: whether there is an activation.
        normed: whether there is a norm.
        processors: of the GPU.
        size: bytes of an element of a weight.
    """
    if size > 1 and rows == 1 and (gated or depth <= 8192):
        return _row_tile(depth, gated)
    # The fastest of a search on an H100 and an H200 over the layers of three decoders. What counts
    # is the memory in flight, so the programs of a processor share its memory among their stages.
    narrow = gated or columns <= 16 * processors
    if size == 1:
        width, most, parts = _quantized_tile(rows, columns, gated, normed, processors)
    else:
        width, most, parts = (16, 128, 1) if gated else (16, 512, 4) if narrow else (32, 256, 2)
        if rows == 8 and not narrow:
            width, most = 16, 512 if normed and depth >= 4096 else 256
        if normed:
            parts = min(parts, 2)  # with 4, Triton 3.8 does not load the rows ahead
    tile = min(most, power_of_two(depth if size > 1 else -(-depth // 2)))
    # Bytes; one row is the norm.
    stage = tile * (2 * rows + size * (2 * width if gated else width) + 2)
    rest = 1024 + 2 * rows * tile  # of the driver; rows times the norm
    for together in range(min(4, -(-columns // (width * processors))), 0, -1):
        buffers = (SHARED_MEMORY // together - rest) // stage
        if buffers >= 3:
            break
    parts = min(parts, tile // 16)
    stages = 1 + min(7, -(-depth // tile), buffers)  # 7 buffers are enough
    return Tile(width, tile, stages, parts, 4 if gated else 8)


def _row_tile(depth: int, gated: bool) -> Tile:
    """Return the tile of a product of one row that reads weights into registers."""
    most = 1024 if gated and depth < 4096 else 2048
    tile = 1024 if depth % most == 1024 else min(most, power_of_two(depth))
    return Tile(2 if gated else 4, tile, 0, 4, 0)


def _quantized_tile(
    rows: int, columns: int, gated: bool, normed: bool, processors: int
) -> tuple[int, int, int]:
    """Return columns, depth and parts of a tile of int8 or float8."""
    # The fastest of a search on an H200, too. Here converting numbers takes as long as the loads,
    # and with more rows loading those from the L2 cache: more warps, or more columns for each load.
    narrow = columns <= 16 * processors
    if rows == 1:
        return (16, 512, 4) if gated else (16, 1024, 4) if narrow or normed else (32, 512, 4)
    if rows > 8:
        return (32, 128, 2) if gated else (32, 256, 2) if normed else (16 if narrow else 32, 512, 4)
    if gated or columns > 32 * processors:
        return (32, 256, 2) if gated else (32, 512, 4)
    return (16, 256, 2) if normed else (16, 512, 4)


def rows_of_tile(rows: int) -> int:
    """Return the number of rows of a tile: 1, 8 or 16, so that few kernels are compiled."""
    return next(size for size in (1, 8, ROWS) if rows <= size)


def op() -> Any:
    """Return the op; the first call registers it."""
    return registered("small_linear", _SCHEMA, by_torch, on_cuda, _fake)


def takes(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    scales: Sequence[torch.Tensor] | None = None,
) -> bool:
    """Return whether the kernel computes the op for these inputs, on a device that supports it."""
    rows, dtype = (*x.shape[:-1],), x.dtype
    if dtype not in DTYPES or not 0 < math.prod(rows) <= ROWS or not 0 < len(weights) <= 3:
        return False
    if activation and (len(weights) == 3 or (len(weights) == 1 and weights[0].shape[0] % 2)):
        return False
    if norm is not None and dtype is torch.float16:
        return False  # products of rows and norm may overflow before they are scaled
    if any(weight.shape != (weight.shape[0], x.shape[-1]) for weight in weights):
        return False
    if not all(weight.is_contiguous() for weight in weights):
        return False
    if scales is not None and not _are_scaled(weights, scales):
        return False
    if scales is None and any(weight.dtype is not dtype for weight in weights):
        return False
    plain: list[tuple[torch.Tensor, tuple[int, ...]]]
    pairs = zip(weights, biases, strict=True)
    plain = [(bias, (weight.shape[0],)) for weight, bias in pairs if bias is not None]
    plain += [] if norm is None else [(norm, x.shape[-1:])]
    if not all(t.is_contiguous() and (t.shape, t.dtype) == (shape, dtype) for t, shape in plain):
        return False
    if activation and weights[0].shape != weights[-1].shape:
        return False
    columns = weights[0].shape[0] // (2 if activation and len(weights) == 1 else 1)
    shape = torch.Size((*rows, columns))
    return residual is None or (residual.shape, residual.dtype) == (shape, dtype)


def _are_scaled(weights: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> bool:
    """Return whether weights are of one quantized dtype, with a scale for each row."""
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or not dtypes <= set(QUANTIZED) or len(scales) != len(weights):
        return False
    pairs = zip(weights, scales, strict=True)
    return all(
        scale.is_contiguous() and scale.dtype in SCALES and scale.numel() == weight.shape[0]
        for weight, scale in pairs
    )


def by_torch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str,
    scales: Sequence[torch.Tensor] | None = None,
    constant: bool = False,
) -> list[torch.Tensor]:
    """Compute the op by ops of torch."""
    if norm is not None:
        normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
        x = (normed * (norm.float() + offset)).to(x.dtype)
    if scales is not None:
        weights = [
            _dequantized(w, scale, x.dtype) for w, scale in zip(weights, scales, strict=True)
        ]
    outputs = [F.linear(x, w, bias) for w, bias in zip(weights, biases, strict=True)]
    if activation:
        gate, up = outputs if len(outputs) == 2 else outputs[0].chunk(2, -1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        outputs = [gate * up]
    return outputs if residual is None else [outputs[0] + residual]


def _dequantized(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight times the scale of each row, rounded once."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    return (weight.to(wide) * scale.to(wide).reshape(-1, 1)).to(dtype)


def _fake(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str,
    scales: Sequence[torch.Tensor] | None = None,
    constant: bool = False,
) -> list[torch.Tensor]:
    sizes = [weight.shape[0] for weight in weights]
    if activation:
        sizes = [sizes[0] // (3 - len(sizes))]
    return [x.new_empty((*x.shape[:-1], size)) for size in sizes]


def on_cuda(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str,
    scales: Sequence[torch.Tensor] | None = None,
    constant: bool = False,
) -> list[torch.Tensor]:
    rest = (weights, biases, norm, eps, offset, residual, activation, scales)
    inputs = (x, weights, biases, norm, residual, activation, scales)
    if why_unsupported(x.device) is not None or not takes(*inputs):
        return by_torch(x, *rest)
    with torch.cuda.device(x.device):
        return launch(x, *rest, constant, dependent=True)


def launch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    norm: torch.Tensor | None,
    eps: float,
    offset: float,
    residual: torch.Tensor | None,
    activation: str,
    scales: Sequence[torch.Tensor] | None = None,
    constant: bool = False,
    *,
    dependent: bool,
    tile: Tile | None = None,
) -> list[torch.Tensor]:
    """Run the kernel for inputs that it :func:`takes`; ``tile`` is for tests."""
    from cgcompile.kernels import small_linear_triton as kernels

    outputs = _fake(x, weights, biases, norm, eps, offset, residual, activation)
    x, depth = x.contiguous(), x.shape[-1]
    weights, biases, scales = list(weights), list(biases), list(scales or ())
    if activation and len(weights) == 1:
        weights = [*weights[0].chunk(2)]
        scales = [half for scale in scales for half in scale.reshape(-1).chunk(2)]
        biases = [None, None] if biases[0] is None else [*biases[0].chunk(2)]
    columns = [weight.shape[0] for weight in weights]
    rows = rows_of_tile(x.numel() // depth)
    counted = columns[:1] if activation else columns
    if tile is None:
        processors = multiprocessors(x.device)
        shape = rows, sum(counted), depth
        size = weights[0].element_size()
        tile = tile_for(*shape, bool(activation), norm is not None, processors, size)
    programs = sum(-(-count // tile.columns) for count in counted)
    missing = [x] * (3 - len(weights))  # stand for what is absent, and are not read
    read_early = [*weights, *([] if norm is None else [norm])]
    early = () if tile.stages else (constant and stays_constant(read_early),)
    start(
        kernels.project if tile.stages else kernels.project_row, (programs,), x, *weights, *missing,
        *scales, *[x] * (3 - len(scales)),
        *(x if bias is None else bias for bias in biases), *missing,
        x if norm is None else norm, x if residual is None else residual.contiguous(),
        *outputs, *[x] * (3 - len(outputs)),
        x.numel() // depth, *columns, *[0] * len(missing), *map(int, early), eps, offset,
        K=depth, COUNT=len(weights), ACTIVATION=ACTIVATIONS.index(activation),
        NORM=norm is not None, RESIDUAL=residual is not None,
        BIASES=sum(1 << n for n, bias in enumerate(biases) if bias is not None),
        COLUMNS=tile.columns, DEPTH=tile.depth, PARTS=tile.parts, STAGES=tile.stages,
        ROWS=rows,
        LINES=tile.lines if depth * weights[0].element_size() >= 128 * tile.lines else 0,
        EVEN=depth % tile.depth == 0 and all(count % tile.columns == 0 for count in columns),
        WIDE=max(columns) * depth >= 2**31, OFFSET=offset != 0,
        SCALED=bool(scales), DEPENDENT=dependent, num_warps=tile.parts,
        **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return outputs
