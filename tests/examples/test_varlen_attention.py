"""The attention of the towers: rows of each sequence among themselves, from offsets in a tensor."""

from itertools import pairwise

import pytest
import torch
from towers.varlen_attention import (
    ATTENTION,
    SHORT,
    attention,
    for_attention,
    masked_attention,
    row_bounds,
)
from transformers import AttentionInterface

OFFSETS = (
    [0, 70],
    [0, 1, 2, 3, 40, 70],
    [0, 5, 5, 5, 64, 64, 70, 70],
    [0, 20, 50],  # rows that are in no sequence
    [0, 0],
)


def by_loop(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    """Compute one sequence at a time, in float64."""
    result = torch.zeros_like(q, dtype=torch.float64)
    for start, end in pairwise(offsets):
        rows = slice(start, end)
        one, keys, values = (x[rows].transpose(0, 1).double() for x in (q, k, v))
        weights = (one @ keys.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        result[rows] = (weights @ values).transpose(0, 1)
    return result


def random_rows(rows: int, dim: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return views of one tensor [rows, 3, heads, dim], as in towers."""
    return torch.randn(rows, 3, 4, dim, device=device).to(dtype).unbind(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 72, 80])
@pytest.mark.parametrize("offsets", OFFSETS)
def test_equals_a_loop_over_sequences(
    offsets: list[int], dim: int, dtype: torch.dtype, device: str
) -> None:
    q, k, v = random_rows(70, dim, device, dtype)
    bounds = row_bounds(torch.tensor(offsets, dtype=torch.int32, device=device), 70)
    result = torch.ops.cgcompile_towers.varlen_attention(q, k, v, bounds, dim**-0.5)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    expected = by_loop(q, k, v, offsets)
    torch.testing.assert_close(result.double(), expected, rtol=close, atol=close)
    assert not result[offsets[-1] :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [64, 300, 4096, 5000])
def test_tall_tiles_equal_short_ones(rows: int) -> None:
    """Both shapes of tiles, at sizes that are multiples of them and others."""
    q, k, v = random_rows(rows, 80, "cuda", torch.bfloat16)
    ends = [0, *range(64, rows - 30, 64), rows - 30]
    bounds = row_bounds(torch.tensor(ends, dtype=torch.int32, device="cuda"), rows)
    result = torch.ops.cgcompile_towers.varlen_attention(q, k, v, bounds, 80**-0.5)
    expected = masked_attention(q, k, v, bounds, 80**-0.5)
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 20, 72, 80])
def test_torchs_kernel_computes_short_sequences(dim: int) -> None:
    """Also empty ones behind them; NaN of one sequence reaches no other."""
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs compute capability 8.0")
    offsets = [0, 1, 2, 3, 40, 104, 232, 300, 300, 300]
    q, k, v = random_rows(300, dim, "cuda", torch.bfloat16)
    expected = by_loop(q, k, v, offsets)
    for tensor in (k, v):
        tensor[104:232] = float("nan")
    starts = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    short = for_attention(starts, 300, SHORT, q.dtype)
    assert short.shape == (1, 10)
    heads = [tensor.transpose(0, 1)[None] for tensor in (q, k, v)]
    result, _ = attention(torch.nn.Module(), *heads, None, cu_seq_lens_q=short)
    assert result.shape == (1, 300, 4, dim)
    assert result[0, 104:232].isnan().all()
    for rows in (slice(0, 104), slice(232, 300)):
        torch.testing.assert_close(result[0, rows].double(), expected[rows], rtol=2e-2, atol=2e-2)


def test_torchs_kernel_gets_short_half_precision_alone(device: str) -> None:
    starts = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    others = [(12, torch.float32)]
    others += [(SHORT + 1, torch.bfloat16)] if device == "cuda" else [(12, torch.bfloat16)]
    for longest, dtype in others:
        bounds = for_attention(starts, 12, longest, dtype)
        assert torch.equal(bounds, row_bounds(starts, 12))


def test_bounds_are_those_of_each_row() -> None:
    bounds = row_bounds(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert bounds.tolist() == [[0, 0, 2, 2, 2, 5, 5], [2, 2, 5, 5, 5, 5, 5]]
    assert bounds.dtype == torch.int32


@pytest.mark.parametrize("where", [1, 2])
def test_nan_stays_in_its_sequence(where: int, device: str) -> None:
    """Keys or values that are NaN reach neither other sequences of a tile nor rows in none."""
    qkv = random_rows(70, 16, device, torch.float32)
    offsets = torch.tensor([0, 20, 50, 64], dtype=torch.int32, device=device)
    bounds = row_bounds(offsets, 70)
    expected = torch.ops.cgcompile_towers.varlen_attention(*qkv, bounds, 0.25)
    for tensor in qkv:
        tensor[64:] = float("nan")
    qkv[where][30] = float("nan")
    result = torch.ops.cgcompile_towers.varlen_attention(*qkv, bounds, 0.25)
    assert result[20:50].isnan().all()
    for rows in (slice(0, 20), slice(50, 70)):
        torch.testing.assert_close(result[rows], expected[rows])


def test_offsets_and_bounds_are_the_same_to_transformers(device: str) -> None:
    assert AttentionInterface()[ATTENTION] is attention
    q, k, v = (torch.randn(1, 4, 12, 16, device=device) for _ in range(3))
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32, device=device)
    module = torch.nn.Module()
    one, _ = attention(module, q, k, v, None, cu_seq_lens_q=offsets)
    other, _ = attention(module, q, k, v, None, cu_seq_lens_q=row_bounds(offsets, 12))
    assert one.shape == (1, 12, 4, 16)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    with pytest.raises(ValueError, match="takes offsets"):
        attention(module, q, k, v, None)


def test_a_compiler_traces_it() -> None:
    q, k, v = random_rows(12, 16, "cpu", torch.float32)
    bounds = row_bounds(torch.tensor([0, 5, 12], dtype=torch.int32), 12)

    def doubled(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.cgcompile_towers.varlen_attention(*inputs, 0.25)
        return result * 2

    result = torch.compile(doubled, backend="aot_eager", fullgraph=True)(q, k, v, bounds)
    expected = 2 * masked_attention(q, k, v, bounds, 0.25)
    torch.testing.assert_close(result, expected)
