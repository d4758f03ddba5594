"""What is a boundary and what should be one: attention ops, regions, the context, collectives."""

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.debug import examine, found, worse_than_notes
from torch import nn

import cgcompile
from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.debug.doctor import finding
from cgcompile.debug.op_observer import Notes, Watch, Way
from cgcompile.debug.restore import Snapshot

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


def test_ops_that_look_like_attention(ops: None) -> None:
    diagnosis = examine(Attends(), torch.randn(4, 2, 8))
    named = found(diagnosis, "unregistered_attention", Attends.forward, "paged")
    assert (named.severity, named.op) == ("error", "doctored::paged_attention")
    assert "splitting_ops=('doctored::paged_attention',)" in named.fix
    built = found(diagnosis, "unregistered_attention", Attends.forward, "mix")
    assert "queries, keys and values" in built.message
    write = found(diagnosis, "cache_write", Attends.forward, "store")
    assert (write.severity, write.op) == ("note", "doctored::store_kv")
    assert found(diagnosis, "host_sync", attend, "inside").op.startswith("aten.")
    assert len(diagnosis.findings) == 4, str(diagnosis)


def test_nothing_is_said_of_ops_that_are_registered(ops: None) -> None:
    config = CompilationConfig(splitting_ops=("doctored::*",))
    assert examine(Attends(), torch.randn(4, 2, 8), config=config).findings == ()
    backend = cgcompile.Backend(splitting_ops=("doctored::paged_attention", "doctored::mix"))
    (write,) = examine(Attends(), torch.randn(4, 2, 8), config=backend).findings
    assert write.kind == "cache_write"


def test_a_region_runs_eager() -> None:
    class Routes(nn.Module):
        def forward(self, x):
            with cgcompile.eager_region():
                best = x.argmax().item()  # <region>
            return x[: x.sum().item() * 0 + best]  # <outside>

    diagnosis = examine(Routes(), torch.tensor([1.0, 5.0, 3.0]).long())
    found(diagnosis, "host_sync", Routes.forward, "outside")
    assert len(diagnosis.findings) == 1, str(diagnosis)
    untraced = examine(Routes(), torch.tensor([1.0, 5.0, 3.0]).long(), config=BREAKABLE)
    assert found(untraced, "host_sync", Routes.forward, "region").severity == "error"


class Reads(nn.Module):
    def forward(self, x):
        y = scaled(x)
        return y * cgcompile.get_forward_context().attn_metadata  # <metadata>


@cgcompile.eager_break_during_capture
def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * cgcompile.get_forward_context().attn_metadata * x.sum().item()  # <broken>


def test_the_forward_context_is_for_breaks() -> None:
    with cgcompile.set_forward_context(2.0):
        split = examine(Reads(), torch.ones(3))
        untraced = examine(Reads(), torch.ones(3), config=BREAKABLE)
    assert found(split, "context_read", Reads.forward, "metadata").severity == "error"
    found(split, "context_read", scaled, "broken")
    found(untraced, "context_read", Reads.forward, "metadata")
    assert len(untraced.findings) == 1, str(untraced)


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
    split = examine(model, torch.ones(2))
    assert found(split, "host_sync", grow, "foreign").severity == "break"


@pytest.fixture
def gloo() -> Iterator[None]:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives(gloo: None) -> None:
    import torch.distributed as dist
    from torch.distributed._functional_collectives import all_reduce

    class Sums(nn.Module):
        def forward(self, x):
            dist.all_reduce(x)  # <inplace>
            return x + all_reduce(x, "sum", dist.group.WORLD)  # <functional>

    x = torch.ones(2)
    diagnosis = examine(Sums(), x)
    for marker in ("inplace", "functional"):
        assert "over backend gloo" in found(diagnosis, "collective", Sums.forward, marker).message
    assert len(diagnosis.findings) == 2, str(diagnosis)
    assert torch.equal(x, torch.ones(2))


def test_another_stream() -> None:
    stream = [7]

    def model(x):
        stream[0] = 8
        y = x + 1  # <side>
        stream[0] = 7
        return y * 2

    x = torch.ones(2)
    notes = Notes(Way.SPLIT, test_another_stream.__code__)
    boundaries, memory = cgcompile.boundaries.Boundaries(), Snapshot([x])
    with Watch(notes, boundaries, x.device, memory, lambda: stream[0]):
        model(x)
    assert found(
        cgcompile.debug.Diagnosis.of("model", "cpu", [finding(note, notes.way) for note in notes]),
        "side_stream",
        model,
        "side",
    )
    assert len(list(notes)) == 1


@pytest.mark.gpu
def test_another_stream_of_cuda() -> None:
    side = torch.cuda.Stream()

    class Forks(nn.Module):
        def forward(self, x):
            with torch.cuda.stream(side):
                y = x + 1  # <forked>
            torch.cuda.current_stream().wait_stream(side)
            return y * 2

    diagnosis = examine(Forks(), torch.ones(2, device="cuda"))
    found(diagnosis, "side_stream", Forks.forward, "forked")
    assert len(diagnosis.findings) == 1


