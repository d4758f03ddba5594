"""The op ``cgcompile::decode_attention``: attention of few query rows over a long cache.

For queries q [B, H, T, D], keys k [B, Hkv, L, D] and values v [B, Hkv, L, Dv], where H is a
multiple of Hkv and head h of q reads head h // (H // Hkv) of k and v, it computes, in this order::

    s = q @ k.T * scale
    s = soft_cap * tanh(s / soft_cap)                 with a soft cap that is not 0
    s = s + mask, or -inf where a boolean mask is False
    p = exp(s) / (sum(exp(s)) + exp(sinks))           with sinks [H], a logit of each head
    result = p @ v

A row whose keys are all excluded, by False or by -inf, is 0. The memory of the
result [B, H, T, Dv] is that of a contiguous [B, T, H, Dv].

On an NVIDIA GPU of compute capability 9.0 or newer Triton kernels compute it for at most
:data:`TOKENS` query rows: they read each key and value once, and no key that the mask excludes from
all rows. Elsewhere, and for inputs that the kernels do not take (:func:`takes`), torch's ops
compute it. It is differentiable, by torch's ops; forward-mode AD raises an error.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from cgcompile.errors import ConfigError
from cgcompile.kernels import multiprocessors, power_of_two, registered, start, why_unsupported
from cgcompile.kernels.small_linear import DTYPES
from cgcompile.torch_compat import torch_ops

__all__ = ["TOKENS", "op", "takes", "why_unsupported"]

TOKENS = 16  # query rows of a request
SIZE = 256  # most values of a head
SCAN = 4096  # most positions of a mask that a program reads at once
MOST_SPLITS = 64  # programs for a head, whose sums one program adds
_SCHEMA = (
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, "
    "float soft_cap) -> Tensor"
)


def op() -> Any:
    """Return the op; the first call registers it."""
    return registered("decode_attention", _SCHEMA, by_torch, on_cuda, _fake, (_setup, _backward))


def takes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> bool:
    """Return whether the kernels compute the op for these inputs, on a device that supports it.

    Sizes may be symbols: the batch and the length are compared with each other only.
    """
    if not all(x.dim() == 4 and x.dtype in DTYPES and x.dtype == q.dtype for x in (q, k, v)):
        return False
    if any(x is not None and x.device != q.device for x in (k, v, mask, sinks)):
        return False  # torch's ops raise an error
    batch, heads, tokens, size = q.shape
    if not 0 < tokens <= TOKENS or heads == 0 or k.shape[1] == 0 or heads % k.shape[1]:
        return False
    if not all(0 < last <= SIZE for last in (size, v.shape[-1])) or k.shape[-1] != size:
        return False
    if k.shape[0] != batch or k.shape[:3] != v.shape[:3] or k.shape[2] == 0:
        return False
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        return False  # the values of a position are not beside each other
    if sinks is not None and sinks.shape != (heads,):
        return False
    if mask is None:
        return True
    whole = (batch, heads, tokens, k.shape[2])[4 - mask.dim() :]
    pairs = zip(mask.shape, whole, strict=True) if mask.dim() <= 4 else [(0, 1)]
    fits = all(own == other or own == 1 for own, other in pairs)
    return fits and mask.dtype in (torch.bool, torch.float32, q.dtype)


class Tile(NamedTuple):
    """How the keys are divided."""

    keys: int  # of a step of a program
    parts: int  # of these keys, each with a warp and a sum of its own
    stages: int
    splits: int  # programs that share a head of the cache


def tile_for(pairs: int, length: int, processors: int) -> Tile:
    """Return how the keys are divided.

    Args:
        pairs: of a request and a head of the cache, times the tiles of their rows.
        length: of the cache.
        processors: of the GPU.
    """
    # From a search on an H200: 16 layers of 8 heads of 128 values in one graph, 8 requests, 200 of
    # 1,024 keys in use. A layer takes 9.1, 9.3, 10.0 us with 4, 2, 1 programs for a head; with
    # 4 programs and 2 stages 9.0, with 32 keys a step 9.4; the best with 128 keys is 9.6. Full and
    # longer caches were not measured. Every program of a head finds the keys in use, so these are
    # divided evenly, and not the length.
    keys = 64
    together = max(1, 2 * processors // pairs)
    splits = min(together, -(-length // keys), MOST_SPLITS)
    return Tile(keys, 4, 3, 1 << (splits.bit_length() - 1))


def rows_of_tile(rows: int, size_v: int) -> int:
    """Return the number of rows of a tile: what the registers of a warp hold."""
    return 16 if rows <= 16 or size_v > 128 else 32


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Compute the op by ops of torch."""
    _require_no_tangent(q, k, v, mask, sinks)
    if sinks is None and soft_cap == 0 and (mask is None or mask.dtype in (torch.bool, q.dtype)):
        # Heads that share keys are rows of one head, so that no key is copied.
        rows, row_mask = _rows(q, k.shape[1]), _rows_of_mask(mask, q, k)
        result = F.scaled_dot_product_attention(rows, k, v, row_mask, scale=scale)
        result = result.reshape(*q.shape[:3], v.shape[-1])
    else:
        result = _written_out(q, k, v, mask, sinks, scale, soft_cap)
    result = result.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return result.transpose(1, 2)


def _require_no_tangent(*tensors: torch.Tensor | None) -> None:
    """Raise ConfigError for forward-mode AD, of which the op would lose the tangents."""
    if torch_ops.has_tangent(tensors):
        raise ConfigError.impossible(
            what="decode_attention of a tensor with a tangent",
            because="the op has no forward derivative",
            instead="Set kernels='-decode_attention' for this model.",
        )


