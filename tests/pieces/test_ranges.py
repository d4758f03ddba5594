"""Artifacts for sizes and ranges: what is compiled, which one runs, and what may not happen."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from hypothesis import example, given
from hypothesis import strategies as st
from lib.asserts import build, check_against_eager
from lib.cases import CASES, D, Decoder
from torch import nn
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode

import cgcompile
from cgcompile import BatchDescriptor, CUDAGraphMode
from cgcompile.errors import ConfigError, PieceCompileError, SymbolError
from cgcompile.pieces.compilers import Artifact, Ranged, SizeRange, ranges_between, reader
from cgcompile.torch_compat import dynamo, expressions, raw_memory

pytestmark = pytest.mark.usefixtures("without_gradients")


def label(fake_inputs, position: int = 0) -> str:
    """What a compiler can tell of the sizes that it compiles for, from one size input."""
    size = fake_inputs[position]
    if isinstance(size, int):
        return str(size)
    least, most = expressions.Shapes(size.node.shape_env).bounds(size.node.expr)
    return f"{least}-{most if most.is_Integer else ''}"


class Labels:
    """A user's compiler whose artifacts record the sizes that they were compiled for."""

    def __init__(self, position: int = 0) -> None:
        self.compiled: list[str] = []
        self.ran: list[str] = []
        self.position = position

    def __call__(self, gm, fake_inputs):
        name = label(fake_inputs, self.position)
        self.compiled.append(name)

        def run(*inputs):
            self.ran.append(name)
            return gm.forward(*inputs)

        return run

    def taken(self) -> list[str]:
        names, self.ran = list(dict.fromkeys(self.ran)), []
        return names


