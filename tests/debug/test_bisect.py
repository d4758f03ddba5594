"""``verify``, with ``bisect=True`` too, names the stage, the pieces, the op and the line of a fault."""

import itertools
import json
from functools import partial
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from lib.breakable import Stack
from lib.cases import D, library
from lib.debug import FULL, PIECEWISE, ROWS, marker, only, step
from lib.faulty_models import (
    Calculates,
    Good,
    Mixes,
    Shares,
    SharesInOtherPieces,
    Stale,
    Workspace,
    WrongPass,
    aten_miscompiler,
    built,
    config,
    miscompiler,
    one_buffer,
    rows,
    softmax,
)
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CUDAGraphWrapper, verify
from cgcompile.debug.compare import Tolerance
from cgcompile.debug.locate import PieceMode, run_step
from cgcompile.debug.search import minimal
from cgcompile.debug.subject import Subject
from cgcompile.errors import ConfigError, DispatchError

bisect = partial(verify, bisect=True)
MAKES = "; this op makes the value"
OVERWRITES = "; it was right before, and is overwritten; the piece begins at that line"


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
@settings(max_examples=60, deadline=None)
def test_the_smallest_set_that_fails(count: int, data: Any) -> None:
    culprits = data.draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=3))
    sizes: list[int] = []

    def fails(some: Any) -> bool:
        assert list(some) == sorted(some)
        sizes.append(len(some))
        return culprits <= set(some)

    assert set(minimal(list(range(count)), fails)) == culprits
    if len(culprits) == 1:
        assert len(sizes) <= 2 * count.bit_length() + 2


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("kind", [Good, Mixes])
def test_nothing_in_a_good_model(device: str, mode: str, kind: Any) -> None:
    verdict = bisect(built(kind, device), rows(device), config=config(cudagraph_mode=mode))
    assert (verdict.ok, verdict.differences, verdict.replays) == (True, (), 3)
    steps = tuple(f"inputs {k}, all replayed: right" for k in range(3))
    assert verdict.checks[0].steps == steps


def test_where_nothing_is_replayed_nothing_is_searched() -> None:
    verdict = bisect(built(Good, "cpu"), rows("cpu"), config=config(capture_device="auto"))
    assert (verdict.ok, verdict.checks[0].steps) == (False, ())
    assert "no_capture_device" in verdict.checks[0].missing


def test_managers_are_not_bisected() -> None:
    with pytest.raises(ConfigError, match="bisect = True; expected False, for a manager"):
        bisect(manager(), requests(1, 1, 1))


def test_the_deprecated_function() -> None:
    with pytest.warns(FutureWarning, match=r"call cgcompile\.verify\(\.\.\., bisect=True\)"):
        bisection = cgcompile.debug.bisect(
            built(Calculates, "cpu"), rows("cpu"), config=config(compiler=miscompiler), sets=2
        )
    assert (bisection.ok, bisection.stage, bisection.pieces) == (False, "compilation", ("piece_2",))
    assert (bisection.finding.op, bisection.steps[1]) == (
        "torch.exp",
        "all pieces uncompiled: right",
    )
    assert json.loads(bisection.to_json())["finding"]["op"] == "torch.exp"
    assert str(bisection).startswith("Calculates: wrong by compilation\n  1. inputs 0, ")
    with (
        pytest.warns(FutureWarning),
        pytest.raises(DispatchError, match="no_capture_device"),
    ):
        cgcompile.debug.bisect(
            built(Good, "cpu"), rows("cpu"), config=config(capture_device="auto")
        )


