"""The passes that cgcompile adds to Inductor, and the settings that come with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InductorError
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cgcompile
from cgcompile.torch_compat import inductor
from cgcompile.torch_compat.inductor import (
    fold_batches,
    spell_out,
    spread_weights,
    take_apart,
    unfused_residuals,
)

LAST, KERNELS = "post_grad_custom_post_pass", "_post_fusion_custom_pass"


def traced(function: Callable[..., Any], *shapes: tuple[int, ...], device: str = "cuda") -> Any:
    """The ATen graph of a function, as if Inductor had made it, for fake tensors of these shapes."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, device=device) for shape in shapes]
        gm = make_fx(function)(*inputs)
    for node in gm.graph.nodes:
        node.meta.pop("seq_nr", None)
    return gm


def ops(gm: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def addmm(gm: fx.GraphModule) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    return node


def test_a_whole_tensor_is_added_apart() -> None:
    gm = traced(lambda x, a, b: torch.addmm(x, a, b).relu(), (4, 6), (4, 5), (5, 6))
    meta = addmm(gm).meta["val"]
    take_apart(gm.graph)
    gm.graph.lint()
    gm.recompile()
    assert ops(gm) == ["aten.mm.default", "aten.add.Tensor", "aten.relu.default"]
    product, total = (node.meta["val"] for node in list(gm.graph.nodes)[3:5])
    assert total is meta
    assert product is not meta
    assert (product.shape, product.stride(), product.dtype) == ((4, 6), (6, 1), torch.float32)
    assert product.device.type == "cuda"
    x, a, b = torch.randn(4, 6), torch.randn(4, 5), torch.randn(5, 6)
    torch.testing.assert_close(gm(x, a, b), torch.addmm(x, a, b).relu())


@pytest.mark.parametrize(
    ("added", "kwargs", "device"),
    [
        ((6,), {}, "cuda"),  # a bias
        ((1, 6), {}, "cuda"),
        ((4, 1), {}, "cuda"),
        ((4, 6), {"beta": 2}, "cuda"),
        ((4, 6), {"alpha": 0.5}, "cuda"),
        ((4, 6), {}, "cpu"),
    ],
)
def test_all_else_stays(added: tuple[int, ...], kwargs: dict[str, Any], device: str) -> None:
    gm = traced(
        lambda x, a, b: torch.addmm(x, a, b, **kwargs), added, (4, 5), (5, 6), device=device
    )
    before = str(gm.graph)
    take_apart(gm.graph)
    assert str(gm.graph) == before
    assert ops(gm) == ["aten.addmm.default"]


def test_what_the_user_wrote_stays() -> None:
    gm = traced(torch.addmm, (4, 6), (4, 5), (5, 6))
    addmm(gm).meta["seq_nr"] = 3
    take_apart(gm.graph)
    assert ops(gm) == ["aten.addmm.default"]


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [2, -0.5])
@pytest.mark.parametrize(("turned", "own"), [(False, False), (True, False), (False, True)])
def test_a_factor_is_not_forgotten(alpha: float, turned: bool, own: bool) -> None:
    """torch 2.11 and 2.13 forget it."""
    w = torch.randn(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.add(*((x, x @ w) if turned else (x @ w, x)), alpha=alpha)

    saw = []
    options = {"post_grad_custom_pre_pass": saw.append} if own else {}
    backend = cgcompile.Backend(
        compiler="inductor", capture_device="host", inductor_options=options
    )
    compiled = torch.compile(function, backend=backend, dynamic=True)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 8)
            torch.testing.assert_close(compiled(x), function(x))
    assert backend.counters.replays == 2
    assert bool(saw) is own
    (piece,) = backend.graphs[0].compilation.pieces
    assert (piece.key is None) is own  # a plain function may change


def test_scaled_additions_are_spelled_out() -> None:
    gm = traced(lambda x, y: torch.add(x, y, alpha=3) + torch.add(x, y), (4, 6), (4, 6))
    spell_out(gm.graph)
    gm.graph.lint()
    gm.recompile()
    add = "aten.add.Tensor"
    assert ops(gm) == ["aten.mul.Tensor", add, add, add]
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    torch.testing.assert_close(gm(x, y), x + 3 * y + (x + y))


