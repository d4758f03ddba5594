"""The one predicate for "cannot be captured, because": devices, copies, collectives, bodies.

A machine without a GPU has no second device to compute on, so the device rules run on graphs of
``meta`` tensors: traced, split and printed, never run. The GPU suite runs the same models.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.cases import D
from lib.snapshots import assert_snapshot
from torch import nn

import cgcompile
from cgcompile.passes.assign import Capturability
from cgcompile.passes.split import SplitGraph
from cgcompile.reasons import Reason


def split_of(model: nn.Module, *inputs: torch.Tensor, **settings) -> SplitGraph:
    """The split of a model that cannot run here: compilation is stopped once it is printed."""
    backend = cgcompile.Backend(compiler="eager", **settings)
    splits = []

    def stop(gm, example_inputs):
        compiled = backend(gm, example_inputs)
        splits.append(compiled.split)
        return gm.forward

    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    with torch.no_grad():
        torch.compile(model, backend=stop, fullgraph=True)(*inputs)
    return splits[0]


class Experts(nn.Module):
    """Mixture-of-experts routing whose offsets come from pageable memory."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4, device="meta")
        self.up = nn.Linear(D, D, device="meta")
        self.offsets = torch.arange(4)

    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        offsets = self.offsets.to(x.device)
        return self.up(x) * (scores + offsets).sum(-1, keepdim=True)


class CpuPart(nn.Module):
    def forward(self, x, lengths):
        longest = lengths.float() * 2
        half = torch.full((), 0.5)  # a 0-dim CPU tensor is read like a number
        return x.sin() * half + longest.to(x.device)[:, None]


class MixedIndex(nn.Module):
    def forward(self, x, rows):
        return x.sin()[rows].cos()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "inputs"),
    [
        ("pageable_copies", Experts, ()),
        ("cpu_tensors", CpuPart, (torch.arange(6),)),
        ("index_on_the_cpu", MixedIndex, (torch.arange(6),)),
    ],
)
def test_split_of(name: str, model: type[nn.Module], inputs: tuple[torch.Tensor, ...]) -> None:
    split = split_of(model(), torch.randn(6, D, device="meta"), *inputs)
    assert_snapshot(f"capturable/{name}", split.text(lines=False))


def test_on_the_cpu_alone_nothing_is_foreign() -> None:
    split = split_of(CpuPart(), torch.randn(6, D), torch.arange(6))
    assert [piece.capture for piece in split.pieces] == [True]


# ---------------------------------------------------------------- collectives


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reduce(nn.Module):
    def forward(self, x):
        import torch.distributed._functional_collectives as collectives

        h = collectives.all_reduce(x.sin(), "sum", dist.group.WORLD)
        return h.cos()


def test_collective_over_gloo_is_a_boundary(gloo) -> None:
    x = torch.randn(6, D)
    backend = cgcompile.Backend(compiler="eager")
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        result = torch.compile(Reduce(), backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(result, x.sin().cos())
    pieces = backend.graphs[0].split.pieces
    assert [piece.capture for piece in pieces] == [True, False, True]
    assert {why.reason for why in pieces[1].why} == {Reason.COLLECTIVE}
    assert "over backend gloo" in pieces[1].why[0].detail


def test_collective_over_nccl_is_captured(gloo, monkeypatch) -> None:
    monkeypatch.setattr(
        "cgcompile.torch_compat.torch_ops.process_group_backend", lambda group, device: "nccl"
    )
    split = split_of(Reduce(), torch.randn(6, D))
    assert [piece.capture for piece in split.pieces] == [True]


# ---------------------------------------------------------------- bodies of higher-order ops


def test_a_boundary_inside_a_body_makes_the_whole_op_one() -> None:
    class Checkpointed(nn.Module):
        def forward(self, x):
            h = torch.utils.checkpoint.checkpoint(self.block, x.sin(), use_reentrant=False)
            return h.cos()

        def block(self, x):
            return F.scaled_dot_product_attention(x, x, x) * 2

    backend, x = cgcompile.Backend(compiler="eager"), torch.randn(6, 4, D)
    with torch.enable_grad():
        model = torch.compile(Checkpointed(), backend=backend, fullgraph=True)
        torch.testing.assert_close(model(x), Checkpointed()(x))
    pieces = backend.graphs[0].split.pieces
    eager = [piece for piece in pieces if not piece.capture]
    assert len(eager) == 1
    assert eager[0].why[0].reason is Reason.SPLITTING_OP
    assert "inside higher_order::tag_activation_checkpoint" in eager[0].why[0].detail


def test_a_body_that_can_be_captured_is() -> None:
    """Also where its sizes are those of the graph around it."""

    class Checkpointed(nn.Module):
        def forward(self, x):
            block = lambda t: t.sin().reshape(t.shape[0] * 2, -1) * t.shape[0]  # noqa: E731
            return torch.utils.checkpoint.checkpoint(block, x.cos(), use_reentrant=False).exp()

    split = split_of(Checkpointed(), torch.randn(6, 4, D))
    assert split.symbols.dims == {"s0": "x.size()[0]"}
    assert [piece.capture for piece in split.pieces] == [True]


class MaskedWrite(nn.Module):
    def __init__(self, one_number: bool) -> None:
        super().__init__()
        self.one_number = one_number

    def forward(self, x, mask):
        y = x.cos()
        y[mask] = x.sum() if self.one_number else x.reshape(-1) * 3
        return y.sin()


@pytest.mark.parametrize("one_number", [True, False])
def test_a_masked_write_of_many_values_counts_the_mask_on_the_host(one_number: bool) -> None:
    x, mask = torch.randn(6, D), torch.ones(6, D, dtype=torch.bool)
    backend = cgcompile.Backend(compiler="eager")
    with torch.no_grad():
        model = MaskedWrite(one_number)
        torch.testing.assert_close(torch.compile(model, backend=backend)(x, mask), model(x, mask))
    pieces = backend.graphs[0].split.pieces
    assert [piece.capture for piece in pieces] == ([True] if one_number else [True, False, True])
    if not one_number:
        assert [why.reason for why in pieces[1].why] == [Reason.HOST_SYNC]
        assert "counts the mask" in pieces[1].why[0].detail


def test_comparing_tensors_reads_them_on_the_host() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(3)
    same = graph.call_function(torch.equal, (x, x))
    sine = graph.call_method("sin", (x,))
    sine.meta["example_value"] = torch.zeros(3)
    graph.output((sine,))
    predicate = Capturability(torch.fx.GraphModule({}, graph), cgcompile.boundaries.Boundaries())
    assert predicate.why_not(same).reason is Reason.HOST_SYNC
    assert predicate.why_not(sine) is None
