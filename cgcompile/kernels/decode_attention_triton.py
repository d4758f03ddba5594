"""The kernels of ``decode_attention``. Importing this file needs triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LOG2E = tl.constexpr(1.4426950408889634)
# A float mask excludes a key by its dtype's least value, or -inf; float32 by that of bfloat16 too.
_LEAST = tl.constexpr(-3.3895313892515355e38)
_LEAST_HALF = tl.constexpr(-65504.0)


@triton.jit
def _keeps(value, MASK: tl.constexpr):
    """Return where a mask (1: boolean, 2: float) keeps keys; NaN is kept, so that it shows."""
    if MASK == 1:
        return value != 0
    least: tl.constexpr = _LEAST_HALF if value.dtype == tl.float16 else _LEAST
    value = value.to(tl.float32)
    return (value > least) | (value != value)


@triton.jit
def _wider(first, last, other_first, other_last):
    return tl.minimum(first, other_first), tl.maximum(last, other_last)


@triton.jit
def _kept_range(mask, rows, live, L, stride, MASK: tl.constexpr, ROW_MASK: tl.constexpr,
                ROWS: tl.constexpr, SCAN: tl.constexpr):  # fmt: skip
    """Return the first key that a row of the mask keeps, and the last one plus 1."""
    if MASK == 0:
        return 0, L
    height: tl.constexpr = ROWS if ROW_MASK else 1  # all rows have one mask
    width: tl.constexpr = SCAN // height
    begins, within = (rows, live) if ROW_MASK else (tl.arange(0, 1), tl.arange(0, 1) < 1)
    first = tl.zeros((height, width), tl.int32) + L
    last = tl.zeros((height, width), tl.int32)
    for start in range(0, L, width):
        keys = start + tl.arange(0, width)[None, :]
        read = within[:, None] & (keys < L)
        value = tl.load(mask + begins[:, None] + keys * stride, mask=read, other=0)
        kept = read & _keeps(value, MASK)
        first = tl.minimum(first, tl.where(kept, keys, L))
        last = tl.maximum(last, tl.where(kept, keys + 1, 0))
    return tl.reduce((tl.ravel(first), tl.ravel(last)), 0, _wider)


@triton.jit
def _capped(scores, soft_cap, CAP: tl.constexpr):
    if CAP:
        u = 2 * _LOG2E * scores / soft_cap
        scores = soft_cap * (1 - 2 / (1 + tl.exp2(u)))  # tanh
    return scores


@triton.jit
def _halved(x, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the halves of the first dimension, each pair in a thread."""
    one, two = tl.split(tl.permute(tl.reshape(x, (2, PARTS // 2, ROWS, COLUMNS)), (1, 2, 3, 0)))
    return one + two


@triton.jit
def _summed(x, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Add parts [PARTS, ROWS, COLUMNS]; ``tl.sum`` waits for all warps once for each value."""
    if PARTS >= 8:
        x = _halved(x, 8, ROWS, COLUMNS)
    if PARTS >= 4:
        x = _halved(x, 4, ROWS, COLUMNS)
    if PARTS >= 2:
        x = _halved(x, 2, ROWS, COLUMNS)
    return tl.reshape(x, (ROWS, COLUMNS))


@triton.jit
def _weighed(scores, v_tile, most, total, result):
    """Add values to a result, which is relative to the largest score so far."""
    now = tl.maximum(most, tl.max(scores, 2))
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, :, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 2)
    result = tl.dot(weights.to(v_tile.dtype), v_tile, result * shrink[:, :, None])
    return now, total, result


@triton.jit
def _stored(sums, values, at, live, has_keys, most, total, result, DV: tl.constexpr,
            DVP: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """Add the parts of a program, and write them."""
    now = tl.max(most, 0)
    shrink = tl.exp2(most - tl.where(now == float("-inf"), 0.0, now)[None, :])
    tl.store(sums + at * 2, now, mask=live)
    tl.store(sums + at * 2 + 1, tl.sum(total * shrink, 0), mask=live)
    if has_keys:
        added = _summed(result * shrink[:, :, None], PARTS, ROWS, DVP)
        columns = tl.arange(0, DVP)[None, :]
        stored = live[:, None] & (columns < DV)
        tl.store(values + at[:, None] * DV + columns, added, mask=stored)


@triton.jit(do_not_specialize=["L", "HEADS"])
def attend_keys(q, k, v, mask, sums, values, scale, soft_cap, G, T, L, HEADS,
           q_batch, q_head, q_token, k_batch, k_head, k_key, v_batch, v_head, v_key,
           mask_batch, mask_head, mask_token, mask_key,
           D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
           MASK: tl.constexpr, ROW_MASK: tl.constexpr, CAP: tl.constexpr, ROWS: tl.constexpr,
           PARTS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, SCAN: tl.constexpr,
           DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute a part of the keys for the rows of one head of the cache.

    Each warp takes keys of its own (PARTS), so that warps do not wait for each other in the loop.
    """
    pair, split, splits = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = (pair // HEADS).to(tl.int64), pair % HEADS
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    live = rows < G * T
    heads, tokens = head * G + rows // T, rows % T
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    mask += batch * mask_batch
    mask_rows = heads.to(tl.int64) * mask_head + tokens * mask_token
    first, last = _kept_range(mask, mask_rows, live, L, mask_key, MASK, ROW_MASK, ROWS, SCAN)
    d, dv = tl.arange(0, DP)[None, None, :], tl.arange(0, DVP)[None, None, :]
    width: tl.constexpr = KEYS // PARTS
    q_rows = (batch * q_batch + heads * q_head + tokens * q_token)[None, :, None]
    q_rows += tl.zeros((PARTS, 1, 1), tl.int64)
    q_tile = tl.load(q + q_rows + d, mask=live[None, :, None] & (d < D), other=0.0)
    k += batch * k_batch + head.to(tl.int64) * k_head
    v += batch * v_batch + head.to(tl.int64) * v_head
    steps = tl.arange(0, PARTS)[:, None] * width + tl.arange(0, width)[None, :]
    most = tl.full((PARTS, ROWS), float("-inf"), tl.float32)
    total = tl.zeros((PARTS, ROWS), tl.float32)
    result = tl.zeros((PARTS, ROWS, DVP), tl.float32)
    begin = (first // KEYS + split) * KEYS
    # Triton 3.8 pipelines this loop only if it counts from 0.
    for step in tl.range(0, tl.cdiv(last - begin, splits * KEYS), num_stages=STAGES):
        keys = begin + step * splits * KEYS + steps
        inside = (keys >= first) & (keys < last)
        at = keys.to(tl.int64)[:, :, None]
        read = inside[:, :, None]
        k_tile = tl.load(k + at * k_key + d, mask=read & (d < D), other=0.0)
        v_tile = tl.load(v + at * v_key + dv, mask=read & (dv < DV), other=0.0)
        scores = tl.dot(q_tile, tl.permute(k_tile, (0, 2, 1))) * scale
        scores = _capped(scores, soft_cap, CAP) * _LOG2E
        within = inside[:, None, :]
        if MASK > 0:
            at = mask_rows[None, :, None] if ROW_MASK else 0
            within = within & live[None, :, None] if ROW_MASK else within
            value = tl.load(mask + at + (keys * mask_key)[:, None, :], mask=within, other=0)
            within = within & _keeps(value, MASK)
            if MASK == 2:
                scores += value.to(tl.float32) * _LOG2E
            # An unused part of a cache may hold NaN, which a weight of 0 does not remove.
            v_tile = tl.where((tl.max(within.to(tl.int32), 1) > 0)[:, :, None], v_tile, 0.0)
        scores = tl.where(within, scores, float("-inf"))
        most, total, result = _weighed(scores, v_tile, most, total, result)
    at = (pair.to(tl.int64) * splits + split) * G * T + rows
    _stored(sums, values, at, live, begin < last, most, total, result, DV, DVP, ROWS, PARTS)


@triton.jit(do_not_specialize=["L", "HEADS", "SPLITS"])
def attend_sums(q, k, v, mask, sinks, sums, values, out, scale, soft_cap, G, T, L, HEADS, SPLITS,
            q_batch, q_head, q_token, k_batch, k_head, k_key, v_batch, v_head, v_key,
            mask_batch, mask_head, mask_token, mask_key,
            D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
            MASK: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, MOST: tl.constexpr,
            DEPENDENT: tl.constexpr):  # fmt: skip
    """Add the parts of a row, and divide by the sum of its weights."""
    pair, row = tl.program_id(0), tl.program_id(1)
    batch, head, token = pair // HEADS, pair % HEADS * G + row // T, row % T
    parts, dv = tl.arange(0, MOST), tl.arange(0, DVP)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = (pair.to(tl.int64) * SPLITS + parts) * G * T + row
    most = tl.load(sums + at * 2, mask=parts < SPLITS, other=float("-inf"))
    used = most > float("-inf")
    total = tl.load(sums + at * 2 + 1, mask=parts < SPLITS, other=0.0)  # NaN without a maximum too
    tile = tl.load(values + at[:, None] * DV + dv[None, :],
                   mask=used[:, None] & (dv < DV)[None, :], other=0.0)  # fmt: skip
    base = tl.max(most, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    shrink = tl.exp2(most - base)
    total = tl.sum(total * shrink, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    result = tl.sum(tile * shrink[:, None], 0)
    result = result / tl.where(total == 0, 1.0, total)
    no_key = total == 0 if MASK == 2 and not SINKS else False
    if no_key:  # what the scores and the least value add up to decides
        where, shared, wide = batch.to(tl.int64), (pair % HEADS).to(tl.int64), head.to(tl.int64)
        q += where * q_batch + wide * q_head + token * q_token
        k += where * k_batch + shared * k_head
        v += where * v_batch + shared * v_head
        mask += where * mask_batch + wide * mask_head + token * mask_token
        result = _without_skipping(q, k, v, mask, scale, soft_cap, L, k_key, v_key, mask_key,
                                   D, DV, DP, DVP, CAP)  # fmt: skip
    out += ((batch.to(tl.int64) * T + token) * HEADS * G + head) * DV
    tl.store(out + dv, result.to(out.dtype.element_ty), mask=dv < DV)


@triton.jit
def _without_skipping(q, k, v, mask, scale, soft_cap, L, k_key, v_key, mask_key, D: tl.constexpr,
                      DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
                      CAP: tl.constexpr):  # fmt: skip
    """Compute a row over all keys, and add the float mask unchanged."""
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    row = tl.load(q + d, mask=d < D, other=0.0).to(tl.float32)
    most, total = float("-inf"), 0.0
    result = tl.zeros((DVP,), tl.float32)
    for start in range(0, L, 16):
        keys = start + tl.arange(0, 16)
        within = keys < L
        at = keys.to(tl.int64)[:, None]
        k_tile = tl.load(k + at * k_key + d, mask=within[:, None] & (d < D), other=0.0)
        v_tile = tl.load(v + at * v_key + dv, mask=within[:, None] & (dv < DV), other=0.0)
        scores = tl.sum(k_tile.to(tl.float32) * row[None, :], 1) * scale
        scores = _capped(scores, soft_cap, CAP)
        value = tl.load(mask + keys * mask_key, mask=within, other=0).to(tl.float32)
        within = within & (value != float("-inf"))
        scores = tl.where(within, scores + value, float("-inf"))
        now = tl.maximum(most, tl.max(scores, 0))
        base = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp(scores - base)
        shrink = tl.exp(most - base)
        total = total * shrink + tl.sum(weights, 0)
        v_tile = tl.where(within[:, None], v_tile.to(tl.float32), 0.0)
        result = result * shrink + tl.sum(v_tile * weights[:, None], 0)
        most = now
    return result / tl.where(total == 0, 1.0, total)