def test_a_product_with_a_repeated_weight_is_no_batch() -> None:
    """As of a linear layer of x [B, 1, K] whose strides are (K, 1, 1)."""
    gm = traced(lambda x, w: torch.bmm(x, w.expand(4, 5, 6)) + 1, (4, 1, 5), (5, 6))
    meta = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)[0].meta
    fold_batches(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    gm.recompile()
    names = ["squeeze.dim", "mm.default", "unsqueeze.default", "add.Tensor"]
    assert ops(gm) == [f"aten.{name}" for name in names]
    new = list(gm.graph.nodes)[-3].meta["val"]
    before = meta["val"]
    assert (new.shape, new.stride(), new.device) == (before.shape, before.stride(), before.device)
    x, w = torch.randn(4, 1, 5), torch.randn(5, 6)
    torch.testing.assert_close(gm(x, w), x @ w + 1)


BATCHES = {
    "two rows": ((4, 2, 5), (5, 6), lambda x, w: torch.bmm(x, w.expand(4, 5, 6))),
    "a matrix each": ((4, 1, 5), (4, 5, 6), torch.bmm),
    "one column, repeated": ((4, 1, 5), (5, 1), lambda x, w: torch.bmm(x, w.expand(4, 5, 6))),
    "one row, repeated": ((4, 1, 5), (1, 6), lambda x, w: torch.bmm(x, w.expand(4, 5, 6))),
    "on the CPU": ((4, 1, 5), (5, 6), lambda x, w: torch.bmm(x, w.expand(4, 5, 6))),
}


@pytest.mark.parametrize("case", BATCHES)
def test_other_batches_stay(case: str) -> None:
    shape, matrix, function = BATCHES[case]
    gm = traced(function, shape, matrix, device="cpu" if case == "on the CPU" else "cuda")
    before = str(gm.graph)
    fold_batches(gm.graph)
    assert str(gm.graph) == before


@pytest.mark.slow
def test_each_weight_waits_for_the_product_before_its_own() -> None:
    order: list[str] = []  # buffers, as they are computed
    waits: dict[str, str] = {}

    def spread(nodes: list[Any]) -> list[Any]:
        before = {node: {each.name for each in node.unmet_dependencies} for node in nodes}
        for node in spread_weights(nodes):
            (name,) = node.get_buffer_names()
            needed = {each.name for each in node.unmet_dependencies}
            assert needed <= {*order}
            for other in needed - before[node]:
                waits[name] = other
            order.append(name)
        return nodes

    def function(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        return [x @ weight.to(torch.float32) for weight in weights]

    # Each of a size of its own: Inductor fuses what is computed from equal ones. The last is small.
    sizes = (520, 528, 536, 8)
    weights = [torch.randint(-3, 3, (512, size), dtype=torch.int8) for size in sizes]
    compiled = torch.compile(function, options={KERNELS: spread})
    x = torch.randn(4, 512)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, *weights), function(x, *weights))
    products = [order[order.index(name) + 1] for name in waits]
    assert len(waits) == 2
    assert list(waits.values()) == [order[1], products[0]]


# ---------------------------------------------------------------- beside the user's own pass


class Own(CustomGraphPass):
    def __init__(self, name: str | None) -> None:
        self.name, self.saw = name, []

    def __call__(self, graph: fx.Graph) -> None:
        self.saw.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    def uuid(self) -> Any:
        return self.name


def test_the_users_pass_comes_after_and_tells_its_name() -> None:
    own = Own("mine")
    both, alone = unfused_residuals(own), unfused_residuals(None)
    gm = traced(torch.addmm, (4, 6), (4, 5), (5, 6))
    both(gm.graph)
    assert own.saw == [["aten.mm.default", "aten.add.Tensor"]]
    assert isinstance(both, CustomGraphPass)
    names = [both.uuid(), alone.uuid(), unfused_residuals(Own("other")).uuid()]
    assert len(set(names)) == 3
    assert unfused_residuals(Own("mine")).uuid() == names[0]
    assert unfused_residuals(Own(None)).uuid() is None


def test_a_function_of_the_users_stays_alone() -> None:
    def mine(graph: fx.Graph) -> None:
        pass

    assert unfused_residuals(mine) is mine


