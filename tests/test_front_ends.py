"""The two front ends agree: FX pieces and breakable capture record one step alike.

Each model runs eager, compiled in pieces, and plain under a breakable wrapper, on the same numbers.
Results must be equal bit by bit, the breaks must be the same ops in the same order, and both must
run each of them once a step.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.breakable import assert_counters, copies
from lib.entry import WARMING, assert_counts
from torch import nn

import cgcompile
from cgcompile import BatchDescriptor, CompilationConfig, CUDAGraphMode, set_forward_context
from cgcompile.boundaries import Boundaries, target_name
from cgcompile.graphs.breakable import BreakableCUDAGraphWrapper
from cgcompile.graphs.sequence import EagerSegment, GraphSegment, GraphSequence
from cgcompile.graphs.wrapper import CUDAGraphOptions
from cgcompile.reasons import Reason
from cgcompile.runtime.compiled_graph import CompiledGraph

D, HEADS, TOKENS, WORDS = 16, 4, 5, 32
SIZES = (6, 3)
PIECEWISE = CUDAGraphMode.PIECEWISE
OPS = ("cgfront::attend", "cgfront::mix", "cgfront::route", "cgfront::append")
IN_PLACE, FRESH, ROUTE, APPEND = OPS
SDPA = "aten::scaled_dot_product_attention"
QUICK = CUDAGraphOptions(gc_disable=True)
RUN: Counter[str] = Counter()  # how often each op of this file has run


# ------------------------------------------------------------------ operators


def attention(q, k, v, mask=None):
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    return scores.softmax(-1) @ v


def attend(q, k, v, mask, out):
    RUN[IN_PLACE] += 1
    out.copy_(attention(q, k, v, mask))


def mix(q, k, v):
    RUN[FRESH] += 1
    return attention(q, k, v)


def route(scores, top):
    RUN[ROUTE] += 1
    weights, chosen = scores.softmax(-1).topk(top, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def append(x, cache):
    RUN[APPEND] += 1
    cache[:, :-1].copy_(cache[:, 1:].clone())
    cache[:, -1].copy_(x)


def fake_route(scores, top):
    weights = scores.new_empty(*scores.shape[:-1], top)
    return weights, torch.empty_like(weights, dtype=torch.int64)


@cache
def library() -> torch.library.Library:
    lib = torch.library.Library("cgfront", "FRAGMENT")
    lib.define("attend(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor(a!) out) -> ()")
    lib.define("mix(Tensor q, Tensor k, Tensor v) -> Tensor")
    lib.define("route(Tensor scores, int top) -> (Tensor, Tensor)")
    lib.define("append(Tensor x, Tensor(a!) cache) -> ()")
    fakes = {
        attend: lambda *_: None,
        mix: lambda q, k, v: torch.empty_like(q, memory_format=torch.contiguous_format),
        route: fake_route,
        append: lambda *_: None,
    }
    for function, fake in fakes.items():
        for key in ("CPU", "CUDA"):
            lib.impl(function.__name__, function, key)
        torch.library.register_fake(f"cgfront::{function.__name__}", fake, lib=lib)
    return lib


# ------------------------------------------------------------------ models


def in_place(q, k, v, mask=None):
    out = torch.empty_like(q)
    torch.ops.cgfront.attend(q, k, v, mask, out)
    return out


def fresh(q, k, v, mask=None):
    return torch.ops.cgfront.mix(q, k, v)


def dense(q, k, v, mask=None, **settings):
    mask = None if mask is None else mask[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **settings)


class Layer(nn.Module):
    """Attention over what is given, or over another sequence, and a gated feed-forward part."""

    def __init__(self, attend: Callable[..., Any] = in_place, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.attend, self.size = attend, D // HEADS
        self.norm, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.q, self.out = nn.Linear(D, D), nn.Linear(D, D)
        self.kv = nn.Linear(D, 2 * kv_heads * self.size)
        self.gate, self.up, self.down = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def heads(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def mixed(self, x, other=None, mask=None):
        h = self.norm(x)
        k, v = self.kv(h if other is None else other).chunk(2, -1)
        attended = self.attend(self.heads(self.q(h)), self.heads(k), self.heads(v), mask)
        return self.out(attended.transpose(1, 2).flatten(2))

    def forward(self, x, other=None, mask=None):
        x = x + self.mixed(x, other, mask)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Stack(nn.Module):
    def __init__(self, *attends: Callable[..., Any], kv_heads: int = HEADS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend, kv_heads) for attend in attends)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Experts(nn.Module):
    """A mixture of experts whose router is a boundary with two results."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(fresh) for _ in range(2))
        self.router = nn.Linear(D, experts)
        self.weights = nn.Parameter(torch.randn(experts, D, D) / D**0.5)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            weights, chosen = torch.ops.cgfront.route(self.router(x), 2)
            every = torch.einsum("nti,eij->ntej", x, self.weights).relu()
            index = chosen[..., None].expand(-1, -1, -1, D)
            x = x + (every.gather(2, index) * weights[..., None]).sum(2)
        return x


