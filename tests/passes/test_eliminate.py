"""What the eliminating passes remove, and what they must leave alone; every case against eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.asserts import compiled_graph
from lib.elimination import removed, run
from torch import nn

import cgcompile
from cgcompile.passes import EliminateClones, EliminateNoOps, PassManager

D = 16
pytestmark = pytest.mark.usefixtures("without_gradients")


def x(*sizes: int) -> torch.Tensor:
    return torch.randn(*(sizes or (6, 4, D)))


def noops(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> dict[str, int]:
    return removed(function, *(inputs or (x(),)), **settings)["eliminate_noops"]


def clones(function: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> dict[str, int]:
    return removed(function, *(inputs or (x(),)), **settings)["eliminate_clones"]


def around(noop: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A program in which only the no-op can go."""
    return lambda t: noop(t * 2).sin()


# ---------------------------------------------------------------- no-ops

GO: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "dropout_off": (lambda t: F.dropout(t, 0.5, False), "torch.nn.functional.dropout"),
    "dropout_by_name": (lambda t: F.dropout(t, training=False), "torch.nn.functional.dropout"),
    "dropout_of_0": (lambda t: F.dropout(t, 0.0, True), "torch.nn.functional.dropout"),
    "dropout_in_place": (lambda t: F.dropout(t, 0.5, False, True), "torch.nn.functional.dropout"),
    "torch_dropout": (lambda t: torch.dropout(t, 0.5, False), "torch.dropout"),
    "aten_dropout": (lambda t: torch.ops.aten.dropout(t, 0.5, False), "aten::dropout"),
    "alpha_dropout": (lambda t: F.alpha_dropout(t, 0.5), "torch.nn.functional.alpha_dropout"),
    "dropout2d": (
        lambda t: F.dropout2d(t[None], 0.5, False)[0],
        "torch.nn.functional.dropout2d",
    ),
    "to_dtype": (lambda t: t.to(torch.float32), "to"),
    "to_device": (lambda t: t.to("cpu"), "to"),
    "to_both": (lambda t: t.to(device="cpu", dtype=torch.float32), "to"),
    "float": (lambda t: t.float(), "float"),
    "type": (lambda t: t.type(torch.float32), "type"),
    "type_as": (lambda t: t.type_as(t.cos()), "type_as"),
    "contiguous": (lambda t: t.contiguous(), "contiguous"),
    "view": (lambda t: t.view(t.shape), "view"),
    "view_minus_1": (lambda t: t.view(-1, 4, D), "view"),
    "reshape": (lambda t: t.reshape(t.shape[0], 4, D), "reshape"),
    "torch_reshape": (lambda t: torch.reshape(t, t.shape), "torch.reshape"),
    "aten_view": (lambda t: torch.ops.aten.view.default(t, t.shape), "aten::view"),
    "flatten": (lambda t: t.flatten(1, 1), "flatten"),
    "expand": (lambda t: t.expand(-1, -1, -1), "expand"),
    "permute": (lambda t: t.permute(0, 1, 2), "permute"),
    "transpose": (lambda t: t.transpose(1, 1), "transpose"),
    "squeeze": (lambda t: t.squeeze(), "squeeze"),
    "slice": (lambda t: t[:], "_operator.getitem"),
    "slices": (lambda t: t[:, 0:4, ...], "_operator.getitem"),
    "slice_beyond": (lambda t: t[:, :9], "_operator.getitem"),
    "slice_by_size": (lambda t: t[: t.shape[0]], "_operator.getitem"),
    "narrow": (lambda t: t.narrow(1, 0, 4), "narrow"),
    "real": (lambda t: torch.real(t), "torch.real"),
    "half_turns": (lambda t: t.transpose(0, 1).transpose(0, 1).contiguous(), "contiguous"),
}


@pytest.mark.parametrize("name", GO)
def test_what_returns_its_argument_goes(name: str) -> None:
    noop, op = GO[name]
    gone = noops(around(noop))
    assert gone.pop(op) == -1
    assert not {**gone, "_operator.getitem": 0}.keys() - {"_operator.getitem"}


