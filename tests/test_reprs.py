"""What an interpreter or a notebook shows of an object: one short line."""

import re
from typing import Any

import torch
from lib import encoders, manager
from torch import nn

import cgcompile
from cgcompile.reasons import Counters, Reason


def shown(value: Any) -> str:
    text = repr(value)
    assert len(text) <= 160, text
    assert "\n" not in text, text
    assert " at 0x" not in text, text
    return text


def test_objects_of_a_compiled_model() -> None:
    config = cgcompile.CompilationConfig(capture_device="host", compiler="eager")
    model = cgcompile.compile(nn.Linear(4, 4), config)
    assert shown(model.backend) == (
        "<Backend FULL_AND_PIECEWISE: 0 compiled graphs, 0 wrappers, 0 calls, 0 replays>"
    )
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 4))
    (graph,) = model.backend.graphs
    assert shown(graph) == "<CompiledGraph: 1 piece; 3 calls, 1 capture, 1 replay>"
    (trace,) = model.traces
    assert re.fullmatch(r"<CompiledTrace \d: traced in .* s, compiled in .* s>", shown(trace))
    assert shown(graph.split) == "<SplitGraph: 1 piece, 1 captured>"
    assert shown(model.backend) == (
        "<Backend FULL_AND_PIECEWISE: 1 compiled graph, 0 wrappers, 3 calls, 1 replay>"
    )


def test_counters_tell_warm_ups_from_fallbacks() -> None:
    counters = Counters(calls=9, captures=1, replays=3)
    counters.plain.update({Reason.WARMING: 2, Reason.INSIDE_CAPTURE: 1, Reason.OVERSIZE: 2})
    assert str(counters).splitlines() == [
        "calls 9: captures 1, replays 3, preparing 3, plain 2, failures 0",
        "  preparing 1 inside_capture: -",
        "  preparing 2 warming: -",
        "  plain 2 oversize: -",
    ]
    assert counters.plain.total() == 5  # the data is as it was


def test_reasons_in_a_dictionary() -> None:
    assert shown({Reason.OVERSIZE: 1}) == "{Reason.OVERSIZE: 1}"


def test_objects_of_an_engine() -> None:
    graph_manager = manager.manager()
    bulk = graph_manager.capture()
    graph_manager.run(manager.requests(1, 1, decode=True))
    graph_manager.run(manager.requests(17))
    assert shown(graph_manager) == (
        "<CudaGraphManager of Decoder: FULL_AND_PIECEWISE, 9 of 9 planned graphs captured>"
    )
    assert shown(graph_manager.dispatcher) == (
        "<CudagraphDispatcher: FULL_AND_PIECEWISE, 9 of 9 planned graphs captured>"
    )
    assert shown(graph_manager.statistics) == "<DispatchStatistics: 2 steps, 1 on graphs>"
    assert [shown(value) for value in bulk.values()] == [
        "<BulkCapture: 5 captured, 0 missing>",
        "<BulkCapture: 4 captured, 0 missing>",
    ]
    assert shown(cgcompile.BatchDescriptor(4, 2, True)) == (
        "BatchDescriptor(num_tokens=4, num_reqs=2, uniform=True)"
    )


def test_objects_of_an_encoder() -> None:
    encoder = encoders.manager(encoders.patches())
    assert shown(encoder) == (
        "<EncoderCudaGraphManager of PatchEncoder: 4 graphs captured, at most 8 items a replay>"
    )
