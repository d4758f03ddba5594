"""What a recording holds and what it leaves alone: the same on the host recorder and on CUDA."""

import contextlib
import gc
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cgcompile.errors import CaptureError
from cgcompile.graphs.capture import capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.testing.host import HostDevice, HostGraph

SIZE = (4, 8)


@pytest.fixture
def host_pool() -> GraphPool:
    """For what only the host recorder shows: numbers of its pool, names of recorded ops."""
    return GraphPool(HostDevice())


def rand(*size, device):
    return torch.rand(size or SIZE, device=device)


def same(result, expected):
    """Bitwise on the CPU; a library of kernels may choose another one inside of a capture."""
    if result.device.type == "cpu" or not result.is_floating_point():
        return torch.equal(result, expected)
    return torch.allclose(result, expected, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------- host code and effects


def test_a_replay_runs_no_host_code(device, pool) -> None:
    runs, factor, x = [], [2], rand(device=device)

    def function():
        runs.append(1)
        return x.sin() * factor[0]

    graph, result = capture(function, pool, "counted")
    factor[0] = None  # the function raises from now on
    for _ in range(3):
        x.uniform_()
        graph.replay()
        assert torch.equal(result, x.sin() * 2)
    assert len(runs) == 1


def test_only_replays_write_and_each_of_them(device, pool) -> None:
    x, counter = rand(device=device), torch.zeros((), dtype=torch.int64, device=device)
    cache, expected = torch.zeros(4, 8, device=device), x.clone()

    def function():
        counter.add_(1)
        cache[1:3].copy_(x[:2])
        x.mul_(2).t()[0].add_(counter)
        return x.view(-1)

    graph, result = capture(function, pool, "written")
    assert counter.item() == 0
    assert not cache.any()
    assert torch.equal(x, expected)
    for count in (1, 2, 3):
        graph.replay()
        assert torch.equal(cache[1:3], expected[:2])
        expected = expected * 2
        expected[:, 0] += count
        assert counter.item() == count
        assert torch.equal(x, expected)
        assert torch.equal(result, expected.view(-1))


def test_results_are_memory_of_the_pool(device, pool) -> None:
    x = rand(device=device)
    graph, (computed, view, argument) = capture(lambda: (x + 1, x[1:], x), pool, "mixed")
    assert [pool.owns(each) for each in (computed, view, argument)] == [True, False, False]
    graph.replay()
    assert torch.equal(computed, x + 1)
    assert torch.equal(view, x[1:])
    assert argument is x


def test_graph_without_recording_says_so(device, pool) -> None:
    graph = pool.device.new_graph()
    with pytest.raises(CaptureError, match="holds no recording"):
        graph.replay()
    x = rand(device=device)
    graph, result = capture(lambda: x + 1, pool, "small")
    graph.replay()
    assert torch.equal(result, x + 1)
    graph.reset()
    with pytest.raises(CaptureError, match="holds no recording"):
        graph.replay()


# ---------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand_like(x) + x,
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: x + torch.randn(SIZE, device=x.device) * torch.rand(8, device=x.device),
        lambda x: torch.empty_like(x).uniform_(1, 2) + x.bernoulli(),
        lambda x: torch.randint(0, 1000, SIZE, device=x.device) + x,
    ],
)
def test_random_ops_draw_at_each_replay_what_eager_draws(device, pool, draw) -> None:
    x, previous = rand(device=device), None
    draw(x)
    graph, result = capture(lambda: draw(x), pool, "random")
    for seed in range(3):
        torch.manual_seed(seed)
        expected = [draw(x).clone() for _ in range(2)]
        torch.manual_seed(seed)
        for drawn in expected:
            graph.replay()
            assert torch.equal(result, drawn)
            assert previous is None or not torch.equal(result, previous)
            previous = result.clone()


