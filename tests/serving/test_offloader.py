"""An offloader with a copy stream of its own: what the hooks of the manager are for."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lib.manager import NONE, D, manager
from torch import nn

from cgcompile.serving.batch import Batch, GraphHooks, Metadata

LAYERS, SLOTS = 6, 2  # layers take slots in turn, so the first is a multiple


class Offloader(GraphHooks):
    """Weights on the host, fetched into a few slots on the device ahead of their use.

    The last fetches of a step are for the first layers of the next one, so that at the end of a
    step the copy stream is at work.
    """

    def __init__(self, device: str, joins: bool = True) -> None:
        on_cuda = device == "cuda"
        self.stream = torch.cuda.Stream() if on_cuda else None
        self.weights = [torch.randn(D, D, pin_memory=on_cuda) for _ in range(LAYERS)]
        self.slots = [torch.empty(D, D, device=device) for _ in range(SLOTS)]
        self.joins = joins
        self.joined = 0
        for layer in range(SLOTS):
            self.fetch(layer)

    def fetch(self, layer: int) -> None:
        """Bring the weight of a layer once all work so far has read its slot."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):
            self.slots[layer % SLOTS].copy_(self.weights[layer % LAYERS], non_blocking=True)

    def wait(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def before_capture(self, pool: Any) -> None:
        self.wait()

    def end_of_capture(self) -> None:
        if self.joins:
            self.wait()
            self.joined += 1

    def before_replay(self) -> None:
        self.wait()


class Offloaded(nn.Module):
    def __init__(self, offloader: Offloader) -> None:
        super().__init__()
        self.offloader = offloader
        self.embed = nn.Embedding(32, D)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + positions[:, None]
        for layer in range(LAYERS):
            if layer:  # what the first layers need was fetched by the step before
                self.offloader.wait()
            x = torch.tanh(x @ self.offloader.slots[layer % SLOTS])
            following = layer + SLOTS
            self.offloader.fetch(following if following < LAYERS else following - LAYERS)
        return x


def batch(size: int, device: str) -> Batch:
    inputs = {
        "input_ids": torch.randint(32, (size,), device=device),
        "positions": torch.randint(64, (size,), device=device),
        "query_start_loc": torch.arange(size + 1, dtype=torch.int32, device=device),
    }
    return Batch(size, size, inputs, 1, True)


def expected(graph_manager: Any, step: Batch) -> torch.Tensor:
    model, inputs = graph_manager.model, step.inputs
    with torch.inference_mode():
        x = model.embed(inputs["input_ids"]) + inputs["positions"][:, None]
        for weight in model.offloader.weights:
            x = torch.tanh(x @ weight.to(x.device))
        return x


def offloaded(device: str, joins: bool = True) -> Any:
    offloader = Offloader(device, joins)
    return manager(
        "FULL_DECODE_ONLY",
        device=device,
        model=Offloaded(offloader),
        metadata=lambda batch, descriptor, buffers: Metadata("there"),
        hooks=(offloader,),
    )


def test_it_is_right_with_its_join(device: str) -> None:
    graph_manager = offloaded(device)
    bulk = graph_manager.capture()
    assert [each.missing for each in bulk.values()] == [()]
    captured = graph_manager.model.offloader.joined
    assert captured >= len(bulk["Capturing CUDA graphs (decode, FULL)"].captured)
    before = graph_manager.counters.replays
    for size in (8, 1, 3, 8):
        step = batch(size, device)
        torch.testing.assert_close(
            graph_manager.run(step), expected(graph_manager, step), rtol=1e-5, atol=1e-5
        )
        with torch.no_grad():  # replays fetch what the host holds now
            if device == "cuda":
                torch.cuda.synchronize()
            for weight in graph_manager.model.offloader.weights:
                weight.normal_()
        # What lies in the slots was fetched before: the next step begins with it.
        for layer in range(SLOTS):
            graph_manager.model.offloader.fetch(layer)
    assert graph_manager.counters.replays == before + 4
    assert graph_manager.model.offloader.joined == captured  # of replays the graph does it


def test_it_fails_unjoined_without(device: str) -> None:
    if device == "cpu":
        pytest.skip("the host has no streams")
    graph_manager = offloaded(device, joins=False)
    (bulk,) = graph_manager.capture().values()
    assert bulk.missing
    assert not bulk.captured
    assert all("unjoined" in why for _, why in bulk.missing)
    step = batch(4, device)  # runs plain, for the reason that the capture gave
    result = graph_manager.run(step)
    torch.cuda.synchronize()
    torch.testing.assert_close(result, expected(graph_manager, step), rtol=1e-5, atol=1e-5)
    chosen = graph_manager.dispatched(step)
    assert chosen.mode is NONE
    assert "unjoined" in chosen.why.detail
