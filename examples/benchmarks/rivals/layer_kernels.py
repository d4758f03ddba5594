"""The kernels of ``decode_layer.py``: a product of at most 16 rows, and attention of one token."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _wait(DEPENDENT: tl.constexpr):
    """Let the next kernel start, then wait for the results of the one before."""
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _prefetch(pointers):
    """Load lines of 128 bytes into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _after(a, b, out, residual, sums, cos, sin, keys, values, at, one, tile, rows, live, N, head,
           j, HEADS, KV, D, CONTEXT, KIND: tl.constexpr):  # fmt: skip
    """Write the tiles of a product: with a residual, gated, or rotated and into the cache."""
    mask = live[:, None]
    place = rows[:, None] * N + one[None, :]
    if KIND == 0:
        a += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        rounded = a.to(out.dtype.element_ty)
        tl.store(out + place, rounded, mask=mask)
        squares = tl.where(mask, rounded.to(tl.float32), 0.0)
        tl.store(sums + tile * 16 + rows, tl.sum(squares * squares, 1))
    elif KIND == 1:
        gated = a * tl.sigmoid(a) * b
        tl.store(out + place, gated.to(out.dtype.element_ty), mask=mask)
    else:
        angle = rows[:, None] * (D // 2) + j[None, :]
        c = tl.load(cos + angle, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angle, mask=mask, other=0.0).to(tl.float32)
        turned = head < HEADS + KV
        first = tl.where(turned, a * c - b * s, a)
        second = tl.where(turned, b * c + a * s, b)
        row = rows * CONTEXT + tl.load(at + rows, mask=live, other=0)
        if head < HEADS:
            start = out + (rows * HEADS + head)[:, None] * D
        elif head < HEADS + KV:
            start = keys + (row * KV + head - HEADS)[:, None] * D
        else:
            start = values + (row * KV + head - HEADS - KV)[:, None] * D
        tl.store(start + j[None, :], first.to(out.dtype.element_ty), mask=mask)
        tl.store(start + (j + D // 2)[None, :], second.to(out.dtype.element_ty), mask=mask)


@triton.jit
def project(x, weight, norm, squares, residual, out, sums, cos, sin, keys, values, at, M, N, eps,
            K: tl.constexpr, KIND: tl.constexpr, NORM: tl.constexpr, TILES: tl.constexpr,
            PADDED: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
            LINES: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
            CONTEXT: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Multiply rows [M, K] by weights [N, K]; see the kinds."""
    tile, rows, n = tl.program_id(0), tl.arange(0, 16), tl.arange(0, COLUMNS)
    live = rows < M
    half: tl.constexpr = (D // 2) // COLUMNS  # tiles of half a head
    head, j = tile // half, (tile % half) * COLUMNS + n
    if KIND == 2:
        one, two = head * D + j, head * D + j + D // 2
    else:
        one, two = tile * COLUMNS + n, tile * COLUMNS + n + N
    if DEPENDENT and LINES > 0:
        line = tl.arange(0, LINES) * 64
        _prefetch(weight + one[:, None] * K + line[None, :])
        if KIND > 0:
            _prefetch(weight + two[:, None] * K + line[None, :])
    _wait(DEPENDENT)
    a = tl.zeros((16, COLUMNS), tl.float32)
    b = tl.zeros((16, COLUMNS), tl.float32)
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = start + tl.arange(0, DEPTH)
        first = tl.load(weight + one[:, None] * K + k[None, :])
        if KIND > 0:
            second = tl.load(weight + two[:, None] * K + k[None, :])
        part = tl.load(x + rows[:, None] * K + k[None, :], mask=live[:, None], other=0.0)
        if NORM:
            part = part * tl.load(norm + k)[None, :]
        a = tl.dot(part, tl.trans(first), a)
        if KIND > 0:
            b = tl.dot(part, tl.trans(second), b)
    if NORM:
        tiles = tl.arange(0, PADDED)
        parts = squares + tiles[:, None] * 16 + rows[None, :]
        total = tl.sum(tl.load(parts, mask=(tiles < TILES)[:, None], other=0.0), 0)
        scale = tl.rsqrt(total / K + eps)[:, None]
        a, b = a * scale, b * scale
    _after(a, b, out, residual, sums, cos, sin, keys, values, at, one, tile, rows, live, N, head,
           j, HEADS, KV, D, CONTEXT, KIND)  # fmt: skip


@triton.jit
def _merge(part, out, base, g, d, real, SPLIT: tl.constexpr, G: tl.constexpr, D: tl.constexpr):
    """Add the parts of attention over the positions of one head."""
    best = tl.full((16,), -float("inf"), tl.float32)
    weight, total = tl.zeros((16,), tl.float32), tl.zeros((16, D), tl.float32)
    for split in tl.static_range(SPLIT):
        start = part + (base + split) * G * (D + 2)
        part_of = start + g[:, None] * D + d[None, :]
        attended = tl.load(part_of, mask=real[:, None], other=0.0, cache_modifier=".cg")
        largest = tl.load(start + G * D + g, mask=real, other=-1e30, cache_modifier=".cg")
        weights = tl.load(start + G * D + G + g, mask=real, other=1.0, cache_modifier=".cg")
        now = tl.maximum(best, largest)
        before, added = tl.exp(best - now), tl.exp(largest - now)
        weight = weight * before + weights * added
        total = total * before[:, None] + attended * added[:, None]
        best = now
    tl.store(out, (total / weight[:, None]).to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def attend(q, keys, values, at, out, part, count, scale,
           HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, CONTEXT: tl.constexpr,
           BLOCK: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Attention of one query for each row; the last program of a head merges its parts."""
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = HEADS // KV
    LENGTH: tl.constexpr = CONTEXT // SPLIT
    g, d, t = tl.arange(0, 16), tl.arange(0, D), tl.arange(0, BLOCK)
    real = g < G
    here = (row * HEADS + kv * G + g)[:, None] * D + d[None, :]
    _wait(DEPENDENT)
    length = tl.load(at + row) + 1
    query = tl.load(q + here, mask=real[:, None], other=0.0)
    best = tl.full((16,), -1e30, tl.float32)
    weight, total = tl.zeros((16,), tl.float32), tl.zeros((16, D), tl.float32)
    for start in tl.range(split * LENGTH, (split + 1) * LENGTH, BLOCK):
        inside = start + t < length
        cached = ((row * CONTEXT + start + t) * KV + kv)[:, None] * D + d[None, :]
        key = tl.load(keys + cached, mask=inside[:, None], other=0.0)
        value = tl.load(values + cached, mask=inside[:, None], other=0.0)
        score = tl.where(inside[None, :], tl.dot(query, tl.trans(key)) * scale, -1e30)
        now = tl.maximum(best, tl.max(score, 1))
        share, before = (
            tl.where(inside[None, :], tl.exp(score - now[:, None]), 0.0),
            tl.exp(best - now),
        )
        weight = weight * before + tl.sum(share, 1)
        total = total * before[:, None] + tl.dot(share.to(value.dtype), value)
        best = now
    base = (row * KV + kv) * SPLIT
    mine = part + (base + split) * G * (D + 2)
    tl.store(mine + g[:, None] * D + d[None, :], total, mask=real[:, None])
    tl.store(mine + G * D + g, best, mask=real)
    tl.store(mine + G * D + G + g, weight, mask=real)
    tl.debug_barrier()
    if tl.atomic_add(count + row * KV + kv, 1, sem="acq_rel") == SPLIT - 1:
        tl.debug_barrier()
        _merge(part, out + here, base, g, d, real, SPLIT, G, D)
        tl.store(count + row * KV + kv, 0)
