"""A wrong result is narrowed to its stage, its pieces, its op and the user's line."""

import itertools
import json
from typing import Any

import pytest
import torch
from expecttest import TestCase
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.breakable import Stack
from lib.cases import D, library
from lib.faulty_models import (
    Calculates,
    Good,
    Mixes,
    Shares,
    Stale,
    Workspace,
    WrongPass,
    attention,
    built,
    config,
    marked_line,
    miscompiler,
    rows,
    softmax,
)
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, BreakableCUDAGraphWrapper, CUDAGraphMode, set_forward_context
from cgcompile import (
    torch_compat as compat,
)
from cgcompile.debug import bisect
from cgcompile.debug.bisect import minimal
from cgcompile.debug.compare import Tolerance
from cgcompile.debug.locate import PieceMode, run_step
from cgcompile.debug.subject import Subject
from cgcompile.errors import DispatchError

PIECEWISE = CUDAGraphMode.PIECEWISE


def stale(device: str, hook: Any, what: str, mode: str = "PIECEWISE") -> tuple[Any, Any, Any]:
    """(model, inputs, what must live): graphs that hold what Python has changed since."""
    state: dict[str, Any] = {"factor": 1.0, "table": torch.ones(D, device=device)}
    old = state["table"]
    hook(lambda x: softmax(x) * state["factor"] + state["table"])
    model, x = cgcompile.compile(built(Stale, device), config(cudagraph_mode=mode)), rows(device)
    assert bisect(model, x, sets=2).ok
    state[what] = 3.0 if what == "factor" else torch.full((D,), 2.0, device=device)
    return model, x, old


# ---------------------------------------------------------------- delta debugging


@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_the_smallest_part_that_fails(count: int, data: Any) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    asked: list[int] = []

    def fails(some: Any) -> bool:
        assert list(some) == sorted(some)
        asked.append(len(some))
        return culprits <= set(some)

    assert set(minimal(list(range(count)), fails)) == culprits
    if len(culprits) == 1:
        assert len(asked) <= 2 * count.bit_length() + 2


# ---------------------------------------------------------------- good models


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("kind", [Good, Mixes])
def test_nothing_in_a_good_model(device: str, mode: str, kind: Any) -> None:
    found = bisect(built(kind, device), rows(device), config=config(cudagraph_mode=mode))
    assert (found.ok, found.stage, found.pieces, found.finding) == (True, "", (), None)
    assert found.replays == 3
    assert found.steps == tuple(f"inputs {k}, all replayed: right" for k in range(3))


def test_nothing_replayed_is_an_error() -> None:
    with pytest.raises(DispatchError, match="no_capture_device"):
        bisect(built(Good, "cpu"), rows("cpu"), config=config(capture_device="auto"))


# ---------------------------------------------------------------- some replayed, some not


@pytest.mark.parametrize("kind", [Good, Calculates, lambda: Stack(2, D)])
@pytest.mark.parametrize("way", [PieceMode.COMPILED, PieceMode.UNCOMPILED])
def test_any_pieces_may_be_replayed(device: str, kind: Any, way: PieceMode) -> None:
    """Views cross, results are written in place, values live long: the step is the same."""
    library()
    model = built(kind, device)
    subject = Subject(model, config(splitting_ops=("cgtest::attend",)))
    call = (rows(device)[:, 0] if isinstance(model, Stack) else rows(device),), {}
    assert subject.until_replayed(call) == ""
    expected = subject.outcome(model, call)
    replays = subject.counters.replays

    def run(chosen: tuple[int, ...], told: list[str]) -> Any:
        def observer(program: Any, recording: Any, inputs: Any, real: Any) -> Any:
            pieces = program.split.pieces
            ways = {p.index: PieceMode.REPLAYED if p.index in chosen else way for p in pieces}
            note = lambda piece, values: told.extend(values)  # noqa: E731
            return run_step(program, recording, inputs, real, ways, note)

        with subject.observed(lambda number: observer):
            return subject.outcome(subject.call, call)

    captured = [p.index for p in subject.handle.graphs[0].split.pieces if p.capture]
    assert len(captured) >= 2
    names: list[list[str]] = []
    for count in range(len(captured) + 1):
        for chosen in itertools.combinations(captured, count):
            names.append([])
            found = run(chosen, names[-1])
            assert Tolerance(exact=device == "cpu").first("", expected, found) is None
    assert subject.counters.replays == replays + 2 ** len(captured)
    assert all(each == names[0] for each in names)
    subject.release()