class Sized(nn.Module):
    """Pieces that read the size, around an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        h = F.scaled_dot_product_attention(q, k, v)
        return torch.cat([h, self.out(h).relu()]).view(x.shape[0], -1) + x.shape[0]


def batch(size: int) -> torch.Tensor:
    return torch.randn(size, 4, D)


def marked(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    torch._dynamo.mark_dynamic(tensor, dim)
    return tensor


def compiled(model, **settings):
    torch.manual_seed(0)
    model = model.eval() if isinstance(model, nn.Module) else model
    backend = cgcompile.Backend(**settings)
    return model, torch.compile(model, backend=backend), backend


def check(model, step, *sizes: int, **tolerance) -> None:
    for size in sizes:
        x = batch(size)
        torch.testing.assert_close(step(x), model(x), **tolerance)


# ---------------------------------------------------------------- ranges


@pytest.mark.slow
def test_ranges_between() -> None:
    assert [str(each) for each in ranges_between((32, 512))] == [
        "sizes 1 to 32",
        "sizes 33 to 512",
        "sizes 513 and more",
    ]
    assert list(map(str, ranges_between((1,)))) == ["size 1", "sizes 2 and more"]


increasing = st.lists(st.integers(1, 60), min_size=1, max_size=5, unique=True).map(sorted)


@given(increasing, st.integers(1, 80))
def test_each_size_is_in_one_range(endpoints: list[int], size: int) -> None:
    holding = [each for each in ranges_between(endpoints) if size in each]
    assert len(holding) == 1
    assert (holding[0].last == size) == (size in endpoints)


@given(increasing, st.sets(st.integers(1, 60)), st.sets(st.integers(0, 5)), st.integers(0, 80))
@example([5, 6], {1, 6}, set(), 6)  # one size by itself, and as a range
def test_the_narrowest_artifact_that_holds_is_taken(
    endpoints: list[int], single: set[int], left_out: set[int], size: int
) -> None:
    sizes = [SizeRange(each, each) for each in sorted(single)]
    ranges = [each for k, each in enumerate(ranges_between(endpoints)) if k not in left_out]
    artifacts = [
        Artifact(span, lambda n, each=span: each, None if k % 3 else lambda given: given[0] % 2)
        for k, span in enumerate([*sizes, *ranges])
    ]
    ranged = Ranged("piece_0", "s0", lambda given: given[0], artifacts, lambda n: None, "nothing")
    fitting = [a for a in artifacts if size in a.sizes and (a.holds is None or size % 2)]
    expected = min(
        (a.sizes for a in fitting), key=lambda each: each.first != each.last, default=None
    )
    assert ranged(size) == expected


# ---------------------------------------------------------------- which artifact


def derived(x):
    """A middle piece has 2 * s0 rows, and no s0."""
    h = torch.cat([x, x])
    h = F.scaled_dot_product_attention(h, h, h)
    h = (h.sin() + 1).flatten(0, 1)
    return F.scaled_dot_product_attention(h[None], h[None], h[None]).cos()


def guarded(x):
    if x.shape[0] > 8 and x.shape[0] % 4 == 0:
        return F.scaled_dot_product_attention(x, x, x).sin()
    return F.scaled_dot_product_attention(x, x, x).cos()


# Model, settings, first size, what is compiled of a piece, and for other sizes what runs.
SERVED = {
    "sizes and ranges": (
        Sized(),
        {"compile_sizes": (5, 9, 700, "<=8", "<=32")},
        (6, "5 9 700 2-8 9-32 33-"),
        {2: "2-8", 5: "5", 8: "2-8", 9: "9", 10: "9-32", 32: "9-32", 33: "33-", 700: "700"},
    ),
    "sizes": (Sized(), {"compile_sizes": (2, 5)}, (6, "2 5 2-"), {2: "2", 5: "5", 33: "2-"}),
    "a range of one size that is listed": (
        Sized(),
        {"compile_sizes": (2, 6, "<=2", "<=5", "<=6")},
        (7, "2 6 3-5 7-"),
        {6: "6", 2: "2", 3: "3-5", 7: "7-"},
    ),
    "derived sizes": (derived, {"compile_sizes": (5,)}, (6, "5 2-"), {5: "5", 10: "2-"}),
    "ranges that a guard excludes": (
        guarded,
        {"compile_sizes": ("<=6", "<=30")},
        (12, "9-30 31-"),
        {16: "9-30", 32: "31-"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SERVED.values(), ids=SERVED)
def test_which_artifact_runs(case) -> None:
    model, settings, (first, artifacts), expected = case
    labels = Labels()
    model, step, backend = compiled(model, compiler=labels, **settings)
    step(marked(batch(first)))
    pieces = [piece for piece in backend.graphs[0].split.distinct if piece.compiled]
    with_sizes = backend.graphs[0].artifacts.count(" by ")
    assert labels.compiled == artifacts.split() * with_sizes
    assert with_sizes == len(pieces) > 0
    labels.taken()
    taken = {}
    for size in expected:
        check(model, step, size)
        (taken[size],) = labels.taken()
    assert taken == expected
    assert len(backend.graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_results_are_those_of_eager(compiler: str) -> None:
    sizes = {"compile_sizes": (1, 2, 5, "<=8")}
    model, step, backend = compiled(Sized(), compiler=compiler, **sizes)
    step(marked(batch(6)))
    check(model, step, 33, 5, 2, 6, 1, rtol=1e-4, atol=1e-5)
    assert len(backend.graphs) == 2  # torch traces size 1 for itself
    assert backend.graphs[0].split.symbols.specialised() == {}
    if compiler == "eager":  # nothing to gain
        assert backend.graphs[0].artifacts == backend.graphs[1].artifacts
    else:
        first, _, second = backend.graphs[0].artifacts.partition("\npiece_2")
        assert_expected_inline(
            first,
            """\
piece_0 by s0 = x.size()[0]
  size 2
  size 5
  sizes 2 to 8
  sizes 9 and more
  otherwise the uncompiled piece""",
        )
        assert second.splitlines()[1:] == first.splitlines()[1:]
    assert backend.graphs[1].artifacts.splitlines()[:2] == [
        "piece_0",
        "  one artifact for all sizes",
    ]


@pytest.mark.slow
def test_inductor_takes_its_own_artifacts_from_its_caches() -> None:
    """The second time all is found by torch's caches, and what is found has the right bounds."""
    sizes = {"compile_sizes": (5, "<=8")}
    texts = []
    for _ in range(2):
        torch._dynamo.reset()
        model, step, backend = compiled(Sized(), compiler="inductor", **sizes)
        step(marked(batch(6)))
        check(model, step, 5, 6, 8, 9, 40, rtol=1e-4, atol=1e-5)
        texts.append(backend.graphs[0].artifacts)
    assert texts[0] == texts[1]
    assert "if" not in texts[0].split()