class Shared(nn.Module):
    """One layer, three times; and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(WORDS, D), Layer(in_place)
        self.head = nn.Linear(D, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)


class InPlaceResidual(nn.Module):
    """One residual tensor, written before and after each boundary, once through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for attend in (in_place, fresh, in_place))

    def forward(self, x):
        x = x.clone()
        first = x[:, 0]
        for layer in self.layers:
            x.add_(layer.mixed(x))
            first.mul_(0.5)
        return x.tanh_()


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for attend in (in_place, fresh))

    def forward(self, x, other):
        for layer in self.layers:
            x = layer(x, other)
        return x * other.mean()


class ReturnsMany(Stack):
    """Pieces' own results, a view of one, what a boundary made, and a container."""

    def forward(self, x):
        first = self.layers[0](x)
        mixed = torch.ops.cgfront.mix(*[self.layers[1].heads(first + k) for k in range(3)])
        last = self.layers[1](first)
        return last, {"first": first, "row": last[:, 0]}, [mixed * 2, (mixed.sum(1),)]


class Encoder(nn.Module):
    """A padding mask that both kinds of attention read."""

    def __init__(self, *attends: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for attend in attends)

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask=mask)
        return (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


class Cached(nn.Module):
    """A cache that is an argument; a boundary appends to it and a piece scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.up = Layer(fresh), nn.Linear(D, D)

    def forward(self, x, cache):
        h = self.up(x)
        torch.ops.cgfront.append(h[:, 0], cache)
        x = self.layer(h, cache) + cache.mean()
        cache.mul_(0.5)
        return x


class Neighbours(nn.Module):
    """Boundaries at both ends and side by side: no piece lies there."""

    def forward(self, x):
        a = torch.ops.cgfront.mix(x, x, x)
        b = torch.ops.cgfront.mix(a, x, a)
        h = (a * b).sin()
        out = torch.empty_like(h)
        torch.ops.cgfront.attend(h, b, h, None, out)
        return out


class LongLived(nn.Module):
    """Fresh results of boundaries that are read long after, with others in between."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, x):
        firsts = []
        for _ in range(4):
            h = self.up(x).sin()[:, None]
            firsts.append(torch.ops.cgfront.mix(h, h, h)[:, 0])
            x = x + firsts[-1]
        return (firsts[0] - firsts[2]) * firsts[1] / (1 + firsts[3].abs())


def hidden(n: int, device: str) -> torch.Tensor:
    return torch.randn(n, TOKENS, D, device=device)


def words(n: int, device: str) -> torch.Tensor:
    return torch.randint(0, WORDS, (n, TOKENS), device=device)


def heads(n: int, device: str) -> torch.Tensor:
    return torch.randn(n, HEADS, TOKENS, D // HEADS, device=device)


def masks(n: int, device: str) -> torch.Tensor:
    lengths = torch.randint(1, TOKENS + 1, (n, 1), device=device)
    return torch.arange(TOKENS, device=device) < lengths


@dataclass(frozen=True)
class Model:
    """A module, what it takes, and the breaks that it must have.

    Attributes:
        build: makes the module.
        breaks: names of the ops that run eager, in order.
        inputs: what makes each input.
        written: the positions of inputs that the model writes: their numbers are not renewed.
        pieces: how many pieces have graphs, where that is not one more than breaks.
    """

    build: Callable[[], nn.Module]
    breaks: tuple[str, ...]
    inputs: tuple[Callable[[int, str], torch.Tensor], ...] = (hidden,)
    written: tuple[int, ...] = ()
    pieces: int | None = None


causal = partial(dense, is_causal=True)

MODELS = {
    "dense": Model(lambda: Stack(in_place, in_place), (IN_PLACE,) * 2),
    "grouped_queries": Model(lambda: Stack(fresh, fresh, kv_heads=2), (FRESH,) * 2),
    "mixture_of_experts": Model(Experts, (FRESH, ROUTE) * 2),
    "shared_weights": Model(Shared, (IN_PLACE,) * 3, (words,)),
    "in_place_residual": Model(InPlaceResidual, (IN_PLACE, FRESH, IN_PLACE)),
    "two_inputs": Model(TwoInputs, (IN_PLACE, FRESH), (hidden, hidden)),
    "tuple_output": Model(lambda: ReturnsMany(in_place, in_place), (IN_PLACE, FRESH, IN_PLACE)),
    "encoder": Model(lambda: Encoder(in_place, in_place), (IN_PLACE,) * 2, (hidden, masks)),
    "sdpa_encoder": Model(lambda: Encoder(dense, in_place), (SDPA, IN_PLACE), (hidden, masks)),
    "sdpa": Model(lambda: Stack(causal, fresh, causal), (SDPA, FRESH, SDPA)),
    "cache": Model(Cached, (APPEND, FRESH), (hidden, hidden), written=(1,)),
    "long_lived": Model(LongLived, (FRESH,) * 4),
    "neighbours": Model(Neighbours, (FRESH, FRESH, IN_PLACE), (heads,), pieces=1),
}


@pytest.fixture(autouse=True)
def with_operators() -> None:
    library()
    RUN.clear()


def mode_of(model: Model) -> AbstractContextManager[None]:
    """SDPA is seen whole in inference mode."""
    return torch.inference_mode() if SDPA in model.breaks else torch.no_grad()


def made(model: Model, device: str) -> nn.Module:
    torch.manual_seed(0)
    return model.build().eval().to(device)


# ------------------------------------------------------------------ the three ways to run a step


def step(size: int) -> set_forward_context:
    descriptor = BatchDescriptor(size)
    return set_forward_context(cudagraph_runtime_mode=PIECEWISE, batch_descriptor=descriptor)


class Buffers:
    """The persistent inputs of one way to run a model: one set for each size."""

    def __init__(self, inputs: dict[int, tuple[torch.Tensor, ...]]) -> None:
        self.inputs = {size: copies(each) for size, each in inputs.items()}
        for tensors in self.inputs.values():
            for tensor in tensors:
                torch._dynamo.mark_dynamic(tensor, 0)

    def fill(self, size: int, numbers: tuple[torch.Tensor, ...], but: tuple[int, ...]) -> Any:
        for index, (buffer, values) in enumerate(zip(self.inputs[size], numbers, strict=True)):
            if index not in but:
                buffer.copy_(values)
        return self.inputs[size]


class FrontEnds:
    """A model that runs eager, in FX pieces and under a breakable wrapper."""

    def __init__(self, name: str, device: str, **settings: Any) -> None:
        self.model, self.device = MODELS[name], device
        self.module = made(self.model, device)
        shared = {"capture_device": "host", "splitting_ops": OPS, **settings}
        shared["splitting_ops"] = tuple(set(self.model.breaks) - {SDPA})
        self.backend = cgcompile.Backend(compiler="eager", cudagraph_mode="PIECEWISE", **shared)
        self.compiled = torch.compile(self.module, backend=self.backend)
        config = CompilationConfig(**shared)
        self.breakable = BreakableCUDAGraphWrapper(self.module, config, PIECEWISE, QUICK)
        self.ways = {"eager": self.module, "fx": self.compiled, "breakable": self.breakable}
        first = {size: self.numbers(size) for size in SIZES}
        self.buffers = {way: Buffers(first) for way in self.ways}

    def numbers(self, size: int) -> tuple[torch.Tensor, ...]:
        return tuple(make(size, self.device) for make in self.model.inputs)

    def step(self, size: int) -> Any:
        """One step of each, on new numbers; all give the same and write the same."""
        numbers, results, inputs = self.numbers(size), {}, {}
        for way, run in self.ways.items():
            inputs[way] = self.buffers[way].fill(size, numbers, self.model.written)
            RUN.clear()
            with step(size):
                results[way] = run(*inputs[way])
            assert Counter(each for each in self.model.breaks if each != SDPA) == RUN, way
        for way in ("fx", "breakable"):
            assert_equal(results[way], results["eager"], way)
            assert_equal(inputs[way], inputs["eager"], way)
        return copies(results["eager"])

    def steps(self, rounds: int) -> None:
        """Rounds over all sizes; no two steps of a size give the same."""
        before: dict[int, Any] = {}
        for _ in range(rounds):
            for size in SIZES:
                result = self.step(size)
                assert size not in before or not equal(result, before[size])
                before[size] = result

    @property
    def graph(self) -> CompiledGraph:
        (graph,) = self.backend.graphs
        return graph

    def recorded_breakable(self, size: int) -> GraphSequence:
        return self.breakable.concrete_cudagraph_entries[BatchDescriptor(size)].sequence

    def recorded_fx(self, size: int) -> GraphSequence:
        sequences = {each.batch.descriptor: each.sequence for each in self.graph.recordings}
        return sequences[BatchDescriptor(size)]


def equal(result: Any, expected: Any) -> bool:
    try:
        assert_equal(result, expected)
    except AssertionError:
        return False
    return True


def assert_equal(result: Any, expected: Any, way: str = "") -> None:
    """Bit by bit, dtypes and containers too; a NaN is never right."""
    torch.testing.assert_close(result, expected, rtol=0, atol=0, msg=lambda m: f"{way}: {m}")


def breaks_of_pieces(graph: CompiledGraph, names: tuple[str, ...]) -> list[str]:
    """The boundaries in the eager pieces of a split, in order, as they are called at run time."""
    boundaries = Boundaries(names)
    targets = [
        target_name(node.target)
        for piece in graph.split.pieces
        if not piece.capture
        for node in piece.module.graph.nodes
        if boundaries.match(node) is not None
    ]
    traced = "torch.nn.functional.scaled_dot_product_attention"
    return [SDPA if name == traced else name for name in targets]


def names_of_breaks(sequence: GraphSequence) -> list[str]:
    return [each.name for each in sequence.segments if isinstance(each, EagerSegment)]


def graphs_of(sequence: GraphSequence) -> list[Any]:
    return [each.graph for each in sequence.segments if isinstance(each, GraphSegment)]


# ------------------------------------------------------------------ they agree


POISONED = ("grouped_queries", "mixture_of_experts", "in_place_residual", "tuple_output", "sdpa")
VARIANTS = [*[(name, False) for name in MODELS], *[(name, True) for name in POISONED]]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "poison"), VARIANTS)
def test_the_front_ends_agree(device: str, name: str, poison: bool) -> None:
    with mode_of(MODELS[name]):
        ends = FrontEnds(name, device, debug="poison" if poison else False, on_fallback="raise")
        ends.steps(6)
    assert_counts(ends.backend, 2, 2 * 4, {WARMING: 2})
    assert_counters(ends.breakable, captures=2, replays=2 * 5)
    assert_same_breaks(ends)
    assert_graphs_of_wrappers(ends)


