"""One door to whether graphs are right: good models are, and each fault is named with its line."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import TestCase
from lib.cases import D
from lib.faulty_models import (
    Calculates,
    Good,
    Mixes,
    Shares,
    Stale,
    Workspace,
    WrongPass,
    built,
    config,
    marked_line,
    miscompiler,
    rows,
    softmax,
)
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CUDAGraphMode,
    CUDAGraphWrapper,
    set_forward_context,
    verify,
)
from cgcompile.debug.compare import InputSets, Tolerance, padded
from cgcompile.errors import ConfigError

PIECEWISE, FULL = CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def only(found: Any) -> Any:
    (difference,) = found.differences
    assert not found.ok
    assert found.replays >= 1
    return difference


# ---------------------------------------------------------------- good models


class GoodTable(TestCase):
    def test_it(self) -> None:
        found = verify(built(Good, "cpu"), rows("cpu"), config=config(), padded_sizes=(8,))
        self.assertExpectedInline(
            str(found),
            """\
Good: ok
check                      inputs  replays  tolerance  result
eager against replay       3       3        bitwise    equal
padded to 8 against exact  3       3        by dtype   equal""",
        )


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("door", ["plain", "torch.compile", "cgcompile.compile"])
def test_a_good_model(device: str, mode: str, door: str) -> None:
    model, settings = built(Good, device), config(cudagraph_mode=mode)
    called: Any = model
    if door == "torch.compile":
        called = torch.compile(model, backend=cgcompile.Backend(settings))
    elif door == "cgcompile.compile":
        called = cgcompile.compile(model, settings)
    x = rows(device)
    before, random = x.clone(), torch.get_rng_state()
    more = {"config": settings} if door == "plain" else {}
    found = verify(called, x, padded_sizes=(8,), breakable=True, tails="nan", **more)
    assert found.ok, found
    assert [(each.compared, each.replays) for each in found.checks] == [(3, 3)] * 3
    assert found.checks[0].tolerance == ("bitwise" if device == "cpu" else "by dtype")
    assert torch.equal(x, before)
    assert model.count.item() == 0
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_a_good_wrapper(device: str, kind: Any) -> None:
    wrapper, mode = (
        kind(built(Good, device), cgcompile.CompilationConfig(capture_device="host")),
        FULL,
    )
    with step(mode):
        found = verify(wrapper, rows(device), sets=4)
    assert found.ok, found
    assert found.replays == 4


def step(mode: CUDAGraphMode, real: int | None = None) -> set_forward_context:
    return set_forward_context(
        None,
        cudagraph_runtime_mode=mode,
        batch_descriptor=BatchDescriptor(6),
        num_unpadded_tokens=real,
    )


@pytest.mark.parametrize(("mode", "kind"), [("FULL", "plain"), ("PIECEWISE", "compiled")])
def test_a_good_manager(device: str, mode: str, kind: str) -> None:
    made = manager(mode, kind, device)
    made.capture()
    batches = [requests(*each, device=device) for each in ((1, 1, 1), (3, 1), (7,), (2, 2))]
    found = verify(made, batches, rtol=1e-4, atol=1e-5)
    assert found.ok, found
    assert {each.name: each.replays for each in found.checks} == {
        "exact eager against exact replay": 2,
        "exact eager against padded replay": 2,
    }
    found = verify(made, lambda number: requests(60 + number, device=device), sets=2)
    assert not found.ok
    assert "batch 0 has no graph: oversize" in str(found)


# ---------------------------------------------------------------- nothing to compare


class Layouts(nn.Module):
    """A result with the batch in its second dimension, and a cache and a result of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 4, D, dtype=torch.float8_e4m3fn))

    def forward(self, x):
        y = F.scaled_dot_product_attention(x, x, x).sin()
        self.cache.copy_(y[:2])
        return y.transpose(0, 1) + 1, y.to(torch.float8_e5m2)


@pytest.mark.parametrize("compiler", ["eager", "aot"])  # compared bitwise, and by dtype
def test_rows_in_another_dimension_and_narrow_numbers(compiler: str) -> None:
    settings = config(compiler=compiler)
    found = verify(Layouts(), rows("cpu"), config=settings, padded_sizes=(8,))
    assert found.ok, found
    assert found.replays == 6


def test_nothing_replayed_is_not_ok() -> None:
    found = verify(built(Good, "cpu"), rows("cpu"), config=config(capture_device="auto"))
    assert (found.ok, found.replays, found.differences) == (False, 0, ())
    assert "nothing was replayed: no_capture_device" in str(found)
    assert verify(manager(), []).checks[0].missing == "there are no batches"


