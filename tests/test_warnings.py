"""The first step without a graph is a warning, with the remedy; once for a reason and a handle."""

import logging
from typing import Any

import pytest
import torch
from lib import encoders, manager
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode, CUDAGraphWrapper, set_forward_context
from cgcompile.errors import DispatchError
from cgcompile.reasons import Reason
from cgcompile.serving import InputBuffer


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The reasons that were warned of, in order."""
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    texts = [text for text in texts if "runs without a CUDA graph" in text]
    for text in texts:
        assert "Remedy: " in text
    return [text.partition(": ")[2].partition(":")[0] for text in texts]


def config(**more: Any) -> cgcompile.CompilationConfig:
    host = {"capture_device": "host", "compiler": "eager", "cache_dir": "off"}
    return cgcompile.CompilationConfig(**{**host, **more})


def test_the_remedy_is_logged_once_for_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = cgcompile.compile(nn.Linear(4, 4), config())
    for _ in range(3):
        model(torch.randn(2, 4, requires_grad=True))
    (record,) = [r for r in caplog.records if "runs without a CUDA graph" in r.getMessage()]
    assert record.getMessage() == (
        "a step (input [2, 4]) runs without a CUDA graph: gradients: an input, a weight or a result requires "
        "grad, or has a tangent. Remedy: call the model in `torch.inference_mode()` or "
        "`torch.no_grad()`. (Logged once for a reason; on_fallback='count' turns it off; "
        "`python -m cgcompile reasons gradients` explains it.)"
    )


def test_graphs_of_one_handle_share_their_warnings(caplog: pytest.LogCaptureFixture) -> None:
    backend = cgcompile.Backend(config())
    layers = [cgcompile.compile(nn.Linear(4, size), backend) for size in (4, 5, 6)]
    for layer in layers:
        layer(torch.randn(2, 4, requires_grad=True))
    assert len(backend.graphs) == 3
    assert backend.counters.plain == {Reason.GRADIENTS: 3}
    assert warned(caplog) == ["gradients"]
    other = cgcompile.compile(nn.Linear(4, 4), config())
    other(torch.randn(2, 4, requires_grad=True))
    assert warned(caplog) == ["gradients"] * 2


def test_a_device_without_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model = cgcompile.compile(nn.Linear(4, 4), config(capture_device="auto"))
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 4))
    assert warned(caplog) == ["no_capture_device"]


def test_a_manager_without_a_device(caplog: pytest.LogCaptureFixture) -> None:
    """One line for a reason and all sizes; the plan names the reason as well."""
    rows = InputBuffer("input", ("tokens", 4), torch.float32)
    limits = {"max_num_tokens": 8, "max_num_reqs": 8}
    settings = config(capture_device="auto")
    graph_manager = cgcompile.CudaGraphManager.from_model(
        nn.Linear(4, 4), [rows], config=settings, **limits
    )
    plan = graph_manager.plan()
    assert (plan.total, plan.graphs, len(plan.missing)) == (
        0,
        (),
        len(graph_manager.dispatcher.plan()),
    )
    assert str(plan).count("not captured: no_capture_device: tensors are on 'cpu'") == 1
    reports = graph_manager.capture()
    assert {"last call" in why for each in reports.values() for _, why in each.missing} == {False}
    lines = [line for line in caplog.messages if "not captured: " in line]
    assert [line.count("no_capture_device") for line in lines] == [1] * len(reports)
    assert all(f"num_tokens={size}" in line for line in lines for size in (1, 2, 4, 8))


def test_a_lesser_mode_than_was_requested(caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("cgwarn::host", mutates_args=())
    def host(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    host.register_fake(torch.empty_like)
    model = cgcompile.compile(lambda x: host(x + 1) + 1, config(splitting_ops="cgwarn::host"))
    x = torch.randn(2, 4)
    context = set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(2)
    )
    with torch.inference_mode(), context:
        for _ in range(3):
            model(x)
    assert model.backend.counters.replays == 1
    (text,) = [r.getMessage() for r in caplog.records if "Remedy" in r.getMessage()]
    assert text.startswith("a step runs in a lesser mode than was requested: attention_support: ")


def test_what_is_expected_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = cgcompile.compile(nn.Linear(4, 4), config())
    with torch.inference_mode():
        for _ in range(3):
            model(torch.randn(2, 4))
        with set_forward_context():
            model(torch.randn(2, 4))
    assert model.backend.counters.plain == {Reason.WARMING: 1, Reason.MODE_NONE: 1}
    assert warned(caplog) == []


@pytest.mark.parametrize("settings", [{"splitting": "breakable"}, {"mode": "NONE"}])
def test_a_model_without_a_trace_needs_a_context(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    settings = {"cudagraph_mode": "FULL", "capture_device": "host", **settings}
    model = cgcompile.compile(net, **settings)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x.normal_()), net(x))
        assert warned(caplog) == ["no_forward_context"]
        assert model.backend.counters.plain == {Reason.NO_CONTEXT: 3}
        strict = cgcompile.compile(net, on_fallback="raise", **settings)
        with pytest.raises(DispatchError, match="no_forward_context"):
            strict(x)


def test_the_setting_turns_all_of_them_off(caplog: pytest.LogCaptureFixture) -> None:
    quiet = config(on_fallback="count")
    model = cgcompile.compile(nn.Linear(4, 4), quiet)
    model(torch.randn(2, 4, requires_grad=True))
    assert model.backend.counters.plain == {Reason.GRADIENTS: 1}
    wrapper_without_context(quiet)
    assert warned(caplog) == []


def wrapper_without_context(settings: cgcompile.CompilationConfig) -> None:
    wrapper = CUDAGraphWrapper(nn.Linear(4, 4), settings, CUDAGraphMode.FULL)
    context = set_forward_context(
        cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=BatchDescriptor(2)
    )
    for _ in range(2):
        with context:
            wrapper(torch.randn(2, 4, requires_grad=True))
    assert wrapper.counters.plain == {Reason.GRADIENTS: 2}


def test_a_wrapper(caplog: pytest.LogCaptureFixture) -> None:
    wrapper_without_context(cgcompile.CompilationConfig(capture_device="host"))
    assert warned(caplog) == ["gradients"]


def test_a_manager_warns_of_batches_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    graph_manager = manager.manager()
    graph_manager.run(manager.requests(2))
    graph_manager.capture()
    graph_manager.run(manager.requests(17))
    graph_manager.run(manager.requests(18))
    graph_manager.run(manager.requests(2))
    assert warned(caplog) == ["not_captured", "oversize"]


def test_an_encoder_warns_of_items_without_a_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = encoders.patches()
    encoder = encoders.manager(model)
    encoder.execute(encoders.images((40, 40)))
    assert warned(caplog) == ["oversize"]