def test_capture_uses_no_random_numbers_up(device, pool) -> None:
    torch.manual_seed(3)
    expected = rand(device=device)
    torch.manual_seed(3)
    graph, result = capture(lambda: rand(device=device), pool, "random")
    assert torch.equal(rand(device=device), expected)
    previous = expected
    for _ in range(2):
        graph.replay()
        assert not torch.equal(result, previous)
        assert not result.isnan().any()
        previous = result.clone()


# ---------------------------------------------------------------- programs


def _views(x):
    y = x * 2
    y.t()[2:5].view(3, 4)[1].mul_(-1)
    y.unflatten(1, (2, 4)).transpose(0, 1)[0].add_(1)
    return y


def _view_of_input(x):
    x[1:].t()[::2].add_(5)
    return x.sum(0)


def _out_variants(x, out):
    torch.mul(x, 3, out=out)
    torch.add(out, x, out=out[:, :])
    return out.clone()


def _index_copy(x, y, slots):
    x.index_copy_(1, slots, y[:, :4])
    return torch.zeros(8, 8, device=x.device).index_copy_(0, slots, y)


def _scatter(x, where):
    x.scatter_(1, where, x * 2)
    return torch.zeros_like(x).scatter_add_(1, where, x)


def _mask(x):
    x[x > 0.5] = 0.0
    return torch.where(x > 0.25, x, -x).masked_fill(x == 0, 7)


def _split_and_join(x):
    first, second = x.split(4, dim=1)
    pieces = torch.chunk(first * 2, 2, dim=0)
    return torch.cat([second, pieces[1].repeat(2, 1)], 1), torch.stack(pieces)


def _normalised(x):
    mean, variance = x.mean(1, keepdim=True), x.var(1, keepdim=True)
    return F.layer_norm(x, (8,)), (x - mean) / (variance + 1).sqrt(), F.softmax(x, -1)


def _attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _under_autocast(x, y):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return (x @ y.t()).float()


def _foreach(x, y):
    torch._foreach_mul_([x, y], 2)
    return torch._foreach_add([x, y], 1)


def _constants(x):
    ones = torch.ones(8, device=x.device)
    ramp = torch.arange(8, device=x.device, dtype=torch.float32)
    return x + ones * 2 + ramp + torch.full((8,), 0.5, device=x.device)


def _filled(x):
    out = torch.empty(8, 8, device=x.device)
    out[:4].copy_(x)
    out[4:] = out[:4] * 2
    return out


def _slots(device):
    return torch.randperm(8, device=device)[:4]


def _rows(device):
    return torch.stack([torch.randperm(8, device=device) for _ in range(4)])


def _tokens(device):
    return torch.randint(0, 16, (4, 3), device=device)


def _heads(device):
    return torch.randn(1, 2, 6, 8, device=device)


def _plain(device):
    return torch.rand(SIZE, device=device)


def _whole(device):
    return torch.randint(0, 100, SIZE, device=device)


def _complex(device):
    return torch.randn(SIZE, dtype=torch.complex64, device=device)