def assert_same_breaks(ends: FrontEnds) -> None:
    """k breaks cut plain Python into k + 1 graphs; an FX graph has one for each captured piece."""
    expected, split = list(ends.model.breaks), ends.graph.split
    assert breaks_of_pieces(ends.graph, ends.backend.config.splitting_ops) == expected
    pieces = [piece.name for piece in split.pieces]
    captured = sum(piece.capture for piece in split.pieces)
    assert captured == (ends.model.pieces or len(expected) + 1)
    for size in SIZES:
        breakable, fx = ends.recorded_breakable(size), ends.recorded_fx(size)
        assert names_of_breaks(breakable) == expected
        kinds = [type(each) for each in breakable.segments]
        assert kinds == [GraphSegment, *[EagerSegment, GraphSegment] * len(expected)]
        assert breakable.num_graphs == len(expected) + 1
        assert breakable.num_eager_breaks == len(expected)
        assert (fx.num_graphs, fx.num_eager_breaks) == (captured, len(pieces) - captured)
        assert [each.name for each in fx.segments] == pieces


def assert_graphs_of_wrappers(ends: FrontEnds) -> None:
    """A sequence of FX pieces holds the very graphs of the wrappers' entries, in order."""
    (binding,) = ends.graph.weight_sets
    wrappers = list(binding.wrappers.values())
    captured = [piece.name for piece in ends.graph.split.pieces if piece.capture]
    assert [wrapper.name for wrapper in wrappers] == captured
    assert not binding.full.concrete_cudagraph_entries
    every = []
    for size in SIZES:
        entries = [
            wrapper.concrete_cudagraph_entries[BatchDescriptor(size)] for wrapper in wrappers
        ]
        graphs = graphs_of(ends.recorded_fx(size))
        assert [id(entry.graph) for entry in entries] == [id(graph) for graph in graphs]
        every += graphs
    assert len({id(graph) for graph in every}) == len(SIZES) * len(captured)


