"""What is a boundary and what should be one: attention ops, regions, the context, collectives."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.debug import by_line, examine, kinds, marker
from lib.patience import PATIENCE
from torch import nn

import cgcompile
from cgcompile import CompilationConfig
from cgcompile.torch_compat import torch_ops

BREAKABLE = CompilationConfig(splitting="breakable")


@pytest.fixture
def ops() -> Iterator[None]:
    """A library of ops, gone after the test."""
    with torch.library._scoped_library("doctored", "DEF") as library:
        library.define("paged_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
        library.impl("paged_attention", attend, "CompositeExplicitAutograd")
        library.define("store_kv(Tensor k, Tensor(a!) cache) -> ()")
        library.impl("store_kv", store, "CPU")
        library.define("mix(Tensor q, Tensor k, Tensor(a!) cache) -> Tensor")
        library.impl("mix", lambda q, k, cache: q + cache.copy_(k), "CPU")
        library.define("norm(Tensor x, Tensor w) -> Tensor")
        library.impl("norm", lambda x, w: x * w, "CPU")
        yield


def store(k: torch.Tensor, cache: torch.Tensor) -> None:
    cache.copy_(k)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    longest = int(q.sum().item() * 0) + len(q)  # <inside>
    return F.scaled_dot_product_attention(q, k, v)[:longest]


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 2, 8))

    def forward(self, x):
        x = torch.ops.doctored.norm(x, x)
        torch.ops.doctored.store_kv(x, self.cache)  # <store>
        x = torch.ops.doctored.mix(x, x, self.cache)  # <mix>
        return torch.ops.doctored.paged_attention(x, x, x)  # <paged>


def test_ops_that_resemble_attention(ops: None) -> None:
    diagnosis = examine(Attends(), torch.randn(4, 2, 8))
    assert kinds(diagnosis) == {
        "paged": "unregistered_attention error",
        "mix": "unregistered_attention error",
        "store": "cache_write note",
        "inside": "host_sync break",
    }
    findings = by_line(diagnosis)
    assert findings["paged"].op == "doctored::paged_attention"
    assert "splitting_ops=('doctored::paged_attention',)" in findings["paged"].fix
    assert "queries, keys and values" in findings["mix"].message


def test_registered_ops_are_not_judged(ops: None) -> None:
    config = CompilationConfig(splitting_ops=("doctored::*",))
    assert examine(Attends(), torch.randn(4, 2, 8), config=config).findings == ()
    backend = cgcompile.Backend(splitting_ops=("doctored::paged_attention", "doctored::mix"))
    assert kinds(examine(Attends(), torch.randn(4, 2, 8), config=backend)) == {
        "store": "cache_write note"
    }


def test_attention_of_torch_is_registered() -> None:
    def dense(x):
        return F.scaled_dot_product_attention(x, x, x)

    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            assert cgcompile.debug.doctor(dense, torch.randn(2, 4, 8)).findings == ()


def routes(x):
    with cgcompile.eager_region():
        best = x.argmax().item()  # <region>
    return x[: x.sum().item() * 0 + best]  # <outside>


def uses_context(x):
    y = scaled(x)
    return y * cgcompile.get_forward_context().attn_metadata  # <metadata>


@cgcompile.eager_break_during_capture
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * cgcompile.get_forward_context().attn_metadata * x.sum().item()  # <broken>


def test_regions_and_breaks_run_eager() -> None:
    """A region where the model is traced, a break where it is not; the context is read in both."""
    x = torch.tensor([1, 5, 3])
    assert kinds(examine(routes, x)) == {"outside": "host_sync break"}
    with cgcompile.eager_region():  # one of the caller's changes nothing outside of the model's
        assert kinds(examine(routes, x))["outside"] == "host_sync break"
    assert kinds(examine(routes, x, config=BREAKABLE))["region"] == "host_sync error"
    with cgcompile.set_forward_context(2.0):
        split = examine(uses_context, torch.ones(3))
        untraced = examine(uses_context, torch.ones(3), config=BREAKABLE)
    assert kinds(untraced) == {"metadata": "context_read error"}
    lines = {(found.kind, marker(found.source)) for found in split.findings}
    assert lines == {
        ("context_read", "metadata"),
        ("context_read", "broken"),
        ("host_sync", "broken"),
    }


def test_breaks_of_another_package() -> None:
    rival = pytest.importorskip("piecewise_cuda_graphs")

    @rival.no_graph
    def grow(x):
        x.mul_(x.sum().item())  # <foreign>

    def model(x):
        y = x + 1
        grow(y)
        return y * 2

    assert examine(model, torch.ones(2), config=BREAKABLE).findings == ()
    assert kinds(examine(model, torch.ones(2))) == {"foreign": "host_sync break"}


def test_collectives() -> None:
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    def sums(x):
        dist.all_reduce(x)  # <inplace>
        return x + all_reduce(x, "sum", dist.group.WORLD)  # <functional>

    x = torch.ones(2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        diagnosis = examine(sums, x)
    finally:
        dist.destroy_process_group()
    assert kinds(diagnosis) == dict.fromkeys(("inplace", "functional"), "collective break")
    assert all("over backend gloo" in found.message for found in diagnosis.findings)
    assert torch.equal(x, torch.ones(2))


# ---------------------------------------------------------------- compiled functions


class Counts:
    """A compiler that counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return gm.forward


