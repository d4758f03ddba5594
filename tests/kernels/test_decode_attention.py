"""The op ``decode_attention``: its definition, kernels in Triton's interpreter, gradients, inputs."""

import math

import pytest
import torch
from lib.programs import INTERPRETER, run_code
from torch.autograd import forward_ad
from torch.nn import functional as F

from cgcompile.errors import ConfigError
from cgcompile.kernels.decode_attention import (
    MOST_SPLITS,
    SCAN,
    Tile,
    op,
    rows_of_tile,
    takes,
    tile_for,
    why_unsupported,
)

INF, LEAST = math.inf, torch.finfo(torch.float32).min
SHAPES = {  # B, H, Hkv, T, L, D, Dv
    "one row": (2, 4, 2, 1, 9, 8, 8),
    "three rows": (3, 4, 4, 3, 7, 8, 6),
    "one head of the cache": (2, 6, 1, 2, 5, 8, 8),
}


def drawn(shape: tuple[int, ...]) -> list[torch.Tensor]:
    batch, heads, shared, tokens, length, size, size_v = shape
    q = torch.randn(batch, tokens, heads, size).transpose(1, 2)
    return [q, torch.randn(batch, shared, length, size), torch.randn(batch, shared, length, size_v)]


def masks_of(shape: tuple[int, ...]) -> list[torch.Tensor | None]:
    batch, heads, _, tokens, length, *_ = shape
    return [
        None,
        (torch.rand(1, 1, 1, length) > 0.5).expand(batch, 1, 1, length),
        torch.rand(batch, 1, tokens, length) > 0.3,
        torch.rand(tokens, length) > 0.3,
        torch.randn(1, heads, 1, length),
    ]