def test_empty_graphs_of_the_one_are_missing_pieces_of_the_other() -> None:
    """Where boundaries are neighbours, breakable capture has a graph without kernels."""
    with torch.no_grad():
        ends = FrontEnds("neighbours", "cpu")
        ends.steps(2)
    breakable, fx = graphs_of(ends.recorded_breakable(6)), graphs_of(ends.recorded_fx(6))
    assert [bool(graph.ops) for graph in breakable] == [False, False, True, False]
    assert [bool(graph.ops) for graph in fx] == [True]


# ------------------------------------------------------------------ what a replay is made of


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a replay called what only a plain or a capturing step needs")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixture_of_experts", "cache", "neighbours"])
def test_a_replay_goes_through_no_code_of_pieces(device: str, name: str) -> None:
    with torch.no_grad():
        ends = FrontEnds(name, device)
        ends.steps(2)
        graph, (binding,) = ends.graph, ends.graph.weight_sets
        for attribute in ("_run", "_run_differentiable"):
            setattr(graph, attribute, refuse)
        for wrapper in (*binding.wrappers.values(), binding.full):
            wrapper.runnable = refuse
        for attribute in ("step", "runnables"):
            object.__setattr__(graph._program, attribute, None)
        for piece in graph.split.pieces:
            if piece.capture:
                piece.module.forward = refuse
        ends.steps(4)
    assert_counts(ends.backend, 2, 2 * 4, {WARMING: 2})


