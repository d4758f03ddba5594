"""The op ``small_linear``: its kernel in Triton's interpreter, its shapes, and what refuses it."""

import itertools

import pytest
import torch
from lib.programs import INTERPRETER, run_code
from lib.quantized import quantized
from torch.nn import functional as F

from cgcompile.kernels import small_linear, why_unsupported
from cgcompile.kernels.small_linear import Tile, op, rows_of_tile, takes, tile_for
from cgcompile.torch_compat import raw_memory

PROGRAM = """
import itertools
import random

import torch
from cgcompile.kernels.small_linear import ACTIVATIONS, Tile, launch, op

torch.manual_seed(0)
random.seed(0)


def drawn(*shape, dtype):
    return torch.randn(*shape).to(dtype)


def exact(value):
    if isinstance(value, list):
        return [exact(item) for item in value]
    return value.double() if isinstance(value, torch.Tensor) else value


def quantized(weights, dtype):
    scales = [w.float().abs().amax(1) / (448 if dtype.is_floating_point else 127) for w in weights]
    data = [w.float() / scale[:, None] for w, scale in zip(weights, scales)]
    return [(d if dtype.is_floating_point else d.round()).to(dtype) for d in data], scales


shapes = ((1, 64, 32), (16, 96, 40), (5, 56, 17), (5, 48, 32))
choices = itertools.product(shapes, ACTIVATIONS, (False, True), (False, True))
for (rows, depth, columns), activation, biased, normed in choices:
    dtype = random.choice((torch.float32, torch.float16))
    with_residual = random.random() < 0.5
    sizes = [columns, columns] if activation else [columns] if with_residual else [columns, 16, 7]
    if activation and random.random() < 0.5:
        sizes = [2 * columns]  # two halves
    x = drawn(1, rows, depth, dtype=dtype)
    weights = [(drawn(n, depth, dtype=torch.float32) / depth**0.5).to(dtype) for n in sizes]
    biases = [drawn(n, dtype=dtype) if biased else None for n in sizes]
    norm = drawn(depth, dtype=dtype) if normed else None
    residual = drawn(1, rows, columns, dtype=dtype) if with_residual else None
    arguments = (x, weights, biases, norm, 1e-5, random.choice((0.0, 1.0)), residual, activation)
    expected = op()(*map(exact, arguments))
    for data in (None, torch.int8, torch.float8_e4m3fn):
        stages = random.choice((0, 2)) if rows == 1 else 2
        tile = Tile(random.choice((8, 16, 32)), 32, stages, random.choice((1, 2)), 0)
        if data is not None:
            data, scales = quantized(weights, data)
            scales = [scale.to(random.choice((dtype, torch.float32))) for scale in scales]
            arguments = (x, data, *arguments[2:8], [scale[:, None] for scale in scales])
            expected = op()(*map(exact, arguments))
        results = launch(*arguments, dependent=False, tile=tile)
        assert len(results) == len(expected)
        for result, right in zip(results, expected):
            assert result.shape == right.shape
            most = 2e-5 if dtype is torch.float32 else 1e-2
            error = (result.double() - right).abs().max() / right.abs().max()
            assert error < most, (float(error), dtype, rows, depth, columns, activation, sizes)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_computes_the_definition_for_tails_biases_and_halves() -> None:
    pytest.importorskip("triton")
    printed = run_code(PROGRAM, imports=INTERPRETER, TRITON_INTERPRET="1")
    assert printed.strip() == "equal"


KINDS = {
    "q, k and v": (
        4096,
        2048,
        {"COUNT": 3, "NORM": True, "BIASES": 7, "EVEN": False, "WIDE": True},
    ),
    "many columns": (16384, 4096, {"COUNT": 3, "NORM": True, "OFFSET": True}),
    "few columns": (1024, 1024, {"NORM": True}),
    "gate and up": (5632, 2048, {"COUNT": 2, "ACTIVATION": 1, "NORM": True}),
    "large gate and up": (14336, 4096, {"COUNT": 2, "ACTIVATION": 1, "NORM": True, "OFFSET": True}),
    "down": (2048, 5632, {"RESIDUAL": True, "BIASES": 1}),
}
DATA = {"*bf16": 2, "*i8": 1, "*fp8e4nv": 1}  # types of pointers to weights, with bytes
# Programs that share a processor, for tiles of 1, 8 and 16 rows.
TOGETHER = {"many columns": (4, 2, 2), "gate and up": (3, 3, 3), "large gate and up": (4, 4, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("rows", [1, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_compiles_for_hopper(kind, rows, data) -> None:
    """Triton's interpreter takes what its compiler refuses. Without a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from cgcompile.kernels import small_linear_triton as kernels

    columns, depth, changes = KINDS[kind]
    how = "ACTIVATION" in changes, "NORM" in changes, 132, DATA[data]
    tile = tile_for(rows, columns, depth, *how)
    constants = {"K": depth, "COUNT": 1, "ACTIVATION": 0, "NORM": False, "RESIDUAL": False}
    constants |= {"BIASES": 0, "EVEN": True, "WIDE": False, "OFFSET": False, "DEPENDENT": True}
    constants["SCALED"] = DATA[data] == 1
    constants |= {"COLUMNS": tile.columns, "DEPTH": tile.depth, "PARTS": tile.parts}
    constants |= {"STAGES": tile.stages, "LINES": tile.lines, "ROWS": rows, **changes}
    types = dict.fromkeys(("M", "N0", "N1", "N2", "early"), "i32") | {
        "eps": "fp32",
        "offset": "fp32",
    }
    types |= dict.fromkeys(("w0", "w1", "w2"), data) | dict.fromkeys(("s0", "s1", "s2"), "*fp32")
    types |= dict.fromkeys(constants, "constexpr")
    kernel = kernels.project if tile.stages else kernels.project_row
    names = [parameter.name for parameter in kernel.params]
    plain = (*constants, "eps", "offset", "M", "early")
    arguments = [name for name in names if name not in plain]
    source = triton.compiler.ASTSource(
        kernel,
        {name: types.get(name, "*bf16") for name in names},
        {(names.index(name),): constant for name, constant in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in arguments},
    )
    options = {"num_warps": tile.parts}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
    if kernel is kernels.project_row:
        assert compiled.metadata.shared <= 1024  # of sums of warps alone
        text, _, _ = compiled.asm["ptx"].rpartition("griddepcontrol.wait")
        assert "griddepcontrol.wait" in text  # unless weights may be read early
        early = tile.columns * tile.depth * (1 + how[0]) + tile.depth * how[1]  # elements
        assert text.count("ld.global") == 2 * early // (16 * 32 * tile.parts)
        return
    _, _, loop = compiled.asm["ttgir"].partition("scf.for")
    loop, _, _ = loop.partition("scf.yield")
    assert "ttg.async_copy_global_to_local" in loop  # of later stages
    assert "tt.load" not in loop  # waits for memory
    together = dict(zip((1, 8, 16), TOGETHER.get(kind, (1, 1, 1)), strict=True))[rows]
    together = together if DATA[data] == 2 else 1
    assert compiled.metadata.shared <= 227 * 1024
    assert (compiled.metadata.shared + 1024) * together <= 228 * 1024


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("shape", [(3, 8), (2, 1, 8)])
def test_shapes_without_running_are_those_of_running(shape, activation) -> None:
    x, weights = torch.randn(shape), [torch.randn(6, 8), torch.randn(6, 8)]
    arguments = (weights, [None, None], torch.ones(8), 1e-6, 0.0, None, activation)
    results = op()(x, *arguments)
    on_meta = [[w.to("meta") for w in arguments[0]], arguments[1], arguments[2].to("meta")]
    data = [w.to(torch.int8) for w in weights]
    scaled = op()(x, data, *arguments[1:], [torch.ones(6, device=x.device)] * 2)
    on_meta += arguments[3:]
    for result, traced in zip([*results, *scaled], op()(x.to("meta"), *on_meta) * 2, strict=True):
        assert (result.shape, result.dtype) == (traced.shape, traced.dtype)
        assert result.stride() == traced.stride()