def test_a_compiled_model_is_examined_uncompiled() -> None:
    def reads(x):
        return x * x.sum().item()  # <item>

    backend = cgcompile.Backend(compiler="eager")
    model = torch.compile(reads, backend=backend)
    assert kinds(examine(model, torch.ones(2))) == {"item": "host_sync break"}
    assert backend.num_compilations == 0


@pytest.mark.parametrize("where", ["whole", "part", "in place", "forward", "function", "profiled"])
def test_other_threads_stay_compiled(where: str) -> None:
    """Torch has one switch for all threads: it is used while a compiled function runs, if at all."""
    ours, theirs = Counts(), Counts()
    other = torch.compile(torch.neg, backend=theirs)

    def read(x):
        return x * x.sum().item()  # <read>

    class Threads(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(torch.ones(2),))
            thread.start()
            thread.join()
            return helper(x)

    helper = torch.compile(read, backend=ours) if where in ("function", "profiled") else read
    model = nn.Sequential(Threads())
    if where == "part":
        model[0] = torch.compile(model[0], backend=ours)
    elif where == "in place":
        model[0].compile(backend=ours)
    elif where == "forward":
        model[0].forward = torch.compile(model[0].forward, backend=ours)
    subject = torch.compile(model, backend=ours) if where == "whole" else model
    before = [dict(vars(module)) for module in model.modules()]
    sys.setprofile((lambda *_: None) if where == "profiled" else None)
    try:
        assert kinds(examine(subject, torch.ones(2)))["read"] == "host_sync break"
    finally:
        sys.setprofile(None)
    assert (ours.graphs, theirs.graphs) == (0, 0 if where == "profiled" else 1)
    assert [dict(vars(module)) for module in model.modules()] == before
    assert_compiles()


def assert_compiles() -> None:
    compiler = Counts()
    torch.compile(torch.abs, backend=compiler)(torch.ones(2))
    assert compiler.graphs == 1


def is_traced() -> bool:
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or captured


def test_code_that_a_traced_model_may_leave_out_is_a_note() -> None:
    def checks(x):
        if not is_traced() and x.isnan().any():  # <guarded>
            raise ValueError("not a number")
        return inner(x)

    def inner(x):
        return x * x.sum().item()  # <plain>

    diagnosis = examine(checks, torch.ones(2))
    assert kinds(diagnosis) == {"guarded": "host_sync note", "plain": "host_sync break"}
    assert "checks whether it is traced" in by_line(diagnosis)["guarded"].message


def test_the_switch_is_restored_where_a_profiler_took_over() -> None:
    def stops(x):
        sys.setprofile(None)
        return x * 2

    helper = torch.compile(stops, backend="eager")
    examine(lambda x: helper(x), torch.ones(2))
    assert_compiles()


def test_the_switch_is_restored_by_the_last_of_two_threads() -> None:
    entered, inside, done, left = (threading.Event() for _ in range(4))
    ours = Counts()

    def read(x):
        entered.set()
        assert inside.wait(PATIENCE)
        return x * 2

    def second() -> None:
        assert entered.wait(PATIENCE)
        with torch_ops.uncompiled():
            inside.set()
            assert done.wait(PATIENCE)
        left.set()

    helper = torch.compile(read, backend=ours)
    other = threading.Thread(target=second)
    other.start()
    examine(lambda x: helper(x), torch.ones(2))
    assert ours.graphs == 0
    done.set()
    other.join(PATIENCE)
    assert left.is_set()
    assert_compiles()
