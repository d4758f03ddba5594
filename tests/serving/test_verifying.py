"""FULL graphs at other layouts than those they were captured at."""

from typing import Any

import pytest
import torch
from lib.front_ends import settings
from lib.manager import NONE, PIECEWISE, Decoder, manager, metadata, requests
from torch import nn

import cgcompile
from cgcompile import get_forward_context, verify
from cgcompile.reasons import Reason
from cgcompile.serving import CudagraphDispatcher, InputBuffer
from cgcompile.serving.batch import Batch, Metadata

LAYOUTS = ((1, 1, 1), (3, 1), (2, 2, 2, 2), (7,), (1,), (12, 4))


def layouts(device: str) -> list[Batch]:
    return [requests(*each, device=device) for each in LAYOUTS]


def test_graphs_that_hold(device: str) -> None:
    graph_manager = manager("FULL", device=device)
    graph_manager.capture()
    verdict = verify(graph_manager, *layouts(device), rtol=1e-5, atol=1e-5)
    assert (verdict.ok, verdict.replays) == (True, len(LAYOUTS))
    assert graph_manager.dispatched(requests(3, device=device)).mode.name == "FULL"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_an_op_that_bakes_a_number_is_found(mode: str, device: str, monkeypatch: Any) -> None:
    """It scales by the longest query, which it asks the host for."""
    from lib.manager import library

    library()

    def baked(q, k, v, out):
        starts = get_forward_context().attn_metadata
        longest = get_forward_context().additional["max_query_len"]
        out.copy_(v * longest + starts[-1])

    monkeypatch.setattr("lib.manager.attend.__code__", baked.__code__)

    def told(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        usual = metadata(batch, descriptor, buffers)
        return Metadata(usual.attn_metadata, additional={"max_query_len": batch.max_query_len})

    graph_manager = manager(mode, device=device, metadata=told, checks="-metadata")
    graph_manager.capture()
    decode = [requests(*[1] * n, device=device, decode=True) for n in (1, 3, 8)]
    assert verify(graph_manager, *decode, rtol=1e-5, atol=1e-5).ok is (mode != "FULL")
    assert graph_manager.dispatched(decode[0]).mode.name != "NONE"
    if mode == "FULL":
        graph_manager.release()
        graph_manager.capture()
        verdict = verify(graph_manager, *layouts(device), rtol=1e-5, atol=1e-5)
        # by check, exact sizes first; the graph of one token has frozen the right numbers
        assert [each.inputs for each in verdict.differences] == [1, 2, 5, 0, 3]
        first = next(each for each in verdict.differences if each.inputs == 0)
        assert first.rows[0] == 0
        assert first.largest > 0.01
        for graph in graph_manager.dispatcher.plan():
            graph_manager.dispatcher.refused(*graph, first.detail)
        chosen = graph_manager.dispatched(requests(3, device=device))
        assert chosen.mode is NONE
        assert chosen.why is not None
        assert chosen.why.reason is Reason.NOT_CAPTURED
        assert "an op inside has baked in a number" in chosen.why.detail
    else:
        assert graph_manager.dispatched(requests(3, device=device)).mode is PIECEWISE
    batch = requests(3, device=device)
    again, plain = graph_manager.run(batch).clone(), graph_manager.run(batch, valid_modes=())
    torch.testing.assert_close(again, plain)


@pytest.mark.slow
def test_the_ops_inside_of_a_full_graph_are_named(monkeypatch: Any) -> None:
    from lib.manager import library

    library()

    def baked(q, k, v, out):
        out.copy_(v * len(get_forward_context().attn_metadata.tolist()))

    graph_manager = manager("FULL", kind="compiled")
    graph_manager.capture()
    monkeypatch.setattr("lib.manager.attend.__code__", baked.__code__)
    (exact,) = verify(graph_manager, requests(1, 3)).differences
    assert "(cgserve::attend [ALWAYS] at manager.py:" in exact.detail
    assert "padding" not in exact.detail


def test_what_never_replays_is_no_proof() -> None:
    """A lazy manager warms, captures, and only then replays."""
    graph_manager = manager("FULL", lazily=True)
    verdict = verify(graph_manager, *layouts("cpu"), rtol=1e-5, atol=1e-5)
    assert (verdict.ok, verdict.replays) == (True, len(LAYOUTS))
    assert graph_manager.counters.replays >= len(LAYOUTS)
    verdict = verify(manager("FULL"), *layouts("cpu"))  # without a capture
    assert (verdict.ok, verdict.replays, verdict.differences) == (False, 0, ())
    (check,) = verdict.checks
    assert check.missing.startswith("batch 0 has no graph: not_captured: FULL")


def test_results_of_one_dimension(monkeypatch: Any) -> None:
    class Ids(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            return super().forward(input_ids, positions).argmax(-1)

    graph_manager = manager("FULL", model=Ids())
    graph_manager.capture()
    assert verify(graph_manager, *layouts("cpu")).ok
    run = graph_manager.run
    monkeypatch.setattr(graph_manager, "run", lambda batch, **more: run(batch, **more) + (not more))
    assert verify(graph_manager, *layouts("cpu")).differences[0].largest == 1


# ---------------------------------------------------------------- state of the model


class Cached(nn.Module):
    """Writes its input into a cache, f32[9, 4], at ``slots`` and reads all of it."""

    def __init__(self, cache: torch.Tensor, is_buffer: bool) -> None:
        super().__init__()
        self.calls = 0
        self.caches = {} if is_buffer else {"layer": cache}
        if is_buffer:
            self.register_buffer("cache", cache)

    def forward(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.calls += 1
        cache = self.caches["layer"] if self.caches else self.cache
        cache[slots] = x
        return x + cache[1:].sum(0)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
@pytest.mark.parametrize("is_buffer", [True, False])
def test_caches_are_restored(is_buffer: bool, mode: str, device: str) -> None:
    """Requests that are served meanwhile keep their caches."""
    cache = torch.zeros(9, 4, device=device)
    graph_manager = cgcompile.CudaGraphManager.from_model(
        Cached(cache, is_buffer),
        [
            InputBuffer("x", ("tokens", 4), torch.float32),
            InputBuffer("slots", ("tokens",), torch.int64, tail=0),
        ],
        max_num_tokens=8,
        max_num_reqs=8,
        metadata=lambda *_: Metadata({}),
        device=device,
        config=settings(device, cudagraph_mode=mode),
    )
    graph_manager.capture()
    cache.normal_()
    before, batches = cache.clone(), []
    for rows in (1, 3, 8):
        inputs = {"x": torch.randn(rows, 4), "slots": torch.arange(1, rows + 1)}
        batches.append(Batch(rows, rows, inputs))
    verdict = verify(graph_manager, *batches)
    assert (verdict.ok, verdict.replays) == (True, 3), verdict
    torch.testing.assert_close(cache, before, rtol=0, atol=0)
    graph_manager.run(batches[-1])
    assert not torch.equal(cache[1:], before[1:])


def test_attributes_are_restored(device: str) -> None:
    """A lazy manager runs Python until it replays."""
    cache = torch.zeros(9, 4, device=device)
    model = Cached(cache, True)
    graph_manager = cgcompile.CudaGraphManager(
        model,
        CudagraphDispatcher(
            "FULL", [4], max_num_reqs=4, support=cgcompile.AttentionCGSupport.ALWAYS
        ),
        [
            InputBuffer("x", ("tokens", 4), torch.float32),
            InputBuffer("slots", ("tokens",), torch.int64, tail=0),
        ],
        device=device,
        metadata=lambda *_: Metadata({}),
        config=settings(device),
    )
    graph_manager.dispatcher.only_captured = False
    inputs = {"x": torch.randn(3, 4), "slots": torch.arange(1, 4)}
    verdict = verify(graph_manager, Batch(3, 3, inputs))
    assert (model.calls, cache.count_nonzero().item()) == (0, 0), verdict