PROGRAMS = {
    "attention": (_attention, (_heads, _heads, _heads)),
    "index_copy": (_index_copy, (_plain, _plain, _slots)),
    "gather": (lambda x, w: x.gather(1, w), (_plain, _rows)),
    "index": (lambda x, s: x[:, s] + x[1, s], (_plain, _slots)),
    "index_put": (
        lambda x, s: x.t().contiguous().index_put_((s,), x[0, :4, None]),
        (_plain, _slots),
    ),
    "scatter": (_scatter, (_plain, _rows)),
    "out": (_out_variants, (_plain, _plain)),
    "views": (_views, (_plain,)),
    "view_of_input": (_view_of_input, (_plain,)),
    "mask": (_mask, (_plain,)),
    "topk": (lambda x: x.topk(3, dim=1), (_plain,)),
    "sort": (lambda x: x.sort(dim=1, descending=True), (_plain,)),
    "max": (lambda x: (x.max(1), x.argmax(0), x.amin(1)), (_plain,)),
    "cumsum": (lambda x: x.cumsum(1), (_whole,)),
    "split": (_split_and_join, (_plain,)),
    "unbind": (lambda x: [each * 2 for each in x.unbind(0)], (_plain,)),
    "embedding": (lambda t, w: F.embedding(t, w), (_tokens, lambda d: torch.rand(16, 8, device=d))),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, padding=1),
        (lambda d: torch.rand(1, 3, 8, 8, device=d), lambda d: torch.rand(4, 3, 3, 3, device=d)),
    ),
    "matmul": (lambda x, y: (x @ y.t(), F.linear(x, y, y[:, 0])), (_plain, _plain)),
    "expand": (lambda x: x[:1].expand(4, 8) + x.new_zeros(1).expand(4, 8), (_plain,)),
    "as_strided": (lambda x: x.as_strided((5, 3), (3, 2), 1) * 2, (_plain,)),
    "as_strided_write": (lambda x: x.as_strided((4,), (9,)).add_(3), (_plain,)),
    "normalised": (_normalised, (_plain,)),
    "complex": (lambda z: (z.conj() * z).real, (_complex,)),
    "conjugate_output": (lambda z: ((z + 1).conj(), z.conj().imag), (_complex,)),
    "roll": (lambda x: x.roll(1, 0).flip(1).tril(), (_plain,)),
    "dtype": (lambda x: (x.to(torch.bfloat16), x > 0.5, x.view(torch.int32)), (_plain,)),
    "swap": (lambda x, y: (x.copy_(y), y.zero_(), x + y), (_plain, _plain)),
    "foreach": (_foreach, (_plain, _plain)),
    "empty": (lambda x: (x[:0].sum(0), x[:0] * 2, x + 1), (_plain,)),
    "autocast": (_under_autocast, (_plain, _plain)),
    "constants": (_constants, (_plain,)),
    "filled": (_filled, (_plain,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_equals_eager(device, pool, name) -> None:
    function, makers = PROGRAMS[name]

    def make():
        return [each(device) for each in makers]

    function(*make())
    buffers, previous = make(), None
    before = [each.clone() for each in buffers]
    graph, result = capture(lambda: function(*buffers), pool, name)
    assert all(map(torch.equal, buffers, before))
    addresses = [each.data_ptr() for each in leaves(result)]
    for _ in range(3):
        inputs = make()
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        expected = function(*inputs)
        check_equal(result, expected)
        check_equal(buffers, inputs)
        assert [each.data_ptr() for each in leaves(result)] == addresses
        now = [each.clone() for each in leaves(result)]
        assert previous is None or not all(map(torch.equal, now, previous))
        previous = now


def leaves(tree):
    return (
        [tree]
        if isinstance(tree, torch.Tensor)
        else [leaf for each in tree for leaf in leaves(each)]
    )


def check_equal(result, expected):
    pairs = list(zip(leaves(result), leaves(expected), strict=True))
    assert pairs
    for one, other in pairs:
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert same(one, other)


def test_module_in_training_mode_updates_its_statistics(device, pool) -> None:
    module, plain = (nn.BatchNorm1d(8, device=device).requires_grad_(False) for _ in range(2))
    x = rand(device=device)
    plain(x.clone())
    plain.reset_running_stats()
    graph, result = capture(lambda: module(x), pool, "norm")
    assert module.num_batches_tracked.item() == 0
    for count in (1, 2, 3):
        x.uniform_()
        graph.replay()
        assert same(result, plain(x))
        assert same(module.running_mean, plain.running_mean)
        assert module.num_batches_tracked.item() == count


# ---------------------------------------------------------------- custom ops


library = torch.library.Library("recorder_tests", "DEF")
library.define("scaled(Tensor x, float by) -> Tensor")
library.define("put(Tensor(a!) cache, Tensor x) -> ()")
bodies = {"scaled": 0, "put": 0, "decorated": 0}


def _scaled(x, by):
    bodies["scaled"] += 1
    return (x * by).sin()


def _put(cache, x):
    bodies["put"] += 1
    cache.copy_(x.flip(0))


for _key in ("CPU", "CUDA"):
    library.impl("scaled", _scaled, _key)
    library.impl("put", _put, _key)


@torch.library.custom_op("recorder_tests::decorated", mutates_args=("cache",))
def decorated(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    bodies["decorated"] += 1
    cache.add_(x)
    return cache * 2


def defined(x, cache):
    torch.ops.recorder_tests.put(cache, x)
    return torch.ops.recorder_tests.scaled(cache, 3.0)


@pytest.mark.parametrize("function", [defined, decorated])
def test_body_of_a_custom_op_does_not_run_at_replay(device, pool, function) -> None:
    x, cache = rand(device=device), torch.zeros(SIZE, device=device)
    expected_cache = cache.clone()
    graph, result = capture(lambda: function(x, cache), pool, "custom")
    assert not cache.any()
    for _ in range(3):
        x.uniform_()
        counts = dict(bodies)
        graph.replay()
        assert bodies == counts
        expected = function(x, expected_cache)
        assert bodies != counts
        assert torch.equal(result, expected)
        assert torch.equal(cache, expected_cache)


# ---------------------------------------------------------------- memory of the pool


def test_graphs_of_one_pool_replay_in_any_order(device, pool) -> None:
    x = rand(16, 64, device=device)
    functions = [
        lambda: (x.sin().cos() + 1).exp().sum(1),
        lambda: x.cos().mul(2).t().contiguous().sqrt(),
        lambda: (x @ x.t()).relu().cumsum(1).amax(1),
    ]
    for function in functions:
        function()
    captured = [capture(each, pool, "one of many") for each in functions]
    previous = [None] * 3
    for order in ((0, 1, 2), (2, 1, 0), (1, 1, 2), (0, 2, 0)):
        for position in order:
            x.uniform_()
            graph, result = captured[position]
            graph.replay()
            assert same(result, functions[position]())
            assert previous[position] is None or not torch.equal(result, previous[position])
            previous[position] = result.clone()


def test_result_that_lives_is_not_overwritten_by_other_graphs(device, pool) -> None:
    x = rand(16, 64, device=device)
    graph, output = capture(lambda: x.sin(), pool, "first")
    graph.replay()
    expected = x.sin()
    for _ in range(4):
        other, result = capture(lambda: (x + 1).exp().cos(), pool, "other")
        x.uniform_()
        other.replay()
        assert torch.equal(result, (x + 1).exp().cos())
        assert torch.equal(output, expected)
        del result


def test_result_of_one_graph_is_the_input_of_the_next(device, pool) -> None:
    x = rand(device=device)
    first, middle = capture(lambda: x.sin(), pool, "first")
    second, result = capture(lambda: middle.mul_(2) + 1, pool, "second")
    for _ in range(3):
        x.uniform_()
        first.replay()
        second.replay()
        assert torch.equal(result, x.sin() * 2 + 1)
        assert torch.equal(middle, x.sin() * 2)


# ---------------------------------------------------------------- the host may not look


def test_refused_read_that_is_swallowed_fails_the_capture(device, pool) -> None:
    """CUDA ends a capture at the first call that it does not permit."""
    x = rand(device=device)

    def function():
        y = x.sin()
        with contextlib.suppress(RuntimeError):
            y.sum().item()
        return y + 1

    with pytest.raises(RuntimeError, match="captur"):
        capture(function, pool, "swallowed")
    graph, result = capture(lambda: x.cos(), pool, "after")
    graph.replay()
    assert torch.equal(result, x.cos())


def test_profiler_takes_the_place_of_what_refuses_tolist(host_pool) -> None:
    """The one gap of the host recorder: the values of the recording run are seen."""
    x, seen = torch.rand(SIZE), []

    def function():
        y = x * 2
        seen.append(y.tolist())
        return y

    expected, profiler = function().tolist(), lambda *_: None
    sys.setprofile(profiler)
    try:
        graph, result = capture(function, host_pool, "profiled")
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert seen == [expected] * 2
    x.uniform_()
    graph.replay()
    assert torch.equal(result, x * 2)
    assert len(seen) == 2


def test_capture_leaves_no_profile_function(host_pool) -> None:
    x = torch.rand(SIZE)
    for function, match in ((x.tolist, r"Tensor.tolist\(\)"), (lambda: x @ x.new_ones(99), "size")):
        with pytest.raises(RuntimeError, match=match):
            capture(function, host_pool, "broken")
        assert sys.getprofile() is None
    graph, result = capture(lambda: x + 1, host_pool, "after")
    assert sys.getprofile() is None
    graph.replay()
    assert result.tolist() == (x + 1).tolist()


@pytest.mark.parametrize(
    "known",
    [
        lambda x: x.repeat_interleave(
            torch.ones(4, dtype=torch.int64, device=x.device), dim=0, output_size=4
        ),
        lambda x: torch.nonzero_static(x > 0.5, size=5),
    ],
)
def test_results_of_known_size_are_no_host_reads(device, pool, known) -> None:
    x = rand(device=device)
    known(x)
    graph, result = capture(lambda: known(x), pool, "known size")
    for _ in range(2):
        x.uniform_()
        graph.replay()
        assert torch.equal(result, known(x))


# ---------------------------------------------------------------- the host recorder alone


def test_recorded_ops(host_pool) -> None:
    x, out = torch.rand(4, 8), torch.zeros(8)

    def function():
        y = (x.sin() + 1).view(-1)
        torch.mul(y[:8], 2, out=out)
        y.zero_()
        torch.empty(3)
        first, _ = y.view(4, 8).topk(2)
        return first * torch.rand(2)

    graph, _ = capture(function, host_pool, "small")
    assert isinstance(graph, HostGraph)
    assert graph.ops == (
        "aten.sin.default",
        "aten.add.Tensor",
        "aten.mul.out",
        "aten.zero_.default",
        "aten.topk.default",
        "aten.rand.default",
        "aten.mul.Tensor",
    )
    graph.reset()
    assert graph.ops == ()


def test_body_of_a_python_op_is_recorded_not_the_call(host_pool) -> None:
    x = torch.rand(4, 8)
    graph, _ = capture(lambda: torch.ops.recorder_tests.scaled(x, 2.0), host_pool, "custom")
    assert graph.ops == ("aten.mul.Tensor", "aten.sin.default")


def test_nothing_is_computed_before_the_first_replay(host_pool) -> None:
    x, mask = torch.rand(4, 8), torch.zeros(4, dtype=torch.bool)
    graph, (real, whole, small, flag, imaginary, unwritten) = capture(
        lambda: (
            *(x + 1, (x * 0).long(), (x * 0).to(torch.int8), mask.clone(), x + 1j),
            torch.empty(4, 8) + x,
        ),
        host_pool,
        "m",
    )
    assert real.isnan().all()
    assert (whole == 0x7F7F7F7F7F7F7F7F).all()
    assert (small == 0x7F).all()
    assert flag.all()
    assert imaginary.isnan().all()
    graph.replay()
    assert torch.equal(real, x + 1)
    assert torch.equal(imaginary, x + 1j)
    assert unwritten.isnan().all()  # no kernel writes the memory of torch.empty
    assert not any(each.any() for each in (whole, small, flag))


@pytest.mark.parametrize("how", ["freed", "replaced"])
def test_freed_input_is_an_error(host_pool, how) -> None:
    module, x = nn.Linear(8, 8).requires_grad_(False), torch.rand(4, 8)
    inputs = [x.clone()]
    graph, result = capture(lambda: module(inputs[0]).sin(), host_pool, "freed")
    graph.replay()
    assert torch.equal(result, module(inputs[0]).sin())
    if how == "freed":
        inputs.clear()
        gc.collect()
    else:
        module.double()
    with pytest.raises(CaptureError, match=r"reads an input \(.* torch.float32 that was freed"):
        graph.replay()


def test_memory_is_used_again_inside_of_a_capture(host_pool) -> None:
    x = torch.rand(1024)

    def chain(length):
        y = x
        for _ in range(length):
            y = y.sin()
        return y

    graph, result = capture(lambda: chain(20), host_pool, "chain")
    assert len(graph.ops) == 20
    assert host_pool.memory.reserved == 2 * 4096
    assert host_pool.memory.live == 4096
    for _ in range(2):
        x.uniform_()
        graph.replay()
        assert torch.equal(result, chain(20))


def test_memory_is_used_again_by_later_captures(host_pool) -> None:
    x = torch.rand(1024)
    graph, output = capture(lambda: x.sin().cos(), host_pool, "first")
    reserved = host_pool.memory.reserved
    address = output.data_ptr()
    del output
    other, result = capture(lambda: x[:512].exp().cos(), host_pool, "second")
    assert host_pool.memory.reserved == reserved == 2 * 4096
    assert host_pool.memory.live == 4096
    for _ in range(2):
        x.uniform_()
        other.replay()
        assert torch.equal(result, x[:512].exp().cos())
        kept = result.clone()
        graph.replay()  # its memory was given away: it may overwrite the other's result
        other.replay()
        assert torch.equal(result, kept)
    held, _ = capture(lambda: (x + 1, x + 2), host_pool, "third")
    assert held.ops == ("aten.add.Tensor",) * 2
    assert address % 64 == 0


def test_memory_of_a_dropped_graph_stays_in_the_pool(host_pool) -> None:
    x, reserved = torch.rand(1024), set()
    for _ in range(5):
        capture(lambda: x.sin() + 1, host_pool, "dropped")
        reserved.add(host_pool.memory.reserved)
    assert reserved == {2 * 4096}
    assert host_pool.memory.live == 0


def test_resizing_an_argument_is_refused(host_pool) -> None:
    x, out = torch.rand(4, 8), torch.empty(0)
    with pytest.raises(CaptureError, match="replaces the memory of its argument"):
        capture(lambda: torch.add(x, 1, out=out), host_pool, "resized")
    graph, result = capture(lambda: x + 1, host_pool, "after")
    graph.replay()
    assert torch.equal(result, x + 1)


def test_graph_records_once(device, pool) -> None:
    x = rand(device=device)
    graph, result = capture(lambda: x + 1, pool, "once")
    with pool.device.on_stream(pool.stream), pytest.raises(CaptureError, match="Call reset"):
        graph.begin(pool.memory)
    assert not pool.device.is_capturing()
    x.uniform_()
    graph.replay()
    assert torch.equal(result, x + 1)


def test_replay_inside_of_a_capture_is_refused_by_the_host(host_pool) -> None:
    x = torch.rand(4)
    graph, result = capture(lambda: x + 1, host_pool, "inner")
    with pytest.raises(CaptureError, match=r"replay\(\): a capture runs in this thread"):
        capture(graph.replay, host_pool, "outer")
    graph.replay()
    assert torch.equal(result, x + 1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_replay_ignores_the_modes_around_it(device, pool, mode) -> None:
    module, x = nn.Linear(8, 8, device=device), rand(device=device)
    module(x)
    with torch.no_grad():
        graph, result = capture(lambda: module(x), pool, "module")
    for _ in range(2):
        x.uniform_()
        with mode(), torch.autocast(device, dtype=torch.bfloat16):
            graph.replay()
        assert result.dtype is torch.float32
        assert not result.requires_grad
        assert same(result, module(x).detach())
