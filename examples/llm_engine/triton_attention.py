"""The kernel of paged attention on CUDA. Importing this file needs triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    tables_ptr,
    owners_ptr,
    positions_ptr,
    scale,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program for each token and head of the cache: online softmax over the token's context."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    owner = tl.load(owners_ptr + token).to(tl.int64)
    length = (tl.load(positions_ptr + token) + 1).to(tl.int32)
    length = tl.where(owner >= 0, length, 0)  # padding sees nothing
    table = tables_ptr + tl.maximum(owner, 0) * table_stride

    dims = tl.arange(0, HEAD_DIM_PADDED)
    group = tl.arange(0, GROUP_PADDED)
    places = tl.arange(0, TILE)
    dim_mask = dims < HEAD_DIM
    row_mask = (group < GROUP)[:, None] & dim_mask[None, :]
    heads = (head * GROUP + group)[:, None]
    q_rows = token * q_token_stride + heads * q_head_stride + dims[None, :]
    q = tl.load(q_ptr + q_rows, mask=row_mask, other=0.0)

    highest = tl.full([GROUP_PADDED], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, HEAD_DIM_PADDED], tl.float32)
    for start in range(0, length, TILE):
        at = start + places
        there = at < length
        block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
        slot = block * block_stride + (at % BLOCK_SIZE) * slot_stride + head * HEAD_DIM
        where = slot[:, None] + dims[None, :]
        mask = there[:, None] & dim_mask[None, :]
        k = tl.load(k_ptr + where, mask=mask, other=0.0)
        v = tl.load(v_ptr + where, mask=mask, other=0.0)
        # "ieee": float32 stays float32; TF32 could turn a close call between two tokens.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(there[None, :], scores, float("-inf"))
        # Every tile has a position that is seen, so that this is finite.
        above = tl.maximum(highest, tl.max(scores, 1))
        shrink = tl.exp2(highest - above)
        weights = tl.exp2(scores - above[:, None])
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None]
        result += tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = above
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    result = result.to(out_ptr.dtype.element_ty)
    out_rows = token * out_token_stride + heads * out_head_stride + dims[None, :]
    tl.store(out_ptr + out_rows, result, mask=row_mask)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    token_to_req: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """As ``gather_attention``; caches are contiguous, and so is the last dimension of the rest."""
    tokens, heads, head_dim = q.shape
    _, block_size, kv_heads, _ = k_cache.shape
    group = heads // kv_heads
    _kernel[(tokens, kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        block_tables,
        token_to_req,
        positions,
        head_dim**-0.5 * LOG2_E,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        block_tables.stride(0),
        HEAD_DIM=head_dim,
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM_PADDED=max(16, triton.next_power_of_2(head_dim)),
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),  # the least that tl.dot takes
        TILE=32 if q.dtype == torch.float32 else 64,
    )