class Ops(TorchDispatchMode):
    """Counts the ATen ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_a_static_artifact_knows_its_size() -> None:
    """What depends on the size alone is a constant for functorch, where it is one."""

    def branching(x):
        h = F.scaled_dot_product_attention(x, x, x)
        return torch.ops.cgranges.by_size(h)

    lib = torch.library.Library("cgranges", "DEF")
    lib.define("by_size(Tensor x) -> Tensor")
    lib.impl(
        "by_size",
        lambda x: x.sin() if isinstance(x.shape[0], int) else x.sin() * 1,
        "CompositeImplicitAutograd",
    )
    _, step, backend = compiled(branching, compiler="aot", compile_sizes=(5,))
    step(marked(batch(6)))
    for size, multiplications in ((5, 0), (7, 1)):
        with Ops() as ops:  # torch.compile itself would run eager in such a mode
            backend.graphs[0](size, batch(size))
        assert ops.names["aten.sin.default"] == 1
        assert ops.names["aten.mul.Tensor"] == multiplications
    lib._destroy()


# ---------------------------------------------------------------- how often


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"compile_sizes": (2, 5, 9)}, 4),
        (
            {"compile_sizes": ("<=8", "<=16")},
            3,
        ),
        ({"compile_sizes": (2, 5, "<=8")}, 4),
        ({"compile_sizes": "cudagraph_capture_sizes", "cudagraph_capture_sizes": (2, 4, 6)}, 4),
    ],
)
def test_equal_pieces_are_compiled_once_for_each_size(settings: dict, count: int) -> None:
    labels = Labels()
    _, step, backend = compiled(Decoder(4), compiler=labels, **settings)
    step(marked(torch.randint(0, 32, (6, 4))))
    assert len(labels.compiled) == 3 * count  # the first, the middle ones, the last
    assert len(backend.graphs[0].artifacts.split("piece_")) == 4


@pytest.mark.slow
def test_a_piece_without_the_dimension_has_one_artifact() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 4, D))

        def forward(self, x):
            w = F.scaled_dot_product_attention(self.weight, self.weight, self.weight).sin()
            return F.scaled_dot_product_attention(x, x, x) * w.sum()

    recorded = []

    def compiler(gm, fake_inputs):
        recorded.append(any(isinstance(each, (int, torch.SymInt)) for each in fake_inputs))
        return gm.forward

    model, step, backend = compiled(Model(), compiler=compiler, compile_sizes=(5, 7))
    check(model, step, 2)
    torch._dynamo.reset()
    recorded.clear()
    step(marked(batch(6)))
    check(model, step, 5, 7, 9)
    assert sorted(recorded) == [False, True, True, True]
    assert "one artifact for all sizes" in backend.graphs[-1].artifacts


# ---------------------------------------------------------------- the named symbol


class TwoDims(nn.Module):
    """The first number of its pieces is the other dimension's."""

    def forward(self, y, x):
        y = y.sin() * y.shape[0]
        h = F.scaled_dot_product_attention(x, x, x)
        return (h.view(-1, D).repeat(2, 1) + y.sum(0)) * x.shape[0]


@pytest.mark.slow
def test_the_named_dimension_decides_not_the_first_number() -> None:
    labels = Labels(position=1)
    settings = {"compile_sizes": (5, "<=8")}

    def compiler(gm, fake_inputs):
        return labels(gm, fake_inputs) if len(fake_inputs) > 3 else gm.forward

    model, step, backend = compiled(
        TwoDims(), compiler=compiler, capture_dim="x.size()[0]", **settings
    )
    step(marked(torch.randn(7, D)), marked(batch(6)))
    assert list(backend.graphs[0].split.symbols.dims.values()) == ["y.size()[0]", "x.size()[0]"]
    labels.taken()
    for rows, size, expected in ((9, 5, "5"), (5, 9, "9-"), (5, 6, "2-8"), (5, 5, "5")):
        y, x = torch.randn(rows, D), batch(size)
        torch.testing.assert_close(step(y, x), model(y, x))
        assert labels.taken() == [expected]
    assert len(backend.graphs) == 1


def symbolic(shape_env: ShapeEnv, size: int) -> torch.SymInt:
    source = torch._dynamo.source.ConstantSource(f"n{size}")
    symbol = shape_env.create_symbol(size, source, DimDynamic.DYNAMIC)
    return shape_env.create_symintnode(symbol, hint=size, source=source)


