"""The op ``cgcompile::rotate_and_cache``: what stands between a projection and attention.

For q [B, H, T, D], k [B, Hkv, T, D] and v [B, Hkv, T, D] it computes, in this order::

    q = q / sqrt(mean(q * q) + eps) * (q_norm + offset)    with a norm [D]; the same for k
    q = q * cos + cat(-q[..., D / 2 :], q[..., : D / 2]) * sin              the same for k
    keys[:, :, positions] = k;  values[:, :, positions] = v

with cos and sin [1 or B, T, D], writes to keys and values [B, Hkv, L, D], and returns q.
Positions are [T], or the first of them: a counter [] that is incremented after the op.

On an NVIDIA GPU of compute capability 9.0 or newer one Triton kernel computes all of it; it starts
before the kernel in front of it has ended (programmatic dependent launch). Elsewhere, and for
inputs that the kernel does not take (:func:`takes`), torch's ops compute it.
"""

from typing import Any

import torch
from torch.nn import functional as F

from cgcompile.kernels import registered, start, why_unsupported
from cgcompile.kernels.small_linear import DTYPES

HEADS = (32, 64, 128, 256)  # sizes of a head that the kernel takes
_SCHEMA = (
    "rotate_and_cache(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor? q_norm, "
    "Tensor? k_norm, float eps, float offset, Tensor positions, Tensor(a!) keys, "
    "Tensor(b!) values) -> Tensor"
)


def op() -> Any:
    """Return the op; the first call registers it."""
    return registered("rotate_and_cache", _SCHEMA, by_torch, on_cuda, _fake)


def takes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> bool:
    """Return whether the kernel computes the op for these inputs, on a device that supports it."""
    rows, _, tokens, size = q.shape
    norms = [norm for norm in (q_norm, k_norm) if norm is not None]
    tables, caches, new = (cos, sin), (keys, values), (k, v)
    if size not in HEADS or q.dtype not in DTYPES or not q.numel() or not k.numel():
        return False
    if any(tensor.dtype is not q.dtype for tensor in (*new, *tables, *caches, *norms)):
        return False
    if any(tensor.stride(-1) != 1 for tensor in (q, *new, *tables, *caches, *norms)):
        return False
    if any(norm.shape != (size,) for norm in norms):
        return False
    if any(tensor.shape not in ((1, tokens, size), (rows, tokens, size)) for tensor in tables):
        return False
    if any(tensor.shape != (rows, k.shape[1], tokens, size) for tensor in new):
        return False
    shape = (rows, k.shape[1], keys.shape[2], size)
    if any(tensor.shape != shape or 0 in tensor.stride() for tensor in caches):
        return False  # torch refuses to write to memory that overlaps itself
    one_device = positions.device == q.device  # a counter may be on the CPU
    known = positions.dtype is torch.int64 and positions.shape in ((tokens,), ())
    return one_device and known and positions.is_contiguous()


def by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Compute the op by ops of torch."""
    cos, sin, rotated = cos.unsqueeze(1), sin.unsqueeze(1), []
    for x, norm in ((q, q_norm), (k, k_norm)):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        if norm is not None:
            y = F.rms_norm(y, y.shape[-1:], None, eps) * (norm.to(y.dtype) + offset)
        one, two = y.chunk(2, -1)
        rotated.append((y * cos + torch.cat((-two, one), -1) * sin).to(x.dtype))
    if positions.dim() == 0:
        positions = positions + torch.arange(q.shape[2], device=q.device)
    keys.index_copy_(2, positions, rotated[1])
    values.index_copy_(2, positions, v)
    return empty(q).copy_(rotated[0])


def empty(q: torch.Tensor) -> torch.Tensor:
    """Return memory for the result: [B, T, H, D] transposed, as eager's of transposed heads."""
    rows, heads, tokens, size = q.shape
    if tokens == 1:
        return q.new_empty((rows, heads, 1, size))
    return q.new_empty((rows, tokens, heads, size)).transpose(1, 2)


def _fake(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return empty(q)


def on_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    inputs = (q, k, v, cos, sin, q_norm, k_norm)
    caches = (positions, keys, values)
    if why_unsupported(q.device) is not None or not takes(*inputs, *caches):
        return by_torch(*inputs, eps, offset, *caches)
    with torch.cuda.device(q.device):
        return launch(*inputs, eps, offset, *caches, dependent=True)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    dependent: bool,
) -> torch.Tensor:
    """Run the kernel for inputs that it :func:`takes`."""
    from cgcompile.kernels import rotate_and_cache_triton as kernels

    out = empty(q)
    rows, heads, tokens, size = q.shape
    pairs = k.shape[1]
    steps = [table.stride(0) if table.shape[0] > 1 else 0 for table in (cos, sin)]
    start(
        kernels.rotate_and_cache, (heads + 2 * pairs, tokens, rows), q, k, v, cos, sin,
        q if q_norm is None else q_norm, k if k_norm is None else k_norm,
        positions, keys, values, out, eps, offset, heads, pairs, keys.shape[2],
        *(stride for tensor in (q, k, v, keys, values, out) for stride in tensor.stride()[:3]),
        steps[0], cos.stride(1), steps[1], sin.stride(1),
        HALF=size // 2, COUNTED=positions.dim() == 0, Q_NORM=q_norm is not None,
        K_NORM=k_norm is not None,
        DEPENDENT=dependent, num_warps=1, **({"launch_pdl": True} if dependent else {}),
    )  # fmt: skip
    return out