STAY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout_on": lambda t: F.dropout(t, 0.5, True),
    "dropout_default": lambda t: F.dropout(t),
    "to_copy": lambda t: t.to(torch.float32, copy=True).add_(1) + t,
    "to_half": lambda t: t.to(torch.float16),
    "contiguous_copy": lambda t: t.transpose(1, 2).contiguous(),
    "view_other": lambda t: t.view(t.shape[0], D, 4),
    "view_dtype": lambda t: t.view(torch.int32) * 1.5,
    "expand_more": lambda t: t[:, :1].expand(-1, 4, -1),
    "permute_other": lambda t: t.permute(2, 0, 1),
    "slice_part": lambda t: t[:, 1:],
    "slice_turned": lambda t: t[::2],
    "flip": lambda t: t.flip(0),
    "index_all": lambda t: t[torch.arange(6)],
    "detach": lambda t: t.detach(),
    "add_0": lambda t: t + 0,
    "add_0_0": lambda t: t + 0.0,
    "mul_1": lambda t: t * 1,
    "mul_1_0": lambda t: t * 1.0,
    "div_1": lambda t: t / 1,
    "whole_by_float": lambda t: t.to(torch.int32) * 1.0,
    "whole_plus_1": lambda t: t.to(torch.int32) + 1,
    "whole_times_0": lambda t: t.to(torch.int32) * 0,
    "whole_true": lambda t: t.to(torch.int32) * True,
    "bool_times_1": lambda t: (t > 0) * 1,
    "alpha": lambda t: torch.add(t.to(torch.int32), 0, alpha=2),
}


@pytest.mark.parametrize("name", STAY)
def test_what_computes_stays(name: str) -> None:
    assert noops(around(STAY[name])) == {}


def test_negative_zero_and_nan_keep_their_bits() -> None:
    odd = torch.tensor([-0.0, 0.0, float("nan"), float("inf"), 1e-45])
    for noop in (lambda t: t + 0, lambda t: t * 1, lambda t: t - 0.0, lambda t: t[:].float()):
        expected = noop(odd).view(torch.int32)
        results, _, _ = run(noop, (odd,), compiler="eager")
        assert torch.equal(results[0].view(torch.int32), expected)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_arithmetic_of_whole_numbers_that_changes_nothing(dtype: torch.dtype) -> None:
    def program(t):
        rows = torch.arange(t.shape[0], dtype=dtype)
        return ((rows + 0) - 0) * 1 + t[:, 0, 0]

    assert noops(program) == {"_operator.add": -1, "_operator.mul": -1, "_operator.sub": -1}


@pytest.mark.slow
def test_a_sum_that_is_written_is_a_copy() -> None:
    def both_used(t):
        rows = torch.arange(t.shape[0])
        moved = rows + 0
        moved.add_(1)
        return rows + t.sum().int(), moved + 1

    def last_use(t):
        rows = torch.arange(t.shape[0]) + 0
        rows.add_(1)
        return rows * t.sum()

    assert noops(both_used) == {}
    assert noops(last_use) == {"_operator.add": -1}


@pytest.mark.slow
def test_the_object_that_the_caller_gets_stays() -> None:
    """``t[:]`` is another tensor object than ``t``, and ``h.view(...)`` than ``h``."""
    assert noops(lambda t: t[:]) == {}
    assert noops(lambda t: (t.add_(1)[:], t.sin())) == {}
    assert noops(lambda t: ((h := t.sin()), h[:])) == {}
    assert noops(lambda t: ((h := t.sin())[:], h.view(h.shape))) == {}
    assert noops(lambda t: (h := t.sin(), h[:].add_(1))) == {}  # add_ returns what h[:] made
    assert noops(lambda t: (h := t.sin(), h[:].add_(1) + 1)) == {"_operator.getitem": -1}
    assert noops(lambda t: t[:].add_(1)) == {}
    assert noops(lambda t: t.sin()[:]) == {"_operator.getitem": -1}
    assert noops(lambda t: ((h := t.sin()[:]), h)) == {"_operator.getitem": -1}


