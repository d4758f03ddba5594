"""What an Explanation says beside pieces: graph breaks, modes, settings; and as data."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from lib.debug import (
    Branches,
    Decoder,
    Reads,
    inputs,
    names_of,
)
from torch import nn

import cgcompile
from cgcompile import AttentionCGSupport, CompilationConfig, SplittingOp, explain
from cgcompile.errors import ConfigError, TraceError

# ------------------------------------------------------------------ graph breaks


def test_a_graph_break_is_told_with_its_line_and_a_fix() -> None:
    found = explain(Branches(), inputs())
    assert not found.traced
    assert (found.pieces, found.totals, found.split) == ((), None, None)
    (broken,) = found.breaks
    assert (broken.entry_point, broken.what) == ("cgcompile.compile", "Data-dependent branching")
    assert broken.source.code == "if y.sum() > 0:"
    assert "splitting='breakable'" in broken.fix
    text = str(found)
    assert "if y.sum() > 0:" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_breaks_under_torch_compile_alone() -> None:
    found = explain(Reads(), inputs(), torch.ones(4))
    assert found.traced
    assert "host_sync" in [why.reason.value for piece in found.pieces for why in piece.why]
    (broken,) = found.breaks
    assert broken.entry_point == "torch.compile"
    assert broken.source.code == "return y * 2, lengths.max().item()"
    assert "capture_scalar_outputs" in broken.fix
    torch._dynamo.reset()
    backend = cgcompile.Backend(compiler="eager", cache_dir="off")
    with torch.no_grad():
        torch.compile(Reads(), backend=backend)(inputs(), torch.ones(4))
    assert backend.graphs[0].split.graph_break is not None


# ------------------------------------------------------------------ modes


def with_support(support: AttentionCGSupport, **more: Any) -> CompilationConfig:
    op = SplittingOp(F.scaled_dot_product_attention, support=support)
    return CompilationConfig(splitting_ops=(op,), **more)


@pytest.mark.parametrize("support", AttentionCGSupport)
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL_DECODE_ONLY"])
def test_the_mode_is_the_one_of_the_dispatcher(support: AttentionCGSupport, mode: str) -> None:
    asked = cgcompile.CUDAGraphMode[mode]
    found = explain(Decoder(1), inputs(), config=with_support(support, cudagraph_mode=mode)).modes
    dispatcher = cgcompile.serving.CudagraphDispatcher(
        asked, [1, 2], max_num_reqs=2, support=support
    )
    assert (found.asked, found.result) == (mode, dispatcher.mode.name)
    assert [why.reason.value for why in found.lost] == [w.reason.value for w in dispatcher.degraded]
    assert found.support == support.name
    if found.lost:
        assert "scaled_dot_product_attention" in found.lost[0].detail


def test_the_mode_without_a_context_is_the_one_of_the_entry() -> None:
    for support in (AttentionCGSupport.ALWAYS, AttentionCGSupport.NEVER):
        config = with_support(support, compiler="eager", capture_device="host", num_warmups=0)
        model = cgcompile.compile(Decoder(1), config)
        told = explain(model, inputs()).modes.without_context
        with torch.inference_mode():
            model(inputs())
        (recording,) = model.backend.graphs[0].recordings
        assert told == recording.batch.mode.name


def test_modes_without_pieces() -> None:
    stock = CompilationConfig(mode="STOCK_TORCH_COMPILE", cudagraph_mode="FULL")
    found = explain(Decoder(1), inputs(), config=stock)
    assert ([piece.captured for piece in found.pieces], found.modes.result) == ([True], "FULL")
    none = explain(Decoder(1), inputs(), config={"cudagraph_mode": "NONE"})
    assert (none.modes.result, none.modes.lost) == ("NONE", ())


# ------------------------------------------------------------------ settings


def test_where_settings_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CGCOMPILE_NUM_WARMUPS", "3")
    by_name = {each.name: each for each in explain(Decoder(1), inputs()).settings}
    assert (by_name["num_warmups"].value, by_name["num_warmups"].origin) == (3, "environment")
    assert by_name["strict"].origin == "default"
    found = explain(Decoder(1), inputs(), config={"strict": "1", "num_warmups": 2})
    by_name = {each.name: each for each in found.settings}
    assert by_name["strict"][1:] == (True, "options")
    assert by_name["num_warmups"][1:] == (2, "options")
    given = CompilationConfig(strict=True, splitting_ops=(F.softmax,))
    by_name = {each.name: each for each in explain(Decoder(1), inputs(), config=given).settings}
    assert by_name["strict"][1:] == (True, "argument")
    assert by_name["splitting_ops"][1:] == (("softmax",), "argument")
    assert by_name["num_warmups"].origin == "environment"
    assert sorted(by_name) == sorted(CompilationConfig.names())


def test_sizes_that_compiling_would_refuse() -> None:
    class Halves(nn.Module):
        def forward(self, x):
            return x.view(2, -1).sin()

    sizes = {"cudagraph_capture_sizes": (4, 5)}
    found = explain(Halves(), torch.randn(4, 5), config=sizes, dynamic_dims={"x": 0})
    (note,) = [each for each in found.notes if "SymbolError" in each]
    assert "5" in note
    assert dict(found.totals.crossing.at)[4] == 80
    assert dict(found.totals.crossing.at)[5] is None
    assert found.symbols[0].guards


def test_breakable_says_what_it_cannot_tell() -> None:
    found = explain(Decoder(1), inputs(), config={"splitting": "breakable"})
    assert not found.traced
    assert found.breaks == ()
    notes = " ".join(found.notes)
    assert "traces nothing" in notes
    assert "torch.nn.functional.scaled_dot_product_attention" in notes


# ------------------------------------------------------------------ as data


def test_the_schema_is_stable() -> None:
    """Whoever changes this raises VERSION in explain.py."""
    found = explain(Reads(), inputs(), torch.ones(4), dynamic_dims={"x": 0}, sizes=[8])
    data = found.to_dict()
    assert json.loads(found.to_json()) == data
    data["pieces"].reverse()  # eager first: it has a reason
    assert data["version"] == 2
    assert_expected_inline(
        names_of(data),
        """\
