"""The epilogue of a manager: captured with the model, run after it, compared as the model is."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.manager import (
    FULL,
    NONE,
    PIECEWISE,
    VOCABULARY,
    D,
    Decoder,
    eager,
    inner,
    manager,
    requests,
)
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, get_forward_context
from cgcompile.errors import AddressChangedError, ConfigError, HostValueChangedError, ManagerError
from cgcompile.graphs.guards import Weights
from cgcompile.serving import Batch, GraphHooks, InputBuffer

Buffers = dict[str, torch.Tensor]


class Sampler(nn.Module):
    """Samples the most likely token, and writes the inputs of the next step."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.head = nn.Linear(D, VOCABULARY, bias=False, device=device)
        self.stride = 1
        self.calls = 0

    def forward(self, hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        tokens = self.tokens(hidden)
        buffers["input_ids"].copy_(tokens)
        buffers["positions"].add_(self.stride).clamp_(max=63)
        return tokens

    def tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden).argmax(-1)


def sampling(device: str = "cpu") -> Sampler:
    torch.manual_seed(3)
    return Sampler(device).eval().requires_grad_(False)


def fronts(graph_manager: Any, batch: Batch) -> Batch:
    """The batch of the next step, of what the epilogue has written."""
    written = {
        name: graph_manager.inputs.buffers[name][: batch.num_tokens]
        for name in ("input_ids", "positions")
    }
    return replace(batch, inputs={**batch.inputs, **written})


def advanced(batch: Batch, tokens: torch.Tensor) -> Batch:
    positions = batch.inputs["positions"]
    assert positions is not None
    written = {"input_ids": tokens, "positions": (positions + 1).clamp(max=63)}
    return replace(batch, inputs={**batch.inputs, **written})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.parametrize(
    ("mode", "runs_in"),
    [("NONE", [NONE]), ("PIECEWISE", [PIECEWISE]), ("FULL_AND_PIECEWISE", [FULL, PIECEWISE])],
)
def test_steps_that_feed_themselves_equal_eager(
    mode: str, runs_in: list[Any], kind: str, device: str
) -> None:
    sampler = sampling(device)
    graph_manager = manager(mode, kind, device, epilogue=sampler)
    for bulk in graph_manager.capture().values():
        assert bulk.missing == ()
    replays = graph_manager.counters.replays
    seen = []
    for lengths, decode in (((1,) * 3, True), ((1,) * 8, True), ((3, 2), False), ((1,), True)):
        for _ in range(2):
            batch = expected = requests(*lengths, device=device, decode=decode)
            for step in range(3):
                taken = batch if step == 0 else fronts(graph_manager, batch)
                mode_of_step = graph_manager.dispatched(taken).mode
                tokens = graph_manager.run(taken)
                wanted = sampler.tokens(eager(inner(graph_manager), expected))
                assert torch.equal(tokens, wanted)
                expected = advanced(expected, wanted)
                assert mode_of_step is (runs_in[0] if decode else runs_in[-1])
                seen.append(tokens.tolist())
    assert len({tuple(row) for row in seen}) > 15  # inputs differ
    with_graphs = 0 if mode == "NONE" else len(seen)
    assert graph_manager.counters.replays - replays == with_graphs


def test_a_graph_is_replayed_on_what_it_wrote(device: str) -> None:
    """Several steps without the host, by ``run_fullgraph``."""
    sampler = sampling(device)
    graph_manager = manager("FULL", device=device, epilogue=sampler)
    graph_manager.capture()
    for _ in range(2):
        expected = requests(1, 1, 1, 1, device=device)
        for step in range(4):
            tokens = graph_manager.run_fullgraph(4) if step else graph_manager.run(expected)
            wanted = sampler.tokens(eager(inner(graph_manager), expected))
            assert torch.equal(tokens, wanted)
            expected = advanced(expected, wanted)


