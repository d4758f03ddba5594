"""The kernels of paged attention on CUDA. Importing this file needs triton.

Where a step has few tokens, several programs share the context of one: each writes what it found of
its part, and a second kernel adds the parts. Grids depend on shapes alone. On Hopper GPUs a kernel
is launched while the one before it still runs, and waits for its results (dependent launch).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = 1.4426950408889634


@triton.jit
def _part_of(length, part, TILE: tl.constexpr, SPLIT: tl.constexpr):
    """Return the first position of a part of the context and the end, of whole tiles."""
    first, last = 0, length
    if SPLIT > 1:
        share = tl.cdiv(tl.cdiv(length, SPLIT), TILE) * TILE
        first, last = part * share, tl.minimum(length, (part + 1) * share)
    return first, last


@triton.jit
def _kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    sums_ptr,
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
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for each token, head of the cache and part of the context: online softmax."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
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
    first, last = _part_of(length, part, TILE, SPLIT)
    for start in range(first, last, TILE):
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
    if SPLIT == 1:
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        out_rows = token * out_token_stride + heads * out_head_stride + dims[None, :]
        tl.store(out_ptr + out_rows, result.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        # [token, head of the cache, part, query]: the weighted values, the maximum and the sum.
        row = ((token * tl.num_programs(1) + head) * SPLIT + part) * GROUP + group
        tl.store(out_ptr + row[:, None] * HEAD_DIM + dims[None, :], result, mask=row_mask)
        tl.store(sums_ptr + row * 2, highest, mask=group < GROUP)
        tl.store(sums_ptr + row * 2 + 1, total, mask=group < GROUP)


@triton.jit
def _add_parts(
    parts_ptr,
    sums_ptr,
    out_ptr,
    out_token_stride,
    out_head_stride,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SPLIT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for each token and query head: add the parts of its context."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    part = tl.arange(0, SPLIT)
    kv_heads = tl.num_programs(1) // GROUP
    row = ((token * kv_heads + head // GROUP) * SPLIT + part) * GROUP + head % GROUP
    mask = (dims < HEAD_DIM)[None, :]
    values = tl.load(parts_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    highest = tl.load(sums_ptr + row * 2)
    total = tl.load(sums_ptr + row * 2 + 1)
    above = tl.maximum(tl.max(highest, 0), -1e30)  # a part may have seen nothing, or all of them
    weights = tl.exp2(highest - above)
    total = tl.sum(total * weights, 0)
    result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    out = out_ptr + token * out_token_stride + head * out_head_stride + dims
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


@cache
def _device(device: torch.device) -> tuple[int, bool]:
    """Return the number of processors, and whether a kernel may start before the last has ended."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def parts_of_context(tokens: int, kv_heads: int, capacity: int, tile: int, processors: int) -> int:
    """Return how many programs share the context of a token: a power of two, at most 16."""
    wanted = min(2 * processors // max(tokens * kv_heads, 1), capacity // tile, 16)
    return 1 << max(wanted, 1).bit_length() - 1


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
    group, tile = heads // kv_heads, 32 if q.dtype == torch.float32 else 64
    capacity = block_tables.shape[1] * block_size
    processors, dependent = _device(q.device)
    early: dict[str, Any] = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    split = parts_of_context(tokens, kv_heads, capacity, tile, processors)
    parts, sums = out, out
    if split > 1:
        parts = q.new_empty((tokens, heads, split, head_dim), dtype=torch.float32)
        sums = q.new_empty((tokens, heads, split, 2), dtype=torch.float32)
    padded = max(16, triton.next_power_of_2(head_dim))
    _kernel[(tokens, kv_heads, split)](
        q,
        k_cache,
        v_cache,
        parts,
        sums,
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
        HEAD_DIM_PADDED=padded,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),  # the least that tl.dot takes
        TILE=tile,
        SPLIT=split,
        **early,
    )
    if split > 1:
        _add_parts[(tokens, heads)](
            parts,
            sums,
            out,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            GROUP=group,
            HEAD_DIM_PADDED=padded,
            SPLIT=split,
            num_warps=1,
            **early,
        )
