"""Memory of our own: blocks that frames share, alias, give back and let go."""

import random
from typing import Any

import pytest
import torch
from lib.breakable import counted, rand, same, soft, step
from lib.entry import HOOKED, Hooked, assert_same, batch, compiled_model, marked
from torch import nn

from cgcompile import BreakableCUDAGraphWrapper, CompilationConfig
from cgcompile.graphs.arena import Arena, Block, OwnedCopy, ScalarCopy
from cgcompile.torch_compat.raw_memory import StorageLife


@pytest.fixture
def where(device: str) -> torch.device:
    return torch.empty(0, device=device).device


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wanted", "allocated"), [(0, 256), (1, 256), (256, 256), (257, 512), (5000, 5120)]
)
def test_blocks_are_aligned(where, wanted, allocated) -> None:
    arena = Arena()
    block = arena.frame().allocate(wanted, where)
    assert (block.nbytes, arena.nbytes) == (allocated, allocated)
    assert block.address % 64 == 0
    assert block.memory.device == where
    assert arena.owns(block.address)
    assert not arena.owns(block.address + 1)
    assert not arena.owns(torch.empty(8, device=where).data_ptr())


@pytest.mark.slow
def test_a_frame_takes_the_smallest_free_block_or_a_new_one(where) -> None:
    draw, arena, known = random.Random(0), Arena(), []
    for _ in range(20):
        frame, free, used = arena.frame(), list(known), []
        for _ in range(10):
            if used and draw.random() < 0.3:
                free.append(used.pop(draw.randrange(len(used))))
                frame.release(free[-1])
            wanted = draw.choice([0, 1, 256, 257, 1000, 5000])
            needed = max(256, -(-wanted // 256) * 256)
            block = frame.allocate(wanted, where)
            fitting = [other.nbytes for other in free if other.nbytes >= needed]
            if fitting:
                assert block.nbytes == min(fitting)
                free.remove(block)
            else:
                assert block not in known
                assert block.nbytes == needed
                known.append(block)
            used.append(block)
        assert arena.nbytes == sum(block.nbytes for block in known)
    assert len(known) < 20  # of 200 that were taken


def test_blocks_of_another_device_are_not_taken(where) -> None:
    arena = Arena()
    other = arena.frame().allocate(256, torch.device("meta"))
    assert arena.frame().allocate(256, where) is not other
    assert arena.nbytes == 512


def test_a_block_with_a_living_tensor_is_in_use(where) -> None:
    arena = Arena()
    frame = arena.frame()
    block = frame.allocate(256, where)
    assert not block.in_use
    layout = block.view(torch.float32, (4, 8), (8, 1))
    tensor = block.alias(layout)
    assert tensor.data_ptr() == block.address
    assert frame.allocate(256, where) is not block
    del layout
    assert block.in_use
    view = tensor[1:]
    del tensor
    assert block.in_use  # through a view of it
    assert arena.frame().allocate(256, where) is not block
    del view
    assert not block.in_use
    assert arena.frame().allocate(100, where) is block
    assert arena.nbytes == 512


@pytest.mark.parametrize("inference", [True, False])
def test_views_lie_in_the_block_and_outside_of_autograd(where, inference) -> None:
    with torch.inference_mode(inference):
        block = Block(1024, where)
        view = block.view(torch.float32, (2, 3), (4, 1), 16)
    assert (view.data_ptr(), view.shape) == (block.address + 16, (2, 3))
    assert (view.stride(), view.dtype) == ((4, 1), torch.float32)
    assert not view.is_inference()
    assert not block.memory.is_inference()
    assert not view.requires_grad
    block.memory.zero_()
    view.fill_(1)
    assert block.memory.view(torch.float32).sum().item() == 6


@pytest.mark.parametrize(
    ("dtype", "shows"),
    [
        (torch.float32, torch.isnan),
        (torch.bfloat16, torch.isnan),
        (torch.complex64, torch.isnan),
        (torch.int64, lambda x: x > 2**60),
        (torch.int32, lambda x: x > 2**30),
    ],
)
def test_poison_shows_in_what_was_stored_last(where, dtype, shows) -> None:
    arena = Arena()
    block = arena.frame().allocate(256, where)
    view = block.view(dtype, (4,), (1,))
    view.fill_(1)
    arena.poison()
    assert shows(view).all()


def test_results_of_other_owners_are_not_poisoned(where) -> None:
    arena = Arena()
    blocks = {
        owner: arena.frame(owner).allocate(256, where, result=True)
        for owner in (None, "one", "other")
    }
    for present, written in ((None, {None}), ("one", {None, "one"}), ("other", {None, "other"})):
        views = {owner: block.view(torch.float32, (4,), (1,)) for owner, block in blocks.items()}
        for view in views.values():
            view.fill_(1)
        arena.poison(present)
        assert {owner for owner, view in views.items() if view.isnan().all()} == written
        assert all((views[owner] == 1).all() for owner in views.keys() - written)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "conjugate"])