def defined(q, k, v, mask, sinks, scale, soft_cap):
    """The definition, one row at a time, in float64."""
    batch, heads, tokens, _ = q.shape
    length, group = k.shape[2], q.shape[1] // k.shape[1]
    result = torch.zeros(*q.shape[:3], v.shape[-1], dtype=torch.float64)
    whole = None if mask is None else mask.expand(batch, heads, tokens, length)
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, h // group].double(), v[b, h // group].double()
            for t in range(tokens):
                scores = keys @ q[b, h, t].double() * scale
                if soft_cap:
                    scores = torch.tanh(scores / soft_cap) * soft_cap
                if whole is not None and whole.dtype is torch.bool:
                    scores[~whole[b, h, t]] = -INF
                elif whole is not None:
                    scores += whole[b, h, t].double()
                most = scores.max()
                if most == -INF:
                    continue
                weights = (scores - most).exp()
                total = weights.sum()
                if sinks is not None:
                    total += (sinks[h].double() - most).exp()
                result[b, h, t] = weights @ values / total
    return result


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_torch_computes_the_definition(shape) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(shape)
    for mask in masks_of(shape):
        for sinks in (None, torch.randn(q.shape[1])):
            for soft_cap in (0.0, 2.0):
                rest = (mask, sinks, 0.3, soft_cap)
                result = op()(q, k, v, *rest)
                torch.testing.assert_close(result, defined(q, k, v, *rest).float())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_without_soft_cap_and_sinks_it_is_sdpa(shape) -> None:
    torch.manual_seed(0)
    q, k, v = drawn(shape)
    for mask in masks_of(shape):
        expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(op()(q, k, v, mask, None, 0.3, 0.0), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
def test_shapes_and_strides_without_running_are_those_of_running(shape, soft_cap) -> None:
    q, k, v = drawn(shape)
    result = op()(q, k, v, None, None, 0.3, soft_cap)
    traced = op()(q.to("meta"), k.to("meta"), v.to("meta"), None, None, 0.3, soft_cap)
    assert (result.shape, result.dtype) == (traced.shape, traced.dtype)
    assert result.stride() == traced.stride()
    batch, heads, tokens, last = result.shape
    rows = result.transpose(1, 2)
    assert rows.is_contiguous()
    assert rows.reshape(batch, tokens, heads * last).data_ptr() == result.data_ptr()


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize(
    ("mask", "mean"),
    [
        (torch.zeros(1, 1, 1, 5, dtype=torch.bool), 0.0),
        (torch.full((1, 1, 1, 5), -INF), 0.0),
        (torch.full((1, 1, 1, 5), LEAST), 1.0),  # all scores are equal after rounding
    ],
    ids=["False", "-inf", "finfo.min"],
)
def test_a_row_without_keys(mask, mean, soft_cap) -> None:
    """Zero, or the mean of the values, as ``scaled_dot_product_attention`` returns."""
    torch.manual_seed(0)
    q, k, v = (x.detach().requires_grad_() for x in drawn((2, 4, 2, 1, 5, 8, 8)))
    result = op()(q, k, v, mask, None, 0.3, soft_cap)
    expected = v.mean(2, keepdim=True).repeat_interleave(2, 1) * mean
    torch.testing.assert_close(result, expected)
    gradients = torch.autograd.grad(result.square().sum(), (q, k, v))
    if mean:
        assert all(gradient.isfinite().all() for gradient in gradients)
    else:
        torch.testing.assert_close(gradients, tuple(torch.zeros_like(x) for x in (q, k, v)))


def test_all_weight_of_a_row_without_keys_is_that_of_its_sink() -> None:
    torch.manual_seed(0)
    q, k, v = drawn((2, 4, 2, 1, 5, 8, 8))
    for mask in (torch.zeros(5, dtype=torch.bool), torch.full((5,), -INF), torch.full((5,), LEAST)):
        result = op()(q, k, v, mask, torch.randn(4), 0.3, 0.0)
        torch.testing.assert_close(result, torch.zeros_like(result))


@pytest.mark.slow
def test_gradients_of_all_inputs_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    inputs = [x.double().requires_grad_() for x in drawn((2, 4, 2, 3, 5, 4, 3))]
    bias, sinks = torch.randn(1, 4, 1, 5).double(), torch.randn(4).double()
    inputs += [bias.requires_grad_(), sinks.requires_grad_()]
    assert torch.autograd.gradcheck(lambda *x: op()(*x, 0.3, 2.0), inputs)
    kept = torch.rand(2, 1, 3, 5) > 0.3
    assert torch.autograd.gradcheck(lambda *x: op()(*x, kept, None, 0.3, 0.0), inputs[:3])
    assert torch.autograd.gradgradcheck(lambda *x: op()(*x, kept, None, 0.3, 0.0), inputs[:3])


def test_a_tangent_is_refused_and_not_lost() -> None:
    q, k, v = drawn((2, 4, 2, 1, 9, 8, 8))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ConfigError, match=r"tangent.*\n.*kernels='-decode_attention'"):
            op()(dual, k, v, None, None, 0.3, 0.0)
        assert torch.equal(op()(q, k, v, None, None, 0.3, 0.0), op()(q, k, v, None, None, 0.3, 0.0))


def test_a_training_step_equals_one_with_sdpa() -> None:
    torch.manual_seed(0)
    q, k, v = (x.detach().requires_grad_() for x in drawn((2, 4, 2, 1, 9, 8, 8)))
    kept = (torch.arange(9) < 6)[None]
    step = torch.compile(lambda *x: op()(*x, kept, None, 0.3, 0.0).square().sum(), backend="eager")
    step(q, k, v).backward()
    expected = F.scaled_dot_product_attention(q, k, v, kept, scale=0.3, enable_gqa=True)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch.testing.assert_close((q.grad, k.grad, v.grad), gradients)
    assert float(q.grad.abs().max()) > 0