@pytest.mark.slow
def test_dropped_graphs_of_one_front_end_leave_the_other(device: str) -> None:
    """Each has a pool of its own."""
    with torch.no_grad():
        ends = FrontEnds("grouped_queries", device)
        ends.steps(3)
        ends.backend.release()
        ends.steps(3)
        assert_counts(ends.backend, 4, 2 * 2, {WARMING: 4})
        assert_counters(ends.breakable, captures=2, replays=2 * 5)
        ends.breakable.clear_all_graphs()
        ends.steps(3)
    assert_counts(ends.backend, 4, 2 * 5, {WARMING: 4})
    assert_counters(ends.breakable, captures=4, replays=2 * 7)


# ------------------------------------------------------------------ compiled as a whole


WHOLE = ["dense", "mixture_of_experts", "shared_weights", "sdpa"]


def check_whole(name: str, device: str, backend: str) -> None:
    """A model that another backend compiled as a whole, with breaks inside of what it made."""
    model = MODELS[name]
    module = made(model, device)
    compiled = torch.compile(module, backend=backend, dynamic=False)
    config = CompilationConfig(capture_device="host", splitting_ops=OPS)
    wrapper = BreakableCUDAGraphWrapper(compiled, config, PIECEWISE, QUICK)
    buffers = {n: tuple(make(n, device) for make in model.inputs) for n in SIZES}
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if device == "cpu" else {"rtol": 2e-4, "atol": 2e-5}
    before: dict[int, Any] = {}
    with mode_of(model):
        for size in SIZES:
            wrapper(*buffers[size])  # no code may be compiled inside of a capture
        for _ in range(5):
            for size in SIZES:
                for buffer, make in zip(buffers[size], model.inputs, strict=True):
                    buffer.copy_(make(size, device))
                expected = module(*buffers[size])
                RUN.clear()
                with step(size):
                    result = wrapper(*buffers[size])
                torch.testing.assert_close(result, expected, **tolerance)
                assert Counter(each for each in model.breaks if each != SDPA) == RUN
                assert size not in before or not equal(expected, before[size])
                before[size] = expected
    assert_counters(wrapper, captures=2, replays=8, plain={Reason.NO_CONTEXT: 2})
    for size in SIZES:
        sequence = wrapper.concrete_cudagraph_entries[BatchDescriptor(size)].sequence
        assert sequence.num_eager_breaks == len(model.breaks)
        assert sequence.num_graphs == len(model.breaks) + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_breaks_in_what_aot_autograd_made(device: str, name: str) -> None:
    check_whole(name, device, "aot_eager")


