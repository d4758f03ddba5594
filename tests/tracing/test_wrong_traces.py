"""Calls that were once served by a trace of something else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cgcompile
from cgcompile.errors import TraceError

pytestmark = pytest.mark.usefixtures("without_gradients")


def compiled(called: Any, guards: str = "none", **given: Any) -> Any:
    return cgcompile.compile(called, compiler="eager", guards=guards, **given)


def test_strides_that_follow_from_sizes() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + x.stride(1)

    one = compiled(step, dynamic_dims={"x": 0})
    for x in (
        torch.arange(9.0).view(3, 3).t(),
        torch.arange(15.0).view(3, 5).t(),
        torch.arange(24.0).view(3, 8)[:, :5].t(),
    ):
        assert torch.equal(one(x), step(x))
    assert len(one.traces) == 2


@pytest.mark.parametrize("guards", ["keep", "shape", "none"])
def test_globals_with_two_underscores_are_the_users(guards: str) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * __weight  # noqa: F821

    names = step.__globals__
    names["__weight"] = torch.full((3,), 2.0)
    one, x = compiled(step, guards), torch.randn(3)
    assert torch.equal(one(x), step(x))
    names["__weight"] = torch.full((3,), 5.0)
    if guards == "none":
        one.invalidate("the weight is another one")
    assert torch.equal(one(x), step(x))
    del names["__weight"]


def test_a_first_call_that_fails_proves_nothing() -> None:
    """Whether a model replaces its tensors is seen after a call that ends well."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + x
            return self.count * 1

    failing = [True]

    def picky(gm: Any, fake_inputs: Any) -> Any:
        def run(*inputs: Any) -> Any:
            if failing.pop() if failing else False:
                raise ValueError("not now")
            return gm.forward(*inputs)

        return run

    one = cgcompile.compile(Counting(), compiler=picky, guards="none")
    x = torch.ones(3)
    with pytest.raises(ValueError, match="not now"):
        one(x)
    for total in (1.0, 2.0, 3.0):
        assert torch.equal(one(x), torch.full((3,), total))


def test_replaced_weights_are_old_ones_and_never_something_else() -> None:
    model = nn.Linear(4, 4)
    one, x = compiled(model), torch.randn(2, 4)
    before = one(x)
    weight = model.weight
    weight.data = torch.zeros(4, 4, dtype=torch.float64)
    assert torch.equal(one(x), before)
    weight.data = torch.zeros(4, 4)
    one.backend.invalidate("weights moved")
    assert torch.equal(one(x), model(x))


def test_a_compiler_that_asks_for_another_trace_gets_it() -> None:
    numpy = pytest.importorskip("numpy")

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = numpy.float64(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * float(self.scale)

    one, x = compiled(Scaled()), torch.randn(3)
    assert torch.equal(one(x), x * 3.0)


# ---------------------------------------------------------------- kept traces


def two_processes(
    tmp_path: Path, one: Any, other: Any, first: Any, second: Any, **given: Any
) -> None:
    """What one leaves, the other must not use unless it is right. (In one process: new objects.)"""
    given = {"cache_dir": str(tmp_path), "keep_traces": True, **given}
    for called, x in ((one, first), (other, second), (one, first)):
        x = x if isinstance(x, tuple) else (x,)
        found = compiled(called, **given)(*x)
        assert torch.equal(torch.as_tensor(found), torch.as_tensor(called(*x)))


class Attribute(nn.Module):
    def __init__(self, kept: Any, use: Any) -> None:
        super().__init__()
        self.kept, self.use = kept, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.kept, x)


class Whole(int):
    pass


def summed(kept: Any, x: torch.Tensor) -> torch.Tensor:
    return x + sum(kept)


def member(kept: Any, x: torch.Tensor) -> torch.Tensor:
    return x + 1 if 3 in kept else x - 1


def plus(kept: Any, x: torch.Tensor) -> torch.Tensor:
    return x + int(kept)


def called(kept: Any, x: torch.Tensor) -> torch.Tensor:
    return kept(x)


def keys(kept: Any, x: torch.Tensor) -> torch.Tensor:
    return x + sum(a + b for a, b in kept)


PAIRS = {
    "set": (member, {3}, {4}),
    "frozenset": (summed, frozenset({1}), frozenset({2})),
    "keys": (keys, {(1, 2): 0}, {(5, 6): 0}),
    "subclass": (plus, Whole(1), Whole(2)),
    "lambda": (
        called,
        [lambda x: x + 1, lambda x: x * 5][0],
        [lambda x: x + 1, lambda x: x * 5][1],
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_attribute_of_another_value(tmp_path: Path, name: str) -> None:
    use, one, other = PAIRS[name]
    if name == "subclass" and torch.__version__ < "2.13":  # where Dynamo does not trace int() of it
        with pytest.raises(TraceError, match="Whole"):
            two_processes(
                tmp_path, Attribute(one, use), Attribute(other, use), *[torch.ones(3)] * 2
            )
        return
    two_processes(tmp_path, Attribute(one, use), Attribute(other, use), *[torch.ones(3)] * 2)


def test_an_attribute_that_is_another_object(tmp_path: Path) -> None:
    class Special(nn.Module):
        def __init__(self, which: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.ReLU() for _ in range(2))
            self.special = [self.layers[which]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for number, layer in enumerate(self.layers):
                x = layer(x) + (10.0 ** (number + 1) if layer is self.special[0] else 0)
            return x

    two_processes(tmp_path, Special(0), Special(1), *[torch.ones(3)] * 2)


def by_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + 1 if y.shape[0] > 4 else x - 1


def number_by_size(x: torch.Tensor) -> int:
    return 1 if x.shape[0] > 4 else 2


def by_layout(x: torch.Tensor) -> torch.Tensor:
    return x + 1 if x.is_contiguous() else x - 1


def test_sizes_and_layouts_that_no_kernel_uses(tmp_path: Path) -> None:
    x, dims = torch.ones(3), {"y": 0}
    given = (x, torch.ones(8)), (x, torch.ones(3))
    two_processes(tmp_path, by_size, by_size, *given, dynamic_dims=dims)
    sizes = torch.ones(8), torch.ones(3)
    two_processes(tmp_path, number_by_size, number_by_size, *sizes, dynamic_dims={"x": 0})
    layouts = torch.ones(3, 5).t(), torch.ones(5, 3)
    two_processes(tmp_path, by_layout, by_layout, *layouts, dynamic_dims={"x": 0})


def test_sizes_of_one_name_are_kept(tmp_path: Path) -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.sum(1) + y

    dims = {"x": {0: "n"}, "y": {0: "n"}}
    for from_disk in (False, True):
        one = compiled(step, dynamic_dims=dims, cache_dir=str(tmp_path), keep_traces=True)
        for n in (3, 5):
            x, y = torch.randn(n, 4), torch.randn(n)
            assert torch.equal(one(x, y), step(x, y))
        assert [each.start.from_disk for each in one.traces] == [from_disk]


def test_layers_that_differ_keep_a_trace_each(tmp_path: Path) -> None:
    def starts() -> list[bool]:
        layers = [Attribute(number, plus) for number in range(3)]
        found = []
        for layer in layers:
            one = compiled(layer, cache_dir=str(tmp_path), keep_traces=True)
            assert torch.equal(one(torch.ones(3)), layer(torch.ones(3)))
            found.append(one.traces[0].start.from_disk)
        return found

    assert starts() == [False, False, False]
    assert starts() == [True, True, True]