@pytest.mark.parametrize("kind", [Good, Calculates, lambda: Stack(2, D)])
@pytest.mark.parametrize("mode", [PieceMode.COMPILED, PieceMode.UNCOMPILED])
def test_any_pieces_may_be_replayed(device: str, kind: Any, mode: PieceMode) -> None:
    """Views cross, results are written in place, values live long: the step is the same."""
    library()
    model = built(kind, device)
    subject = Subject(model, config(splitting_ops=("cgtest::attend",)))
    call = (rows(device)[:, 0] if isinstance(model, Stack) else rows(device),), {}
    assert subject.until_replayed(call) == ""
    expected = subject.outcome(model, call)
    replays = subject.counters.replays

    def run(chosen: tuple[int, ...], names: list[str]) -> Any:
        def observer(program: Any, recording: Any, inputs: Any, real: Any) -> Any:
            pieces = program.split.pieces
            modes = {p.index: PieceMode.REPLAYED if p.index in chosen else mode for p in pieces}
            note = lambda piece, values: names.extend(values)  # noqa: E731
            return run_step(program, recording, inputs, real, modes, note)

        with subject.observed(lambda number: observer):
            return subject.outcome(subject.call, call)

    captured = [p.index for p in subject.handle.graphs[0].split.pieces if p.capture]
    assert len(captured) >= 2
    names: list[list[str]] = []
    for count in range(len(captured) + 1):
        for chosen in itertools.combinations(captured, count):
            names.append([])
            result = run(chosen, names[-1])
            assert Tolerance(exact=device == "cpu").first("", expected, result) is None
    assert subject.counters.replays == replays + 2 ** len(captured)
    assert all(each == names[0] for each in names)
    subject.close()


# ---------------------------------------------------------------- faults


def assert_located(
    model: Any, x: Any, stage: str, pieces: Any, location: Any, detail: str = "", **more: Any
) -> tuple[Any, Any]:
    """Both modes give ``location``, the piece, op and marker of a fault; bisection the pieces."""
    before = x.clone()
    difference, bisection = only(verify(model, x, sets=1, **more)), bisect(model, x, **more)
    assert (only(bisection).pieces, bisection.ok) == (pieces, False)
    for fault in (difference, only(bisection)):
        assert (fault.stage, fault.piece, fault.op, marker(fault.line)) == (stage, *location)
        assert (fault.inputs, fault.rows) == (0, tuple(range(ROWS)))
        assert fault.detail.endswith(detail)
    assert torch.equal(x, before)
    return difference, bisection


BOTH = ("piece_0", "piece_2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "compiler", "hook_with", "stage", "pieces", "location", "detail"),
    [
        (Calculates, miscompiler, None, "compilation", BOTH[1:], ("torch.exp", "shows"), MAKES),
        (
            Calculates,
            aten_miscompiler,
            None,
            "compilation",
            BOTH[1:],
            ("torch.exp", "shows"),
            MAKES,
        ),
        (Shares, one_buffer, "double", "compilation", BOTH, ("", "overwrites"), OVERWRITES),
        (Shares, "eager", Workspace, "replay", BOTH, ("", "overwrites"), OVERWRITES),
        (SharesInOtherPieces, "eager", Workspace, "replay", BOTH, ("", "overwrites"), OVERWRITES),
    ],
)
def test_faults_of_pieces(
    device, hook, kind, compiler, hook_with, stage, pieces, location, detail
) -> None:
    """Two pieces are wrong together where they share a workspace, or the buffer of an artifact."""
    x = rows(device)
    if hook_with is not None:
        hook(Workspace(x) if hook_with is Workspace else lambda x: x * 2)
    location = ("piece_2", *location)
    more = {"config": config(compiler=compiler)}
    difference, bisection = assert_located(
        built(kind, device), x, stage, pieces, location, detail, **more
    )
    right = [f"{'compiled' if stage == 'compilation' else 'replayed'}: {BOTH[0]}: right"]
    assert set(right) < set(bisection.checks[0].steps)
    assert ("all pieces compiled, not captured: wrong" in bisection.checks[0].steps) is (
        stage == "compilation"
    )
    if detail is OVERWRITES:
        assert difference.value == only(bisection).value == "kept"


def stale(device: str, hook: Any, what: str, mode: str) -> tuple[Any, torch.Tensor, Any]:
    """A model whose graphs hold what Python has changed since; keeps the old table alive."""
    state: dict[str, Any] = {"factor": 1.0, "table": torch.ones(D, device=device)}
    old = state["table"]
    hook(lambda x: softmax(x) * state["factor"] + state["table"])
    model, x = cgcompile.compile(built(Stale, device), config(cudagraph_mode=mode)), rows(device)
    assert verify(model, x, sets=2).ok
    assert bisect(model, x, sets=2).ok
    state[what] = 3.0 if what == "factor" else torch.full((D,), 2.0, device=device)
    return model, x, old