# ---------------------------------------------------------------- replay


def made_here(difference: Any) -> None:
    """The op is the one that makes the value of the piece that is wrong."""
    assert (difference.op, difference.value) == ("_operator.add", "add")
    assert difference.line.startswith(marked_line("FAULT: stale shows"))
    assert difference.detail.endswith("; this op makes the value")


@pytest.mark.parametrize("what", ["factor", "table"])
def test_a_piece_that_has_frozen_something(device: str, hook: Any, what: str) -> None:
    model, x, _old = stale(device, hook, what)
    before = x.clone()
    found = bisect(model, x)
    assert (found.stage, found.pieces, found.ok) == ("replay", ("piece_2",), False)
    assert found.finding.rows == tuple(range(6))
    assert found.finding.inputs == 0
    assert torch.equal(x, before)
    made_here(found.finding)


def test_a_full_graph_that_has_frozen_something(device: str, hook: Any) -> None:
    model, x, _old = stale(device, hook, "factor", "FULL")
    found = bisect(model, x)
    assert found.stage == "replay"
    assert found.pieces == ("the whole step",)
    assert "inputs 0, all replayed: right" in found.steps[1:]  # captured anew nothing is wrong
    assert (found.finding.piece, found.finding.op) == ("the whole step", "")
    assert found.finding.rows == tuple(range(6))


OVERWRITTEN = "it was right before, and is overwritten; the piece begins at that line"


def test_two_pieces_that_are_wrong_together(device: str, hook: Any) -> None:
    """One workspace for both: either of them alone is right."""
    hook(Workspace(rows(device)))
    found = bisect(built(Shares, device), rows(device), config=config())
    assert (found.stage, found.pieces) == ("replay", ("piece_0", "piece_2"))
    assert "replayed: piece_0: right" in found.steps
    assert "replayed: piece_2: right" in found.steps
    assert (found.finding.piece, found.finding.value) == ("piece_2", "kept")
    assert found.finding.line.startswith(marked_line("FAULT: overwrites"))
    assert found.finding.detail.endswith(f"; {OVERWRITTEN}")


class Equal(nn.Module):
    """Two pieces of equal structure, on two lines."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        kept = torch.ops.cgentry.hooked(self.first(x))
        y = attention(x)
        other = torch.ops.cgentry.hooked(self.second(y))  # FAULT: equal
        return attention(other) + kept


def test_equal_pieces_have_the_line_where_they_begin(hook: Any) -> None:
    hook(Workspace(rows("cpu")))
    found = bisect(built(Equal, "cpu"), rows("cpu"), config=config())
    assert found.pieces == ("piece_0", "piece_2")
    assert "# FAULT: equal" in found.finding.line
    assert found.finding.detail.endswith(f"; {OVERWRITTEN}")


def test_a_break_of_a_wrapper(device: str, hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    settings = cgcompile.CompilationConfig(capture_device="host")
    wrapper = BreakableCUDAGraphWrapper(built(Stale, device), settings, PIECEWISE)
    context = set_forward_context(
        None, cudagraph_runtime_mode=PIECEWISE, batch_descriptor=BatchDescriptor(6)
    )
    x = rows(device)
    with context, torch.inference_mode():
        assert bisect(wrapper, x).ok
        factor = 3.0
        found = bisect(wrapper, x)
    assert (found.stage, found.ok) == ("replay", False)
    # the op is in the segment before that break, and its result among the arguments of the break
    assert found.finding.piece == "break 1 (aten::scaled_dot_product_attention)"
    assert "[0][0]: 384 of 384 numbers differ" in found.finding.detail
    assert found.finding.rows == tuple(range(6))


class Broken(nn.Module):
    """Dynamo makes two graphs of it; the fault is in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.stale = Calculates(), Stale()

    def forward(self, x):
        x = self.good(x)
        torch._dynamo.graph_break()
        return self.stale(x)