def test_a_padded_size_needs_fewer_rows_and_no_context() -> None:
    model = built(Good, "cpu")
    found = verify(model, rows("cpu"), config=config(), padded_sizes=(6,))
    assert not found.ok
    assert found.checks[1].missing == "the batch has 6 rows, not fewer"
    compiled = cgcompile.compile(model, config())
    with step(PIECEWISE), torch.no_grad():
        found = verify(compiled, rows("cpu"), padded_sizes=(8,))
    assert found.checks[0].ok
    assert "a forward context sets the padding" in found.checks[1].missing


def test_settings_that_cannot_be() -> None:
    compiled = cgcompile.compile(built(Good, "cpu"), config())
    with pytest.raises(ConfigError):
        verify(compiled, rows("cpu"), config=config())
    with pytest.raises(ConfigError, match="tails"):
        verify(compiled, rows("cpu"), tails="zeros")


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("tails", ["random", "nan"])
def test_padding_that_reaches_real_rows(device: str, tails: str) -> None:
    found = only(
        verify(
            built(Mixes, device),
            rows(device),
            config=config(),
            sets=1,
            padded_sizes=(8,),
            tails=tails,
        )
    )
    assert (found.stage, found.piece, found.op) == ("padding", "piece_2", "mean")
    assert found.line.startswith(marked_line("FAULT: mixes rows"))
    assert found.rows == tuple(range(6))
    assert found.padding_rows == ()


def stale(device: str, hook: Any, what: str, mode: str) -> tuple[Any, torch.Tensor, Any]:
    """A model whose graphs hold what Python has changed since; keeps the old table alive."""
    state: dict[str, Any] = {"factor": 1.0, "table": torch.ones(D, device=device)}
    old = state["table"]
    hook(lambda x: softmax(x) * state["factor"] + state["table"])
    model, x = cgcompile.compile(built(Stale, device), config(cudagraph_mode=mode)), rows(device)
    assert verify(model, x, sets=2).ok
    state[what] = 3.0 if what == "factor" else torch.full((D,), 2.0, device=device)
    return model, x, old


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
@pytest.mark.parametrize("what", ["factor", "table"])
def test_what_a_graph_has_frozen(device: str, hook: Any, what: str, mode: str) -> None:
    """A number of the host, and the address of a buffer that is another one now."""
    model, x, _old = stale(device, hook, what, mode)
    found = only(verify(model, x, sets=1))
    assert found.stage == "replay"
    assert found.rows == tuple(range(6))
    assert found.largest > 0.1
    if mode == "FULL":  # a CUDA graph cannot be looked into
        assert (found.piece, found.op, found.line) == ("the whole step", "", "")
        return
    assert (found.piece, found.op, found.value) == ("piece_2", "_operator.add", "add")
    assert found.line.startswith(marked_line("FAULT: stale shows"))
    assert found.detail.endswith("; this op makes the value")