def test_a_capturing_step_runs_the_epilogue_once() -> None:
    sampler = sampling()
    graph_manager = manager("FULL", epilogue=sampler, lazily=True)
    batch = expected = requests(2, 1)
    for step in range(4):  # plain, captured, replayed twice
        tokens = graph_manager.run(batch if step == 0 else fronts(graph_manager, batch))
        wanted = sampler.tokens(eager(inner(graph_manager), expected))
        assert torch.equal(tokens, wanted)
        expected = advanced(expected, wanted)
    assert graph_manager.counters.captures == 1
    assert graph_manager.counters.replays == 2


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_rows_that_the_epilogue_wrote_are_written_again(mode: str) -> None:
    seen: list[Buffers] = []

    def noting(batch: Batch, descriptor: BatchDescriptor, buffers: Buffers) -> Any:
        rows = descriptor.num_tokens
        seen.append({name: buffers[name][:rows].clone() for name in ("input_ids", "positions")})
        return cgcompile.serving.Metadata(buffers["query_start_loc"])

    graph_manager = manager(mode, epilogue=sampling(), metadata=noting)
    graph_manager.capture()
    graph_manager.run(requests(8))
    for count in (5, 6, 5):
        batch = requests(count)
        graph_manager.run(batch)
        assert not graph_manager.inputs.buffers["positions"][count:8].eq(0).all()  # written
        graph_manager.run(fronts(graph_manager, batch))
        for staged in seen[-2:]:
            assert staged["positions"].shape[0] == 8
            assert staged["positions"][:count].gt(0).all()
            assert staged["positions"][count:].eq(0).all()
            assert staged["input_ids"][count:].eq(0).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_an_epilogue_may_run_the_model_again(mode: str, kind: str, device: str) -> None:
    """Several steps in one: padding rows run along, and are cut."""
    sampler, managers = sampling(device), []

    def more(hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        tokens = [sampler(hidden, buffers)]
        for _ in range(3):
            model = managers[0].model
            hidden = model(input_ids=buffers["input_ids"], positions=buffers["positions"])
            tokens.append(sampler(hidden, buffers))
        return torch.stack(tokens, 1)

    graph_manager = manager(mode, kind, device, epilogue=more)
    managers.append(graph_manager)
    for bulk in graph_manager.capture().values():
        assert bulk.missing == ()
    replays, seen = graph_manager.counters.replays, []
    for lengths in ((1, 2), (3, 1, 1), (1, 2), (8,)):
        batch = expected = requests(*lengths, device=device)
        wanted = []
        for _ in range(4):
            wanted.append(sampler.tokens(eager(inner(graph_manager), expected)))
            expected = advanced(expected, wanted[-1])
        tokens = graph_manager.run(batch)
        assert torch.equal(tokens, torch.stack(wanted, 1))
        seen.append(tokens.tolist())
    assert seen[0] != seen[2]
    assert graph_manager.counters.replays - replays >= (0 if mode == "NONE" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_an_epilogue_draws_the_random_numbers_of_eager(mode: str) -> None:
    sampler = sampling()

    def draw(hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        return torch.multinomial(sampler.head(hidden).softmax(-1), 1).squeeze(1)

    graph_manager = manager(mode, "compiled", epilogue=draw)
    graph_manager.capture()
    seen = []
    for seed in range(4):
        batch = requests(1, 1, 1, 1)
        torch.manual_seed(seed)
        tokens = graph_manager.run(batch).clone()
        after = torch.rand(1)
        torch.manual_seed(seed)
        assert torch.equal(tokens, draw(eager(inner(graph_manager), batch), {}))
        assert torch.equal(torch.rand(1), after)
        seen.append(tuple(tokens.tolist()))
    assert len(set(seen)) > 1


def last_rows(hidden: torch.Tensor, buffers: Buffers) -> Any:
    """A result for each request; reads a buffer that the model does not take, and the context."""
    starts = buffers["query_start_loc"]
    assert get_forward_context().attn_metadata is starts
    last = hidden[(starts[1:].long() - 1).clamp(min=0)]
    return {"last": last, "lengths": starts[1:] - starts[:-1]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_rows_of_the_result_are_requests(mode: str, kind: str) -> None:
    graph_manager = manager(mode, kind, epilogue=last_rows, outputs="reqs")
    graph_manager.capture()
    for lengths in ((3, 1, 2), (5,), (1, 1, 1), (2, 7, 4)):
        batch = requests(*lengths)
        result = graph_manager.run(batch)
        hidden = eager(inner(graph_manager), batch)
        ends = torch.tensor(lengths).cumsum(0)
        torch.testing.assert_close(result["last"], hidden[ends - 1], rtol=1e-5, atol=1e-5)
        assert result["lengths"].tolist() == list(lengths)
    if mode == "FULL":
        assert graph_manager.output_buffers["last"].shape == (8, D)


def test_results_that_do_not_fit_are_errors() -> None:
    graph_manager = manager("PIECEWISE", epilogue=last_rows)  # outputs="tokens"
    with pytest.raises(ManagerError, match="tokens"):
        graph_manager.run(requests(3, 1))
    graph_manager = manager("NONE", epilogue=lambda result, buffers: None)
    with pytest.raises(ManagerError):
        graph_manager.run(requests(3))
    with pytest.raises(ConfigError, match="epilogue"):
        manager("NONE", epilogue="sample")


# ---------------------------------------------------------------- what a graph has read


def replaced_head(sampler: Sampler) -> None:
    sampler.head.weight = nn.Parameter(torch.randn(VOCABULARY, D), requires_grad=False)


def moved_head(sampler: Sampler) -> None:
    sampler.head.weight.data = torch.randn(VOCABULARY, D)


def other_stride(sampler: Sampler) -> None:
    sampler.stride = 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (replaced_head, AddressChangedError, "head.weight"),
        (moved_head, AddressChangedError, "head.weight"),
        (other_stride, HostValueChangedError, "stride"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_what_the_epilogue_read_is_compared(
    change: Callable[[Sampler], None], error: type[Exception], named: str, kind: str
) -> None:
    sampler = sampling()
    graph_manager = manager("FULL", kind, epilogue=sampler)
    graph_manager.capture()
    batch = requests(3)
    wanted = sampler.tokens(eager(inner(graph_manager), batch))
    assert torch.equal(graph_manager.run(batch), wanted)
    change(sampler)
    with pytest.raises(error, match=named):
        graph_manager.run(batch)
    graph_manager.release()
    graph_manager.capture()
    wanted = sampler.tokens(eager(inner(graph_manager), batch))
    assert torch.equal(graph_manager.run(batch), wanted)
    assert graph_manager.counters.replays == 2


@pytest.mark.slow
def test_weights_of_the_model_are_compared_beside_an_epilogue() -> None:
    graph_manager = manager("FULL", "compiled", epilogue=sampling())
    graph_manager.capture()
    model = inner(graph_manager)
    model.layers[1].out.weight = nn.Parameter(torch.randn(D, D), requires_grad=False)
    with pytest.raises(AddressChangedError, match=r"layers\.1\.out\.weight"):
        graph_manager.run(requests(3))


def test_a_weight_that_model_and_epilogue_hold_is_compared_once() -> None:
    model = Decoder()
    outer = nn.Sequential(model)
    alone = Weights(outer).objects
    assert [*map(id, Weights((outer, lambda: model)).objects)] == [*map(id, alone)]


def test_an_epilogue_that_rebinds_a_tensor_is_not_captured() -> None:
    sampler = sampling()

    def rebinding(hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        sampler.last = sampler.tokens(hidden)
        return sampler.last

    graph_manager = manager("FULL", epilogue=rebinding, on_fallback="count")
    (bulk,) = graph_manager.capture().values()
    assert not bulk.captured
    for _ in range(2):
        batch = requests(3)
        wanted = sampler.tokens(eager(inner(graph_manager), batch))
        assert torch.equal(graph_manager.run(batch), wanted)
        assert torch.equal(sampler.last, wanted)


def test_an_epilogue_beside_a_model_without_guards() -> None:
    """``from_model`` compiles the model alone, and passes the epilogue on."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Embedding(50, D), nn.Linear(D, D)).eval().requires_grad_(False)
    sampler = sampling()

    def sample(hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        tokens = sampler.tokens(hidden)
        buffers["input"].copy_(tokens)
        return tokens

    config = cgcompile.CompilationConfig(
        compiler="eager", cudagraph_mode="FULL", capture_device="host"
    )
    ids = InputBuffer("input", ("tokens",), torch.int64)
    graph_manager = cgcompile.CudaGraphManager.from_model(
        model, [ids], max_num_tokens=8, max_num_reqs=8, config=config, epilogue=sample
    )
    graph_manager.capture()
    assert graph_manager.backend is not None
    for count in (3, 8, 2):
        tokens = torch.randint(0, 50, (count,))
        sampled = graph_manager.run(Batch(count, count, {"input": tokens}))
        for _ in range(3):
            tokens = sampler.tokens(model(tokens))
            assert torch.equal(sampled, tokens)
            taken = graph_manager.inputs.buffers["input"][:count]
            sampled = graph_manager.run(Batch(count, count, {"input": taken}))
    assert graph_manager.counters.replays == 12
    sampler.head.weight = nn.Parameter(torch.randn(VOCABULARY, D), requires_grad=False)
    with pytest.raises(AddressChangedError, match=r"head\.weight"):
        graph_manager.run(Batch(3, 3, {"input": torch.tensor([1, 2, 3])}))


class Counting(Sampler):
    """Its result depends on how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(64, dtype=torch.int64))

    def forward(self, hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        count = self.runs[: len(hidden)].add_(1)
        return super().forward(hidden, buffers) + count


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_verify_restores_what_the_epilogue_writes(kind: str) -> None:
    """Its tensors, and the buffers, whose fronts may be the inputs of a batch."""
    sampler = Counting().eval().requires_grad_(False)
    graph_manager = manager("FULL_AND_PIECEWISE", kind, epilogue=sampler)
    graph_manager.capture()
    batch = requests(1, 1, 1, decode=True)
    graph_manager.run(batch)
    following = fronts(graph_manager, batch)
    kept = [sampler.runs, *(graph_manager.inputs.buffers[name] for name in ("input_ids",))]
    before = [tensor.clone() for tensor in kept]
    report = cgcompile.verify(graph_manager, following, requests(3, 1))
    assert report.differences == ()
    assert report.checks[0].replays + report.checks[1].replays == 2
    for tensor, old in zip(kept, before, strict=True):
        assert torch.equal(tensor, old)


def test_verify_finds_an_epilogue_that_has_baked_in_a_number() -> None:
    sampler = sampling()
    graph_manager = manager("FULL", epilogue=sampler, checks="-state")
    graph_manager.capture()
    sampler.tokens = lambda hidden: hidden.argmin(-1)  # type: ignore[method-assign]
    report = cgcompile.verify(graph_manager, requests(3))
    assert len(report.differences) == 1


@pytest.mark.slow
@pytest.mark.parametrize("on_input_change", ["eager", "recapture"])
def test_a_step_that_is_not_replayed_runs_the_epilogue_too(on_input_change: str) -> None:
    sampler = sampling()
    graph_manager = manager(
        "FULL", epilogue=sampler, on_input_change=on_input_change, on_fallback="count"
    )
    graph_manager.capture()
    batch = requests(3)
    graph_manager.run(batch)
    replays = graph_manager.counters.replays
    sampler.stride = 2
    for count in (3, 2):
        batch = requests(count)
        wanted = sampler.tokens(eager(inner(graph_manager), batch))
        assert torch.equal(graph_manager.run(batch), wanted)
        positions = batch.inputs["positions"]
        assert positions is not None
        written = graph_manager.inputs.buffers["positions"][:count]
        assert torch.equal(written, (positions + 2).clamp(max=63))
    assert graph_manager.counters.replays == replays


@pytest.mark.slow
def test_hooks_join_after_the_epilogue_and_a_plan_measures_it() -> None:
    order: list[str] = []

    class Joins(GraphHooks):
        def end_of_capture(self) -> None:
            order.append("joined")

    sampler = sampling()

    def sample(hidden: torch.Tensor, buffers: Buffers) -> torch.Tensor:
        order.append("sampled")
        return sampler.tokens(hidden)

    graph_manager = manager("FULL", epilogue=sample, hooks=[Joins()])
    assert len(graph_manager.plan().graphs) == len(graph_manager.dispatcher.plan())
    graph_manager.capture()
    assert order[-2:] == ["sampled", "joined"]
    batch = requests(3, 2)
    wanted = sampler.tokens(eager(inner(graph_manager), batch))
    assert torch.equal(graph_manager.run(batch), wanted)
    assert graph_manager.counters.replays == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "compiled"])
def test_a_manager_with_an_epilogue_is_freed_without_a_collection(kind: str, device: str) -> None:
    sampler = sampling(device)
    graph_manager = manager("FULL_AND_PIECEWISE", kind, device, epilogue=sampler)
    graph_manager.capture()
    for batch in (requests(1, 1, device=device, decode=True), requests(3, 1, device=device)):
        graph_manager.run(batch)
    assert graph_manager.counters.replays >= 2
    lives = [weakref.ref(held) for held in (graph_manager, graph_manager.pool, sampler)]
    gc.collect()
    gc.disable()
    try:
        del graph_manager, sampler
        assert [life() for life in lives] == [None] * 3
    finally:
        gc.enable()
