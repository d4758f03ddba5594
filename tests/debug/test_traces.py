"""Artifacts in torch's structured trace, which tlparse shows; and nothing without one."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from lib.breakable import FULL, rand, step
from lib.entry import HOOKED, Hooked, assert_same, batch, compiled_model

import cgcompile
from cgcompile import CompilationConfig, CUDAGraphWrapper, Reason
from cgcompile.torch_compat import torch_settings
from cgcompile.torch_compat.torch_settings import is_tracing

pytestmark = pytest.mark.usefixtures("without_gradients")

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "cgcompile_split",
    "cgcompile_split_data",
    "cgcompile_code",
    "cgcompile_compilation",
    "cgcompile_refusal",
    "cgcompile_capture",
    "cgcompile_sequence",
}
PROGRAM = """
import sys; sys.path.insert(0, "tests")
import torch
from lib.entry import HOOKED, Hooked, batch, compiled_model
model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
x = batch("cpu")
with torch.no_grad():
    for _ in range(3):
        assert torch.equal(compiled(x), model(x))
(graph,) = backend.graphs
print(graph.split, end="\\0")
print(graph.source, end="\\0")
print(*graph.recordings[0].sequence.labels, sep="\\n", end="")
"""


class Artifact(NamedTuple):
    """One of the trace."""

    encoding: str
    payload: str
    metadata: dict[str, Any]

    @property
    def data(self) -> Any:
        assert self.encoding == "json"
        return json.loads(self.payload)


class Trace(logging.Handler):
    """A trace in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Artifact]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        entry = record.metadata.get("artifact", {})
        if entry.get("name", "").startswith("cgcompile"):
            artifact = Artifact(entry["encoding"], record.payload, record.metadata)
            self.found.setdefault(entry["name"], []).append(artifact)


@pytest.fixture
def trace() -> Iterator[Trace]:
    logger, handler = logging.getLogger("torch.__trace"), Trace()
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


def of_file(path: Path) -> dict[str, list[Artifact]]:
    """The artifacts of ours in a file that torch wrote."""
    trace = Trace()
    entries: list[list[str]] = []
    for line in path.read_text().splitlines():
        if line.startswith("\t"):
            entries[-1].append(line[1:])
        else:
            entries.append([line[line.index("] ") + 2 :]])
    for metadata, *payload in entries:
        fields = {"metadata": json.loads(metadata), "payload": "\n".join(payload)}
        trace.emit(logging.makeLogRecord(fields))
    return trace.found


@pytest.mark.slow
def test_a_process_with_a_trace_writes_what_was_split_and_captured(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TORCH_TRACE": str(tmp_path), "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    split, source, labels = done.stdout.split("\0")
    (file,) = tmp_path.iterdir()
    artifacts = of_file(file)
    assert set(artifacts) == NAMES
    assert artifacts["cgcompile_split"][0].payload == split
    assert artifacts["cgcompile_code"][0].payload.strip() == source.strip()
    data = artifacts["cgcompile_split_data"][0].data
    assert (data["device"], data["crossing_bytes"], data["graph_break"]) == ("cpu", "4608", None)
    pieces = data["pieces"]
    assert [piece["name"] for piece in pieces] == ["piece_0", "piece_1", "piece_2"]
    assert [piece["captured"] for piece in pieces] == [True, False, True]
    assert pieces[2]["inputs"][0] == pieces[1]["outputs"][0]
    assert pieces[1]["why"] == [{"reason": "splitting_op", "detail": "cgentry::hooked [NEVER]"}]
    (capture,) = artifacts["cgcompile_capture"]
    assert capture.data["segments"] == ["graph piece_0", "eager piece_1", "graph piece_2"]
    assert capture.data["nbytes"] > 0
    assert capture.data["seconds"] > 0
    assert capture.data["batch"].startswith("num_tokens=6")
    assert artifacts["cgcompile_sequence"][0].payload.splitlines() == capture.data["segments"]
    assert artifacts["cgcompile_refusal"][0].data["reason"] == Reason.WARMING.value
    for artifact in chain.from_iterable(
        artifacts.values()
    ):  # tlparse puts all below one compilation
        assert (artifact.metadata["frame_id"], artifact.metadata["frame_compile_id"]) == (0, 0)
    # Names of ranges are those of another process.
    _, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    for _ in range(2):
        compiled(batch("cpu"))
    assert labels.splitlines() == list(backend.graphs[0].recordings[0].sequence.labels)


def test_a_step_without_a_graph_is_written_once_for_each_detail(trace: Trace) -> None:
    model, compiled, backend = compiled_model(Hooked, "cpu", **HOOKED)
    backend.close_capture()
    x = batch("cpu")
    for _ in range(3):
        assert_same(compiled(x), model(x))
    assert backend.counters.plain == {Reason.CAPTURE_FORBIDDEN: 3}
    detail = backend.counters.details[Reason.CAPTURE_FORBIDDEN]
    (refusal,) = trace.found["cgcompile_refusal"]
    cause = detail.removesuffix("; last call: x [6, 4, 16]")
    assert cause != detail
    assert refusal.data == {"reason": "capture_forbidden", "detail": cause}
    assert "cgcompile_capture" not in trace.found


def test_wrappers_write_too(trace: Trace) -> None:
    wrapper = CUDAGraphWrapper(torch.sin, CompilationConfig(capture_device="host"))
    x = rand(device="cpu")
    wrapper(x)
    with step(4, FULL):
        wrapper(x)
    assert trace.found["cgcompile_refusal"][0].data["reason"] == "no_forward_context"
    (capture,) = trace.found["cgcompile_capture"]
    assert capture.data["name"] == "sin"
    assert "stack" not in capture.metadata  # which torch writes where it misses a compilation


def test_a_graph_that_is_not_split_is_written_as_one_piece(trace: Trace) -> None:
    backend = cgcompile.Backend(mode="NONE", cudagraph_mode="FULL", capture_device="host")
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend=backend)
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(compiled(x), F.scaled_dot_product_attention(x, x, x))
    (split,) = trace.found["cgcompile_split_data"]
    assert [piece["name"] for piece in split.data["pieces"]] == ["piece_0"]
    assert trace.found["cgcompile_code"][0].payload == backend.graphs[0].source


def test_without_a_trace_nothing_is_computed() -> None:
    assert not is_tracing(), "this process has TORCH_TRACE set"

    def payload() -> str:
        raise AssertionError("it was computed")

    torch_settings.trace_artifact("cgcompile_test", payload)


def test_a_payload_is_computed_once(trace: Trace) -> None:
    calls: list[int] = []

    def payload() -> dict[str, int]:
        calls.append(1)
        return {"n": 1}

    torch_settings.trace_artifact("cgcompile_test", payload)
    assert calls == [1]
    (artifact,) = trace.found["cgcompile_test"]
    assert (artifact.data, artifact.encoding) == ({"n": 1}, "json")