def test_reading_a_symbol() -> None:
    shape_env = ShapeEnv()
    s, t = symbolic(shape_env, 6), symbolic(shape_env, 7)
    symbol = s.node.expr
    with torch._subclasses.FakeTensorMode(shape_env=shape_env):
        plain, twice, mixed = torch.empty(t, s), torch.empty(2 * s + 1, 4), torch.empty(s * t)
        halved, squared = torch.empty(s // 2), torch.empty(s * s)
    cases = [
        ([t, s], (13, 11), 11),
        ([t, plain], (13, torch.empty(13, 11)), 11),
        ([t, twice], (13, torch.empty(23, 4)), 11),
        ([3 * s - 1], (32,), 11),
        ([twice, s], (torch.empty(23, 4), 11), 11),
        ([t], (13,), None),
        ([mixed, t], (torch.empty(143), 13), None),
        ([halved], (torch.empty(5),), None),
        ([squared], (torch.empty(121),), None),
        ([4, "text", None], (4, "text", None), None),
    ]
    for fakes, values, expected in cases:
        read = reader(fakes, symbol)
        assert (None if read is None else read(values)) == expected, fakes


# ---------------------------------------------------------------- graphs


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_capture_takes_the_artifact_of_the_padded_size(mode: str) -> None:
    labels = Labels()
    model, step, backend = compiled(
        build(CASES["sdpa"]),
        compiler=labels,
        capture_device="host",
        cudagraph_capture_sizes=(4, 8),
        compile_sizes="cudagraph_capture_sizes,<=16",
        cudagraph_mode=mode,
    )
    buffer = marked(torch.zeros(8, 4, D))
    step(buffer)
    views = {4: buffer[:4], 8: buffer}
    labels.taken()
    for real, padded in ((3, 4), (4, 4), (5, 8), (8, 8)):
        for _ in range(3):
            buffer.normal_()
            with cgcompile.set_forward_context(
                cudagraph_runtime_mode=CUDAGraphMode[mode],
                batch_descriptor=BatchDescriptor(padded),
                num_unpadded_tokens=real,
            ):
                result = step(views[padded])[:real]
            torch.testing.assert_close(result, model(views[padded])[:real])
        replays_only = real in (4, 8)
        assert labels.taken() == ([] if replays_only else [str(padded)])
    assert backend.counters.captures == 2
    assert backend.counters.replays == 8


@pytest.mark.slow
def test_auto_dispatch_takes_the_artifact_of_the_size_it_captures() -> None:
    labels = Labels()
    model, step, backend = compiled(
        Sized(), compiler=labels, capture_device="host", compile_sizes=(5,)
    )
    step(marked(batch(6)))
    for size, expected in ((5, "5"), (7, "2-")):
        labels.taken()
        check(model, step, size, size)
        assert labels.taken() == [expected]
        check(model, step, size, size)
        assert labels.taken() == []  # replays
    assert backend.counters.captures == 2


# ---------------------------------------------------------------- guards


def guards(backend: cgcompile.Backend) -> list[str]:
    return [str(guard) for guard, _ in backend.graphs[0].split.symbols.guards()]


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot", pytest.param("inductor", marks=pytest.mark.slow)])
def test_artifacts_of_some_sizes_add_no_guards_to_dynamo(compiler: str) -> None:
    kept = []
    for sizes in ({}, {"compile_sizes": (2, 5)}, {"compile_sizes": ("<=8",)}):
        torch._dynamo.reset()
        _, step, backend = compiled(Sized(), compiler=compiler, **sizes)
        step(marked(batch(6)))
        assert backend.graphs[0].split.symbols.specialised() == {}
        kept.append(guards(backend))
    assert kept[1] == kept[0]
    assert set(kept[2]) <= set(kept[0])


@pytest.mark.slow
def test_what_a_compiler_assumes_of_its_range_is_checked_at_each_call() -> None:
    ran = []

    def compiler(gm, fake_inputs):
        name, size = label(fake_inputs), fake_inputs[0]
        if name == "9-":
            assert size % 4 == 0 or size % 4 != 0  # a guard, whatever it is
        return lambda *inputs: ran.append(name) or gm.forward(*inputs)

    model, step, backend = compiled(Sized(), compiler=compiler, compile_sizes="<=8")
    step(marked(batch(12)))
    assert "sizes 9 and more, if Eq(Mod(s0, 4), 0)" in backend.graphs[0].artifacts
    for size, expected in ((16, ["9-"]), (13, []), (8, ["2-8"]), (7, ["2-8"])):
        ran.clear()
        check(model, step, size)
        assert list(dict.fromkeys(ran)) == expected
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_a_bound_decides_comparisons_without_a_guard() -> None:
    decided = {}

    def compiler(gm, fake_inputs):
        decided[label(fake_inputs)] = bool(fake_inputs[0] <= 8)
        return gm.forward

    _, step, backend = compiled(Sized(), compiler=compiler, compile_sizes="<=8")
    step(marked(batch(6)))
    assert decided == {"2-8": True, "9-": False}
    assert "if" not in backend.graphs[0].artifacts.split()


NAMED = {"capture_dim": "x.size()[0]"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [{}, {"compile_sizes": (2,), **NAMED}, {"compile_sizes": ("<=2",), **NAMED}],
)
def test_a_size_that_torch_itself_fixes(sizes: dict, caplog) -> None:
    """The artifact for all sizes is specialised under the others: the graph is traced again."""

    def convolved(x, w):
        h = F.conv2d(x, w, padding=1) * 2
        h = F.scaled_dot_product_attention(h, h, h)
        return F.conv2d(h, w, padding=1) * 2

    model, step, _ = compiled(convolved, compiler="inductor", **sizes)
    w = torch.randn(8, 8, 3, 3)
    for number in (2, 3):
        for layout in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(number, 8, 5, 6).to(memory_format=layout)
            torch.testing.assert_close(step(x, w), model(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["aot", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_in_inference_mode(compiler: str) -> None:
    def writes(x):
        x.mul_(2)
        h = F.scaled_dot_product_attention(x, x, x)
        return h.add_(x.shape[0]).sin()

    sizes = {"compile_sizes": (5, "<=8")}
    model, step, backend = compiled(writes, compiler=compiler, **sizes)
    with torch.inference_mode():
        step(marked(batch(6)))
        for size in (5, 7, 9):
            x = batch(size)
            torch.testing.assert_close(step(x.clone()), model(x), rtol=1e-4, atol=1e-5)
    assert backend.graphs[0].artifacts.count("size 5") == 2


@pytest.mark.slow
def test_two_dimensions_that_a_guard_relates() -> None:
    """The other dimension is compiled with a number that the model allows beside the size."""

    def related(x, y):
        if y.shape[0] > 2 * x.shape[0]:
            return F.scaled_dot_product_attention(x, x, x).sin() + y[: x.shape[0]].sum()
        return F.scaled_dot_product_attention(x, x, x) * 0

    seen = []

    def compiler(gm, fake_inputs):
        seen.append([each for each in fake_inputs[:2] if not isinstance(each, torch.Tensor)])
        return gm.forward

    model, step, backend = compiled(
        related, compiler=compiler, capture_dim="x.size()[0]", compile_sizes=(5, 40)
    )
    step(marked(batch(6)), marked(torch.randn(20)))
    for size, rows in ((5, 11), (5, 30), (40, 81), (7, 90)):
        x, y = batch(size), torch.randn(rows)
        torch.testing.assert_close(step(x, y), model(x, y))
    assert [[type(each) for each in row] for row in seen] == [
        [torch.SymInt, int],
        [torch.SymInt, int],
        [torch.SymInt, torch.SymInt],
    ]
    assert len(backend.graphs) == 1


@pytest.mark.slow
def test_unbacked_sizes() -> None:
    labels = Labels()
    sizes = {"compile_sizes": (1, 5, "<=8")}
    model, step, backend = compiled(build(CASES["sdpa"]), compiler=labels, **sizes)
    x = batch(6)
    torch._dynamo.decorators.mark_unbacked(x, 0)
    step(x)
    assert labels.compiled[:4] == ["1", "5", "1-8", "9-"]
    for size, expected in ((1, "1"), (5, "5"), (8, "1-8"), (9, "9-")):
        labels.taken()
        check(model, step, size)
        assert labels.taken() == [expected]
    assert len(backend.graphs) == 1


# ---------------------------------------------------------------- inputs of any kind


@pytest.mark.slow
def test_inputs_that_share_memory_share_it_in_every_artifact() -> None:
    def writes(x, base):
        head, tail = base[: x.shape[0]], base[1:]
        h = F.scaled_dot_product_attention(x, x, x)
        head.add_(h.sum((1, 2), keepdim=True))
        return h + tail[: x.shape[0]] * 2 + base.sum()

    model, step, _ = compiled(writes, compiler="aot", compile_sizes=(5,))
    for size in (6, 5, 7):
        x, base = batch(size), torch.randn(9, 1, 1)
        if size == 6:
            marked(x)
        theirs = base.clone()
        torch.testing.assert_close(step(x, base), model(x, theirs))
        torch.testing.assert_close(base, theirs)


def test_values_of_another_environment() -> None:
    """Views keep strides, offsets and what they share; sizes are constants or bounded."""
    shape_env = ShapeEnv()
    s = symbolic(shape_env, 6)
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode(shape_env=shape_env):
        base = torch.empty(s, 3 * D)
        values = [s, base[:, :D], base[:, D : 2 * D], torch.empty(2 * s, 3)[1:]]
    inputs = []
    for k, value in enumerate(values):
        inputs.append(graph.placeholder(f"i{k}"))
        inputs[-1].meta["example_value"] = value
    graph.output((graph.call_function(torch.add, (inputs[1], inputs[0])),))
    gm = torch.fx.GraphModule({}, graph)
    for size, expected in ((4, 4), (expressions.Span(20, 9, 30), "symbolic")):
        own = expressions.OwnShapes({s.node.expr: size}, "test")
        copy = own.copied(gm, dynamo.copied(gm))
        n, first, second, third = (
            node.meta["example_value"] for node in copy.graph.find_nodes(op="placeholder")
        )
        assert (n == 4) if expected == 4 else isinstance(n, torch.SymInt)
        assert first.stride() == second.stride() == (3 * D, 1)
        assert (first.storage_offset(), second.storage_offset()) == (0, D)
        assert raw_memory.storage_key(first) == raw_memory.storage_key(second)
        assert raw_memory.storage_key(first) != raw_memory.storage_key(third)
        assert third.storage_offset() == 3
        assert bool(third.shape[0] == 2 * n - 1)
        assert own.guards() == []
        (result,) = copy.graph.output_node().args[0]
        assert bool(result.meta["example_value"].shape[0] == n)
    assert gm.graph.find_nodes(op="placeholder")[0].meta["example_value"] is s


def test_a_view_of_memory_of_unknown_size_is_not_made_again() -> None:
    shape_env = ShapeEnv()
    s, t = symbolic(shape_env, 6), symbolic(shape_env, 9)
    graph = torch.fx.Graph()
    with torch._subclasses.FakeTensorMode(shape_env=shape_env):
        base = torch.empty(t + s)
        values = [s, base[1 : s + 1]]
    for k, value in enumerate(values):
        graph.placeholder(f"i{k}").meta["example_value"] = value
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    known, other = s.node.expr, t.node.expr
    assert expressions.why_not_copied(gm, {known, other}) is None
    assert expressions.why_not_copied(gm, {known}) == (
        "input 'i1' is a view of memory whose size no input determines"
    )


def test_a_tensor_subclass_that_stays_whole_has_one_artifact() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def model(x, w):
        return (x @ w).sum(-1)

    labels = []
    backend = cgcompile.Backend(
        compiler=lambda gm, fakes: labels.append(len(fakes)) or gm.forward, compile_sizes=(5,)
    )
    w = torch.randn(D, D)
    step = torch.compile(model, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        for size in (6, 5):
            x = marked(batch(size)) if size == 6 else batch(size)
            wrapped = TwoTensor(w, w.clone())
            torch.testing.assert_close(step(x, wrapped).a, model(x, wrapped).a)
    assert len(labels) == 1


HARD = ("flex_attention", "vmap_sdpa", "base_mutated_by_boundary", "view_mutated_in_another_piece")
HARD += (
    "cond",
    "input_mutated_in_pieces",
    "unbacked_input",
    "size_returned",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", HARD)
def test_pieces_of_every_kind(name: str) -> None:
    case = CASES[name]
    sizes = {"compile_sizes": (*case.sizes[:1], "<=4")}
    backend = check_against_eager(case, "aot", **sizes)
    texts = [graph.artifacts for graph in backend.graphs]
    assert any(f"\n  size {case.sizes[0]}\n  sizes " in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autocast", "no_grad", "inference_mode"])
def test_state_that_pieces_switch(name: str) -> None:
    states = {
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
    }

    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(D, D)

        def forward(self, x):
            with states[name]():
                h = self.linear(x)
                return F.scaled_dot_product_attention(h, h, h).sin() @ self.linear.weight

    sizes = {"compile_sizes": (5, "<=8")}
    model, step, backend = compiled(Stateful(), compiler="aot", **sizes)
    step(marked(batch(6)))
    check(model, step, 5, 6, 9)
    assert backend.graphs[0].artifacts.count("size 5") == 2
    assert not torch.is_inference_mode_enabled()


# ---------------------------------------------------------------- errors


def raised(model, *inputs: torch.Tensor, **settings) -> Exception:
    _, step, _ = compiled(model, **settings)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        step(*inputs)
    return caught.value.inner_exception


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "where"), [("5", "piece_0, size 5"), ("9-", "piece_0, sizes 9 and more")]
)
def test_a_compiler_that_raises_for_one_size(failing: str, where: str) -> None:
    def broken(gm, fake_inputs):
        if label(fake_inputs) == failing:
            raise ValueError("no kernel for this")
        return gm.forward

    sizes = {"compile_sizes": (5, "<=8")}
    error = raised(Sized(), marked(batch(6)), compiler=broken, **sizes)
    assert isinstance(error, PieceCompileError)
    assert f"{where}: compiler 'broken' raised ValueError: no kernel for this" in str(error)
    assert "test_ranges.py:" in str(error)
    assert "in forward" in str(error)


def test_a_piece_that_cannot_be_traced_at_a_size() -> None:
    lib = torch.library.Library("cgrangesbad", "DEF")
    lib.define("narrow(Tensor x) -> Tensor")

    def fake(x):
        if type(x.shape[0]) is int:
            raise ValueError("sizes of this op are never known")
        return torch.empty_like(x)

    lib.impl("narrow", lambda x: x.clone(), "CPU")
    torch.library.register_fake("cgrangesbad::narrow", fake, lib=lib)

    def narrow(x):
        return torch.ops.cgrangesbad.narrow(F.scaled_dot_product_attention(x, x, x)) + 1

    error = raised(narrow, marked(batch(6)), compiler="aot", compile_sizes=(5,))
    assert isinstance(error, PieceCompileError)
    assert "size 5: running it on fake values of this size raised" in str(error)
    assert "never known" in str(error)
    assert "test_ranges.py:" in str(error)
    lib._destroy()


@pytest.mark.slow
def test_a_users_compiler_may_not_fix_a_size_of_a_range() -> None:
    def narrow(gm, fake_inputs):
        if label(fake_inputs) == "9-":
            int(fake_inputs[0])
        return gm.forward

    error = raised(Sized(), marked(batch(6)), compiler=narrow, compile_sizes="<=8")
    assert isinstance(error, SymbolError)
    assert "piece_0, sizes 9 and more" in str(error)
    assert "fixed the dynamic dimension" in str(error)


def test_a_size_that_the_model_refuses() -> None:
    def fours(x):
        torch._check(x.shape[0] % 4 == 0)
        return (
            F.scaled_dot_product_attention(x.view(4, -1, D), x.view(4, -1, D), x.view(4, -1, D)) * 2
        )

    error = raised(fours, marked(torch.randn(8, D)), compiler="eager", compile_sizes=(8, 10))
    assert isinstance(error, SymbolError)
    assert "compile_sizes: size 10 of s0 = x.size()[0] is refused" in str(error)


@pytest.mark.parametrize("settings", [{"compile_sizes": 5}, {"compile_sizes": "<=8"}])
@pytest.mark.parametrize("compiler", ["eager", "aot"])
def test_several_dimensions_need_a_name(settings: dict, compiler: str) -> None:
    inputs = marked(torch.randn(7, D)), marked(batch(6))
    error = raised(TwoDims(), *inputs, compiler=compiler, **settings)
    assert isinstance(error, ConfigError)
    assert "Set capture_dim to one of: y.size()[0], x.size()[0]" in str(error)
