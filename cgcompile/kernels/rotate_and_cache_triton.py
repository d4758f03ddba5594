"""The kernel of ``rotate_and_cache``. Importing this file needs triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _normed(a, b, norm, d, eps, offset, HALF: tl.constexpr):
    """Return both halves of a head after an RMS norm."""
    root = tl.rsqrt((tl.sum(a * a) + tl.sum(b * b)) / (2 * HALF) + eps)
    a *= root * (tl.load(norm + d).to(tl.float32) + offset)
    b *= root * (tl.load(norm + HALF + d).to(tl.float32) + offset)
    return a, b


@triton.jit
def _trap_unless(condition):
    """End the program with an error of the device, as torch's index check does."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $1, 0; @p trap; mov.u32 $0, 0; }",
        "=r,r",
        [condition.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["H", "P", "L"])
def rotate_and_cache(q, k, v, cos, sin, q_norm, k_norm, positions, keys, values, out, eps, offset,
                     H, P, L, q0, q1, q2, k0, k1, k2, v0, v1, v2, keys0, keys1, keys2, values0,
                     values1, values2, out0, out1, out2, cos0, cos1, sin0, sin1,
                     HALF: tl.constexpr, COUNTED: tl.constexpr, Q_NORM: tl.constexpr,
                     K_NORM: tl.constexpr, DEPENDENT: tl.constexpr):  # fmt: skip
    """Compute one head of q, k or v; programs are numbered over heads, tokens and rows."""
    head, token, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head, row = head.to(tl.int64), row.to(tl.int64)  # a long cache has more than 2**31 elements
    d = tl.arange(0, HALF)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    position = tl.load(positions) + token if COUNTED else tl.load(positions + token)
    if DEPENDENT:  # Triton's interpreter has no assembly
        _trap_unless((position >= 0) & (position < L))
    if head < H:
        source = q + row * q0 + head * q1 + token * q2
        target = out + row * out0 + head * out1 + token * out2
    elif head < H + P:
        source = k + row * k0 + (head - H) * k1 + token * k2
        target = keys + row * keys0 + (head - H) * keys1 + position * keys2
    else:
        source = v + row * v0 + (head - H - P) * v1 + token * v2
        target = values + row * values0 + (head - H - P) * values1 + position * values2
    a, b = tl.load(source + d).to(tl.float32), tl.load(source + HALF + d).to(tl.float32)
    if head < H + P:
        at = cos + row * cos0 + token * cos1
        c0, c1 = tl.load(at + d).to(tl.float32), tl.load(at + HALF + d).to(tl.float32)
        at = sin + row * sin0 + token * sin1
        s0, s1 = tl.load(at + d).to(tl.float32), tl.load(at + HALF + d).to(tl.float32)
        if Q_NORM:  # noqa: SIM102 (known while it compiles)
            if head < H:
                a, b = _normed(a, b, q_norm, d, eps, offset, HALF)
        if K_NORM:  # noqa: SIM102
            if head >= H:
                a, b = _normed(a, b, k_norm, d, eps, offset, HALF)
        a, b = a * c0 - b * s0, b * c1 + a * s1
    tl.store(target + d, a.to(out.dtype.element_ty))
    tl.store(target + HALF + d, b.to(out.dtype.element_ty))