# ---------------------------------------------------------------- Inductor's settings


def test_without_a_gpu_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not {LAST, "combo_kernels"} & inductor.known_patches({}).keys()


def test_kernels_are_tuned_at_the_first_call_but_with_the_cpp_wrapper() -> None:
    name = "triton.autotune_at_compile_time"
    assert inductor.known_patches({})[name] is False
    assert inductor.known_patches({"cpp_wrapper": True})[name] is True
    for asked in (True, False):
        assert inductor.known_patches({"cpp_wrapper": True, name: asked})[name] is asked


def test_settings_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    patches = inductor.known_patches({})
    assert patches["combo_kernels"] is patches["combo_kernels_pointwise_only"] is True
    assert patches[LAST].uuid() == unfused_residuals(None).uuid()
    own = Own("mine")
    patches = inductor.known_patches({"combo_kernels": False, LAST: own})
    assert patches["combo_kernels"] is False
    assert "combo_kernels_pointwise_only" not in patches
    assert patches[LAST].uuid() == unfused_residuals(own).uuid()


def test_a_pass_of_the_user_over_kernels_runs_after_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    kernels: list[Any] = [object()]
    saw: list[Any] = []

    class Kernels(CustomGraphPass):
        name: str | None = "mine"

        def __call__(self, nodes: Any) -> Any:
            saw.append(nodes)
            return nodes

        def uuid(self) -> Any:
            return self.name

    monkeypatch.setattr(inductor, "spread_weights", lambda nodes: [*nodes, "spread"])
    own = Kernels()
    chained = inductor.known_patches({KERNELS: own})[KERNELS]
    assert chained(kernels) == [*kernels, "spread"] == saw[0]
    assert chained.uuid() != inductor.known_patches({})[KERNELS].uuid()
    own.name = None  # Inductor would cache the chain, and not run it at the next compilation
    assert inductor.known_patches({KERNELS: own})[KERNELS] is own
    assert inductor.known_patches({KERNELS: len})[KERNELS] is len


@pytest.mark.slow
def test_inductor_caches_what_was_compiled_with_all_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patches = inductor.known_patches({})
    assert {LAST, KERNELS} <= patches.keys()
    patches.pop("combo_kernels_pointwise_only")
    names = ("fxgraph_cache_miss", "fxgraph_cache_hit")

    def counted() -> list[int]:  # the first compilation of a process replaces the counter
        return [torch._dynamo.utils.counters["inductor"][name] for name in names]

    torch.compile(lambda x: x + 1)(torch.randn(8))
    for expected in ([1, 0], [0, 1]):
        torch._dynamo.reset()
        before = counted()
        torch.compile(lambda x: x @ x + 1, options=patches)(torch.randn(8, 8))
        assert [now - then for now, then in zip(counted(), before, strict=True)] == expected


@pytest.mark.parametrize("asked", [{}, {"combo_kernels": True}])
def test_a_piece_that_cannot_be_combined_is_compiled_without(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    tried = []

    def compile_standalone(gm: Any, inputs: Any, *, options: Any, **more: Any) -> str:
        patches = options["config_patches"]
        tried.append(patches["combo_kernels"])
        assert (KERNELS in patches) is tried[-1]
        if tried[-1]:
            raise InductorError(RuntimeError("no such kernel"), compile_standalone)
        return "compiled"

    gm = traced(torch.add, (4,), (4,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch._inductor.standalone_compile", compile_standalone)
    if asked:
        with pytest.raises(InductorError, match="no such kernel"):
            inductor.compile_standalone(gm, [], asked)
        assert tried == [True]
    else:
        assert inductor.compile_standalone(gm, [], asked) == "compiled"
        assert tried == [True, False]


def test_a_restart_of_the_trace_is_no_failed_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compile_standalone(*args: Any, **settings: Any) -> str:
        tried.append(settings)
        raise TensorifyScalarRestartAnalysis

    gm = traced(torch.add, (4,), (4,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch._inductor.standalone_compile", compile_standalone)
    with pytest.raises(TensorifyScalarRestartAnalysis):
        inductor.compile_standalone(gm, [], {})
    assert len(tried) == 1