def test_the_graph_of_several_is_named(device: str, hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    model = torch.compile(built(Broken, device), backend=cgcompile.Backend(config()))
    x = rows(device)
    assert bisect(model, x, sets=2).ok
    factor = 3.0
    found = bisect(model, x)
    assert (found.stage, found.pieces) == ("replay", ("graph 1 piece_2",))
    assert found.finding.piece == "piece_2"
    made_here(found.finding)


# ---------------------------------------------------------------- compilers


def test_a_compiler_that_is_wrong(device: str) -> None:
    found = bisect(built(Calculates, device), rows(device), config=config(compiler=miscompiler))
    assert (found.stage, found.pieces) == ("compilation", ("piece_2",))
    assert (found.finding.piece, found.finding.op) == ("piece_2", "torch.exp")
    assert found.finding.line.startswith(marked_line("FAULT: shows"))
    assert found.finding.detail.endswith("; this op makes the value")
    assert "all pieces uncompiled: right" in found.steps
    assert "all pieces compiled, not captured: wrong" in found.steps


def shared_output(gm: torch.fx.GraphModule, fake_inputs: Any) -> Any:
    """Returns its first result in one buffer, call after call, as graphs with static outputs do."""
    buffer: list[torch.Tensor] = []

    def run(*inputs: Any) -> Any:
        first, *others = gm.forward(*inputs)
        buffer[:] = buffer or [torch.empty_like(first)]
        return [buffer[0].copy_(first), *others]

    return run


def test_pieces_that_share_what_a_compiler_made(device: str, hook: Any) -> None:
    """Equal pieces have one artifact, and with it one buffer."""
    hook(lambda x: x * 2)
    found = bisect(built(Equal, device), rows(device), config=config(compiler=shared_output))
    assert (found.stage, found.pieces) == ("compilation", ("piece_0", "piece_2"))
    assert (found.finding.piece, found.finding.value) == ("piece_2", "kept")
    assert found.finding.detail.endswith(f"; {OVERWRITTEN}")


def test_a_compiler_of_aten_graphs_that_is_wrong(device: str) -> None:
    """Parts of a piece go through torch's own lowering, long after the trace."""

    def swapped(aten: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in aten.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            node.target = torch.ops.aten.cos.default
        aten.recompile()
        return aten.forward

    def compiler(gm: torch.fx.GraphModule, fake_inputs: Any) -> Any:
        return compat.compile_aten(gm, fake_inputs, swapped)

    found = bisect(built(Calculates, device), rows(device), config=config(compiler=compiler))
    assert (found.stage, found.pieces) == ("compilation", ("piece_2",))
    assert found.finding.op == "torch.exp"
    assert found.finding.line.startswith(marked_line("FAULT: shows"))


# ---------------------------------------------------------------- passes and traces


@pytest.mark.parametrize("where", ["graph_passes", "piece_passes"])
def test_a_pass_that_is_wrong(device: str, where: str) -> None:
    chosen = config(**{where: (WrongPass(),)})
    found = bisect(built(Calculates, device), rows(device), config=chosen)
    assert (found.stage, found.culprit, found.pieces) == ("pass", "fold_sines", ("piece_2",))
    assert found.finding.op == "torch.cos"
    assert found.finding.line.startswith(marked_line("FAULT: miscompiled"))
    assert "a pass of yours, fold_sines, changes it" in found.finding.detail


class Attribute(Good):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


def test_a_trace_that_has_frozen_an_attribute(device: str) -> None:
    model = built(Attribute, device)
    compiled = cgcompile.compile(model, config(), guards="none")
    assert bisect(compiled, rows(device)).ok
    model.scale = 2.0
    found = bisect(compiled, rows(device))
    assert (found.stage, found.pieces) == ("tracing", ())
    assert "traced anew it is right" in found.finding.detail


# ---------------------------------------------------------------- values


class Printed(TestCase):
    def test_it(self) -> None:
        found = bisect(built(Calculates, "cpu"), rows("cpu"), config=config(compiler=miscompiler))
        text = str(found).replace(marked_line("FAULT: shows"), "models.py:7")
        numbers = text.index("384 of")
        self.assertExpectedInline(
            text[:numbers],
            """\
Calculates: wrong by compilation
  1. inputs 0, all replayed: wrong
  2. all pieces uncompiled: right
  3. all pieces compiled, not captured: wrong
  4. compiled: piece_0, piece_2: wrong
  5. compiled: piece_0: right
  6. compiled: piece_2: wrong
pieces piece_2
wrong by compilation, inputs 0: piece_2, torch.exp
  at    models.py:7 in forward: z = torch.exp(-z * z)  # FAULT: shows
  value z_1: """,
        )


def test_a_bisection_as_json() -> None:
    found = bisect(built(Calculates, "cpu"), rows("cpu"), config=config(compiler=miscompiler))
    read = json.loads(found.to_json())
    assert read == found.to_dict()
    assert (read["ok"], read["stage"], read["pieces"]) == (False, "compilation", ["piece_2"])
    assert read["finding"]["op"] == "torch.exp"
