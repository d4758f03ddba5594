"""Attention over a paged cache, as one splitting op: ``cgcompile_serve::paged_attention``.

A request's keys and values lie in blocks all over the cache; its row of the block table names them
in order. Each query token looks at positions 0 to its own, wherever it comes from: decode, drafts
to be verified and chunks of a prompt are all the same to the kernel. So three tensors are all it
needs, and grids depend on padded shapes alone, as ``AttentionCGSupport.ALWAYS`` declares.

The op takes no metadata: it reads that of the present step from the forward context. Block 0
belongs to no request: padded rows write there, and block tables point there behind their end.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch

from cgcompile import AttentionCGSupport, SplittingOp, get_forward_context

# Triton is not part of torch for the CPU.
HAS_TRITON = importlib.util.find_spec("triton") is not None

OP = "cgcompile_serve::paged_attention"
ROWS_AT_ONCE = 64  # of the gather path, which copies the whole context of every row


class PagedMetadata(NamedTuple):
    """What attention must know of a step, all on the model's device.

    Attributes:
        block_tables: [R, B] int32; the blocks of each request, 0 behind its end.
        token_to_req: [T] int32; the row of each token's request, -1 for padding.
        positions: [T] int64; of each token in its request.
    """

    block_tables: torch.Tensor
    token_to_req: torch.Tensor
    positions: torch.Tensor


def gather_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    metadata: PagedMetadata,
) -> None:
    """In plain torch: gather each token's context, mask what is behind it.

    Args:
        q: [T, H, D].
        k_cache: [N, S, K, D]: N blocks of S tokens; K heads, of which each serves H / K of ``q``.
        v_cache: as ``k_cache``.
        out: [T, H, D]; zeros for padding.
        metadata: of the step.
    """
    for start in range(0, q.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        owner = metadata.token_to_req[rows]
        lengths = torch.where(owner >= 0, metadata.positions[rows] + 1, 0)
        blocks = metadata.block_tables[owner.clamp(min=0)]
        keys = k_cache[blocks].flatten(1, 2).transpose(1, 2).float()  # [t, K, L, D]
        values = v_cache[blocks].flatten(1, 2).transpose(1, 2).float()
        seen = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]  # [t, L]
        grouped = q[rows].unflatten(1, (keys.shape[1], -1)).float()  # [t, K, H / K, D]
        scores = grouped @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
        # A finite stand-in for -inf: the softmax of a row that sees nothing is no NaN then.
        scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) * seen[:, None, None]
        # Zero times NaN is NaN, which a block may hold behind its end.
        result = weights @ values.masked_fill(~seen[:, None, :, None], 0.0)
        out[rows] = result.flatten(1, 2).to(out.dtype)


def attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, out: torch.Tensor
) -> None:
    """The op: attention of this step's queries, by the best kernel there is."""
    metadata = get_forward_context().attn_metadata
    if q.is_cuda and HAS_TRITON:
        _triton_attention()(q, k_cache, v_cache, out, *metadata)
    else:
        gather_attention(q, k_cache, v_cache, out, metadata)


@cache
def _triton_attention() -> Callable[..., None]:
    from llm_engine.triton_attention import paged_attention

    return paged_attention


@cache
def library() -> torch.library.Library:
    """Defines the op, once a process. A plain library costs less per call than ``custom_op``."""
    lib = torch.library.Library("cgcompile_serve", "FRAGMENT")
    lib.define(
        "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor(a!) out) -> ()",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        lib.impl("paged_attention", attend, key)
    torch.library.register_fake(OP, lambda q, k_cache, v_cache, out: None, lib=lib)
    return lib


def splitting_op() -> SplittingOp:
    """The boundary to configure: a replay calls the function, past torch's dispatcher."""
    library()
    return SplittingOp(OP, support=AttentionCGSupport.ALWAYS, impl={"cpu": attend, "cuda": attend})