ADD = ("piece_2", "_operator.add", "stale shows")


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("what", ["factor", "table"])
def test_a_value_that_is_baked_in(device: str, hook: Any, what: str, mode: str) -> None:
    """A number of the host, and the address of a buffer that was replaced."""
    model, x, _old = stale(device, hook, what, mode)
    if mode == "FULL":  # a CUDA graph has no pieces
        location = ("the whole step", "", "")
        _, bisection = assert_located(model, x, "replay", ("the whole step",), location)
        assert "inputs 0, all replayed: right" in bisection.checks[0].steps[1:]  # captured anew
    else:
        difference, _ = assert_located(model, x, "replay", ("piece_2",), ADD, MAKES)
        assert difference.value == "add"
        assert difference.largest > 0.1


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_wrapper_that_is_stale(device: str, hook: Any, kind: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    mode = FULL if kind is CUDAGraphWrapper else PIECEWISE
    # with the state compared, the step is refused before bisect compares it
    host = cgcompile.CompilationConfig(capture_device="host", checks="-state")
    wrapper, x = kind(built(Stale, device), host, mode), rows(device)
    # the op is in the segment before that break, and its result among the arguments of the break
    part = "the result" if mode is FULL else "break 1 (aten::scaled_dot_product_attention)"
    with step(mode), torch.inference_mode():
        assert verify(wrapper, x, sets=2).ok
        assert bisect(wrapper, x).ok
        factor = 3.0
        difference, _ = assert_located(wrapper, x, "replay", (part,), (part, "", ""))
    assert ("[0][0]: 384 of 384 numbers differ" in difference.detail) is (mode is PIECEWISE)
    assert difference.detail.count("numbers differ") == (1 if mode is FULL else 2)


class Broken(nn.Module):
    """Dynamo makes two graphs of it; the fault is in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.stale = Calculates(), Stale()

    def forward(self, x):
        x = self.good(x)
        torch._dynamo.graph_break()
        return self.stale(x)


@pytest.mark.slow
def test_the_graph_of_several_is_named(device: str, hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    model = torch.compile(built(Broken, device), backend=cgcompile.Backend(config()))
    x = rows(device)
    assert bisect(model, x, sets=2).ok
    factor = 3.0
    assert_located(model, x, "replay", ("graph 1 piece_2",), ADD, MAKES)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["graph", "pieces"])
def test_a_pass_that_is_wrong(device: str, where: str) -> None:
    chosen = config(passes=(WrongPass(),) if where == "graph" else ("split", WrongPass()))
    fault = only(bisect(built(Calculates, device), rows(device), config=chosen))
    assert (fault.stage, fault.culprit, fault.pieces) == ("pass", "fold_sines", ("piece_2",))
    assert (fault.op, marker(fault.line)) == ("torch.cos", "miscompiled")
    assert "a pass of yours, fold_sines, changes it" in fault.detail
    difference = only(verify(built(Calculates, device), rows(device), config=chosen, sets=1))
    assert (difference.stage, "a pass or the trace" in difference.detail) == ("tracing", True)


class Attribute(Good):
    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.mark.slow
def test_an_attribute_that_is_baked_into_the_trace(device: str) -> None:
    model = built(Attribute, device)
    compiled = cgcompile.compile(model, config(), guards="none")
    assert bisect(compiled, rows(device)).ok
    model.scale = 2.0
    fault = only(bisect(compiled, rows(device)))
    assert (fault.stage, fault.pieces) == ("tracing", ())
    assert "traced anew it is right" in fault.detail


# ---------------------------------------------------------------- values


def test_text_and_json() -> None:
    verdict = bisect(built(Calculates, "cpu"), rows("cpu"), config=config(compiler=miscompiler))
    text = str(verdict)
    assert_expected_inline(
        text[: text.index("\n  at ")],
        """\
Calculates: not ok
check                 inputs  replays  tolerance  result
eager against replay  1       1        by dtype   1 differ
  1. inputs 0, all replayed: wrong
  2. all pieces uncompiled: right
  3. all pieces compiled, not captured: wrong
  4. compiled: piece_0, piece_2: wrong
  5. compiled: piece_0: right
  6. compiled: piece_2: wrong
wrong by compilation, inputs 0: piece_2, torch.exp""",
    )
    assert "in forward: z = torch.exp(-z * z)  # FAULT: shows\n  value z_1: 384 of" in text
    read = json.loads(verdict.to_json())
    assert read == verdict.to_dict()
    (check,) = read["checks"]
    assert (check["steps"][1], check["findings"][0]["pieces"]) == (
        "all pieces uncompiled: right",
        ["piece_2"],
    )
