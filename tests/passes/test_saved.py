"""A Dynamo graph to bytes and back: the same split, the same numbers, in another process too."""

import enum
import hashlib
import json
import math
import operator
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, D
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import build, clone, mark
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cgcompile
from cgcompile import compat
from cgcompile.boundaries import Boundaries
from cgcompile.errors import CGCompileError, SavedGraphError, SymbolError, UnsavableGraphError
from cgcompile.passes import dump_graph, load_graph, split_graph
from cgcompile.passes.saved import _MAGIC

ROOT = Path(__file__).resolve().parents[2]


class Call:
    """What Dynamo passed to a graph, and what came back."""

    def __init__(self, args: tuple[Any, ...], result: Any) -> None:
        self.args, self.result = args, result


class Saved:
    """A graph that Dynamo traced, its saved form, and its calls."""

    def __init__(self, gm: fx.GraphModule) -> None:
        compat.make_floats_constant(gm)
        self.gm, self.data, self.calls = gm, dump_graph(gm), []
        self.guards = guards_of(gm)

    def run(self, *args: Any) -> Any:
        given = cloned(args)
        result = seeded(self.gm.forward, args)
        self.calls.append(Call(given, cloned((result, args))))
        return result


def cloned(tree: Any) -> Any:
    return compat.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


def seeded(function: Callable[..., Any], args: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return function(*args)


def fake_mode_of(gm: fx.GraphModule) -> Any:
    return compat.fake_context(node.meta.get("example_value") for node in gm.graph.nodes)


def guards_of(gm: fx.GraphModule) -> list[tuple[str, str]]:
    return [(str(g), line) for g, line in compat.Shapes(fake_mode_of(gm).shape_env).guards()]


@cache
def traced(name: str) -> list[Saved]:
    """The graphs of a case, each called at all sizes; nobody changes them."""
    torch._dynamo.reset()
    case, found = CASES[name], []

    def keep(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.append(Saved(gm))
        return found[-1].run

    with torch.no_grad(), torch._dynamo.config.patch(**case.dynamo):
        compiled = torch.compile(build(case), backend=keep, dynamic=case.dynamic)
        for position, size in enumerate(case.sizes):
            inputs = clone(case.inputs(size))
            if position == 0:
                mark(case, inputs)
            compiled(*inputs)
    return found


def text_of_split(name: str, gm: fx.GraphModule) -> str:
    return split_graph(gm, Boundaries(CASES[name].settings.get("splitting_ops", ()))).text()


@pytest.mark.parametrize("name", CASES)
def test_same_graph_split_and_numbers(name: str) -> None:
    for saved in traced(name):
        loaded = load_graph(saved.data)
        assert loaded.graph.python_code("self").src == saved.gm.graph.python_code("self").src
        assert guards_of(loaded) == saved.guards
        assert dump_graph(loaded) == saved.data  # values, sharing, sizes: all that is kept
        for call in saved.calls:
            args = cloned(call.args)
            with torch.no_grad():
                found = (seeded(loaded.forward, args), args)
            torch.testing.assert_close(found, call.result, rtol=0, atol=0, equal_nan=True)
        assert text_of_split(name, loaded) == text_of_split(name, saved.gm)


COMPILED = ("sdpa", "decoder", "derived_sizes", "guard", "two_symbols", "vmap_sdpa", "eager_region")
COMPILED += ("unbacked_input", "nonzero", "inference_mode", "base_mutated_view_read")


@pytest.mark.parametrize("name", COMPILED)
def test_pieces_of_a_loaded_graph_compile(name: str) -> None:
    case = CASES[name]
    settings = {**case.settings, "compiler": "aot", "capture_device": "host"}
    for saved in traced(name):
        backend = cgcompile.Backend(**settings)
        graph = backend(load_graph(saved.data), ())
        for call in saved.calls:
            args = cloned(call.args)
            for _ in range(3):  # warming, capture, replay
                with torch.no_grad():
                    found = seeded(graph, args)
                torch.testing.assert_close(found, call.result[0], rtol=2e-4, atol=2e-5)
        assert backend.counters.replays > 0


FRESH = ("decoder", "flex_attention", "op_overload", "custom_op_function", "cond", "vmap_sdpa")

SCRIPT = """
import sys, torch
from cases import CASES, library
from cgcompile.boundaries import Boundaries
from cgcompile.passes import load_graph, split_graph
library()
for name, data, args in torch.load(sys.argv[1], weights_only=True):
    gm = load_graph(data)
    with torch.no_grad():
        result = gm(*args)
    text = split_graph(gm, Boundaries(CASES[name].settings.get("splitting_ops", ()))).text()
    torch.save((result, text), f"{sys.argv[1]}.{name}")
"""


def test_a_fresh_process_with_another_hash_seed(tmp_path: Path) -> None:
    graphs = {name: traced(name)[0] for name in FRESH}
    rows = [(n, s.data, compat.tree_map(_plain, s.calls[0].args)) for n, s in graphs.items()]
    file = tmp_path / "graphs"
    torch.save(rows, file)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONHASHSEED": "4711", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", SCRIPT, str(file)], check=True, env=environment)
    for name, saved in graphs.items():
        result, text = torch.load(f"{file}.{name}", weights_only=True)
        torch.testing.assert_close(tuple(result), saved.calls[0].result[0], rtol=0, atol=0)
        assert text == text_of_split(name, saved.gm)


