"""The op ``rotate_and_cache``: its kernel in Triton's interpreter, its shapes, what refuses it."""

from pathlib import Path

import pytest
import torch
from lib.programs import INTERPRETER, run_code
from torch.nn import functional as F

from cgcompile.kernels import why_unsupported
from cgcompile.kernels.rotate_and_cache import op, takes

LENGTH = 12  # of the cache


def inputs_of(rows=2, heads=4, pairs=2, tokens=1, size=32, dtype=torch.float32, device="cpu"):
    """Return random arguments of the op, with norms, in their order."""

    def drawn(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    q, k, v = (drawn(rows, tokens, n, size).transpose(1, 2) for n in (heads, pairs, pairs))
    tables = [drawn(1, tokens, size) for _ in range(2)]
    norms = [drawn(size) for _ in range(2)]
    positions = torch.randperm(LENGTH, device=device)[:tokens]
    caches = [drawn(rows, pairs, LENGTH, size) for _ in range(2)]
    return [q, k, v, *tables, *norms, 1e-6, 1.0, positions, *caches]


def eager(q, k, v, cos, sin, q_norm, k_norm, eps, offset, positions, keys, values):
    """Compute the op as ``transformers`` does; return q, and the keys and values after it."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x, norm):
        if norm is not None:
            normed = F.rms_norm(x.float(), x.shape[-1:], None, eps)
            x = (normed * (offset + norm.float())).type_as(x)
        one, two = x.chunk(2, -1)
        return (x * cos) + (torch.cat((-two, one), -1) * sin)

    if positions.dim() == 0:
        positions = positions + torch.arange(q.shape[2], device=q.device)
    keys = keys.index_copy(2, positions, turned(k, k_norm))
    return turned(q, q_norm), keys, values.index_copy(2, positions, v)


def exact(arguments):
    """Compute the op in float64."""
    q, k, v, cos, sin, q_norm, k_norm, eps, offset, positions, keys, values = (
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in arguments
    )
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)

    def turned(x, norm):
        if norm is not None:
            x = x * (x.square().mean(-1, True) + eps).rsqrt() * (norm + offset)
        one, two = x.chunk(2, -1)
        return x * cos + torch.cat((-two, one), -1) * sin

    if positions.dim() == 0:
        positions = positions + torch.arange(q.shape[2], device=q.device)
    keys = keys.index_copy(2, positions, turned(k, k_norm))
    return turned(q, q_norm), keys, values.index_copy(2, positions, v)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_op_computes_what_eager_computes(tokens) -> None:
    for _ in range(3):
        arguments = inputs_of(tokens=tokens)
        expected = eager(*arguments)
        caches = arguments[-2:]
        result = op()(*arguments)
        for tensor, right in zip((result, *caches), expected, strict=True):
            torch.testing.assert_close(tensor, right)
        plain = eager(*arguments[:5], None, None, *arguments[7:])
        assert result.stride() == plain[0].stride()


def test_a_counter_is_the_position_of_the_first_token() -> None:
    arguments = inputs_of(tokens=3)
    arguments[9] = torch.tensor(4)
    expected = eager(*arguments)
    assert torch.equal(arguments[-1], expected[2]) is False
    result = op()(*arguments)
    for tensor, right in zip((result, *arguments[-2:]), expected, strict=True):
        torch.testing.assert_close(tensor, right)
    assert torch.equal(arguments[-1][:, :, 4:7], arguments[2])


HERE = Path(__file__).parent
PROGRAM = f"""
import itertools
import random
import sys

sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import torch
from test_rotate_and_cache import LENGTH, exact, inputs_of
from cgcompile.kernels.rotate_and_cache import launch

torch.manual_seed(0)
random.seed(0)
for tokens, rows, size, norms in itertools.product((1, 3), (1, 3), (32, 64), range(4)):
    arguments = inputs_of(rows, 4, 2, tokens, size, torch.float16)
    if random.random() < 0.5:
        arguments[3:5] = [table.repeat(rows, 1, 1) for table in arguments[3:5]]
    if random.random() < 0.5:
        arguments[9] = torch.tensor(5)
    if random.random() < 0.5:
        arguments[-1] = arguments[-1].transpose(1, 2).contiguous().transpose(1, 2)
    arguments[5:7] = [x if norms >> n & 1 else None for n, x in enumerate(arguments[5:7])]
    expected = exact(arguments)
    results = launch(*arguments, dependent=False), *arguments[-2:]
    for result, right in zip(results, expected):
        assert result.shape == right.shape
        error = (result.double() - right).abs().max() / right.abs().max()
        assert error < 1e-3, (float(error), tokens, rows, size, norms)

arguments = inputs_of(1, 3, 3, 1, 32, torch.float16)  # the last head begins at element 2**31
keys = torch.empty(2**31 + LENGTH * 32, dtype=torch.float16)  # pages that are not used take nothing
keys = keys.as_strided((1, 3, LENGTH, 32), (3 * 2**30, 2**30, 32, 1))
arguments[-2] = keys.copy_(arguments[-2])
expected = exact(arguments)[1]
launch(*arguments, dependent=False)
assert (keys.double() - expected).abs().max() < 1e-2
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_computes_the_definition_with_and_without_norms() -> None:
    pytest.importorskip("triton")
    printed = run_code(PROGRAM, imports=INTERPRETER, TRITON_INTERPRET="1")
    assert printed.strip() == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("normed", [False, True])
def test_the_kernel_compiles_for_hopper(normed) -> None:
    """Triton's interpreter takes what its compiler refuses. Without a GPU."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from cgcompile.kernels import rotate_and_cache_triton as kernels

    constants = {"HALF": 64, "COUNTED": normed, "Q_NORM": normed, "K_NORM": normed}
    constants |= {"DEPENDENT": True}
    types = dict.fromkeys(constants, "constexpr") | {"positions": "*i64"}
    pointers = ("q", "k", "v", "cos", "sin", "q_norm", "k_norm", "keys", "values", "out")
    types |= dict.fromkeys(pointers, "*bf16") | {"eps": "fp32", "offset": "fp32"}
    names = [parameter.name for parameter in kernels.rotate_and_cache.params]
    source = triton.compiler.ASTSource(
        kernels.rotate_and_cache,
        {name: types.get(name, "i32") for name in names},
        {(names.index(name),): constant for name, constant in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    text = compiled.asm["ptx"]
    assert "griddepcontrol.wait" in text
    assert "trap" in text
    assert not text.partition("griddepcontrol.wait")[0].count("ld.global")  # not before it


@pytest.mark.parametrize("tokens", [1, 3])
def test_shapes_without_running_are_those_of_running(tokens) -> None:
    arguments = inputs_of(tokens=tokens)
    traced = op()(*(x.to("meta") if isinstance(x, torch.Tensor) else x for x in arguments))
    result = op()(*arguments)
    assert (result.shape, result.dtype) == (traced.shape, traced.dtype)
    assert result.stride() == traced.stride()


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.repeat_interleave(2, -1)[..., ::2]


REFUSED = {
    "float32": lambda x: [t.float() if t.is_floating_point() else t for t in x],
    "another dtype": lambda x: [*x[:4], x[4].half(), *x[5:]],
    "another head": lambda x: [
        t if t is None or t.dim() < 3 else t[..., :24] for t in [*x[:5], None, None, *x[7:]]
    ],
    "strided head": lambda x: [_strided(x[0]), *x[1:]],
    "strided norm": lambda x: [*x[:5], _strided(x[5]), *x[6:]],
    "norm of another size": lambda x: [*x[:6], x[6][:1], *x[7:]],
    "cos of each head": lambda x: [*x[:3], x[3][:, None].repeat(1, 4, 1, 1), *x[4:]],
    "cos of another batch": lambda x: [*x[:3], x[3].repeat(3, 1, 1), *x[4:]],
    "values of another size": lambda x: [*x[:2], x[2][..., :16], *x[3:]],
    "keys without rows": lambda x: [*x[:-2], x[-2][:1], x[-1]],
    "expanded cache": lambda x: [*x[:-1], x[-1][:1].expand(2, -1, -1, -1)],
    "another length": lambda x: [*x[:-1], x[-1][:, :, :5]],
    "int32 positions": lambda x: [*x[:7], x[7].int(), *x[8:]],
    "two positions": lambda x: [*x[:7], x[7].repeat(2), *x[8:]],
    "counter elsewhere": lambda x: [*x[:7], torch.tensor(4, device="meta"), *x[8:]],
    "int32 counter": lambda x: [*x[:7], torch.tensor(4, dtype=torch.int32), *x[8:]],
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_inputs_that_the_kernel_does_not_take(change) -> None:
    """Each of them would be read as something else, or beyond its end."""
    arguments = inputs_of(dtype=torch.bfloat16)
    del arguments[7:9]
    assert takes(*arguments)
    assert takes(*arguments[:5], None, None, *arguments[7:])
    assert takes(*arguments[:7], torch.tensor(4), *arguments[8:])
    assert not takes(*change(arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "tokens", "size"), [(1, 1, 64), (8, 1, 128), (3, 5, 256)])
def test_the_kernel_is_at_least_as_exact_as_eager(rows, tokens, size, dtype) -> None:
    """On CUDA against float64, over 32 inputs."""
    if why_unsupported(torch.device("cuda", 0)) is not None:
        pytest.skip("needs compute capability 9.0")
    torch.manual_seed(0)
    errors = torch.zeros(2, 3, dtype=torch.float64)
    for number in range(32):
        arguments = inputs_of(rows, 16, 4, tokens, size, dtype, "cuda")
        if number % 2:
            arguments[9] = torch.tensor(number % (LENGTH - tokens), device="cuda")
        assert takes(*arguments[:7], *arguments[9:])
        right, plain = exact(arguments), eager(*arguments)
        results = op()(*arguments), *arguments[-2:]
        for way, tensors in enumerate((results, plain)):
            for n, (tensor, expected) in enumerate(zip(tensors, right, strict=True)):
                errors[way, n] += (tensor.double() - expected).square().mean().cpu()
    ratios = (errors[0] / errors[1].clamp(min=1e-30)).sqrt()
    assert float(ratios[:2].max()) <= 1.05
    assert float(errors[0, 2]) == 0  # values are copied
