"""The registry of splitting ops: every form of a name, what is refused, and what it answers."""

import pytest
import torch
import torch.nn.functional as F
from lib.cases import library, soft
from torch import fx

from cgcompile import AttentionCGSupport, SplittingOp, eager_region
from cgcompile.boundaries import Boundaries
from cgcompile.errors import BoundaryError


@pytest.fixture(autouse=True)
def ops() -> None:
    library()


def names(boundaries: Boundaries) -> list[str]:
    return [op.name for op in boundaries]


@pytest.mark.parametrize(
    "form",
    [
        "cgtest::attend",
        "cgtest.attend",
        "cgtest::*tend",
        "cgtest::atten[d]*",
        pytest.param(lambda: torch.ops.cgtest.attend, id="packet"),
    ],
)
def test_forms_that_mean_every_overload(form) -> None:
    boundaries = Boundaries([form() if callable(form) else form], builtin=False)
    op = torch.ops.cgtest.attend
    for called in (op, op.default, op.scaled):
        assert boundaries.match_call(called) is not None
    assert boundaries.match_call(torch.ops.cgtest.scale_) is None


@pytest.mark.parametrize(
    "form",
    [
        "cgtest::attend.scaled",
        "cgtest.attend.scaled",
        pytest.param(lambda: torch.ops.cgtest.attend.scaled, id="overload"),
    ],
)
def test_forms_that_mean_one_overload(form) -> None:
    boundaries = Boundaries([form() if callable(form) else form], builtin=False)
    op = torch.ops.cgtest.attend
    assert boundaries.match_call(op.scaled) is not None
    assert boundaries.match_call(op.default) is None
    assert boundaries.match_call(op) is not None  # the packet may reach it


def test_default_overload_by_name() -> None:
    boundaries = Boundaries(["cgtest::attend.default"], builtin=False)
    assert boundaries.match_call(torch.ops.cgtest.attend.default) is not None
    assert boundaries.match_call(torch.ops.cgtest.attend.scaled) is None


@pytest.mark.parametrize(
    ("form", "called"),
    [
        (soft, lambda: torch.ops.cgtest.soft.default),
        ("torch.nn.functional.gelu", lambda: F.gelu),
        (F.gelu, lambda: F.gelu),
        ("higher_order::while_loop", lambda: torch.ops.higher_order.while_loop),
        ("while_loop", lambda: torch.ops.higher_order.while_loop),
    ],
)
def test_functions_and_higher_order_ops(form, called) -> None:
    assert Boundaries([form], builtin=False).match_call(called()) is not None


def test_tag_needs_no_registration() -> None:
    boundary = Boundaries(builtin=False).match_call(torch.ops.cgtest.unsafe.default)
    assert boundary is not None
    assert "cudagraph_unsafe" in boundary.name


def test_predicate_sees_nodes_and_no_calls() -> None:
    graph = fx.Graph()
    node = graph.call_method("relu", (graph.placeholder("x"),))
    boundaries = Boundaries([SplittingOp(predicate=lambda n: n.target == "relu")], builtin=False)
    assert boundaries.match(node) is not None
    assert boundaries.match_call(torch.relu) is None


def test_builtin_attention() -> None:
    boundaries = Boundaries()
    for called in (
        F.scaled_dot_product_attention,
        torch.ops.aten.scaled_dot_product_attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
        F.multi_head_attention_forward,
    ):
        boundary = boundaries.match_call(called)
        assert boundary is not None, called
        assert boundary.support is AttentionCGSupport.ALWAYS
    assert boundaries.match_call(F.linear) is None
    assert Boundaries(builtin=False).match_call(F.scaled_dot_product_attention) is None


@pytest.mark.parametrize(
    "name",
    [
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "xformers::efficient_attention_forward_cutlass",
        "xformers_flash::flash_fwd",
        "flashinfer::batch_prefill_with_paged_kv_cache_run",
        "flashinfer::batch_decode_with_paged_kv_cache_run",
    ],
)
def test_names_of_attention_packages(name: str) -> None:
    space, op = name.split("::")
    lib = torch.library.Library(space, "FRAGMENT")
    lib.define(f"{op}(Tensor q) -> Tensor")
    boundary = Boundaries().match_call(getattr(getattr(torch.ops, space), op))
    assert boundary is not None
    assert boundary.support is AttentionCGSupport.NEVER


def test_other_ops_of_those_packages_are_none() -> None:
    lib = torch.library.Library("flashinfer", "FRAGMENT")
    lib.define("cg_rmsnorm(Tensor x) -> Tensor")
    assert Boundaries().match_call(torch.ops.flashinfer.cg_rmsnorm) is None


def test_the_user_may_redeclare_a_builtin_op() -> None:
    mine = SplittingOp(F.scaled_dot_product_attention, support=AttentionCGSupport.NEVER)
    boundary = Boundaries([mine]).match_call(F.scaled_dot_product_attention)
    assert boundary.support is AttentionCGSupport.NEVER


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cgtest::atend", "'cgtest::attend'"),
        ("cgtest.atend", "'cgtest::attend'"),
        ("cgtest::attend.scled", "cgtest::attend"),
        ("torch.nn.functional.geluu", ""),
        ("nowhere::*", ""),
        ("attention", ""),
    ],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(BoundaryError, match="no operator, higher-order op or function") as caught:
        Boundaries([name])
    assert hint in str(caught.value)


def test_things_that_are_no_ops() -> None:
    with pytest.raises(BoundaryError, match="found 3"):
        Boundaries([3])
    with pytest.raises(BoundaryError, match="target= or predicate="):
        SplittingOp()
    with pytest.raises(BoundaryError, match="target= or predicate="):
        SplittingOp("ns::op", predicate=lambda node: True)


def test_declared_twice() -> None:
    Boundaries(["cgtest::attend", "cgtest.attend"])  # the same meaning
    with pytest.raises(BoundaryError, match="declared twice"):
        Boundaries(
            ["cgtest::attend", SplittingOp("cgtest::attend", support=AttentionCGSupport.ALWAYS)]
        )


def test_support_levels_are_ordered() -> None:
    assert (
        AttentionCGSupport.NEVER
        < AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        < AttentionCGSupport.UNIFORM_BATCH
        < AttentionCGSupport.ALWAYS
    )


def test_uuid_tells_registries_apart() -> None:
    assert Boundaries().uuid() == Boundaries().uuid()
    assert Boundaries().uuid() != Boundaries(["cgtest::attend"]).uuid()
    low = SplittingOp("cgtest::attend", support=AttentionCGSupport.UNIFORM_BATCH)
    assert Boundaries([low]).uuid() != Boundaries(["cgtest::attend"]).uuid()


def test_eager_region_leaves_eager_code_as_it_is() -> None:
    x = torch.randn(3)
    with eager_region():
        y = x.sin()
    torch.testing.assert_close(y, torch.sin(x))
