"""Attention among the rows of each sequence, as an op: ``cgcompile_towers::varlen_attention``.

Vision towers put all images of a call one behind the other and let each frame, or each window of
it, attend to itself. ``transformers``' SDPA path splits the rows by lengths that it reads on the
host, which a graph cannot do. Here a tensor holds for every row the range of its keys:
what a graph records depends on shapes alone, and a replay may have other sequences. Where it runs,
``torch.nn.attention.varlen.varlen_attn`` computes short sequences, such as windows.

Importing this file offers it to ``transformers`` under the name :data:`ATTENTION`. The name holds
"flash", which is how towers know that an attention takes offsets.
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

# Triton is not part of torch for the CPU.
HAS_TRITON = importlib.util.find_spec("triton") is not None

ATTENTION = "cgcompile_flash_varlen"
OP = "cgcompile_towers::varlen_attention"
ROWS_AT_ONCE = 1024  # of the path in plain torch, which masks all keys for every row

# Rows of a block of torch's kernel. For longer sequences it launches several for each one, also
# for those that are empty, and later versions of torch take another kernel.
SHORT = 128
LARGEST_HEAD = 256  # of torch's kernel


def for_attention(
    offsets: torch.Tensor, rows: int, longest: int, dtype: torch.dtype
) -> torch.Tensor:
    """What :func:`attention` takes in place of offsets, so that layers do not compute it again.

    Args:
        offsets: rising, from 0 to ``rows``.
        rows: T, of all sequences.
        longest: rows of the longest sequence, or more.
        dtype: of the queries.

    Returns:
        [1, sequences + 1], the offsets, for torch's kernel; or [2, T], the :func:`row_bounds`.
    """
    short = offsets.is_cuda and longest <= SHORT and dtype in (torch.float16, torch.bfloat16)
    if short and torch.cuda.get_device_capability(offsets.device) >= (8, 0):
        return offsets[None]
    return row_bounds(offsets, rows)


def row_bounds(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """[2, rows]: where the sequence of each row starts and ends, from rising offsets.

    Rows behind the last offset are in none: start and end are equal. Reads nothing on the host.
    """
    places = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    after = torch.searchsorted(offsets, places, right=True)
    starts, ends = offsets[after - 1], offsets[after.clamp(max=len(offsets) - 1)]
    return torch.stack((starts, ends)).to(torch.int32)


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    """In plain torch: each row attends to the rows between its bounds.

    Args:
        q: [T, H, D].
        k: as ``q``.
        v: as ``q``.
        bounds: [2, T] int32, of :func:`row_bounds`.
        scale: of the scores.

    Returns:
        [T, H, D]; zeros for rows without keys.
    """
    keys = torch.arange(q.shape[0], device=q.device)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    # NaN times a weight of 0 is NaN: that of other sequences is left out, an own one is the result.
    bad = ~(k.isfinite() & v.isfinite()).all(-1)
    k, v = k.masked_fill(bad[..., None], 0.0), v.masked_fill(bad[..., None], 0.0)
    parts = []
    for start in range(0, q.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        starts, ends = bounds[0, rows, None], bounds[1, rows, None]
        own = (keys >= starts) & (keys < ends)
        # All keys for a row without any: the result is dropped.
        mask = own | (starts == ends)
        attended = F.scaled_dot_product_attention(
            q[rows].transpose(0, 1), k, v, attn_mask=mask, scale=scale
        )
        attended = attended.masked_fill((starts == ends), 0.0)
        spoiled = (own & bad[:, None]).any(-1, keepdim=True)
        parts.append(attended.masked_fill(spoiled, float("nan")).transpose(0, 1))
    return torch.cat(parts)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, scale: float
) -> torch.Tensor:
    """The op: by the best kernel there is."""
    if q.is_cuda and HAS_TRITON:
        return _triton_attention()(q, k, v, bounds, scale)
    return masked_attention(q, k, v, bounds, scale)


@cache
def _triton_attention() -> Callable[..., torch.Tensor]:
    from towers.triton_varlen import varlen_attention

    return varlen_attention


@cache
def library() -> torch.library.Library:
    """Defines the op, once a process. A plain library costs less per call than ``custom_op``."""
    lib = torch.library.Library("cgcompile_towers", "FRAGMENT")
    lib.define(
        "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale) -> Tensor",
        tags=(torch.Tag.pt2_compliant_tag,),
    )
    for key in ("CPU", "CUDA"):
        lib.impl("varlen_attention", attend, key)
    torch.library.register_fake(OP, lambda q, k, v, bounds, scale: q.new_empty(q.shape), lib=lib)
    return lib


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What ``transformers`` calls: query, key and value [1, H, T, D], gives [1, T, H, D].

    Args:
        module: the attention module, not read.
        query: of all rows.
        key: of all rows.
        value: of all rows.
        attention_mask: must be None.
        scaling: of the scores.
        cu_seq_lens_q: offsets, or what :func:`for_attention` makes of them.
    """
    if cu_seq_lens_q is None or attention_mask is not None or len(query) != 1:
        raise ValueError(f"{ATTENTION} takes offsets, no mask, and one row of sequences")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    bounds = cu_seq_lens_q
    if bounds.dim() == 2 and len(bounds) == 1:  # short sequences
        bounds = bounds[0]
        if q.shape[-1] % 8 == 0 and q.shape[-1] <= LARGEST_HEAD:
            result: Any = varlen_attn(q, k, v, bounds, bounds, SHORT, SHORT, scale=scale)
            return result[None], None
    if bounds.dim() == 1:
        bounds = row_bounds(bounds, len(q))
    return torch.ops.cgcompile_towers.varlen_attention(q, k, v, bounds, scale)[None], None


library()
AttentionInterface.register(ATTENTION, attention)