MASKS = """
import torch


def masks_of(dtype, device, B, H, T, L):
    \"\"\"Masks by name, with the positions of the cache that none of them keeps.\"\"\"
    least, inf = torch.finfo(dtype).min, float("inf")
    keys, rows = torch.arange(L, device=device), torch.arange(T, device=device)
    random = torch.rand(B, H, T, L, device=device)
    used = keys < max(1, L // 3)

    def filled(kept, value):
        return torch.zeros(kept.shape, dtype=dtype, device=device).masked_fill(~kept, value)

    batch = torch.arange(B, device=device)[:, None, None, None]
    return {
        "no mask": None,
        "used": used.expand(B, 1, 1, L),
        "window": ((keys >= L // 2) & (keys < L // 2 + 5))[None, None, None].expand(B, 1, 1, L),
        "holes": (keys % 7 == 3)[None],
        "each request": (random[:, :1, :1] > 0.5) & used,
        "causal": keys < (L // 2 + rows)[:, None],
        "each head": random > 0.5,
        "all False for one": (batch > 0).expand(B, 1, 1, L),
        "bias": torch.randn(1, H, 1, L, device=device).to(dtype),
        "used, -inf": filled(used, -inf)[None, None, None],
        "used, least": filled(used, least)[None, None, None].expand(B, 1, T, L),
        "used, float32": filled(used, -inf).float(),
        "all -inf": torch.full((L,), -inf, dtype=dtype, device=device),
        "all least": torch.full((1, 1, T, L), least, dtype=dtype, device=device),
        "-inf and least": torch.where(keys % 3 == 0, -inf, least).to(dtype),
        "least for one": filled((batch > 0).expand(B, 1, 1, L), least),
    }
"""
PROGRAM = """
import random

from cgcompile.kernels.decode_attention import Tile, launch, op

torch.manual_seed(0)
random.seed(0)


def exact(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


shapes = ((2, 4, 2, 1, 70, 32, 64), (1, 6, 2, 3, 50, 24, 16), (2, 1, 1, 1, 1, 16, 16))
for B, H, shared, T, L, D, DV in shapes:
    for first in (0, 1):
        dtype = (torch.float32, torch.float16)[first]
        for name, mask in list(masks_of(dtype, "cpu", B, H, T, L).items())[first::2]:
            q = torch.randn(B, T, H, D).to(dtype).transpose(1, 2)
            k = torch.randn(B, L, shared, D).to(dtype).transpose(1, 2)
            v = torch.randn(B, shared, L, DV).to(dtype)
            sinks = torch.randn(H, 2).to(dtype)[:, 0] if random.random() < 0.3 else None
            rest = (mask, sinks, 0.25, random.choice((0.0, 2.0)))
            expected = op()(*map(exact, (q, k, v, *rest)))
            if mask is not None and (mask.dtype is torch.bool or name.endswith("inf")):
                kept = mask if mask.dtype is torch.bool else mask == 0
                read = kept.expand(B, H, T, L).unflatten(1, (shared, -1)).any(3).any(2)
                k[~read], v[~read] = float("nan"), float("nan")
            parts = random.choice((1, 2, 4, 8))
            tile = Tile(16 * parts, parts, 2, random.choice((1, 2, 3)))
            result = launch(q, k, v, *rest, dependent=False, tile=tile)
            assert (result.shape, result.stride()) == (expected.shape, expected.stride())
            most = 1e-5 if dtype is torch.float32 else 4e-3
            error = (result.double() - expected).abs().max()
            assert error < most, (float(error), name, dtype, tile, B, H, shared, T, L, D, DV)
q = torch.randn(1, 2, 1, 16)
k, v = torch.randn(2, 1, 1, 20, 16)
kept = torch.arange(20)[None] < 10
q[0, 0] = float("nan")
for splits in (1, 2):
    tile = Tile(16, 1, 2, splits)
    result = launch(q, k, v, kept, None, 0.25, 0.0, dependent=False, tile=tile)
    assert result[0, 0].isnan().all() and not result[0, 1].isnan().any()
# The last head of a mask that is a part of a long one begins at element 2**31.
memory = torch.empty(2**31 + 20, dtype=torch.float16)  # pages that are not used take nothing
q, k, v = (torch.randn(1, n, length, 16).half() for n, length in ((3, 1), (1, 20), (1, 20)))
mask = memory.as_strided((1, 3, 1, 20), (3 * 2**30, 2**30, 20, 1))
for value in (0.0, torch.finfo(torch.float16).min):  # the second keeps no key
    mask.copy_(torch.full((20,), value).masked_fill_(torch.arange(20) > 9, float("-inf")))
    result = launch(q, k, v, mask, None, 0.25, 0.0, dependent=False, tile=Tile(16, 1, 2, 1))
    expected = op()(*map(exact, (q, k, v, mask)), None, 0.25, 0.0)
    assert (result.double() - expected).abs().max() < 4e-3
print("equal")
"""