@pytest.mark.slow
def test_a_tensor_that_is_changed_itself_stays() -> None:
    def turned(t):
        h = t * 2
        view = h[:]
        h.transpose_(1, 2)
        return view.sin(), h + 1

    def marked(t):
        h = (t * 2).view(t.shape)
        h.requires_grad_(False)
        return h.sin()

    assert noops(turned) == {}
    assert noops(marked) in ({}, {"view": -1})  # Dynamo may drop what marks nothing


@pytest.mark.parametrize(
    "views",
    [
        lambda t: F.dropout(t[:][:], 0.5, False),
        lambda t: F.dropout(t, 0.5, False)[:][:],
        lambda t: F.dropout(t[:], 0.0, True)[:],
        lambda t: F.dropout(F.dropout(t, 0.5, False)[:], 0.5, False),
    ],
)
def test_a_view_of_an_input_is_returned_through_dropout(views) -> None:
    """The caller gets another object than what was passed, and dropout is no reason to forget."""
    x = torch.randn(4, 4, D)
    assert views(x) is not x
    removed(lambda t: (views(t), t.sin()), x)  # compares what is one object


@pytest.mark.slow
def test_dropout_that_is_off_aliases_as_in_eager() -> None:
    """torch's own compiler makes a copy of it, and would miss the write."""

    def program(t):
        h = t * 2
        view = F.dropout(h, 0.5, False).view(t.shape[0], -1)
        h.add_(1)
        y = F.scaled_dot_product_attention(t, t, t)
        h.mul_(3)
        return view + 1, y

    for compiler in ("eager", "aot"):
        results, _, _ = run(program, (t := x(),), compiler=compiler)
        assert torch.equal(results[0], program(t)[0])


