"""The key of a piece: equal in every process, different for everything that may matter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import sympy
import torch
from lib.cases import D, Decoder
from torch.utils._sympy import functions as of_sizes

import cgcompile
from cgcompile.passes import FunctionPass
from cgcompile.passes.split import GraphText, Unnameable
from cgcompile.pieces.cache import facts_of_piece, key_of
from cgcompile.torch_compat import inductor
from cgcompile.torch_compat.expressions import inclusive

ROOT = Path(__file__).resolve().parents[2]


def compiled(function, *inputs, dynamic=True, **settings):
    """The backend of one function; rows are dynamic where there are 6 to 9 of them."""
    torch._dynamo.reset()
    backend = cgcompile.Backend(**{"compiler": "aot", **settings})
    for value in inputs if dynamic else ():
        if isinstance(value, torch.Tensor) and value.shape[0] in range(6, 10):
            torch._dynamo.mark_dynamic(value, 0)
    with torch.no_grad():
        backend.keep_alive = torch.compile(function, backend=backend)
        backend.keep_alive(*inputs)
    return backend


def key(function, *inputs, **settings) -> str:
    backend = compiled(function, *inputs, **settings)
    (origin,) = backend.graphs[0].compilation.pieces
    assert origin.key is not None, origin.uncached
    return origin.key


def facts(function, *inputs) -> dict[str, str]:
    backend = compiled(function, *inputs)
    (piece,) = backend.graphs[0].split.pieces
    module = piece.module
    fakes = [n.meta["example_value"] for n in module.graph.find_nodes(op="placeholder")]
    return facts_of_piece(module, fakes)


def base(x, w):
    return (x @ w).sin() * 2 + 1


def X(*sizes: int, **more) -> torch.Tensor:
    return torch.ones(*(sizes or (6, D)), **more)


# ---------------------------------------------------------------- equal

STABLE = """
import sys; sys.path.insert(0, "tests")
import torch, cgcompile
from lib.cases import Decoder
model, backend = Decoder(3).eval(), cgcompile.Backend(compiler="aot")
x = torch.randint(0, 32, (6, 4))
torch._dynamo.mark_dynamic(x, 0)
with torch.no_grad():
    torch.compile(model, backend=backend)(x)