def test_copies_of_tensors_that_require_grad_do_not(where, layout) -> None:
    dtype = torch.complex64 if layout == "conjugate" else torch.float32
    source = torch.rand(4, 6, dtype=dtype, device=where, requires_grad=True)
    read = {"contiguous": source, "strided": source.t(), "conjugate": source.conj()}[layout]
    copy = OwnedCopy(read.detach(), Arena().frame())
    with torch.enable_grad():
        copy.fill(read)
        copy.fill(read)  # what a graph recorded by autograd would refuse
    assert not copy.tensor.requires_grad
    assert copy.tensor.grad_fn is None
    assert torch.equal(copy.tensor, read.detach())


def test_a_scalar_that_requires_grad_is_copied_without_it(where) -> None:
    source = torch.tensor(2.5, requires_grad=True)
    copy = ScalarCopy(source.detach(), Arena().frame(), where)
    with torch.enable_grad():
        copy.fill(source)
    assert not copy.tensor.requires_grad
    assert copy.tensor.item() == 2.5


def test_cleared_blocks_go_with_the_frames_that_use_them(where) -> None:
    arena = Arena()
    frame = arena.frame()
    block = frame.allocate(1024, where)
    life, address = StorageLife(block.memory), block.address
    arena.release()
    assert arena.nbytes == 0
    assert not arena.owns(address)
    assert not life.ended  # the frame still uses it
    block.view(torch.float32, (4,), (1,)).fill_(2)
    assert arena.frame().allocate(1024, where) is not block
    assert arena.nbytes == 1024
    del block, frame
    assert life.ended


# ---------------------------------------------------------------- through what uses it


def captured(device: str, sizes: tuple[int, ...], **settings: Any) -> list[int]:
    """Bytes of the arena after each size has been captured."""
    model, compiled, backend = compiled_model(Hooked, device, **HOOKED, **settings)
    sums = []
    for position, size in enumerate(sizes):
        for _ in range(3):
            x = batch(device, size)
            assert_same(compiled(marked(x) if not position and not sums else x), model(x))
        (graph,) = backend.graphs
        sums.append(graph.pool.arena.nbytes)
    assert (backend.counters.captures, backend.counters.replays) == (len(sizes), len(sizes))
    return sums


@pytest.mark.slow
@pytest.mark.usefixtures("without_gradients")
@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_smaller_batches_of_a_compiled_model_add_no_memory(device: str, mode: str) -> None:
    sums = captured(device, (64, 33, 7, 2), cudagraph_mode=mode)
    assert sums == sums[:1] * 4
    assert sums[0] > 0


@pytest.mark.usefixtures("without_gradients")
def test_larger_batches_do(device: str) -> None:
    sums = captured(device, (2, 7, 64))
    assert sums[0] < sums[1] < sums[2]


class Chain(nn.Module):
    """Several breaks that return fresh tensors."""

    def __init__(self, cut: Any, depth: int = 2) -> None:
        super().__init__()
        self.cut, self.depth = cut, depth

    def forward(self, x):
        for k in range(self.depth):
            x = self.cut(x.sin() + k) * 2
        return x


def captured_chain(device: str, depth: int, sizes: tuple[int, ...]) -> list[int]:
    cut, _ = counted(soft)
    wrapper = BreakableCUDAGraphWrapper(Chain(cut, depth), CompilationConfig(capture_device="host"))
    sums = []
    for size in sizes:
        x = rand(size, 8, device=device)
        for _ in range(3):
            x.uniform_()
            with step(size):
                assert same(wrapper(x), Chain(soft, depth)(x))
        sums.append(wrapper.pool.arena.nbytes)
    return sums


def test_smaller_batches_of_a_wrapper_add_no_memory(device: str) -> None:
    sums = captured_chain(device, 3, (64, 33, 7, 2))
    assert sums == sums[:1] * 4
    assert sums[0] > 0


def test_bridges_serve_later_breaks(device: str) -> None:
    """What no graph reads any more serves the next break: a deep chain needs no more than 2."""
    assert captured_chain(device, 9, (64,))[0] <= captured_chain(device, 2, (64,))[0]