@pytest.mark.slow
def test_views_of_what_went_are_known_to_share_its_memory() -> None:
    """Else no later pass would see the hazard of a write to the one and a read of the other."""
    gm = None

    def look(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        nonlocal gm
        gm = PassManager([EliminateNoOps(), EliminateClones()])(graph)
        return gm

    def program(t):
        h = t * 2
        dropped = F.dropout(h, 0.5, False)
        first, second = dropped.view(-1).chunk(2)
        copy = (t + 1).clone()
        half = copy[:, :2]
        copy.mul_(2)
        return first + 1, second + 2, half + 1

    look.name, look.uuid = "look", lambda: "look"  # type: ignore[attr-defined]
    run(program, (x(),), compiler="eager", passes=(look,))
    assert gm is not None
    keys = {}
    for node in gm.graph.nodes:
        value = node.meta.get("example_value")
        parts = value if isinstance(value, (tuple, list)) else [value]
        keys[node.name] = [p.untyped_storage()._cdata for p in parts if isinstance(p, torch.Tensor)]
    assert "dropped" not in keys
    assert "copy" not in keys
    assert keys["first"] == keys["second"] == keys["h"]
    assert keys["half"] == keys["add"]


@pytest.mark.slow
def test_no_guard_comes_of_comparing_sizes() -> None:
    def program(t):
        h = (t * 2).view(-1, t.shape[1], D)[: t.shape[0]].expand(t.shape)
        return h.clone().mul_(2)

    def guards(**settings: Any) -> list[str]:
        _, _, backend = run(program, (x(),), compiler="eager", **settings)
        shapes = backend.graphs[0].split.symbols
        return [str(guard) for guard, _ in shapes.guards()]

    with_passes = guards()
    assert with_passes == guards(passes="-eliminate_noops,-eliminate_clones")


def test_parameters_and_gradients_keep_their_history() -> None:
    """A view made under no_grad is cut off from its base: they are not the same tensor."""
    weight = nn.Parameter(torch.randn(D))

    def program(t):
        with torch.no_grad():
            w = weight.view(D)
        return (t * w + t * weight.view(D)).sum()

    backend = cgcompile.Backend(compiler="eager")
    with torch.enable_grad():
        torch.compile(program, backend=backend)(t := x()).backward()
        gradient, weight.grad = weight.grad, None
        program(t).backward()
    assert torch.equal(gradient, weight.grad)


@pytest.mark.slow
def test_functorch_regions_are_left_alone() -> None:
    def program(t):
        return torch.func.vmap(lambda row: row.view(row.shape)[:] * 2)(t)

    assert noops(program) == {}


@pytest.mark.slow
def test_a_declared_boundary_stays() -> None:
    attend = cgcompile.SplittingOp(predicate=lambda node: node.target == "contiguous", name="mine")

    def program(t):
        with cgcompile.eager_region():
            h = (t * 2).float()
        return h.contiguous().sin()

    assert noops(program) == {"contiguous": -1}
    assert noops(program, splitting_ops=(attend,)) == {}


# ---------------------------------------------------------------- copies


@pytest.mark.slow
def test_an_in_place_boundary_writes_the_source_of_a_clone() -> None:
    def program(t):
        h = (t * 2).clone()
        torch.ops.cgtest.scale_(h, 0.5)
        return h.sin()

    assert clones(program) == {"clone": -1}
    assert clones(program, compiler="aot") == {"clone": -1}


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "method": lambda h: h.clone(),
    "function": lambda h: torch.clone(h),
    "op": lambda h: torch.ops.aten.clone.default(h),
    "to": lambda h: h.to(torch.float32, copy=True),
    "filled": lambda h: torch.empty_like(h).copy_(h),
    "filled_new": lambda h: h.new_empty(h.shape).copy_(h),
    "of_a_clone": lambda h: h.clone().clone(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_every_form_of_a_copy(name: str) -> None:
    copy = COPIES[name]

    def program(t):
        h = copy(t * 2)
        view = h.view(t.shape[0], -1)
        torch.ops.cgtest.scale_(view, 0.5)
        h[:, 0] = 1.0
        return h.sin(), view.cos()

    def used_later(t):
        source = t * 2
        h = copy(source)
        torch.ops.cgtest.scale_(h, 0.5)
        return source + h

    assert sum(clones(program).values()) == (
        -2 if name in ("filled", "filled_new", "of_a_clone") else -1
    )
    assert sum(clones(used_later).values()) == (-1 if name == "of_a_clone" else 0)


@pytest.mark.slow
def test_a_copy_without_writes_is_removed() -> None:
    assert clones(lambda t: (h := t * 2) + h.clone()) == {"clone": -1}
    assert clones(lambda t: ((h := t * 2).clone() + 1, h.view(-1))) == {"clone": -1}
    assert clones(lambda t: (h := t * 2, h.clone())) == {}  # the caller may write one of them


def attended(t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(t)
    torch.ops.cgtest.attend(h, h, h, out)
    return out


NEEDED: dict[str, Callable[[torch.Tensor], Any]] = {
    "of_an_input": lambda t: t.clone().mul_(2),
    "of_a_view_of_an_input": lambda t: t[:].clone().mul_(2) + t,
    "of_an_input_read_alone": lambda t: t.clone() + 1,
    "of_a_written_input": lambda t: t.add_(1).clone().mul_(2),
    "source_returned": lambda t: ((h := t * 2), h.clone().mul_(2)),
    "view_returned": lambda t: ((h := t * 2).view(-1), h.clone().mul_(2)),
    "view_read_later": lambda t: (v := (h := t * 2)[:, 1:], h.clone().mul_(2) , v + 1)[1:],
    "source_written_later": lambda t: ((h := t * 2).clone(), h.mul_(2) + 1),
    "copy_written": lambda t: (c := (h := t * 2).clone(), c.add_(1), h + 1)[1:],
    "by_a_view": lambda t: (c := (h := t * 2).clone(), c[0].add_(1), h + 1)[::2],
    "expanded": lambda t: (t * 2)[:, :1].expand(-1, 4, -1).clone().mul_(2),
    "other_strides": lambda t: (t * 2).transpose(1, 2).clone(memory_format=torch.contiguous_format).mul_(2),
    "sliced": lambda t: (t * 2)[:, 1:3].clone().mul_(2),
    "shifted": lambda t: (t * 2)[1:].clone().mul_(2),
    "foreign_memory": lambda t: torch.ops.cgtest.unsafe(t).clone().mul_(2),
    "filled_late": lambda t: (b := torch.empty_like(t), b.fill_(1), b.copy_(t * 2), b.mul_(2))[-1],
    "filled_in_part": lambda t: torch.zeros_like(t).copy_((t * 2)[:1]).mul_(2),
    "filled_other_dtype": lambda t: torch.empty_like(t, dtype=torch.float64).copy_(t * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_a_copy_that_is_needed_stays(name: str) -> None:
    assert clones(NEEDED[name]) == {}


@pytest.mark.slow
def test_a_copy_of_a_parameter_or_buffer_stays() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(D))
            self.register_buffer("cache", torch.zeros(4, D))

        def forward(self, t):
            return t * self.weight.clone().mul_(2) + self.cache.clone().add_(1), self.cache + 1

    assert clones(Model()) == {}
    assert clones(Model(), x(6, 4, D), compiler="aot") == {}


def test_a_copy_that_a_gradient_needs_stays() -> None:
    weight = nn.Parameter(torch.randn(D))

    def program(t):
        h = (t * weight).exp()
        return h.clone().mul_(2).sum()  # without the clone, mul_ writes what exp keeps

    backend = cgcompile.Backend(compiler="eager")
    with torch.enable_grad():
        torch.compile(program, backend=backend)(t := x()).backward()
        gradient, weight.grad = weight.grad, None
        program(t).backward()
    assert torch.equal(gradient, weight.grad)


@pytest.mark.slow
def test_a_copy_in_an_eager_region_or_declared_stays() -> None:
    clone = cgcompile.SplittingOp(predicate=lambda node: node.target == "clone", name="mine")

    def marked(t):
        with cgcompile.eager_region():
            h = (t * 2).clone()
        return h.mul_(2)

    assert clones(marked) == {}
    assert clones(lambda t: (t * 2).clone().mul_(2), splitting_ops=(clone,)) == {}


@pytest.mark.slow
def test_attention_into_a_clone() -> None:
    def program(t):
        out = (t * 2).clone()
        torch.ops.cgtest.attend(t, t, t, out)
        return out.sin()

    assert clones(program) == {"clone": -1}
    assert clones(lambda t: attended(t, (t * 2).clone()).sin()) == {"clone": -1}


@pytest.mark.slow
def test_size_that_only_data_tells_is_left_alone() -> None:
    def program(t):
        rows = torch.nonzero(t[:, 0, 0] > 0).squeeze(-1)
        return (t[rows] * 2).clone().mul_(2)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        assert clones(program) == {}


def test_replayed_steps_write_the_source_at_every_replay() -> None:
    def program(t):
        h = (t * 2).clone()
        torch.ops.cgtest.scale_(h, 0.5)
        return h.sin() + 1

    backend = cgcompile.Backend(
        compiler="eager", capture_device="host", splitting_ops=("cgtest::scale_",)
    )
    compiled = torch.compile(program, backend=backend)
    previous = None
    with torch.inference_mode():
        for _ in range(4):
            t = x()
            result = compiled(t)
            assert torch.equal(result, program(t))
            assert previous is None or not torch.equal(result, previous)
            previous = result.clone()
    assert backend.counters.replays == 2


@pytest.mark.slow
def test_nothing_goes_from_a_graph_without_such_ops() -> None:
    records = {r.name: r for r in compiled_graph("sdpa").split.passes}
    assert records["eliminate_noops"].difference == {}
    assert records["eliminate_clones"].difference == {}