print(*(each.key for each in backend.graphs[0].compilation.pieces))
"""


@pytest.mark.slow
def test_keys_are_the_same_in_every_process() -> None:
    keys = [
        subprocess.run(
            [sys.executable, "-c", STABLE],
            env={**os.environ, "PYTHONHASHSEED": seed, "SOME_VARIABLE": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == 3


@pytest.mark.slow
def test_names_and_hints_do_not_matter() -> None:
    def renamed(other, weight):
        product = other @ weight
        return product.sin() * 2 + 1

    assert key(base, X(), X(D, D)) == key(renamed, X(), X(D, D))
    assert key(base, X(), X(D, D)) == key(base, X(9, D), X(D, D))  # another size at first
    assert key(lambda w, _, x: base(x, w), X(D, D), 3, X()) == key(base, X(), X(D, D))


def test_the_text_of_a_piece() -> None:
    texts = facts(base, X(), X(D, D))
    assert texts["graph"].splitlines() == [
        "%0 = input size s0",
        "%1 = input f32[s0, 16] cpu strides (16, 1)",
        "%2 = input f32[16, 16] cpu strides (16, 1)",
        "%3 = _operator.matmul(%1, %2) -> f32[s0, 16] cpu strides (16, 1)",
        "%4 = method sin(%3) -> f32[s0, 16] cpu strides (16, 1)",
        "%5 = _operator.mul(%4, 2) -> f32[s0, 16] cpu strides (16, 1)",
        "%6 = _operator.add(%5, 1) -> f32[s0, 16] cpu strides (16, 1)",
        "return (%6)",
    ]
    assert texts["sizes"].splitlines() == ["2 <= s0 <= int_oo"]


# ---------------------------------------------------------------- different


def passed(version: str) -> dict:
    return {"passes": ("split", FunctionPass("mine", lambda gm: None, version))}


VARIANTS = {
    "base": lambda: key(base, X(), X(D, D)),
    "static": lambda: key(base, X(), X(D, D), dynamic=False),
    "dtype": lambda: key(base, X().half(), X(D, D).half()),
    "size": lambda: key(base, X(6, 2 * D), X(2 * D, D)),
    "strides": lambda: key(base, X(), X(D, D).t()),
    "offset": lambda: key(base, X(7, D)[1:], X(D, D)),
    "requires grad": lambda: key(base, X(), X(D, D).requires_grad_()),
    "parameter": lambda: key(base, X(), torch.nn.Parameter(X(D, D))),
    "op": lambda: key(lambda x, w: (x @ w).cos() * 2 + 1, X(), X(D, D)),
    "constant": lambda: key(lambda x, w: (x @ w).sin() * 3 + 1, X(), X(D, D)),
    "float": lambda: key(lambda x, w: (x @ w).sin() * 2.0 + 1, X(), X(D, D)),
    "keyword": lambda: key(lambda x, w: torch.add((x @ w).sin(), 1, alpha=2), X(), X(D, D)),
    "outputs": lambda: key(lambda x, w: (base(x, w), x + 1), X(), X(D, D)),
    "guard": lambda: key(lambda x, w: base(x, w) if x.shape[0] < 99 else x, X(), X(D, D)),
    "pass": lambda: key(base, X(), X(D, D), **passed("1")),
    "pass version": lambda: key(base, X(), X(D, D), **passed("2")),
}


@pytest.mark.slow
def test_whatever_may_matter_makes_another_key() -> None:
    keys = {name: make() for name, make in VARIANTS.items()}
    same: dict[str, list[str]] = {}
    for name, text in keys.items():
        same.setdefault(text, []).append(name)
    assert [names for names in same.values() if len(names) > 1] == []


def test_inputs_that_share_memory_make_another_key() -> None:
    def step(x, y):
        return x * 2 + y

    data = torch.ones(8, D)
    keys = {
        key(step, X(4, D), torch.ones(8, D)[4:]),
        key(step, data[:4], data[4:]),
    }
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda: torch._inductor.config.patch(max_fusion_size=7), "inductor"),
        (lambda: torch._functorch.config.patch(cse=False), "functorch"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "state"),
        (lambda: torch.inference_mode(), "state"),
    ],
)
def test_settings_of_torch_are_facts(change, fact: str) -> None:
    import torch._functorch.config
    import torch._inductor.config  # noqa: F401

    before = inductor.compiler_settings({})
    with change():
        after = inductor.compiler_settings({})
    assert [name for name in before if before[name] != after[name]] == [fact]
    assert inductor.compiler_settings({}) == before


def test_all_settings_that_hold_passes_are_facts() -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    settings = inductor.compiler_settings({})
    for kind, module in (("inductor", inductor_config), ("functorch", functorch_config)):
        names = {name for name in module._config if "custom_" in name and name.endswith("_pass")}
        rows = {row.partition(" = ")[0] for row in settings[kind].splitlines()}
        assert names
        assert names <= rows


def test_old_names_of_options_are_known() -> None:
    import torch._inductor.config as inductor_config

    old = [name for name, entry in inductor_config._config.items() if entry.alias is not None]
    assert all(map(inductor.is_inductor_option, [*old, *inductor.inductor_option_names()]))
    assert not inductor.is_inductor_option("no_setting")


def test_options_are_facts() -> None:
    before, after = (
        inductor.compiler_settings({}),
        inductor.compiler_settings({"max_fusion_size": 7}),
    )
    assert [name for name in before if before[name] != after[name]] == ["inductor"]


def test_versions_and_machine_are_facts() -> None:
    versions = inductor.versions()
    assert torch.__version__ in versions["torch"]
    assert set(versions) == {"torch", "triton", "runtime", "python"}
    before = inductor.machine([torch.device("cpu")])
    torch.set_num_threads(torch.get_num_threads() + 1)
    try:
        assert inductor.machine([torch.device("cpu")]) != before
    finally:
        torch.set_num_threads(torch.get_num_threads() - 1)
    assert key_of(versions) != key_of({**versions, "torch": "2.99"})


# ---------------------------------------------------------------- no key


class Own:
    """An Inductor pass without uuid()."""

    def __call__(self, graph) -> None: ...


@pytest.fixture(scope="module")
def ops():
    library = torch.library.Library("cgc_keys", "DEF")
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x + 1, "CPU")
    library.impl("plain", lambda x: torch.empty_like(x), "Meta")
    library.define("inside(Tensor x) -> Tensor")
    library.impl("inside", lambda x: x + 1, "CompositeImplicitAutograd")
    yield torch.ops.cgc_keys
    library._destroy()


@torch._dynamo.allow_in_graph
def users_own(x):
    return x * 2


def uncached(function, *inputs, **settings) -> str | None:
    backend = compiled(function, *inputs, **settings)
    (origin,) = backend.graphs[0].compilation.pieces
    assert (origin.key is None) == (origin.uncached != "caching is off")
    return origin.uncached


def test_an_op_of_the_users_has_a_key_unless_its_code_is_compiled_in(ops) -> None:
    assert uncached(lambda x: ops.plain(x) + 1, X()) == "caching is off"
    reason = uncached(lambda x: ops.inside(x) + 1, X())
    assert reason == "cgc_keys::inside is decomposed into other ops, by code that may change"


def test_a_size_from_float_arithmetic_has_a_key() -> None:
    def step(x):
        rows = torch.cat([x.new_ones(round(x.shape[0] * 0.3))] * 2)
        return rows * rows.shape[0]

    assert uncached(step, X()) == "caching is off"
    size = of_sizes.ToFloat(sympy.Symbol("s7", integer=True, positive=True))
    texts = [GraphText(lasting=True).expression(scale * size) for scale in (0.3, 0.1 + 0.2)]
    assert texts == ["(0.3 * float(s0))", "(0.30000000000000004 * float(s0))"]


def test_a_function_of_the_users_has_no_key() -> None:
    reason = uncached(lambda x: users_own(x) + 1, X())
    assert reason == "it calls users_own, whose code is not torch's and may change"


def test_a_tensor_class_has_no_key() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    # Taken apart, a piece of plain tensors is left; under autocast it stays whole.
    pair = TwoTensor(X(), X())
    assert uncached(lambda x: x * 2, pair, dynamic=False) == "caching is off"
    with torch.autocast("cpu", torch.bfloat16):
        reason = uncached(lambda x: x * 2, pair, dynamic=False)
    assert reason == "a TwoTensor is among its values"


def test_a_users_compiler_is_not_shared_or_kept() -> None:
    backend = compiled(base, X(), X(D, D), compiler=lambda gm, inputs: gm.forward)
    (origin,) = backend.graphs[0].compilation.pieces
    assert (origin.how, origin.key) == ("compiled", None)
    assert origin.uncached == "the compiler is the user's"


def test_settings_without_a_text_have_no_key() -> None:
    with pytest.raises(ValueError, match=r"post_grad_custom_pre_pass holds a Own without uuid"):
        inductor.compiler_settings({"post_grad_custom_pre_pass": Own()})
    with pytest.raises(ValueError, match="freezing bakes weights in"):
        inductor.compiler_settings({"freezing": True})


@pytest.mark.parametrize(
    ("size", "why"), [(8, None), (1 << 15, "it holds a tensor of 131072 bytes")]
)
def test_constants_are_told_by_their_bytes(size: int, why: str | None) -> None:
    def told(value: float) -> str:
        module = torch.nn.Module()
        module.constant = torch.full((size,), value)
        graph = torch.fx.Graph()
        graph.output((graph.get_attr("constant"),))
        return facts_of_piece(torch.fx.GraphModule(module, graph), [])["graph"]

    if why is not None:
        with pytest.raises(Unnameable, match=why):
            told(1.0)
        return
    assert told(1.0) == told(1.0)
    assert told(1.0) != told(2.0)
    assert told(0.0) != told(-0.0)


@pytest.mark.slow
def test_layers_of_a_decoder_share_between_models() -> None:
    backend = cgcompile.Backend(compiler="aot")
    models = [Decoder(3).eval(), Decoder(5).eval()]
    x = torch.randint(0, 32, (6, 4))
    torch._dynamo.mark_dynamic(x, 0)
    with torch.no_grad():
        for model in models:
            result = torch.compile(model, backend=backend)(x)
            torch.testing.assert_close(result, model(x))
    first, second = [graph.compilation for graph in backend.graphs]
    assert (first.compiled, first.shared) == (3, 0)
    assert (second.compiled, second.shared) == (0, 3)


def test_guards_of_one_meaning_have_one_text() -> None:
    """What a compiler adds as ``s0 > 1`` is added as ``s0 >= 2`` where its artifact is loaded."""
    size, other = sympy.symbols("size other", integer=True)
    assert inclusive(size > 1) == inclusive(size >= 2) == sympy.Ge(size, 2)
    assert inclusive(size < other) == sympy.Le(size, other - 1)
    assert inclusive(sympy.Ne(size, 1)) == sympy.Ne(size, 1)
    number = sympy.Symbol("number", real=True)
    assert inclusive(number > 1) == (number > 1)