def _rows(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return [B, H, T, N] as [B, heads, H // heads * T, N]."""
    batch, _, _, size = x.shape
    return x.reshape(batch, heads, x.shape[1] // heads * x.shape[2], size)


def _rows_of_mask(
    mask: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor
) -> torch.Tensor | None:
    """Return a mask for :func:`_rows` of the queries; equal rows stay one row."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    if mask.shape[1] == mask.shape[2] == 1:
        return mask
    return _rows(mask.expand(-1, q.shape[1], q.shape[2], -1), k.shape[1])


def _written_out(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Compute the op with sums in float32 at least; in any layout."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    rows = _rows(q, k.shape[1]).to(dtype)
    scores = rows @ k.to(dtype).mT * scale
    if soft_cap != 0:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    row_mask = _rows_of_mask(mask, q, k)
    if row_mask is not None and row_mask.dtype is torch.bool:
        scores = scores.masked_fill(~row_mask, -torch.inf)
    elif row_mask is not None:
        scores = scores + row_mask
    length = scores.shape[-1]
    if sinks is not None:
        sink_rows = sinks.to(dtype)[None, :, None, None].expand(*q.shape[:3], 1)
        scores = torch.cat((scores, _rows(sink_rows, k.shape[1])), -1)
    empty = (scores == -torch.inf).all(-1, keepdim=True)  # not NaN, nor in a gradient
    weights = scores.masked_fill(empty, 0).softmax(-1)[..., :length].masked_fill(empty, 0)
    result = weights @ v.to(dtype)
    return result.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    batch, heads, tokens, _ = q.shape
    return q.new_empty((batch, tokens, heads, v.shape[-1])).transpose(1, 2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.scale, ctx.soft_cap = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    tensors = list(ctx.saved_tensors)
    indices = [index for index, needed in enumerate(ctx.needs_input_grad[:5]) if needed]

    def computed(*values: torch.Tensor) -> torch.Tensor:
        inputs: list[Any] = [*tensors]
        for index, value in zip(indices, values, strict=True):
            inputs[index] = value
        q, k, v, mask, sinks = inputs
        return _written_out(q, k, v, mask, sinks, ctx.scale, ctx.soft_cap)

    pullback = torch.func.vjp(computed, *(tensors[index] for index in indices))[1]
    gradients = dict(zip(indices, pullback(grad), strict=True))
    return tuple(gradients.get(index) for index in range(7))


def on_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Compute the op for CUDA tensors."""
    _require_no_tangent(q, k, v, mask, sinks)
    if why_unsupported(q.device) is not None or not takes(q, k, v, mask, sinks):
        return by_torch(q, k, v, mask, sinks, scale, soft_cap)
    with torch.cuda.device(q.device):
        return launch(q, k, v, mask, sinks, scale, soft_cap, dependent=True)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    scale: float,
    soft_cap: float,
    *,
    dependent: bool,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Run the kernels for inputs that they :func:`takes`; ``tile`` is for tests."""
    from cgcompile.kernels import decode_attention_triton as kernels

    batch, heads, tokens, size = q.shape
    _, shared, length, size_v = v.shape
    out = _fake(q, k, v, mask, sinks, scale, soft_cap)
    q = q if q.stride(-1) == 1 else q.contiguous()
    pairs, rows = batch * shared, heads // shared * tokens
    row_tile = rows_of_tile(rows, size_v)
    row_tiles = -(-rows // row_tile)
    if tile is None:
        tile = tile_for(pairs * row_tiles, length, multiprocessors(q.device))
    kind = 0 if mask is None else 1 if mask.dtype is torch.bool else 2
    mask_strides = [0, 0, 0, 0]
    if mask is None:
        mask = q  # stands for what is absent, and is not read
    else:
        whole = mask.expand(batch, heads, tokens, length)
        dims = zip(whole.shape, whole.stride(), strict=True)
        mask_strides = [stride if count > 1 else 0 for count, stride in dims]
        mask = mask.view(torch.uint8) if kind == 1 else mask
    sums = torch.empty(pairs, tile.splits, rows, 2, dtype=torch.float32, device=q.device)
    values = sums.new_empty(pairs, tile.splits, rows, size_v)
    sizes = (heads // shared, tokens, length, shared)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides)
    most = power_of_two(tile.splits, 1)
    named = {"D": size, "DV": size_v, "DP": power_of_two(size), "DVP": power_of_two(size_v)}
    named |= {"MASK": kind, "CAP": soft_cap != 0, "DEPENDENT": dependent}
    named |= {"launch_pdl": True} if dependent else {}
    start(
        kernels.attend_keys, (pairs, tile.splits, row_tiles),
        q, k, v, mask, sums, values, scale, soft_cap, *sizes, *strides,
        ROW_MASK=kind != 0 and mask_strides[1:3] != [0, 0], ROWS=row_tile, PARTS=tile.parts,
        KEYS=tile.keys, STAGES=tile.stages, SCAN=min(SCAN, power_of_two(length, 1024)),
        num_warps=tile.parts, **named,
    )  # fmt: skip
    start(
        kernels.attend_sums, (pairs, rows),
        q, k, v, mask, q if sinks is None else sinks.contiguous(),
        sums, values, out, scale, soft_cap, *sizes, tile.splits, *strides,
        SINKS=sinks is not None, MOST=most,
        num_warps=max(1, most * power_of_two(size_v) // 2048), **named,
    )  # fmt: skip
    return out