@pytest.mark.slow
def test_the_kernels_compute_the_definition_for_all_masks() -> None:
    """In Triton's interpreter; what a mask excludes from all rows is NaN in keys and values."""
    pytest.importorskip("triton")
    printed = run_code(MASKS + PROGRAM, imports=INTERPRETER, TRITON_INTERPRET="1")
    assert printed.strip() == "equal"


KINDS = {
    "one mask": ({}, 2),  # programs that share a processor
    "64 values": ({"D": 64}, 4),
    "256 values": ({"D": 256}, 1),
    "no mask": ({"MASK": 0}, 2),
    "float mask, soft cap": ({"MASK": 2, "CAP": True}, 2),
    "a mask for each row": ({"ROW_MASK": True, "ROWS": 32}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "together"), KINDS.values(), ids=KINDS)
def test_the_kernel_compiles_for_hopper(changes, together) -> None:
    """Triton's interpreter takes what its compiler refuses. Without a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from cgcompile.kernels import decode_attention_triton as kernels

    tile = tile_for(64, 1024, 132)
    constants = {"D": 128, "MASK": 1, "ROW_MASK": False, "CAP": False, "ROWS": 16, "SCAN": SCAN}
    constants |= {"PARTS": tile.parts, "KEYS": tile.keys, "STAGES": tile.stages, **changes}
    constants |= dict.fromkeys(("DV", "DP", "DVP"), constants["D"])
    constants |= {"DEPENDENT": True, "mask_key": 1, "T": 1}
    kernel = kernels.attend_keys
    names = [parameter.name for parameter in kernel.params]
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("q", "k", "v"), "*bf16")
    types |= {"mask": "*bf16" if constants["MASK"] == 2 else "*u8", "sums": "*fp32"}
    types |= {"values": "*fp32", "scale": "fp32", "soft_cap": "fp32"}
    types |= dict.fromkeys(constants, "constexpr")
    plain = ("G", "L", "HEADS", "scale", "soft_cap", *constants)
    source = triton.compiler.ASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): constant for name, constant in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in names if n not in plain},
    )
    options = {"num_warps": tile.parts}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert "griddepcontrol.wait" in compiled.asm["ptx"]
    loop = compiled.asm["ttgir"].rpartition("scf.for")[2].partition("scf.yield")[0]
    assert loop.count("ttg.async_copy_global_to_local") == 2  # keys and values of later steps
    assert (compiled.metadata.shared + 1024) * together <= 228 * 1024


@pytest.mark.slow
@pytest.mark.parametrize(("mask", "sinks"), [(2, False), (1, True)])
def test_the_second_kernel_compiles_for_hopper(mask, sinks) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from cgcompile.kernels import decode_attention_triton as kernels

    constants = dict.fromkeys(("D", "DV", "DP", "DVP"), 128) | {"MASK": mask, "SINKS": sinks}
    constants |= {"CAP": mask == 2, "MOST": 4, "DEPENDENT": True}
    names = [parameter.name for parameter in kernels.attend_sums.params]
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("q", "k", "v", "sinks", "out"), "*bf16")
    types |= {"mask": "*bf16" if mask == 2 else "*u8", "scale": "fp32", "soft_cap": "fp32"}
    types |= {"sums": "*fp32", "values": "*fp32"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(
        kernels.attend_sums,
        {name: types[name] for name in names},
        {(names.index(name),): constant for name, constant in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    text = compiled.asm["ptx"]
    assert "griddepcontrol.wait" in text
    assert not text.partition("griddepcontrol.wait")[0].count("ld.global")  # not before it


def test_programs_fill_the_gpu_and_have_keys() -> None:
    assert tile_for(64, 1024, 132) == Tile(64, 4, 3, 4)  # measured
    assert [tile_for(8, length, 132).splits for length in (1, 64, 65, 1024, 4096)] == [
        1,
        1,
        2,
        16,
        32,
    ]
    assert tile_for(512, 4096, 132).splits == 1
    assert tile_for(1, 131072, 132).splits == MOST_SPLITS
    assert [rows_of_tile(rows, 128) for rows in (1, 16, 17, 128)] == [16, 16, 32, 32]
    assert rows_of_tile(17, 256) == 16


Q = torch.zeros(2, 8, 1, 64, dtype=torch.bfloat16)
K = torch.zeros(2, 4, 16, 64, dtype=torch.bfloat16)
REFUSED = {
    "17 rows": {"q": Q.expand(2, 8, 17, 64)},
    "no rows": {"q": Q[:, :, :0]},
    "float32": {"q": Q.float(), "k": K.float(), "v": K.float()},
    "keys in another dtype": {"k": K.half()},
    "values in another dtype": {"v": K.half()},
    "heads that are no multiple": {"q": Q[:, :6]},
    "more than 256 values": {"v": K.repeat(1, 1, 1, 5)},
    "keys of another size": {"k": K[..., :32]},
    "another batch": {"k": K[:1], "v": K[:1]},
    "fewer values than keys": {"v": K[:, :, :8]},
    "no keys": {"k": K[:, :, :0], "v": K[:, :, :0]},
    "strided keys": {"k": K.repeat(1, 1, 1, 2)[..., ::2]},
    "strided values": {"v": K.repeat(1, 1, 1, 2)[..., ::2]},
    "three dimensions": {"q": Q[0], "k": K[0], "v": K[0]},
    "mask on another device": {"mask": torch.ones(16, dtype=torch.bool, device="meta")},
    "sinks of another size": {"sinks": torch.zeros(4)},
    "mask of another length": {"mask": torch.ones(15, dtype=torch.bool)},
    "mask of five dimensions": {"mask": torch.ones(1, 1, 1, 1, 16, dtype=torch.bool)},
    "mask of integers": {"mask": torch.ones(16, dtype=torch.int32)},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=REFUSED)
def test_inputs_that_the_kernels_do_not_take(changes) -> None:
    """Each of them would be read as something else, or beyond its end."""
    plain = {"q": Q, "k": K, "v": K, "mask": None, "sinks": None}
    assert takes(**plain)
    assert takes(**plain | {"mask": torch.zeros(2, 1, 1, 16).bfloat16(), "sinks": torch.zeros(8)})
    assert takes(**plain | {"mask": torch.ones(16, dtype=torch.bool), "v": K[..., :16]})
    assert takes(**plain | {"k": K.transpose(1, 2).contiguous().transpose(1, 2)})
    assert not takes(**plain | changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_are_named(device) -> None:
    assert why_unsupported(torch.device(device)) == f"{device} is no NVIDIA GPU"


FEW = ("used", "bias")
ROWS = ("used", "causal", "each head", "all False for one", "all least", "least for one")
ON_CUDA = {  # shape, dtype, soft cap and sinks, names of masks; each takes some kernels to compile
    "one row": ((2, 8, 2, 1, 333, 128, 128), torch.bfloat16, (0.0, False), None),
    "four rows": ((3, 8, 8, 4, 77, 64, 64), torch.float16, (2.0, True), ROWS),
    "tiles of rows": ((1, 32, 4, 16, 513, 128, 128), torch.bfloat16, (0.0, False), ROWS),
    "unequal sizes": ((2, 4, 4, 1, 4100, 80, 96), torch.bfloat16, (0.0, False), FEW),
    "256 values": ((1, 8, 1, 1, 1500, 256, 256), torch.bfloat16, (2.0, False), FEW),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "extras", "names"), ON_CUDA.values(), ids=ON_CUDA)
def test_the_kernels_are_exact_on_cuda(shape, dtype, extras, names) -> None:
    """For all masks, with NaN where the cache is not in use, against float64."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    soft_cap, has_sinks = extras
    batch, heads, shared, tokens, length, size, size_v = shape
    namespace: dict = {}
    exec(MASKS, namespace)
    masks = namespace["masks_of"](dtype, "cuda", batch, heads, tokens, length)
    assert len(masks) == 16
    for name in names or masks:
        mask = masks[name]
        q = torch.randn(batch, tokens, heads, size, device="cuda", dtype=dtype).transpose(1, 2)
        k = torch.randn(batch, length, shared, size, device="cuda", dtype=dtype).transpose(1, 2)
        v = torch.randn(batch, shared, length, size_v, device="cuda", dtype=dtype)
        sinks = torch.randn(heads, device="cuda", dtype=dtype) if has_sinks else None
        exact = [None if x is None else x.double() for x in (q, k, v)]
        float_mask = mask is not None and mask.dtype is not torch.bool
        exact += [mask.double() if float_mask else mask, sinks if sinks is None else sinks.double()]
        expected = op()(*exact, 0.25, soft_cap)
        if name.startswith("used") and "least" not in name:
            k[:, :, length // 3 :] = v[:, :, length // 3 :] = math.nan
        assert takes(q, k, v, mask, sinks)
        result = op()(q, k, v, mask, sinks, 0.25, soft_cap)
        assert result.stride() == expected.stride()
        step = torch.finfo(dtype).eps * max(1e-3, float(expected.abs().max()))
        difference = float((result.double() - expected).abs().max())
        assert difference < 2 * step, name


@pytest.mark.gpu
def test_errors_are_those_of_sdpa_or_smaller() -> None:
    """The root of the mean square over 32 random inputs, of three decoders, against float64."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    for heads, shared, size in ((32, 8, 128), (32, 8, 64), (16, 8, 128)):
        ours, theirs = 0.0, 0.0
        for seed in range(32):
            torch.manual_seed(seed)
            q = torch.randn(4, heads, 1, size, device="cuda", dtype=torch.bfloat16)
            k, v = torch.randn(2, 4, shared, 512, size, device="cuda", dtype=torch.bfloat16)
            kept = (torch.arange(512, device="cuda") < 300).expand(4, 1, 1, 512)
            expected = op()(q.double(), k.double(), v.double(), kept, None, size**-0.5, 0.0)
            repeated = [x.repeat_interleave(heads // shared, 1) for x in (k, v)]
            sdpa = F.scaled_dot_product_attention(q, *repeated, kept)
            result = op()(q, k, v, kept, None, size**-0.5, 0.0)
            ours += float((result.double() - expected).square().mean())
            theirs += float((sdpa.double() - expected).square().mean())
        assert 0 < ours**0.5 <= 1.05 * theirs**0.5


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_positions_in_use() -> None:
    """The kernels find the keys in use on the device, at each replay."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    q = torch.randn(2, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    kept = torch.zeros(1, 1, 1, 1024, device="cuda", dtype=torch.bool)
    op()(q, k, v, kept, None, 0.125, 0.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op()(q, k, v, kept, None, 0.125, 0.0)
    for used in (1, 64, 65, 700, 1024, 3, 100):
        q.normal_()
        kept.copy_(torch.arange(1024, device="cuda") < used)
        if used == 100:
            q[1, 3] = math.nan  # shows in its row, and in no other
        graph.replay()
        expected = op()(q.double(), k.double(), v.double(), kept, None, 0.125, 0.0)
        difference = {"rtol": 0, "atol": 2e-2, "equal_nan": True}
        torch.testing.assert_close(result.double(), expected, **difference)
