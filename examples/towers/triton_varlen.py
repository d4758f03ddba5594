"""The kernel of varlen attention on CUDA. Importing this file needs triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MANY_ROWS = 4096  # from here on tall tiles leave enough programs for every multiprocessor


@triton.jit
def _scan(
    q,
    k_ptr,
    v_ptr,
    starts,
    ends,
    first,
    last,
    scale,
    k_row_stride,
    v_row_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SEVERAL: tl.constexpr,
):
    """Online softmax of the rows ``q`` over keys ``first`` to ``last``, each row among its own.

    With ``SEVERAL`` sequences a row meets values that are not its own, with a weight of 0. Zero
    times NaN is NaN, so such values are left out, and rows that have them among their own are NaN.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)
    dim_there = dims < HEAD_DIM
    places = tl.arange(0, TILE_KEYS)
    # 64 bits for where a tile begins, 32 within it: wide ones for every element take registers.
    k_at = places[:, None] * k_row_stride + dims[None, :]
    v_at = places[:, None] * v_row_stride + dims[None, :]
    # Finite, so that a row without a key so far gives no NaN.
    highest = tl.full([TILE_ROWS], -1e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    spoiled = tl.zeros([TILE_ROWS], tl.float32)
    result = tl.zeros([TILE_ROWS, HEAD_DIM_PADDED], tl.float32)
    for start in range(first, last, TILE_KEYS):
        at = start + places
        mask = (at < last)[:, None] & dim_there[None, :]
        far = tl.cast(start, tl.int64)
        k = tl.load(k_ptr + far * k_row_stride + k_at, mask=mask, other=0.0)
        # "ieee": float32 stays float32, so that results are those of the model's own attention.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        own = (at[None, :] >= starts[:, None]) & (at[None, :] < ends[:, None])
        scores = tl.where(own, scores, float("-inf"))
        above = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - above)
        weights = tl.exp2(scores - above[:, None])
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + far * v_row_stride + v_at, mask=mask, other=0.0)
        if SEVERAL:
            finite = tl.abs(v.to(tl.float32)) < float("inf")
            v = tl.where(finite, v, 0.0)
            bad = tl.max(tl.where(finite, 0.0, 1.0), 1)
            spoiled = tl.maximum(spoiled, tl.max(tl.where(own, bad[None, :], 0.0), 1))
        result = result * shrink[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = above
    total = tl.where(total == 0, 1.0, total)
    return tl.where(spoiled[:, None] > 0, float("nan"), result / total[:, None])


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    bounds_ptr,
    scale,
    rows,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
    v_head_stride,
    out_row_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """One program for each tile of rows and head.

    The keys of a tile go from the first sequence of its rows to the last one, which lie next to
    each other; each row is masked to its own. So the time depends on lengths, and empty sequences
    cost nothing.
    """
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row_there = row < rows
    starts = tl.load(bounds_ptr + row, mask=row_there, other=0)
    ends = tl.load(bounds_ptr + rows + row, mask=row_there, other=0)
    seen = ends > starts
    first = tl.min(tl.where(seen, starts, rows), 0)
    last = tl.max(tl.where(seen, ends, 0), 0)
    latest = tl.max(tl.where(seen, starts, 0), 0)  # start of the last sequence

    dims = tl.arange(0, HEAD_DIM_PADDED)
    far_row = row.to(tl.int64)[:, None]
    row_mask = row_there[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = far_row * q_row_stride + head * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=row_mask, other=0.0)
    k_ptr += head * k_head_stride
    v_ptr += head * v_head_stride
    if latest > first:
        result = _scan(
            q,
            k_ptr,
            v_ptr,
            starts,
            ends,
            first,
            last,
            scale,
            k_row_stride,
            v_row_stride,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            TILE_ROWS,
            TILE_KEYS,
            True,
        )
    else:
        result = _scan(
            q,
            k_ptr,
            v_ptr,
            starts,
            ends,
            first,
            last,
            scale,
            k_row_stride,
            v_row_stride,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            TILE_ROWS,
            TILE_KEYS,
            False,
        )
    out_at = far_row * out_row_stride + head * out_head_stride + dims[None, :]
    tl.store(out_ptr + out_at, result.to(out_ptr.dtype.element_ty), mask=row_mask)


def varlen_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    """As ``masked_attention``; the last dimension of all is contiguous, and so is ``bounds``."""
    rows, heads, head_dim = q.shape
    out = torch.empty(rows, heads, head_dim, dtype=q.dtype, device=q.device)
    tile_rows, tile_keys = (128 if rows >= MANY_ROWS else 64), 64
    if q.dtype == torch.float32:  # in registers as a whole, without tensor cores
        tile_rows = tile_keys = 32
    _kernel[(triton.cdiv(rows, tile_rows), heads)](
        q,
        k,
        v,
        out,
        bounds,
        scale * LOG2_E,
        rows,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        out.stride(0),
        out.stride(1),
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        num_warps=8 if tile_rows == 128 else 4,
        num_stages=2,
    )
    return out
