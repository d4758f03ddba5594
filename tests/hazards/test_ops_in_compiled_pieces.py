"""The body of a custom op inside a captured piece does not run at replay, whatever compiles it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cgcompile
from cgcompile.errors import AddressChangedError, CaptureError

ROWS, WIDTH = 4, 8
NOW: dict[str, Tensor] = {}  # what the bodies read: metadata that a graph cannot see
CALLS: list[str] = []

library = torch.library.Library("opaque", "FRAGMENT")


@torch.library.custom_op("opaque::fresh", mutates_args=())
def fresh(x: Tensor) -> Tensor:
    CALLS.append("fresh")
    return x * NOW["scale"]


@torch.library.custom_op("opaque::several", mutates_args=())
def several(x: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("several")
    return x * NOW["scale"], x - NOW["scale"]


@torch.library.custom_op("opaque::in_place", mutates_args={"x"})
def in_place(x: Tensor) -> None:
    CALLS.append("in_place")
    x.mul_(NOW["scale"])


@torch.library.custom_op("opaque::cached", mutates_args={"cache", "out"})
def cached(x: Tensor, cache: Tensor, out: Tensor) -> None:
    CALLS.append("cached")
    cache[NOW["row"]] = x
    out.copy_(cache[NOW["row"]].flip(0) * NOW["scale"])


fresh.register_fake(torch.empty_like)
several.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
in_place.register_fake(lambda x: None)
cached.register_fake(lambda x, cache, out: None)


def to_lists(x: Tensor, parts: list[Tensor]) -> list[Tensor]:
    CALLS.append("listed")
    return [x + part * NOW["scale"] for part in parts]


library.define("listed(Tensor x, Tensor[] parts) -> Tensor[]")
library.impl("listed", to_lists, "CPU")
torch.library.register_fake(
    "opaque::listed", lambda x, parts: [torch.empty_like(x) for _ in parts], lib=library
)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(2 * ROWS, WIDTH))

    def mixed(self, x: Tensor) -> Tensor:
        if self.kind == "fresh":
            return torch.ops.opaque.fresh(x)
        if self.kind == "several":
            one, other = torch.ops.opaque.several(x)
            return one.sin() + other
        if self.kind == "listed":
            parts = [x.cos(), x.sin()]
            one, other = torch.ops.opaque.listed(x, parts)
            return one + 2 * other + parts[0]
        if self.kind == "in_place":
            y = x.sin()
            torch.ops.opaque.in_place(y)
            return y + x
        out = torch.empty_like(x)
        torch.ops.opaque.cached(x, self.cache, out)
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(self.first(x).relu()).tanh()
        return self.mixed(self.second(x))


@pytest.fixture(autouse=True)
def metadata() -> Iterator[None]:
    set_metadata(2.0, 0)
    CALLS.clear()
    yield
    NOW.clear()


KEPT: list[dict[str, Tensor]] = []  # graphs read it; nothing here tests freed memory


def set_metadata(scale: float, first: int) -> None:
    NOW.update(scale=torch.tensor([scale]), row=torch.arange(first, first + ROWS))
    KEPT.append(dict(NOW))


def built(kind: str, compiler: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = Model(kind).eval().requires_grad_(False)
    config = cgcompile.CompilationConfig(capture_device="host", compiler=compiler)
    return module, cgcompile.compile(module, config)


@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["fresh", "several", "listed", "in_place", "cached"])
def test_replays_hold_what_the_body_read_at_capture(kind: str, compiler: str) -> None:
    module, compiled = built(kind, compiler)
    old = dict(NOW)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            torch.testing.assert_close(compiled(x), module(x))
        assert compiled.backend.counters.captures == 1
        set_metadata(-3.0, ROWS)
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            before = module.cache.clone()
            CALLS.clear()
            result, written = compiled(x).clone(), module.cache.clone()
            assert not CALLS
            module.cache.copy_(before)
            new = module(x)
            assert not torch.allclose(result, new)
            now = dict(NOW)
            NOW.update(old)
            module.cache.copy_(before)
            torch.testing.assert_close(result, module(x))
            torch.testing.assert_close(written, module.cache)
            NOW.update(now)
    assert compiled.backend.counters.replays == 3


@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["fresh", "cached"])
def test_verify_finds_it_under_other_metadata(kind: str, compiler: str) -> None:
    _, compiled = built(kind, compiler)
    x = torch.randn(ROWS, WIDTH)
    with torch.inference_mode():
        assert cgcompile.verify(compiled, x).ok
        set_metadata(-3.0, ROWS)
        assert not cgcompile.verify(compiled, x).ok


@torch.library.custom_op("opaque::reads", mutates_args=())
def reads(x: Tensor) -> Tensor:
    return x * x.sum().item()


reads.register_fake(torch.empty_like)


@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_read_on_the_host_in_a_body_is_refused(compiler: str) -> None:
    config = cgcompile.CompilationConfig(capture_device="host", compiler=compiler)
    compiled = cgcompile.compile(lambda x: torch.ops.opaque.reads(x.sin()) + 1, config)
    with torch.inference_mode():
        for _ in range(3):
            x = torch.rand(ROWS)
            torch.testing.assert_close(compiled(x), x.sin() * x.sin().sum() + 1)
    assert compiled.backend.counters.captures == 0


@pytest.mark.parametrize(
    "compiler", ["eager", "aot", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_freed_tensor_that_a_body_read_is_named(compiler: str) -> None:
    _, compiled = built("fresh", compiler)
    with torch.inference_mode():
        for _ in range(3):
            compiled(torch.randn(ROWS, WIDTH))
        KEPT.clear()
        NOW.clear()
        error, text = AddressChangedError, r"a tensor \(1,\).* which captured ops read or write"
        if compiler == "inductor":  # bodies in compiled code are not seen: the recorder notices it
            error = CaptureError
            text = r"aten.mul.Tensor in opaque::fresh \(test_ops_in_compiled_pieces.py:\d+\) reads"
        for _ in range(2):
            with pytest.raises(error, match=text):
                compiled(torch.randn(ROWS, WIDTH))
    assert compiled.backend.counters.replays == 1
