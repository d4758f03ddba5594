"""A fault in what a model computes: which tool says what, and at which line.

Each model has one fault, on the line that ends in a marker; a right form of it passes the same
tool. What is told to who did not ask (an error, a counted reason) stands beside it.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.cases import D
from lib.debug import PIECEWISE, ROWS, at, examine, found, only, step, worse_than_notes
from lib.faulty_models import Workspace, attention, built, config, rows
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CUDAGraphWrapper, explain, verify
from cgcompile.debug import Diagnosis, bisect
from cgcompile.errors import AddressChangedError, CaptureError, HostValueChangedError
from cgcompile.reasons import Reason

# ---------------------------------------------------------------- 1: wrong padding


class Centres(nn.Module):
    def __init__(self, over: int) -> None:
        super().__init__()
        self.over = over

    def forward(self, x):
        x = attention(x.sin())
        return x - x.mean(self.over, keepdim=True)  # <mean>


class AttendsRows(nn.Module):
    """An attention of every row to every other, which writes its result."""

    def __init__(self, across: bool) -> None:
        super().__init__()
        self.shape = (-1, D) if across else (-1, 1, D)

    def forward(self, x):
        x = x[:, 0].sin().view(self.shape)
        out = torch.empty_like(x)
        torch.ops.cgentry.attend(x, x, x, out)  # <across>
        return out.cos()


@pytest.mark.parametrize(
    ("kind", "wrong", "correct", "op", "marker"),
    [
        (Centres, 0, 1, "mean", "mean"),
        (AttendsRows, True, False, "cgentry::attend", "across"),
    ],
)
def test_padding_that_reaches_real_rows(
    kind: Any, wrong: Any, correct: Any, op: str, marker: str
) -> None:
    def padded(argument: Any) -> Any:
        model = built(lambda: kind(argument), "cpu")
        return verify(model, rows("cpu"), config=config(), sets=1, padded_sizes=(8,))

    seen = only(padded(wrong))
    assert (seen.stage, seen.op, seen.padding_rows) == ("padding", op, ())
    assert len(seen.rows) > 1
    assert seen.line.startswith(at(kind, marker))
    assert padded(correct).ok


# ---------------------------------------------------------------- 2: an op that is not registered


class Attends(nn.Module):
    """Scaled by the metadata of the step, which the op reads in the forward context."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        out = torch.empty_like(q)
        torch.ops.cgentry.attend(q, k, v, out)  # <attend>
        return out + 1  # <shows>


def test_an_attention_op_that_is_not_registered() -> None:
    model, x = built(Attends, "cpu"), rows("cpu")
    registered = {"splitting_ops": ("cgentry::attend",)}
    seen = found(examine(model, x), "unregistered_attention", Attends.forward, "attend")
    assert (seen.severity, seen.op) == ("error", "cgentry::attend")
    assert str(registered["splitting_ops"]) in seen.fix
    assert examine(model, x, config=config(**registered)).findings == ()

    def later(**settings: Any) -> Any:
        """After a step with other metadata than that of the capture."""
        compiled = cgcompile.compile(model, config(**settings))
        with torch.inference_mode(), step(PIECEWISE, 1.0):
            assert verify(compiled, x, sets=2).ok
        with torch.inference_mode(), step(PIECEWISE, 3.0):
            return verify(compiled, x, sets=1)

    difference = only(later())
    assert (difference.stage, difference.op) == ("replay", "_operator.add")  # makes the value
    assert difference.line.startswith(at(Attends, "shows"))
    assert later(**registered).ok


# ---------------------------------------------------------------- 3: .item()


class Scales(nn.Module):
    def forward(self, x):
        y = x.relu()
        return y / y.sum().item()  # <item>


class ScalesRight(nn.Module):
    def forward(self, x):
        y = x.relu()
        return y / y.sum()


