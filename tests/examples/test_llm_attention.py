"""Attention over a paged cache: against dense attention, and the kernel against plain torch."""

import pytest
import torch
import torch.nn.functional as F
from llm_engine.attention import HAS_TRITON, PagedMetadata, attend, gather_attention
from llm_engine.runner import paged_batch
from llm_engine.scheduler import BlockTable

from cgcompile import set_forward_context

# (block size, heads, heads of the cache, head dim)
SHAPES = [(4, 4, 2, 16), (16, 8, 2, 64), (3, 6, 2, 24), (1, 4, 4, 32)]
# (context length, tokens of this step) of each request: decode, drafts, chunks, a whole prompt
REQUESTS = [(1, 1), (17, 1), (33, 4), (40, 23), (70, 70), (16, 16), (5, 2)]
PADDING = 3


class Case:
    """Dense keys and values of some requests, and the same in blocks, scattered over a cache."""

    def __init__(self, shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> None:
        block_size, heads, kv_heads, dim = shape
        width = max(-(-length // block_size) for length, _ in REQUESTS) + 2
        blocks = 1 + width * len(REQUESTS)
        size = (blocks, block_size, kv_heads, dim)
        # Memory that no request has written is NaN: other blocks, and the ends of its own.
        self.k_cache, self.v_cache = (torch.full(size, float("nan"), dtype=dtype) for _ in "kv")
        free = (torch.randperm(blocks - 1) + 1).tolist()
        tables, self.dense = [], []
        for length, _ in REQUESTS:
            table = BlockTable()
            table.widen(width)
            table.add([free.pop() for _ in range(-(-length // block_size))])
            tables.append(table.row)
            k, v = (torch.randn(length, kv_heads, dim, dtype=dtype) for _ in "kv")
            self.dense.append((k, v))
            for cache, rows in ((self.k_cache, k), (self.v_cache, v)):
                for position, row in enumerate(rows):
                    cache[table.blocks[position // block_size], position % block_size] = row
        counts = [count for _, count in REQUESTS]
        starts = [length - count for length, count in REQUESTS]
        ids = torch.zeros(sum(counts), dtype=torch.int64)
        batch = paged_batch(ids, starts, counts, tables, [True] * len(counts), block_size)
        self.queries = torch.randn(sum(counts), heads, dim, dtype=dtype)
        pad = torch.zeros(PADDING, dtype=torch.int64)
        owners = torch.cat((batch.inputs["token_to_req"], pad.int() - 1))
        positions = torch.cat((batch.inputs["positions"], pad))
        tables = batch.inputs["block_tables"]
        self.metadata = PagedMetadata(*(x.to(device) for x in (tables, owners, positions)))
        self.k_cache, self.v_cache = self.k_cache.to(device), self.v_cache.to(device)
        self.q = torch.cat((self.queries, torch.randn(PADDING, heads, dim, dtype=dtype))).to(device)

    def expected(self) -> torch.Tensor:
        """Compute each request alone, by torch's own attention; zeros for padding."""
        results, at = [], 0
        for (length, count), (k, v) in zip(REQUESTS, self.dense, strict=True):
            q = self.queries[at : at + count].transpose(0, 1).float()
            at += count
            rows = torch.arange(length - count, length)
            mask = torch.arange(length) <= rows[:, None]
            group = q.shape[0] // k.shape[1]
            k, v = (x.float().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
            results.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1))
        return F.pad(torch.cat(results), (0, 0, 0, 0, 0, PADDING))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_equals_dense(shape: tuple[int, int, int, int], device: str) -> None:
    torch.manual_seed(0)
    case = Case(shape, device, torch.float32)
    out = torch.full_like(case.q, 7.0)
    gather_attention(case.q, case.k_cache, case.v_cache, out, case.metadata)
    torch.testing.assert_close(out.cpu(), case.expected(), rtol=1e-5, atol=1e-5)
    assert out[-PADDING:].eq(0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
@pytest.mark.parametrize("parts", [None, 2, 8])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (16, 32, 8, 128)], ids=str)
def test_the_kernel_equals_gathered(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    views: bool,
    parts: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries may be views of a wider tensor; several programs may share a context."""
    if parts is not None:
        from llm_engine import triton_attention

        monkeypatch.setattr(triton_attention, "parts_of_context", lambda *_: parts)
    torch.manual_seed(0)
    case = Case(shape, "cuda", dtype)
    q = torch.cat((case.q, case.q), 1)[:, : case.q.shape[1]] if views else case.q
    expected, out = torch.full_like(case.q, 7.0), torch.full_like(case.q, 7.0)
    gather_attention(case.q, case.k_cache, case.v_cache, expected, case.metadata)
    with set_forward_context(case.metadata):
        attend(q, case.k_cache, case.v_cache, out)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert out[-PADDING:].eq(0).all()


@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_few_tokens_share_the_processors() -> None:
    from llm_engine.triton_attention import parts_of_context

    parts = [parts_of_context(n, 8, 4096, 64, 132) for n in (0, 1, 4, 8, 16, 17, 33, 1000)]
    assert parts == [16, 16, 8, 4, 2, 1, 1, 1]
    assert parts_of_context(1, 8, 100, 64, 132) == 1