def test_rows_that_are_padding_are_told(hook: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    model, x = cgcompile.compile(built(Stale, "cpu"), config()), rows("cpu")
    with step(PIECEWISE, real=4), torch.no_grad():
        assert verify(model, x, sets=2).ok
        factor = 3.0
        found = only(verify(model, x, sets=1))
    assert (found.piece, found.op) == ("piece_2", "_operator.add")
    assert found.padding_rows == (4, 5)
    assert "rows [4, 5] are padding" in str(found)


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_what_a_wrapper_has_frozen(device: str, hook: Any, kind: Any) -> None:
    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    mode = FULL if kind is CUDAGraphWrapper else PIECEWISE
    settings = cgcompile.CompilationConfig(capture_device="host")
    wrapper = kind(built(Stale, device), settings, mode)
    x = rows(device)
    with step(mode), torch.inference_mode():
        assert verify(wrapper, x, sets=2).ok
        factor = 3.0
        found = only(verify(wrapper, x, sets=1))
    assert (found.stage, found.rows) == ("replay", tuple(range(6)))
    assert found.piece == (
        "the result" if mode is FULL else "break 1 (aten::scaled_dot_product_attention)"
    )
    assert ("[0][0]: 384 of 384 numbers differ" in found.detail) is (mode is PIECEWISE)
    assert found.detail.count("numbers differ") == (1 if mode is FULL else 2)


def test_a_result_that_a_later_piece_overwrites(device: str, hook: Any) -> None:
    hook(Workspace(rows(device)))
    found = only(verify(built(Shares, device), rows(device), config=config(), sets=1))
    assert (found.stage, found.piece, found.value) == ("replay", "piece_2", "kept")
    assert found.line.startswith(marked_line("FAULT: overwrites"))
    detail = "it was right before, and is overwritten; the piece begins at that line"
    assert found.detail.endswith(f"; {detail}")


def test_a_piece_that_is_miscompiled(device: str) -> None:
    settings = config(compiler=miscompiler)
    found = only(verify(built(Calculates, device), rows(device), config=settings, sets=1))
    assert (found.stage, found.piece, found.op) == ("compilation", "piece_2", "torch.exp")
    assert found.line.startswith(marked_line("FAULT: shows"))
    assert found.detail.endswith("; this op makes the value")


def test_a_pass_that_is_wrong() -> None:
    settings = config(graph_passes=(WrongPass(),))
    found = only(verify(built(Calculates, "cpu"), rows("cpu"), config=settings, sets=1))
    assert found.stage == "tracing"
    assert "a pass or the trace" in found.detail


def test_a_manager_whose_op_has_frozen_a_number(hook: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, D)

        def forward(self, input_ids, positions, inputs_embeds=None):
            return torch.ops.cgentry.hooked(self.embed(input_ids))

    factor = 1.0
    hook(lambda x: softmax(x) * factor)
    made = manager("FULL", model=built(Scaled, "cpu"))
    made.capture()
    batches = [requests(1, 1, 1), requests(3, 1)]
    assert verify(made, batches).ok
    factor = 2.0
    found = verify(made, batches)
    assert [each.inputs for each in found.differences] == [1, 0]
    assert "an op inside has baked in a number" in found.differences[0].detail


def test_breakable_gives_something_else(hook: Any) -> None:
    """The kernel of an op does something else while plain Python is captured."""
    calls: list[int] = []

    def varies(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return softmax(x)

    hook(varies)
    model = cgcompile.compile(built(Stale, "cpu"), config())
    assert verify(model, rows("cpu"), sets=1).ok
    hook(lambda x: softmax(x) * 2)
    found = verify(model, rows("cpu"), sets=1, breakable=True)
    assert [check.ok for check in found.checks] == [False, False]
    assert [each.stage for each in found.differences] == ["replay", "breakable"]
    assert calls


# ---------------------------------------------------------------- values


def test_a_verification_as_json(hook: Any) -> None:
    model, x, _old = stale("cpu", hook, "factor", "PIECEWISE")
    found = verify(model, x, sets=1)
    read = json.loads(found.to_json())
    assert read == found.to_dict()
    assert (read["ok"], read["subject"]) == (False, "Stale")
    (difference,) = read["checks"][0]["findings"]
    assert (difference["piece"], difference["rows"]) == ("piece_2", list(range(6)))


def test_sets_of_inputs() -> None:
    x, ids = torch.randn(4, 3) * 5 + 7, torch.tensor([2, 5, 3, 4])
    given = InputSets({"x": x, "ids": ids, "n": 3})
    first = x.clone(), ids.clone()
    for number in (1, 2):
        args, kwargs = given.fill(number)
        assert (args, kwargs["n"]) == ((), 3)
        assert kwargs["x"] is x
        assert not torch.equal(x, first[0])
        assert 2 <= int(ids.min()) <= int(ids.max()) <= 5
        assert 2 < float(x.mean()) < 12
    made = InputSets(lambda number: (torch.full((number // 2 + 1,), float(number)),))
    assert made.fill(1)[0][0] is made.first[0][0]
    assert made.first[0][0].item() == 1.0
    assert made.fill(2)[0][0].tolist() == [2.0, 2.0]


def test_padded_inputs() -> None:
    x, ids, other = torch.randn(3, 2), torch.tensor([4, 5, 6]), torch.zeros(5)
    generator = torch.Generator().manual_seed(0)
    (large, more, same), _ = padded(((x, ids, other), {}), 6, "nan", generator)
    assert torch.equal(large[:3], x)
    assert large[3:].isnan().all()
    assert set(more[3:].tolist()) <= {4, 5, 6}
    assert same is other


@pytest.mark.parametrize(
    ("tolerance", "dtype", "expected", "text"),
    [
        (Tolerance(True), torch.float32, (0.0, 0.0), "bitwise"),
        (Tolerance(), torch.float32, (1e-3, 1e-4), "by dtype"),
        (Tolerance(), torch.bfloat16, (5e-2, 1e-2), "by dtype"),
        (Tolerance(), torch.complex64, (1e-3, 1e-4), "by dtype"),
        (Tolerance(), torch.int64, (0.0, 0.0), "by dtype"),
        (Tolerance(True, rtol=0.5), torch.float32, (0.5, 0.0), "rtol=0.5, atol=0"),
    ],
)
def test_tolerances(tolerance: Tolerance, dtype: Any, expected: Any, text: str) -> None:
    assert tolerance.of(dtype) == expected
    assert str(tolerance) == text