def test_item() -> None:
    x = rows("cpu")
    seen = found(examine(Scales(), x), "host_sync", Scales.forward, "item")
    assert (seen.severity, seen.op) == ("break", ".item()")
    assert not worse_than_notes(examine(ScalesRight(), x))
    assert verify(ScalesRight(), x, config=config(), sets=1).ok
    (broken,) = explain(Scales(), x).breaks
    assert broken.source.where.startswith(at(Scales, "item"))
    assert explain(ScalesRight(), x).breaks == ()
    with torch.inference_mode(), step(), pytest.raises(CaptureError) as caught:
        CUDAGraphWrapper(Scales(), config())(x)
    assert caught.value.op == "aten.item.default"
    found(Diagnosis.of_error(caught.value), "host_sync", Scales.forward, "item")


# ---------------------------------------------------------------- 4: a tensor on the CPU


class Places(nn.Module):
    def forward(self, x):
        x = x.sin()
        return x[torch.arange(3)]  # <arange>


class PlacesRight(nn.Module):
    def forward(self, x):
        x = x.sin()
        return x[torch.arange(3, device=x.device)]


def test_a_tensor_on_the_cpu() -> None:
    x = torch.ones(ROWS, 4, D, device="meta")  # stands for a GPU
    seen = found(examine(Places(), x), "cpu_tensor", Places.forward, "arange")
    assert seen.severity == "break"
    assert examine(PlacesRight(), x).findings == ()

    def eager(model: nn.Module) -> list[Any]:
        pieces = [piece for piece in explain(model, x).pieces if not piece.captured]
        return [(piece.why[0].reason, piece.source[0].where) for piece in pieces]

    ((reason, where),) = eager(Places())
    assert reason is Reason.CPU_TENSOR
    assert where.startswith(at(Places, "arange"))
    assert eager(PlacesRight()) == []


# ---------------------------------------------------------------- 5: an input that moves


class Reads(nn.Module):
    def forward(self, x):  # <input>
        return x.sin()


def test_an_input_buffer_that_moves() -> None:
    steady = rows("cpu")
    with step():
        diagnosis = examine(Reads(), prepare=lambda: rows("cpu"), config=config())
        assert examine(Reads(), prepare=lambda: steady, config=config()).findings == ()
    seen = found(diagnosis, "moving_input", Reads.forward, "input")
    assert (seen.severity, seen.op) == ("error", "input 0")

    def serve(x: torch.Tensor) -> torch.Tensor:
        return wrapper(x)  # <serve>

    wrapper = CUDAGraphWrapper(Reads(), config())
    with torch.inference_mode(), step():
        serve(steady)
        assert torch.equal(serve(steady), steady.sin())
        with pytest.raises(AddressChangedError, match="input 0") as caught:
            serve(rows("cpu"))
    found(Diagnosis.of_error(caught.value), "moving_input", serve, "serve")


# ---------------------------------------------------------------- 6: a number of the host


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def forward(self, x, shift=0.0):
        y = x.sin() + shift
        return y * self.scale


def test_a_number_that_went_stale() -> None:
    def changed(first: Any, change: Any) -> Any:
        model.scale = first
        wrapper = CUDAGraphWrapper(model, config())
        with torch.inference_mode(), step():
            assert verify(wrapper, x, sets=2).ok
            change()
            return verify(wrapper, x, sets=1)

    model, x, scale = Weighs(), rows("cpu"), torch.ones(())
    seen = only(changed(1.0, lambda: setattr(model, "scale", 3.0)))
    assert (seen.stage, seen.piece) == ("replay", "the result")
    assert seen.rows == tuple(range(6))
    assert seen.largest == pytest.approx(2 * x.sin().abs().max().item())  # 1.0 and 3.0 times it
    assert seen.detail.startswith("384 of 384 numbers differ, by up to 2")
    assert changed(scale, lambda: scale.fill_(3.0)).ok
    wrapper = CUDAGraphWrapper(model, config())
    with torch.inference_mode(), step():
        wrapper(x, 1.0)
        assert torch.equal(wrapper(x, 1.0), (x.sin() + 1.0) * scale)
        with pytest.raises(HostValueChangedError, match=r"input 1 is 2\.0, was 1\.0"):
            wrapper(x, 2.0)


