"""Additions that Inductor took into matrix products are taken out where they cost a copy."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cgcompile
from cgcompile import compat
from cgcompile.compat.addends import AddendsApart, addends_apart

aten = torch.ops.aten


def fused(
    addend: tuple[Any, ...] = (4, 6),
    device: str = "cuda",
    dtype: torch.dtype = torch.float32,
    kwargs: Mapping[str, Any] | None = None,
    traced: bool = False,
    rows: Any = 4,
) -> fx.GraphModule:
    """A product with an addend, as Inductor makes it of ``x + a @ b``, on a device that may lack.

    Args:
        addend: its shape.
        device: of all.
        dtype: of all.
        kwargs: of ``addmm``.
        traced: as if the user had written it.
        rows: of the product.
    """
    graph = fx.Graph()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        if rows is None:
            rows = mode.shape_env.create_unbacked_symint()
            addend = (rows, *addend[1:])
        for name, shape in (("x", addend), ("a", (rows, 5)), ("b", (5, 6))):
            node = graph.placeholder(name)
            node.meta["val"] = torch.empty(shape, device=device, dtype=dtype)
        x, a, b = graph.nodes
        node = graph.call_function(aten.addmm.default, (x, a, b), dict(kwargs or {}))
        node.meta = {"val": torch.empty(rows, 6, device=device, dtype=dtype), "stack_trace": "here"}
    if traced:
        node.meta["seq_nr"] = 3
    graph.output((node, graph.call_function(aten.relu.default, (node,))))
    return fx.GraphModule({}, graph)


def passed(gm: fx.GraphModule) -> list[str]:
    AddendsApart()(gm.graph)
    gm.graph.lint()
    gm.recompile()
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


APART = ["aten.mm.default", "aten.add.Tensor", "aten.relu.default"]
KEPT = ["aten.addmm.default", "aten.relu.default"]

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "as large as the product": ({}, APART),
    "in half precision": ({"dtype": torch.bfloat16}, APART),
    "rows that vary": ({"rows": None}, APART),
    "a bias, which is not copied": ({"addend": (6,)}, KEPT),
    "one row for all": ({"addend": (1, 6)}, KEPT),
    "scaled": ({"kwargs": {"alpha": 2}}, KEPT),
    "the user's own": ({"traced": True}, KEPT),
    "on a CPU": ({"device": "cpu"}, KEPT),
}


@pytest.mark.parametrize("name", CASES)
def test_which_are_taken_apart(name: str) -> None:
    given, expected = CASES[name]
    assert passed(fused(**given)) == expected


def test_the_results_are_those_of_eager_mode() -> None:
    gm = fused()
    given = torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)
    before = gm(*given)
    assert passed(gm) == APART
    x, a, b = given
    after = gm(*given)
    assert torch.equal(after[0], x + a @ b)
    assert torch.equal(after[1], (x + a @ b).relu())
    torch.testing.assert_close(before, after)


def test_new_ops_have_values_of_their_own_and_the_line_of_the_user() -> None:
    gm = fused(rows=None)
    passed(gm)
    product, total, _ = (node for node in gm.graph.nodes if node.op == "call_function")
    one, other = product.meta["val"], total.meta["val"]
    assert one.shape == other.shape
    assert one.device == other.device
    assert one.untyped_storage()._cdata != other.untyped_storage()._cdata
    assert product.meta["stack_trace"] == total.meta["stack_trace"] == "here"


def test_it_is_part_of_the_key() -> None:
    needed = addends_apart()
    with_it = compat.compiler_settings({})["inductor"]
    assert ("AddendsApart" in with_it) == (needed is not None)


def test_a_pass_of_the_users_stays() -> None:
    class Theirs(AddendsApart):
        def uuid(self) -> str:
            return "theirs"

    theirs = {"post_grad_custom_post_pass": Theirs()}
    with torch._inductor.config.patch(theirs):
        ambient = compat.compiler_settings({})["inductor"]
    for text in (ambient, compat.compiler_settings(theirs)["inductor"]):
        assert "post_grad_custom_post_pass = Theirs 'theirs'" in text


@pytest.mark.gpu
def test_a_residual_that_leaves_a_piece_is_not_copied() -> None:
    """As many kernels as torch.compile runs for the same layer, but for what no piece can save."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x + self.one(x)
            h = x + self.two(F.rms_norm(x, (64,)))
            return h, F.rms_norm(h, (64,))

    model = Layer().cuda().bfloat16()
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    backend = cgcompile.Backend(compiler="inductor", cudagraph_mode="NONE")
    compiled = torch.compile(model, backend=backend)
    with torch.inference_mode():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=2e-2)
        with torch.profiler.profile() as seen:
            compiled(x)
            torch.cuda.synchronize()
    copies = [each.name for each in seen.events() if "Memcpy DtoD" in each.name]
    assert copies == []