@pytest.mark.parametrize(
    ("settings", "severity"), [({}, "break"), ({"splitting": "breakable"}, "error")]
)
def test_how_bad_it_is_depends_on_the_way(settings: dict, severity: str) -> None:
    class Syncs(nn.Module):
        def forward(self, x):
            if x.sum() > 0:  # <if>
                return x + 1
            return x

    config = CompilationConfig(**settings)
    diagnosis = examine(Syncs(), torch.ones(2), config=config)
    assert found(diagnosis, "host_sync", Syncs.forward, "if").severity == severity
    whole = cgcompile.compile(Syncs(), CompilationConfig(**settings, compiler="eager"))
    assert (
        found(examine(whole, torch.ones(2)), "host_sync", Syncs.forward, "if").severity == "error"
    )
    if not settings:
        with pytest.raises(cgcompile.CGCompileError), torch.inference_mode():
            whole(torch.ones(2))


def test_a_compiled_model_is_looked_at_uncompiled() -> None:
    class Syncs(nn.Module):
        def forward(self, x):
            return x * x.sum().item()  # <item>

    backend = cgcompile.Backend(compiler="eager")
    model = torch.compile(Syncs(), backend=backend)
    diagnosis = examine(model, torch.ones(2))
    found(diagnosis, "host_sync", Syncs.forward, "item")
    assert backend.num_compilations == 0


class Compiles:
    """A compiler that counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.graphs += 1
        return gm.forward


@pytest.mark.parametrize("where", ["whole", "part", "in place", "forward", "function", "profiled"])
def test_other_threads_go_on_compiled(where: str) -> None:
    """Torch's switch is one for all threads: it is used while a compiled function runs, if at all."""
    ours, theirs = Compiles(), Compiles()
    other = torch.compile(torch.neg, backend=theirs)

    def read(x):
        return x * x.sum().item()  # <read>

    class Asks(nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=other, args=(torch.ones(2),))
            thread.start()
            thread.join()
            return helper(x)

    helper = torch.compile(read, backend=ours) if where in ("function", "profiled") else read
    model = nn.Sequential(Asks())
    if where == "part":
        model[0] = torch.compile(model[0], backend=ours)
    elif where == "in place":
        model[0].compile(backend=ours)
    elif where == "forward":
        model[0].forward = torch.compile(model[0].forward, backend=ours)
    looked_at = torch.compile(model, backend=ours) if where == "whole" else model
    before = [dict(vars(each)) for each in model.modules()]
    sys.setprofile((lambda *_: None) if where == "profiled" else None)
    try:
        diagnosis = examine(looked_at, torch.ones(2))
    finally:
        sys.setprofile(None)
    found(diagnosis, "host_sync", read, "read")
    assert (ours.graphs, theirs.graphs) == (0, 0 if where == "profiled" else 1)
    assert [dict(vars(each)) for each in model.modules()] == before
    torch.compile(torch.abs, backend=ours)(torch.ones(2))
    assert ours.graphs == 1


def test_attention_of_torch_is_registered() -> None:
    class Dense(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            diagnosis = cgcompile.debug.doctor(Dense(), torch.randn(2, 4, 8))
        assert not worse_than_notes(diagnosis), str(diagnosis)
        assert diagnosis.findings == ()


def is_traced() -> bool:
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return torch.compiler.is_compiling() or captured


def test_what_a_traced_model_may_leave_out_is_a_note() -> None:
    class Checks(nn.Module):
        def forward(self, x):
            if not is_traced() and x.isnan().any():  # <guarded>
                raise ValueError("not a number")
            return self.inner(x)

        def inner(self, x):
            return x * x.sum().item()  # <plain>

    diagnosis = examine(Checks(), torch.ones(2))
    seen = found(diagnosis, "host_sync", Checks.forward, "guarded")
    assert seen.severity == "note"
    assert "checks whether it is traced" in seen.message
    assert found(diagnosis, "host_sync", Checks.inner, "plain").severity == "break"


def test_the_switch_is_put_back_where_a_profiler_took_over() -> None:
    def stops(x):
        sys.setprofile(None)
        return x * 2

    ours = Compiles()
    helper = torch.compile(stops, backend="eager")
    examine(lambda x: helper(x), torch.ones(2))
    torch.compile(torch.abs, backend=ours)(torch.ones(2))
    assert ours.graphs == 1


def test_the_switch_is_put_back_by_the_last_of_two_threads() -> None:
    entered, left, ours = threading.Event(), threading.Event(), Compiles()

    def read(x, ours_, theirs):
        ours_.set()
        assert theirs.wait(60)
        return x * 2

    helper = torch.compile(read, backend=ours)
    other = threading.Thread(target=lambda: (entered.wait(60), second(), left.set()))

    def second() -> None:
        with compat.uncompiled():
            inside.set()
            assert done.wait(60)

    inside, done = threading.Event(), threading.Event()
    other.start()
    examine(lambda x: helper(x, entered, inside), torch.ones(2))
    assert ours.graphs == 0
    done.set()
    other.join(60)
    assert left.is_set()
    torch.compile(torch.abs, backend=ours)(torch.ones(2))
    assert ours.graphs == 1