# ---------------------------------------------------------------- 7: a result that is an alias


class Shares(nn.Module):
    """Two results of one op, the first of which is used last."""

    def forward(self, x):
        kept = torch.ops.cgentry.hooked(x.sin())
        y = attention(x)
        other = torch.ops.cgentry.hooked(y.relu())  # <other>
        return attention(other) + kept


def test_results_that_alias_one_workspace(hook: Any) -> None:
    model, x = built(Shares, "cpu"), rows("cpu")
    hook(Workspace(x))  # has one workspace while a graph is captured
    seen = only(verify(model, x, config=config(), sets=1))
    assert (seen.stage, seen.piece, seen.value) == ("replay", "piece_2", "kept")
    assert seen.line.startswith(at(Shares, "other"))
    assert "it was right before, and is overwritten" in seen.detail
    culprits = bisect(model, x, config=config())
    assert (culprits.stage, culprits.pieces) == ("replay", ("piece_0", "piece_2"))
    hook(lambda x: x * 2)
    assert verify(model, x, config=config(), sets=1).ok


# ---------------------------------------------------------------- 8: a vmap region


class Maps(nn.Module):
    def forward(self, x):
        def one(row):
            return F.scaled_dot_product_attention(row, row, row).sin()  # <vmap>

        return torch.vmap(one)(x.cos()[:, None])


class MapsRight(nn.Module):
    def forward(self, x):
        return attention(x.cos()[:, None]).sin()


@cgcompile.eager_break_during_capture
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_vmap_region_with_a_boundary() -> None:
    x = rows("cpu")
    for settings, severity in (({}, "note"), ({"splitting": "breakable"}, "error")):
        chosen = config(**settings)
        seen = found(examine(Maps(), x, config=chosen), "functorch", Maps, "vmap")
        assert (seen.severity, seen.op) == (severity, "torch.func Vmap")
        assert examine(MapsRight(), x, config=chosen).findings == ()

    def eager(model: nn.Module) -> tuple[Any, str]:
        (piece,) = [piece for piece in explain(model, x).pieces if not piece.captured]
        return {cause.reason for cause in piece.why}, piece.source[0].where

    reasons, where = eager(Maps())
    assert reasons == {Reason.SPLITTING_OP, Reason.STATE_REGION}
    assert where.startswith(at(Maps, "vmap"))
    assert eager(MapsRight())[0] == {Reason.SPLITTING_OP}


class MapsAlone(nn.Module):
    def forward(self, x):
        return torch.vmap(torch.sin)(x)  # <alone>


def test_a_vmap_region_without_a_boundary_is_captured() -> None:
    (piece,) = explain(MapsAlone(), rows("cpu")).pieces
    assert piece.captured
    assert piece.source[0].where.startswith(at(MapsAlone, "alone"))  # and no line of torch's
    assert verify(MapsAlone(), rows("cpu"), config=config(), sets=1).ok


class MapsABreak(nn.Module):
    def __init__(self, maps: bool) -> None:
        super().__init__()
        self.double = torch.vmap(doubled) if maps else doubled

    def forward(self, x):
        return self.double(x.cos())  # <break>


def test_a_break_inside_of_vmap() -> None:
    wrong, correct = (BreakableCUDAGraphWrapper(MapsABreak(maps), config()) for maps in (1, 0))
    x = rows("cpu")
    with torch.inference_mode(), step(PIECEWISE):
        with pytest.raises(
            CaptureError, match=r"'doubled' ran inside of torch.func \(Vmap\)"
        ) as caught:
            wrong(x)
        for _ in range(2):
            assert torch.equal(correct(x), x.cos() * 2)
    assert correct.counters.replays == 1
    found(Diagnosis.of_error(caught.value), "functorch", MapsABreak.forward, "break")