@pytest.mark.gpu
@pytest.mark.parametrize("name", WHOLE)
def test_breaks_in_what_inductor_made(name: str) -> None:
    check_whole(name, "cuda", "inductor")


@pytest.mark.slow
@pytest.mark.parametrize(("attend", "op"), [(in_place, IN_PLACE), (fresh, FRESH)])
def test_a_break_in_a_region_of_inductor_breaks_on_the_host(attend: Any, op: str) -> None:
    """The host recorder would see the region as one call: it runs uncompiled in a capture."""
    torch.manual_seed(0)
    module = Layer(attend).eval()
    options = {"wrap_inductor_compiled_regions": True}
    compiled = torch.compile(module, dynamic=False, options=options)
    config = CompilationConfig(capture_device="host", splitting_ops=(op,))
    wrapper, x = BreakableCUDAGraphWrapper(compiled, config, PIECEWISE, QUICK), hidden(6, "cpu")
    with torch.no_grad():
        wrapper(x)
        for _ in range(3):
            x.normal_()
            with step(6):
                result = wrapper(x)
                torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
    assert_counters(wrapper, captures=1, replays=2, plain={Reason.NO_CONTEXT: 1})
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    breaks = [each.name for each in entry.sequence.segments if isinstance(each, EagerSegment)]
    assert set(breaks) == {op}


class Waves(nn.Module):
    def forward(self, x):
        return (x.sin() * 2).cos() + x


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [True, False])
def test_a_whole_model_of_inductor_replays_on_the_host(wrapped: bool) -> None:
    """The host recorder would see none of Inductor's kernels: it runs uncompiled in a capture."""
    module, options = Waves().eval(), {"wrap_inductor_compiled_regions": wrapped}
    compiled = torch.compile(module, dynamic=False, options=options)
    config = CompilationConfig(capture_device="host")
    wrapper, x = BreakableCUDAGraphWrapper(compiled, config, PIECEWISE, QUICK), hidden(6, "cpu")
    with torch.no_grad():
        wrapper(x)
        for _ in range(3):
            x.normal_()
            with step(6):
                result = wrapper(x)
            torch.testing.assert_close(result, module(x), rtol=1e-5, atol=1e-5)
