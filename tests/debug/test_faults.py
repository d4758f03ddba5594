"""A fault in a model, or around it: which tool reports what, and at which line.

Each model has one fault, on the line that ends in a marker; a correct form passes the same tool.
Errors and counted reasons, which come without a tool, are beside it.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.cases import D
from lib.debug import (
    FULL,
    PIECEWISE,
    ROWS,
    by_line,
    examine,
    kinds,
    marker,
    only,
    only_finding,
    step,
)
from lib.faulty_models import Mixes, attention, built, config, rows
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CUDAGraphWrapper, explain, verify
from cgcompile.debug import Diagnosis, doctor
from cgcompile.errors import (
    AddressChangedError,
    CaptureError,
    DispatchError,
    HostValueChangedError,
)
from cgcompile.reasons import Reason


def eager_pieces(model: Any, x: torch.Tensor) -> list[tuple[set[str], str]]:
    """(reasons, marker) of each piece that is not captured."""
    pieces = [piece for piece in explain(model, x).pieces if not piece.captured]
    return [({why.reason for why in p.why}, marker(p.source[0])) for p in pieces]


def replayed(model: Any, x: torch.Tensor, expected: Any, mode: Any = FULL) -> None:
    """A correct form is captured and replayed."""
    wrapper = BreakableCUDAGraphWrapper(model, config(), mode)
    with torch.inference_mode(), step(mode):
        for _ in range(2):
            assert torch.equal(wrapper(x), expected)
    assert wrapper.counters.replays == 1


# ---------------------------------------------------------------- padding that reaches real rows


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


@pytest.mark.slow
@pytest.mark.parametrize("tails", ["random", "nan"])
@pytest.mark.parametrize(
    ("wrong", "right", "op", "mark"),
    [
        (Mixes, None, "mean", "mixes rows"),
        (lambda: Centres(0), lambda: Centres(1), "mean", "mean"),
        (lambda: AttendsRows(True), lambda: AttendsRows(False), "cgentry::attend", "across"),
    ],
)
def test_padding_that_reaches_real_rows(device, wrong, right, op, mark, tails) -> None:
    more = {"config": config(), "sets": 1, "padded_sizes": (8,), "tails": tails}
    difference = only(verify(built(wrong, device), rows(device), **more))
    assert (difference.stage, difference.op, marker(difference.line)) == ("padding", op, mark)
    assert difference.rows == tuple(range(ROWS)) if tails == "nan" else len(difference.rows) > 1
    assert difference.padding_rows == ()
    assert right is None or verify(built(right, device), rows(device), **more).ok


# ---------------------------------------------------------------- an op that is not registered


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
    finding = by_line(examine(model, x))["attend"]
    assert (finding.kind, finding.severity) == ("unregistered_attention", "error")
    assert str(registered["splitting_ops"]) in finding.fix
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
    assert marker(difference.line) == "shows"
    assert later(**registered).ok


# ---------------------------------------------------------------- host reads and CPU tensors


def scales(x):
    y = x.relu()
    return y / y.sum().item()  # <item>


def scales_on_the_device(x):
    y = x.relu()
    return y / y.sum()


def places(x):
    x = x.sin()
    return x[torch.arange(3)]  # <arange>


def places_on_the_device(x):
    x = x.sin()
    return x[torch.arange(3, device=x.device)]


def test_item() -> None:
    x = rows("cpu")
    assert kinds(examine(scales, x)) == {"item": "host_sync break"}
    (broken,) = explain(scales, x).breaks
    assert marker(broken.source) == "item"
    with torch.inference_mode(), step(), pytest.raises(CaptureError) as caught:
        CUDAGraphWrapper(scales, config())(x)
    assert caught.value.op == "aten.item.default"
    assert kinds(Diagnosis.of_error(caught.value)) == {"item": "host_sync error"}
    assert examine(scales_on_the_device, x).findings == explain(scales_on_the_device, x).breaks
    assert verify(scales_on_the_device, x, config=config(), sets=1).ok


def test_a_tensor_on_the_cpu() -> None:
    x = torch.ones(ROWS, 4, D, device="meta")  # stands for a GPU
    assert kinds(examine(places, x)) == {"arange": "cpu_tensor break"}
    assert eager_pieces(places, x) == [({Reason.CPU_TENSOR}, "arange")]
    assert examine(places_on_the_device, x).findings == ()
    assert eager_pieces(places_on_the_device, x) == []


# ---------------------------------------------------------------- inputs that move or change


class Weighs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def forward(self, x, shift=0.0):  # <input>
        y = x.sin() + shift
        return y * self.scale


def test_an_input_buffer_that_moves() -> None:
    steady, model = rows("cpu"), Weighs()
    with step():
        diagnosis = examine(model, prepare=lambda: rows("cpu"), config=config())
        assert examine(model, prepare=lambda: steady, config=config()).findings == ()
    assert kinds(diagnosis) == {"input": "moving_input error"}

    def serve(x: torch.Tensor) -> torch.Tensor:
        return wrapper(x)  # <serve>

    wrapper = CUDAGraphWrapper(model, config())
    with torch.inference_mode(), step():
        serve(steady)
        assert torch.equal(serve(steady), steady.sin())
        with pytest.raises(AddressChangedError, match="input 0") as caught:
            serve(rows("cpu"))
    assert kinds(Diagnosis.of_error(caught.value)) == {"serve": "moving_input error"}


def test_a_number_that_went_stale() -> None:
    def changed(first: Any, change: Any, **settings: Any) -> Any:
        model.scale = first
        wrapper = CUDAGraphWrapper(model, config(**settings))
        with torch.inference_mode(), step():
            assert verify(wrapper, x, sets=2).ok
            change()
            return verify(wrapper, x, sets=1)

    model, x, scale = Weighs(), rows("cpu"), torch.ones(())
    with pytest.raises(HostValueChangedError, match=r"self\.scale is 3\.0, was 1\.0") as stale:
        changed(1.0, lambda: setattr(model, "scale", 3.0))
    assert only_finding(stale.value).kind == "changing_attribute"
    difference = only(changed(1.0, lambda: setattr(model, "scale", 3.0), checks="-state"))
    assert (difference.stage, difference.piece, difference.rows) == (
        "replay",
        "the result",
        tuple(range(6)),
    )
    assert difference.largest == pytest.approx(
        2 * x.sin().abs().max().item()
    )  # 1.0 and 3.0 times it
    assert difference.detail.startswith("384 of 384 numbers differ, by up to 2")
    assert changed(scale, lambda: scale.fill_(3.0)).ok
    wrapper = CUDAGraphWrapper(model, config())
    with torch.inference_mode(), step():
        wrapper(x, 1.0)
        assert torch.equal(wrapper(x, 1.0), (x.sin() + 1.0) * scale)
        with pytest.raises(HostValueChangedError, match=r"input 1 is 2\.0, was 1\.0"):
            wrapper(x, 2.0)


# ---------------------------------------------------------------- vmap regions


def maps(x):
    def one(row):
        return F.scaled_dot_product_attention(row, row, row).sin()  # <vmap>

    return torch.vmap(one)(x.cos()[:, None])


def maps_nothing(x):
    return attention(x.cos()[:, None]).sin()


@pytest.mark.slow
def test_a_vmap_region_with_a_boundary() -> None:
    x = rows("cpu")
    for splitting, severity in (("fx", "note"), ("breakable", "error")):
        chosen = config(splitting=splitting)
        assert kinds(examine(maps, x, config=chosen)) == {"vmap": f"functorch {severity}"}
        assert examine(maps_nothing, x, config=chosen).findings == ()
    boundary, region = Reason.SPLITTING_OP, Reason.STATE_REGION
    assert eager_pieces(maps, x) == [({boundary, region}, "vmap")]
    assert eager_pieces(maps_nothing, x)[0][0] == {boundary}


@pytest.mark.slow
def test_a_vmap_region_without_a_boundary_is_captured() -> None:
    def alone(x):
        return torch.vmap(torch.sin)(x)  # <alone>

    (piece,) = explain(alone, rows("cpu")).pieces
    assert (piece.captured, marker(piece.source[0])) == (True, "alone")  # and no line of torch's
    assert verify(alone, rows("cpu"), config=config(), sets=1).ok


@cgcompile.eager_break_during_capture
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class MapsABreak(nn.Module):
    def __init__(self, maps: bool) -> None:
        super().__init__()
        self.double = torch.vmap(doubled) if maps else doubled

    def forward(self, x):
        return self.double(x.cos())  # <break>


def test_a_break_inside_of_vmap() -> None:
    x = rows("cpu")
    wrong, text = BreakableCUDAGraphWrapper(MapsABreak(True), config()), r"torch.func \(Vmap\)"
    with (
        torch.inference_mode(),
        step(PIECEWISE),
        pytest.raises(CaptureError, match=f"'doubled' ran inside of {text}") as caught,
    ):
        wrong(x)
    assert kinds(Diagnosis.of_error(caught.value)) == {"break": "functorch error"}
    replayed(MapsABreak(False), x, x.cos() * 2, PIECEWISE)


# ---------------------------------------------------------------- weights that move


class Moves(nn.Module):
    def __init__(self, moves: bool) -> None:
        super().__init__()
        self.up, self.moves = nn.Linear(D, D), moves

    def forward(self, x):
        x = x @ self.up.weight
        if self.moves:
            self.up.weight.data = self.up.weight.data.clone()  # <moves>
        return self.up(x)


def test_weights_that_move() -> None:
    x, model = rows("cpu"), Moves(False)
    finding = by_line(examine(Moves(True), x))["moves"]
    assert (finding.kind, finding.op) == ("replaced_attribute", "self.up.weight")
    assert examine(model, x).findings == ()

    wrapper = CUDAGraphWrapper(model, config())
    with torch.inference_mode(), step():
        wrapper(x)
        cgcompile.update_weights(model, {"up.bias": torch.ones(D)})
        assert torch.equal(wrapper(x), model(x))
        model.up.weight.data = torch.ones(D, D)
        with pytest.raises(AddressChangedError, match=r"weight 'up\.weight' was rep") as caught:
            wrapper(x)  # <call>
    assert kinds(Diagnosis.of_error(caught.value)) == {"call": "replaced_attribute error"}

    compiled = cgcompile.compile(model, config(), guards="none")  # its docs name this exception
    assert verify(compiled, x, bisect=True).ok
    model.up.weight.data = torch.zeros(D, D)
    fault = only(verify(compiled, x, bisect=True))
    assert (fault.stage, "traced anew it is right" in fault.detail) == ("tracing", True)
    compiled.invalidate("weights moved")
    assert verify(compiled, x, bisect=True).ok


# ---------------------------------------------------------------- generators and caches


class Draws(nn.Module):
    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return x + torch.rand(x.shape, generator=self.generator, device=x.device)  # <draw>


def test_a_generator_that_is_not_registered() -> None:
    x, model = rows("cpu"), Draws(torch.Generator())
    assert kinds(examine(model, x)) == {"draw": "generator break"}
    assert kinds(examine(Draws(None), x)) == {"draw": "random note"}
    with torch.inference_mode(), step():
        with pytest.raises(CaptureError, match="not registered") as caught:
            CUDAGraphWrapper(model, config())(x)
        default = CUDAGraphWrapper(Draws(None), config())
        assert not torch.equal(default(x).clone(), default(x))
    assert default.counters.replays == 1
    assert kinds(Diagnosis.of_error(caught.value)) == {"draw": "generator error"}
    assert only_finding(caught.value).op.startswith("aten.rand.generator")


class Decodes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)

    def forward(self, x, cache):
        q, k, v = (tensor.view(1, 1, -1, D) for tensor in self.qkv(x).chunk(3, -1))
        k, v = cache.update(k, v, 0)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.mark.slow
def test_a_dynamic_cache() -> None:
    from transformers import DynamicCache, LlamaConfig, StaticCache

    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
    static = StaticCache(LlamaConfig(hidden_size=D, **heads), max_cache_len=16)
    model, x = Decodes(), torch.randn(1, D)
    grows = examine(model, x, DynamicCache()).of_kind("growing_state")
    for finding, name in zip(grows, ("keys", "values"), strict=True):
        assert (finding.kind, finding.severity) == ("growing_state", "break")
        assert finding.op == f"input 1.layers[0].{name}"
        assert finding.source.file.endswith("cache_utils.py")
        assert finding.source.code.startswith(f"self.{name} = torch.cat(")
    assert examine(model, x, static).findings == ()

    def served(cache: Any) -> cgcompile.Backend:
        backend = cgcompile.Backend(config())
        compiled = torch.compile(model, backend=backend)
        with torch.inference_mode():
            for _ in range(8):
                compiled(x, cache)
        return backend

    finding = only_finding(doctor(served(DynamicCache())))
    assert (finding.kind, "StaticCache" in finding.message) == (Reason.GROWING_STATE.value, True)
    backend = served(static)
    assert doctor(backend).findings == ()
    assert backend.counters.replays >= 4


# ---------------------------------------------------------------- another mode than before


class Steps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):  # <forward>
        self.steps.add_(1)  # <write>
        return x * self.scale + self.steps


def test_a_buffer_that_was_made_in_inference_mode() -> None:
    x = rows("cpu")
    with torch.inference_mode():
        model = Steps()
    with torch.no_grad():
        diagnosis = doctor(model, x)
        assert doctor(Steps(), x).findings == ()
        with pytest.raises(RuntimeError, match="outside InferenceMode") as caught:
            model(x)
    assert kinds(diagnosis) == {"write": "inference_tensor error"}
    assert only_finding(caught.value).kind == "inference_tensor"
    assert examine(model, x).findings == ()


def test_grad_mode_after_a_capture_in_inference_mode() -> None:
    x, model = rows("cpu"), Steps()
    wrapper = CUDAGraphWrapper(model, config())
    strict = CUDAGraphWrapper(model, config(on_fallback="raise"))
    with torch.inference_mode(), step():
        wrapper(x), strict(x)
    with step():
        wrapper(x)
        with pytest.raises(DispatchError, match=Reason.GRADIENTS.value):
            strict(x)
        with torch.no_grad():
            wrapper(x)
    assert (wrapper.counters.plain, wrapper.counters.replays) == ({Reason.GRADIENTS: 1}, 1)
    finding = only_finding(doctor(wrapper))
    assert (finding.kind, "inference_mode()" in finding.fix) == ("gradients", True)
    assert by_line(doctor(model, x))["forward"].fix == finding.fix