def _plain(found: Any) -> Any:
    return found.detach() if isinstance(found, torch.Tensor) else found


def test_guards_refuse_the_same_sizes() -> None:
    split = split_graph(load_graph(traced("guard")[0].data), Boundaries())
    split.symbols.check_sizes((4, 8), None)
    with pytest.raises(SymbolError, match=r"Mod\(s0, 4\).*cases\.py"):
        split.symbols.check_sizes((6,), None)


def test_the_callers_state_does_not_matter() -> None:
    saved = traced("vmap_sdpa")[0]
    other = FakeTensorMode()
    with torch.inference_mode(), torch.device("meta"), other:
        loaded = load_graph(saved.data)
        assert torch.is_inference_mode_enabled()
    assert dump_graph(loaded) == saved.data


def test_ranges_are_those_of_the_trace() -> None:
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        saved = traced.__wrapped__("sdpa")[0]
    loaded = load_graph(saved.data)  # with the switch off
    for gm in (saved.gm, loaded):
        size = gm.graph.find_nodes(op="placeholder")
        numbers = [n.meta["example_value"] for n in size]
        (symint,) = [n for n in numbers if isinstance(n, torch.SymInt)]
        bounds = compat.Shapes.of([symint]).bounds(symint.node.expr)
        assert bounds[0] == 1
        assert symint.node.hint == CASES["sdpa"].sizes[0]
    assert dump_graph(loaded) == saved.data


def test_the_graph_break_is_told() -> None:
    first = traced("graph_break")[0]
    loaded = load_graph(first.data)
    assert compat.graph_break(loaded) == compat.graph_break(first.gm) is not None
    assert compat.graph_break(compat.copied(loaded)) is not None
    inputs = [n for n in compat.copied(loaded).graph.nodes if n.op == "placeholder"]
    assert any(map(compat.source_name, inputs))
    assert any(map(compat.is_static_input, inputs))


# ---------------------------------------------------------------- graphs made by hand