version: int
model: str
device: str
traced: bool
pieces: list
  index: int
  name: str
  captured: bool
  why: list
    reason: str
    detail: str
  support: str
  num_ops: int
  source: list
    where: str
    code: str
  inputs: list
    name: str
    shape: list
    dtype: str
    device: str
    bytes:
      expression: str
      traced: int
      at: list list
    storage:
      expression: str
      traced: int
      at: list list
    source: NoneType
    static: bool
    written: bool
  outputs: list
    name: str
    shape: list
    dtype: str
    device: str
    bytes:
      expression: str
      traced: int
      at: list list
    storage:
      expression: str
      traced: int
      at: list list
    source: NoneType
    static: bool
    written: bool
  bytes_in:
    expression: str
    traced: int
    at: list list
  bytes_out:
    expression: str
    traced: int
    at: list list
  same_as: int
  compiled: bool
  uncompiled: NoneType
symbols: list
  name: str
  source: str
  traced: int
  least: int
  most: NoneType
  guards: list
totals:
  pieces: int
  captured: int
  eager: int
  distinct: int
  compiled: int
  ops: int
  crossing:
    expression: str
    traced: int
    at: list list
  static:
    expression: str
    traced: int
    at: list list
breaks: list
  entry_point: str
  what: str
  hints: list
  source:
    where: str
    code: str
  fix: str
modes:
  asked: str
  result: str
  without_context: str
  support: str
  lost: list
    reason: str
    detail: str
settings: list
  name: str
  value: str
  origin: str
notes: list str""",
    )
    (again,) = {explain(Reads(), inputs(), torch.ones(4)).to_json() for _ in range(2)}
    assert json.loads(again)["traced"] is True


def test_bad_calls() -> None:
    with pytest.raises(ConfigError, match="dynamic_shapes"):
        explain(Decoder(), inputs(), dynamic_shapes="some")
    with pytest.raises(ConfigError, match="no parameter"):
        explain(Decoder(), inputs(), dynamic_dims={"y": 0})
    with pytest.raises(ConfigError):
        explain(Decoder, inputs())
    with pytest.raises(TraceError):
        explain(Decoder(), inputs(), dynamic_dims={"x": 7})
    with pytest.raises(TypeError):
        explain(Decoder(), inputs(), inputs())