WIDE = torch.zeros(8, 16, dtype=torch.bfloat16)
REFUSED = {
    "17 rows": {"x": WIDE.repeat(3, 1)[:17]},
    "no rows": {"x": WIDE[:0]},
    "float32": {"x": WIDE.float(), "weights": [WIDE.float()]},
    "another dtype": {"weights": [WIDE.half()]},
    "transposed weight": {"weights": [torch.zeros(16, 16).bfloat16().t()]},
    "no weight": {"weights": [], "biases": []},
    "four weights": {"weights": [WIDE] * 4, "biases": [None] * 4},
    "bias of one": {"biases": [WIDE[0, :1]]},
    "bias of each row": {"biases": [WIDE[:, :8]]},
    "strided bias": {"biases": [WIDE[:, 0]]},
    "expanded bias": {"biases": [WIDE[0, :1].expand(8)]},
    "strided norm": {"norm": torch.zeros(16, 2).bfloat16()[:, 0]},
    "norm in float32": {"norm": torch.zeros(16)},
    "norm in float16": {"x": WIDE.half(), "weights": [WIDE.half()], "norm": WIDE[0].half()},
    "broadcast residual": {"residual": WIDE[0, :8]},
    "residual in float32": {"residual": torch.zeros(8, 8)},
    "int8 without scales": {"weights": [WIDE.to(torch.int8)]},
    "scales of plain weights": {"scales": [torch.ones(8)]},
    "int8 beside float8": {
        "weights": [WIDE.to(torch.int8), WIDE.to(torch.float8_e4m3fn)],
        "biases": [None] * 2,
        "scales": [torch.ones(8)] * 2,
    },
    "too few scales": {
        "weights": [WIDE.to(torch.int8)] * 2,
        "biases": [None] * 2,
        "scales": [torch.ones(8)],
    },
    "one scale": {"weights": [WIDE.to(torch.int8)], "scales": [torch.ones(1)]},
    "scales of columns": {"weights": [WIDE.to(torch.int8)], "scales": [torch.ones(16)]},
    "expanded scales": {"weights": [WIDE.to(torch.int8)], "scales": [torch.ones(1).expand(8)]},
    "scales of float64": {"weights": [WIDE.to(torch.int8)], "scales": [torch.ones(8).double()]},
    "uint8": {"weights": [WIDE.to(torch.uint8)], "scales": [torch.ones(8)]},
    "odd halves": {"weights": [WIDE[:3]], "activation": "silu"},
    "unequal weights": {"weights": [WIDE, WIDE[:4]], "biases": [None] * 2, "activation": "silu"},
    "three and an activation": {
        "weights": [WIDE] * 3,
        "biases": [None] * 3,
        "activation": "silu",
    },
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_inputs_that_the_kernel_does_not_take(changes) -> None:
    """Each of them would be read as something else, or beyond its end."""
    plain = {"x": WIDE, "weights": [WIDE], "biases": [None], "norm": None, "residual": None}
    plain["activation"] = ""
    assert takes(**plain)
    assert takes(**plain | {"x": WIDE.repeat(2, 2)[:, ::2][None]})  # it is copied
    for dtype in (torch.int8, torch.float8_e4m3fn):
        assert takes(**plain | {"weights": [WIDE.to(dtype)], "scales": [torch.ones(8, 1)]})
    assert takes(**plain | {"residual": torch.zeros(8, 8).bfloat16().t(), "norm": WIDE[0]})
    assert not takes(**plain | changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_are_named(device) -> None:
    assert why_unsupported(torch.device(device)) == f"{device} is no NVIDIA GPU"


def test_tiles_are_powers_of_two_with_loads_ahead() -> None:
    kinds = ((False, False), (False, True), (True, True))
    sizes = (1, 64, 1024, 4096, 16384, 49152), (16, 56, 896, 2048, 14336)
    for rows, columns, depth, kind, processors, size in itertools.product(
        (1, 8, 16), *sizes, kinds, (1, 132), (1, 2)
    ):
        tile = tile_for(rows, columns, depth, *kind, processors, size)
        assert tile.depth & (tile.depth - 1) == 0
        if size == 2 and rows == 1 and (kind[0] or depth <= 8192):
            assert tile == (2 if kind[0] else 4, tile.depth, 0, 4, 0)
            continue
        assert tile.depth // tile.parts >= 16
        assert tile.stages > min(3, -(-depth // tile.depth)), (rows, columns, depth, *kind)
        held = (size * tile.columns * (1 + kind[0]) + 2 * rows) * tile.depth * (tile.stages - 1)
        assert held <= 227 * 1024


def test_tiles_of_a_decoder() -> None:
    """Those that were measured: hidden size 2048, on a GPU of 132 processors."""
    assert tile_for(8, 4096, 2048, False, True, 132) == Tile(16, 256, 8, 2, 8)
    assert tile_for(16, 4096, 2048, False, True, 132) == Tile(32, 256, 8, 2, 8)
    assert tile_for(8, 6144, 4096, False, True, 132) == Tile(16, 512, 5, 2, 8)
    assert tile_for(8, 4096, 14336, False, False, 132) == Tile(16, 256, 8, 2, 8)
    assert tile_for(8, 2048, 2048, False, False, 132) == Tile(16, 512, 5, 4, 8)
    assert tile_for(8, 5632, 2048, True, True, 132) == Tile(16, 128, 8, 1, 4)
    assert tile_for(16, 5632, 2048, True, True, 132) == Tile(16, 128, 6, 1, 4)
    assert tile_for(8, 2048, 5632, False, False, 132) == Tile(16, 512, 8, 4, 8)
    assert tile_for(1, 4096, 4096, False, False, 132) == Tile(4, 2048, 0, 4, 0)
    assert tile_for(1, 3072, 1024, True, True, 132) == Tile(2, 1024, 0, 4, 0)
    assert tile_for(1, 14336, 4096, True, True, 132) == Tile(2, 2048, 0, 4, 0)
    assert tile_for(1, 1024, 3072, False, False, 132) == Tile(4, 1024, 0, 4, 0)
    assert tile_for(1, 2048, 8192, False, False, 132) == Tile(4, 2048, 0, 4, 0)
    assert tile_for(1, 4096, 14336, False, False, 132).stages == 8


def test_tiles_of_quantized_weights() -> None:
    """Those that were measured, for hidden sizes 4096 and 2048."""
    assert tile_for(1, 4096, 4096, False, False, 132, 1) == Tile(32, 512, 8, 4, 8)
    assert tile_for(8, 28672 // 2, 4096, True, True, 132, 1) == Tile(32, 256, 4, 2, 4)
    assert tile_for(8, 6144, 4096, False, True, 132, 1) == Tile(32, 512, 5, 4, 8)
    assert tile_for(8, 4096, 14336, False, False, 132, 1) == Tile(16, 512, 7, 4, 8)
    assert tile_for(16, 28672 // 2, 4096, True, True, 132, 1) == Tile(32, 128, 5, 2, 4)
    assert tile_for(1, 2048, 2048, False, False, 132, 1) == Tile(16, 1024, 3, 4, 8)


def early_of(tensors, memory, monkeypatch, **named) -> int:
    """Return whether a launch for one row may read weights early, in a capture into memory."""
    started = []
    monkeypatch.setattr(small_linear, "start", lambda *args, **_: started.append(args))
    x, weight, norm = tensors
    tile = Tile(4, 16, 0, 1, 0)
    before = raw_memory.CAPTURED_MEMORY.set(memory)
    try:
        small_linear.launch(
            x, [weight], [None], norm, 0.0, 0.0, None, "", dependent=True, tile=tile, **named
        )
    finally:
        raw_memory.CAPTURED_MEMORY.reset(before)
    ((_, _, *arguments),) = started
    return arguments[19]  # after the number of rows and of columns of each weight


def test_constant_weights_are_read_early_in_a_capture_alone(monkeypatch) -> None:
    pytest.importorskip("triton")
    x, weight, norm = tensors = torch.randn(1, 16), torch.randn(8, 16), torch.randn(16)
    outside = set().__contains__
    assert early_of(tensors, outside, monkeypatch, constant=True) == 1
    assert early_of(tensors, outside, monkeypatch) == 0
    assert early_of(tensors, None, monkeypatch, constant=True) == 0
    assert early_of(tensors, {x.data_ptr()}.__contains__, monkeypatch, constant=True) == 1
    for copied in (weight, norm):  # it lies in memory of the graph, so a kernel wrote it
        inside = {copied.data_ptr()}.__contains__
        assert early_of(tensors, inside, monkeypatch, constant=True) == 0


def test_tiles_have_one_eight_or_sixteen_rows() -> None:
    assert [rows_of_tile(rows) for rows in range(1, 17)] == [1, *[8] * 7, *[16] * 8]


@pytest.mark.gpu
@pytest.mark.parametrize("data", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        *((1, 64, 32), (1, 896, 1041), (1, 4096, 4256), (1, 8192, 64)),
        *((16, 2048, 40), (5, 200, 17), (8, 896, 1040), (8, 4096, 4256), (16, 896, 4256)),
    ],
)
def test_the_kernel_is_as_exact_as_eager(rows, depth, columns, activation, dtype, data) -> None:
    """On CUDA, with and without norm, bias and residual, against float64."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(rows)

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).to(dtype)

    def exact(value):
        if isinstance(value, list):
            return [exact(item) for item in value]
        return value.double() if isinstance(value, torch.Tensor) else value

    for full in (False, True):
        sizes = [columns] * 2 if activation else [columns] if full else [columns, 16, 7]
        arguments = (
            drawn(rows, depth),
            [drawn(n, depth, scale=depth**-0.5) for n in sizes],
            [drawn(n) if full else None for n in sizes],
            drawn(depth) if full else None,
            1e-5,
            1.0,
            drawn(rows, columns) if full else None,
            activation,
        )
        if data is not None:
            weights, scales = zip(*(quantized(w, data) for w in arguments[1]), strict=True)
            arguments = (arguments[0], [*weights], *arguments[2:], [*scales])
        takes_it = takes(*arguments[:4], *arguments[6:])
        assert takes_it == (dtype is torch.bfloat16 or not full)
        expected = op()(*map(exact, arguments))
        for result, right in zip(op()(*arguments), expected, strict=True):
            step = torch.finfo(dtype).eps * float(right.abs().max())
            torch.testing.assert_close(result.double(), right, rtol=0, atol=2 * step)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("rows", [1, 8])
def test_the_error_is_at_most_that_of_eager(rows, activation) -> None:
    """On CUDA against float64 over 32 inputs: the norm, the product and what follows, in bfloat16."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    errors = torch.zeros(2, dtype=torch.float64, device="cuda")
    for _ in range(32):
        x, norm, residual = (
            torch.randn(n, 1024, device="cuda").bfloat16() for n in (rows, 1, rows)
        )
        weights = [(torch.randn(1024, 1024, device="cuda") / 32).bfloat16() for _ in range(2)]
        weights = weights if activation else weights[:1]
        added = None if activation else residual
        arguments = (weights, [None] * len(weights), norm[0], 1e-6, 0.0, added, activation)
        exact = [[w.double() for w in weights], arguments[1], norm[0].double(), 1e-6, 0.0]
        exact += [None if added is None else added.double(), activation]
        right = op()(x.double(), *exact)[0]
        normed = norm[0] * F.rms_norm(x.float(), (1024,), None, 1e-6).bfloat16()
        outputs = [F.linear(normed, weight) for weight in weights]
        plain = F.silu(outputs[0]) * outputs[1] if activation else outputs[0] + residual
        for way, tensor in enumerate((op()(x, *arguments)[0], plain)):
            errors[way] += (tensor.double() - right).square().mean()
    assert float((errors[0] / errors[1]).sqrt()) <= 1.05


@pytest.mark.gpu
@pytest.mark.parametrize("data", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_errors_of_quantized_weights_are_at_most_those_of_eager(rows, data) -> None:
    """Against float64, over 32 random inputs."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    weight = torch.randn(2048, 1024, device="cuda") / 32
    weight, scale = quantized(weight, data)
    ours = theirs = 0.0
    for _ in range(32):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        exact = x.double() @ (weight.double() * scale.double()[:, None]).t()
        (result,) = op()(x, [weight], [None], None, 0.0, 0.0, None, "", [scale])
        if data is torch.int8:  # as torchao computes both
            eager = (x @ weight.t().to(x.dtype)) * scale.to(x.dtype)
        else:
            eager = x @ (weight.t().float() * scale).to(x.dtype)
        ours += float((result.double() - exact).square().mean())
        theirs += float((eager.double() - exact).square().mean())
    assert ours**0.5 <= 1.05 * theirs**0.5


def test_the_op_is_registered_once(monkeypatch) -> None:
    first = op()
    monkeypatch.setattr("cgcompile.kernels.small_linear.by_torch", lambda *args: None)
    assert op() is first