def by_hand(
    target: Any = torch.sin,
    args: tuple[Any, ...] = (),
    *,
    given: Any = None,
    attribute: Any = None,
    made: Any = None,
) -> fx.GraphModule:
    """``target(x, *args)``, with values of an own trace."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = fake() if given is None else given
    held = {} if attribute is None else {"held": attribute}
    extra = (graph.get_attr("held"),) if held else ()
    node = graph.call_function(target, (x, *extra, *args))
    node.meta["example_value"] = x.meta["example_value"] if made is None else made
    graph.output((node,))
    return compat.lazy_module(held, graph)  # code that does not print would be no Python


def fake(*shape: int, **options: Any) -> torch.Tensor:
    with FakeTensorMode(shape_env=ShapeEnv()):
        return torch.empty(shape or (2, 3), **options)


def first_args(gm: fx.GraphModule) -> tuple[Any, ...]:
    (node,) = gm.graph.find_nodes(op="call_function", target=torch.sin)
    return node.args[1:]


class Colour(enum.Enum):
    RED = 1


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.just(...),
    st.just(math.nan),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda"), torch.device("cuda:1")]),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.channels_last]),
    st.sampled_from([*cgcompile.CUDAGraphMode, *cgcompile.AttentionCGSupport]),
    st.lists(st.integers(0, 9)).map(torch.Size),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers(), st.none()),
    st.builds(range, st.integers(-9, 9), st.integers(-9, 9), st.integers(1, 3)),
)
ARGUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal in type and value; nan is nan, and 0.0 is not -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


@given(argument=ARGUMENTS)
@settings(max_examples=300, deadline=None)
def test_arguments_come_back_as_they_were(argument: Any) -> None:
    gm = by_hand(args=(argument,))
    loaded = load_graph(dump_graph(gm))
    assert same(first_args(loaded), first_args(gm))


def test_symbolic_arguments_and_values() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, static_shapes=False)
    n = mode.from_tensor(torch.empty(6, 3), source=None).shape[0]
    u, f = env.create_unbacked_symint(), env.create_unbacked_symfloat()
    numbers = (n, n * 2 + 1, n // 2, torch.sym_max(n, 4), n > 4, u, u * 4, f, n / 4, u >= 2)
    with mode:
        base = torch.empty(n, 8)
        values = (base, base[:, 2:5], base.view(torch.uint8), torch.empty(u, 2), base.t())
    gm = by_hand(args=numbers, given=base, made=values)
    loaded = load_graph(dump_graph(gm))
    assert [str(found) for found in first_args(loaded)] == [str(number) for number in numbers]
    assert first_args(loaded)[0].node.hint == 6
    assert not first_args(loaded)[5].node.has_hint()
    (node,) = loaded.graph.find_nodes(op="call_function", target=torch.sin)
    found = node.meta["example_value"]
    for a, b in zip(found, values, strict=True):
        assert (a.dtype, str(a.shape), str(a.stride())) == (b.dtype, str(b.shape), str(b.stride()))
        assert str(a.storage_offset()) == str(b.storage_offset())
    keys = [compat.storage_key(each) for each in found]
    assert len({keys[0], keys[1], keys[2], keys[4]}) == 1
    assert keys[3] != keys[0]
    assert found[0] is next(iter(loaded.graph.nodes)).meta["example_value"]
    assert guards_of(loaded) == guards_of(gm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_small_constants_are_kept(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    constant = torch.randn(shape).to(dtype)
    loaded = load_graph(dump_graph(by_hand(torch.add, attribute=constant)))
    assert torch.equal(loaded.held, constant)
    assert loaded.held.dtype is dtype
    parameter = torch.nn.Parameter(torch.randn(2))
    again = load_graph(dump_graph(by_hand(torch.add, attribute=parameter)))
    assert isinstance(again.held, torch.nn.Parameter)
    assert again.held.requires_grad


def test_values_of_another_device_need_no_such_device() -> None:
    gm = by_hand(given=fake(2, device="cuda"))
    loaded = load_graph(dump_graph(gm))
    found = next(iter(loaded.graph.nodes)).meta["example_value"]
    assert found.device == torch.device("cuda:0")


# ---------------------------------------------------------------- what cannot be saved


class Thing:
    pass


class _Raises:
    @property
    def __class__(self) -> Any:
        raise KeyError("no")


class Wrapper(torch.Tensor):
    pass


def of_main(x: torch.Tensor) -> torch.Tensor:
    return x


of_main.__module__ = "__main__"


def _calls_a_module() -> fx.GraphModule:
    graph = fx.Graph()
    graph.output((graph.call_module("layer", (graph.placeholder("x"),)),))
    return fx.GraphModule({"layer": torch.nn.Identity()}, graph)


def _own_code() -> fx.GraphModule:
    return fx.symbolic_trace(lambda x: x["a"], concrete_args={"x": {"a": fx.PH}})


def _jvp() -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return gm.forward

    def f(x: torch.Tensor) -> Any:
        return torch.func.jvp(torch.sin, (x,), (x,))

    torch.compile(f, backend=keep, fullgraph=True)(torch.randn(3))
    return found[0]


def _triton() -> Any:
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation

    return triton_kernel_wrapper_mutation


UNSAVABLE: dict[str, tuple[Callable[[], fx.GraphModule], str]] = {
    "function of __main__": (lambda: by_hand(of_main), "'of_main'.*function of __main__"),
    "local function": (lambda: by_hand(lambda x: x), "<lambda>.*cannot be imported"),
    "triton kernel": (lambda: by_hand(_triton()), "triton_kernel_wrapper_mutation"),
    "module": (_calls_a_module, "'layer'.*calls the module layer"),
    "object": (lambda: by_hand(args=(Thing(),)), "'sin'.*a value of type .*Thing"),
    "nested object": (lambda: by_hand(args=([{"a": Thing()}],)), "type .*Thing"),
    "local enum": (lambda: by_hand(args=(enum.Enum("E", "A").A,)), "cannot be imported"),
    "number of numpy": (lambda: by_hand(args=(type("N", (int,), {})(1),)), "type .*N"),
    "real value": (lambda: by_hand(given=torch.ones(2)), "'x'.*not a fake tensor"),
    "subclass": (lambda: by_hand(given=torch.ones(2).as_subclass(Wrapper)), "a subclass"),
    "conjugate": (lambda: by_hand(made=fake(2, dtype=torch.cfloat).conj()), "conjugate"),
    "sparse": (lambda: by_hand(given=fake(2, layout=torch.sparse_coo)), "torch.sparse_coo"),
    "two traces": (lambda: by_hand(made=fake(2)), "another trace"),
    "large constant": (lambda: by_hand(attribute=torch.zeros(99, 999)), "395604 bytes"),
    "attribute": (lambda: by_hand(attribute=torch.nn.Identity()), "attribute of type .*Identity"),
    "value that raises": (lambda: by_hand(made=_Raises()), "KeyError: 'no'"),
    "own code": (_own_code, "calling convention"),
    "forward-mode AD": (_jvp, "_jvp_increment_nesting|_enter_dual_level"),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_told(name: str) -> None:
    make, expected = UNSAVABLE[name]
    gm = make()
    limit = sys.getrecursionlimit()
    if name == "deep":
        sys.setrecursionlimit(380)
    try:
        with pytest.raises(
            UnsavableGraphError, match=f"(?s)cannot be saved.*{expected}|{expected}"
        ):
            dump_graph(gm)
    finally:
        sys.setrecursionlimit(limit)


# ---------------------------------------------------------------- what cannot be loaded


def content_of(data: bytes) -> Any:
    return json.loads(zlib.decompress(data[len(_MAGIC) + 32 :]))


def packed(content: Any) -> bytes:
    body = zlib.compress(json.dumps(content).encode())
    return _MAGIC + hashlib.sha256(body).digest() + body


@pytest.fixture(scope="module")
def data() -> bytes:
    return traced("vmap_sdpa")[0].data


@given(st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_bytes_are_told(data: bytes, draw: Any) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    flipped = bytes([data[place] ^ draw.draw(st.integers(1, 255))])
    for damaged in (data[:place], data[:place] + flipped + data[place + 1 :], data + flipped):
        with pytest.raises(SavedGraphError, match="is damaged"):
            load_graph(damaged)


@given(st.binary(max_size=200))
@settings(max_examples=50, deadline=None)
def test_foreign_bytes_are_told(foreign: bytes) -> None:
    for each in (foreign, _MAGIC + hashlib.sha256(foreign).digest() + foreign):
        with pytest.raises(SavedGraphError, match="is damaged"):
            load_graph(each)


JUNK = st.sampled_from([None, -1, 0, 99999, 2.5, "x", [], ["tensor", 0], ["node", -7], {}, [[1]]])


@given(st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_file_of_another_program_never_crashes(data: bytes, draw: Any) -> None:
    content = content_of(data)
    at: Any = content
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = draw.draw(st.sampled_from(keys))
        if (
            not isinstance(at[key], (dict, list))
            or not at[key]
            or draw.draw(st.integers(0, 3)) == 0
        ):
            break
        at = at[key]
    at[key] = draw.draw(JUNK)
    with suppress(CGCompileError):
        load_graph(packed(content))
    assert _level() == 0
    assert not torch.is_autocast_enabled("cpu")


def _level() -> int:
    return torch._C._functorch.maybe_current_level() or 0


def test_another_torch_is_told(data: bytes) -> None:
    content = {**content_of(data), "torch": "1.0"}
    with pytest.raises(SavedGraphError, match=r"of torch 1\.0; expected"):
        load_graph(packed(content))


def test_an_op_that_is_gone_or_changed_is_told() -> None:
    saved = traced("op_packet")[0]
    text = json.dumps(content_of(saved.data))
    gone = json.loads(text.replace("cgtest::attend", "cgtest::gone"))
    with pytest.raises(SavedGraphError, match=r"calls cgtest::gone .* does not exist here"):
        load_graph(packed(gone))
    changed = json.loads(text.replace("Tensor v, Tensor(a!) out", "Tensor v, Tensor out"))
    with pytest.raises(SavedGraphError, match="means something else here"):
        load_graph(packed(changed))
    function = json.loads(text.replace('"linear"', '"linnear"'))
    with pytest.raises(SavedGraphError, match="linnear"):
        load_graph(packed(function))


def test_a_value_that_comes_out_different_is_told(data: bytes) -> None:
    content = content_of(data)
    for row in content["graph"]["nodes"]:
        if row[5].get("run"):
            row[5]["run"] = "torch.float16 [3] [1]"
    with pytest.raises(SavedGraphError, match=r"should give torch\.float16"):
        load_graph(packed(content))
    assert _level() == 0


def test_a_failure_inside_autocast_leaves_it() -> None:
    found: list[bytes] = []

    def keep(gm: fx.GraphModule, _: Any) -> Any:
        found.append(dump_graph(gm))
        return gm.forward

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.vmap(lambda row: row @ row)(x)

    torch.compile(f, backend=keep, fullgraph=True)(torch.randn(4, D, D))
    assert load_graph(found[0])
    text = json.dumps(content_of(found[0])).replace("torch.bfloat16 [", "torch.float16 [")
    with pytest.raises(SavedGraphError, match=r"float16.*found torch\.bfloat16"):
        load_graph(packed(json.loads(text)))
    assert not torch.is_autocast_enabled("cpu")


def test_a_user_function_is_found_by_name() -> None:
    loaded = load_graph(dump_graph(by_hand(operator.neg)))
    assert any(node.target is operator.neg for node in loaded.graph.nodes)
    again = load_graph(dump_graph(by_hand(cgcompile.eager_region)))
    assert any(node.target is cgcompile.eager_region for node in again.graph.nodes)
