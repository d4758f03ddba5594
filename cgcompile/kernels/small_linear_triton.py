"""The kernel of ``small_linear``. Importing this file needs triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def nothing():
    """Do nothing; its compilation loads Triton's compiler."""


@triton.jit
def _prefetch(weight, rows, at, N, K: tl.constexpr, LINES: tl.constexpr):
    """Load the first lines of 128 bytes of rows of a weight into the L2 cache."""
    if LINES > 0:
        line: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        offsets = at[:, None] * K + tl.arange(0, LINES)[None, :] * line
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [weight + tl.where((rows < N)[:, None], offsets, 0)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _loaded(weight, rows, k, N, K: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile [parts, rows, depth] of a weight [N, K]; ``k`` is [parts, 1, depth]."""
    pointers = weight + rows[None, :, None] * K + k
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(rows < N)[None, :, None] & (k < K), other=0.0)


@triton.jit
def _widened(weight, x):
    """Return a tile of a quantized weight in the dtype of ``x``."""
    if weight.dtype == tl.float8e4nv:
        # In one step Triton converts number by number, which takes longer than the loads.
        weight = weight.to(tl.float16).to(tl.float32)
    return weight.to(x.dtype)


@triton.jit
def _multiplied(y, weight, x, SCALED: tl.constexpr):
    """Add the product of tiles of x and a weight to [parts, rows, columns], or that transposed."""
    if SCALED:
        # The weight as first factor: a tensor core takes 16 of its rows, and 8 rows of x.
        y = tl.dot(_widened(weight, x), tl.permute(x, (0, 2, 1)), y)
    else:
        y = tl.dot(x, tl.permute(weight, (0, 2, 1)), y)
    return y


@triton.jit
def _summed(y, SCALED: tl.constexpr):
    """Return [rows, columns], the sum of what :func:`_multiplied` adds up for each part."""
    y = tl.sum(y, 0)
    if SCALED:
        y = tl.permute(y, (1, 0))
    return y


@triton.jit
def _scaled(y, scale, columns, N, SCALED: tl.constexpr):
    """Multiply the sums of quantized weights by the scale of each column."""
    if SCALED:
        y *= tl.load(scale + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _residual_of(residual, rows, columns, live, N, RESIDUAL: tl.constexpr):
    """Load a tile of the residual, if there is one."""
    if RESIDUAL:
        mask = live[:, None] & (columns < N)[None, :]
        return tl.load(residual + rows[:, None] * N + columns[None, :], mask=mask, other=0.0)
    else:
        return 0.0


@triton.jit
def _stored(out, scale, bias, rest, y, rows, columns, live, N, SCALED: tl.constexpr,
            HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr):  # fmt: skip
    """Apply scale and bias, add a tile of the residual, and write a tile of an output."""
    y = _scaled(y, scale, columns, N, SCALED)
    if HAS_BIAS:
        y += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    mask = live[:, None] & (columns < N)[None, :]
    offsets = rows[:, None] * N + columns[None, :]
    if RESIDUAL:
        y += rest.to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _chosen(w0, w1, w2, N0, N1, N2, tile, COUNT: tl.constexpr, ACTIVATION: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    """Return the weight of a program, its rows and number, and the tile in it."""
    weight, N, which = w0, N0, 0
    if ACTIVATION == 0 and COUNT > 1:
        first = tl.cdiv(N0, COLUMNS)
        if tile >= first:
            tile -= first
            weight, N, which = w1, N1, 1
            if COUNT > 2:
                second = tl.cdiv(N1, COLUMNS)
                if tile >= second:
                    tile -= second
                    weight, N, which = w2, N2, 2
    return weight, N, which, tile


@triton.jit
def _squared(squares, x, SCALED: tl.constexpr):
    """Add squares of a tile of rows: with plain weights, products of rows with each other."""
    if SCALED:
        # Beside a product of quantized weights, Triton would not load ahead what another one reads.
        shape: tl.constexpr = squares.shape
        wide = tl.reshape(x.to(tl.float32), (shape[0], shape[1], shape[2], 8))
        squares += tl.sum(wide * wide, 3)
    else:
        squares = tl.dot(x, tl.permute(x, (0, 2, 1)), squares)
    return squares


@triton.jit
def _root(squares, rows, K: tl.constexpr, eps, SCALED: tl.constexpr):
    """Return 1 / rms of each row, from what :func:`_squared` adds up."""
    if not SCALED:
        squares = tl.where(rows[:, None] == rows[None, :], squares, 0.0)
    total = tl.sum(squares, 1)
    return tl.rsqrt(total / K + eps)[:, None]


@triton.jit
def _gated(a, b, b0, b1, columns, N, ACTIVATION: tl.constexpr, BIASES: tl.constexpr):
    """Return the activation of ``a`` times ``b``."""
    if BIASES & 1:
        a += tl.load(b0 + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if BIASES & 2:
        b += tl.load(b1 + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    u = a
    if ACTIVATION == 2:
        u = 1.5957691216057308 * (a + 0.044715 * a * a * a)  # tanh(u / 2) = 2 sigmoid(u) - 1
    return a * tl.sigmoid(u) * b


@triton.jit(do_not_specialize=["M"])
def project(x, w0, w1, w2, s0, s1, s2, b0, b1, b2, norm, residual, o0, o1, o2, M, N0, N1, N2,
            eps, offset,
            K: tl.constexpr, COUNT: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
            RESIDUAL: tl.constexpr, BIASES: tl.constexpr, COLUMNS: tl.constexpr,
            DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr,
            ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, OFFSET: tl.constexpr,
            SCALED: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute a tile of columns; programs are numbered over the columns of all weights.

    Each part of the depth has a sum of its own: a shorter chain of products that depend on each
    other.
    """
    tile, rows = tl.program_id(0), tl.arange(0, ROWS)
    live = rows < (M if ROWS > 1 else 1)
    weight, N, which, tile = _chosen(w0, w1, w2, N0, N1, N2, tile, COUNT, ACTIVATION, COLUMNS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = columns.to(tl.int64) if WIDE else columns  # offsets into a weight
    if DEPENDENT:
        _prefetch(weight, columns, at, N, K, LINES)
        if ACTIVATION > 0:
            _prefetch(w1, columns, at, N, K, LINES)
        gdc_launch_dependents()
        gdc_wait()
    part: tl.constexpr = DEPTH // PARTS
    sums: tl.constexpr = (PARTS, COLUMNS, ROWS) if SCALED else (PARTS, ROWS, COLUMNS)
    a, b = tl.zeros(sums, tl.float32), tl.zeros(sums, tl.float32)
    squares = tl.zeros((PARTS, ROWS, part // 8 if SCALED else ROWS), tl.float32)
    begins = tl.arange(0, PARTS)[:, None, None] * part
    steps = begins + tl.arange(0, part)[None, None, :]
    for start in tl.range(0, K, DEPTH, num_stages=STAGES):
        k = start + steps
        one = _loaded(weight, at, k, N, K, EVEN)
        if ACTIVATION > 0:
            two = _loaded(w1, at, k, N, K, EVEN)
        mask = live[None, :, None] if EVEN else live[None, :, None] & (k < K)
        x_tile = tl.load(x + rows[None, :, None] * K + k, mask=mask, other=0.0)
        if NORM:
            squares = _squared(squares, x_tile, SCALED)
            scale = tl.load(norm + k) if EVEN else tl.load(norm + k, mask=k < K, other=0.0)
            if OFFSET:
                scale = (scale.to(tl.float32) + offset).to(x_tile.dtype)
            x_tile = x_tile * scale
        a = _multiplied(a, one, x_tile, SCALED)
        if ACTIVATION > 0:
            b = _multiplied(b, two, x_tile, SCALED)
    a, b = _summed(a, SCALED), _summed(b, SCALED)
    rest = _residual_of(residual, rows, columns, live, N, RESIDUAL)
    if NORM:
        root = _root(tl.sum(squares, 0), rows, K, eps, SCALED)
        a, b = a * root, b * root
    if ACTIVATION > 0:
        a, b = _scaled(a, s0, columns, N, SCALED), _scaled(b, s1, columns, N, SCALED)
        gated = _gated(a, b, b0, b1, columns, N, ACTIVATION, BIASES)
        _stored(o0, s0, b0, rest, gated, rows, columns, live, N, False, False, RESIDUAL)
    elif which == 0:
        _stored(o0, s0, b0, rest, a, rows, columns, live, N, SCALED, BIASES & 1, RESIDUAL)
    elif which == 1:
        _stored(o1, s1, b1, rest, a, rows, columns, live, N, SCALED, BIASES & 2, False)
    else:
        _stored(o2, s2, b2, rest, a, rows, columns, live, N, SCALED, BIASES & 4, False)


@triton.jit
def _row_of(weight, at, rows, k, N, K: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile [columns, depth] of a weight [N, K]."""
    pointers = weight + at[:, None] * K + k[None, :]
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=(rows < N)[:, None] & (k < K)[None, :], other=0.0)


@triton.jit
def _part_of(vector, k, K: tl.constexpr, EVEN: tl.constexpr):
    """Load a part of a vector [K]."""
    return tl.load(vector + k) if EVEN else tl.load(vector + k, mask=k < K, other=0.0)


@triton.jit
def _folded(x):
    """Add 8 neighbours in each row, which a thread has: sums take fewer registers."""
    return tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 8, 8)), 2)


@triton.jit
def _added(a, b, squares, one, two, x, scale, offset, k, K: tl.constexpr, GATED: tl.constexpr,
           NORM: tl.constexpr, EVEN: tl.constexpr):  # fmt: skip
    """Add the products of tiles with a part of the row to sums of 8 places in a tile each."""
    part = _part_of(x, k, K, EVEN).to(tl.float32)
    if NORM:
        squares += part * part
        part *= scale.to(tl.float32) + offset
    a += _folded(one.to(tl.float32) * part[None, :])
    if GATED:
        b += _folded(two.to(tl.float32) * part[None, :])
    return a, b, squares


@triton.jit(do_not_specialize=["M", "early"])
def project_row(x, w0, w1, w2, s0, s1, s2, b0, b1, b2, norm, residual, o0, o1, o2, M, N0, N1, N2,
                early, eps, offset,
                K: tl.constexpr, COUNT: tl.constexpr, ACTIVATION: tl.constexpr, NORM: tl.constexpr,
                RESIDUAL: tl.constexpr, BIASES: tl.constexpr, COLUMNS: tl.constexpr,
                DEPTH: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
                LINES: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr,
                OFFSET: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute what :func:`project` computes, for one row and without tensor cores.

    Weights go from memory to registers: the loads of the next tile are under way while a tile is
    multiplied, and the registers of a processor hold more of them than its shared memory. With
    ``early``, those of the first tile begin before the kernel in front has ended.
    """
    tile, rows = tl.program_id(0), tl.arange(0, 1)
    live = rows < 1
    GATED: tl.constexpr = ACTIVATION > 0
    weight, N, which, tile = _chosen(w0, w1, w2, N0, N1, N2, tile, COUNT, ACTIVATION, COLUMNS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    at = columns.to(tl.int64) if WIDE else columns  # offsets into a weight
    if DEPENDENT:
        gdc_launch_dependents()
        if early == 0:
            gdc_wait()
    a = tl.zeros((COLUMNS, DEPTH // 8), tl.float32)
    b = tl.zeros((COLUMNS, DEPTH // 8), tl.float32)
    squares = tl.zeros((DEPTH,), tl.float32)
    k = tl.arange(0, DEPTH)
    one = _row_of(weight, at, columns, k, N, K, EVEN)
    two = _row_of(w1, at, columns, k, N, K, EVEN) if GATED else one
    scale = _part_of(norm, k, K, EVEN) if NORM else 0.0
    if DEPENDENT:
        gdc_wait()  # again costs nothing
    rest = _residual_of(residual, rows, columns, live, N, RESIDUAL)  # loaded with the others
    for start in range(DEPTH, K, DEPTH):
        one_next = _row_of(weight, at, columns, start + k, N, K, EVEN)
        two_next = _row_of(w1, at, columns, start + k, N, K, EVEN) if GATED else one_next
        scale_next = _part_of(norm, start + k, K, EVEN) if NORM else 0.0
        a, b, squares = _added(
            a, b, squares, one, two, x, scale, offset, start - DEPTH + k, K, GATED, NORM, EVEN
        )
        one, two, scale = one_next, two_next, scale_next
    last: tl.constexpr = (K - 1) // DEPTH * DEPTH
    a, b, squares = _added(
        a, b, squares, one, two, x, scale, offset, last + k, K, GATED, NORM, EVEN
    )
    a, b = tl.sum(a, 1)[None, :], tl.sum(b, 1)[None, :]
    if NORM:
        root = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        a, b = a * root, b * root
    if GATED:
        a, b = _scaled(a, s0, columns, N, SCALED), _scaled(b, s1, columns, N, SCALED)
        gated = _gated(a, b, b0, b1, columns, N, ACTIVATION, BIASES)
        _stored(o0, s0, b0, rest, gated, rows, columns, live, N, False, False, RESIDUAL)
    elif which == 0:
        _stored(o0, s0, b0, rest, a, rows, columns, live, N, SCALED, BIASES & 1, RESIDUAL)
    elif which == 1:
        _stored(o1, s1, b1, rest, a, rows, columns, live, N, SCALED, BIASES & 2, False)
    else:
        _stored(o2, s2, b2, rest, a, rows, columns, live, N, SCALED, BIASES & 4, False)
