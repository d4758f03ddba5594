"""What lives how long: many replays under churn and poison, release, failures, threads, garbage."""

import contextlib
import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lib.breakable import FULL, PIECEWISE, Asked, churn, in_thread, operators, step
from lib.cases import D, library
from lib.entry import Hooked, assert_same, backend_for, made
from lib.front_ends import MANAGERS, ROWS, WIDTH, WRAPPERS, check, column, front_end, layers
from lib.patience import PATIENCE
from torch import nn

import cgcompile
from cgcompile import BreakableCUDAGraphWrapper, CompilationConfig, CUDAGraphWrapper, capture_all
from cgcompile.errors import GuardError
from cgcompile.graphs.capture import capture_postponed, inside_capture
from cgcompile.graphs.pool import GraphPool
from cgcompile.reasons import Reason
from cgcompile.testing.host import HostDevice
from cgcompile.torch_compat import raw_memory

pytestmark = pytest.mark.usefixtures("without_gradients")

SIZES = (7, 4, 2, 1)
OPS = ("cgtest::attend", "cgentry::hooked")


class Model(nn.Module):
    """Layers with an op that writes in place, and one that returns a fresh tensor."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(D, 3 * D) for _ in range(depth))
        self.hooked = nn.ModuleList(Hooked() for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, x):
        for qkv, hooked in zip(self.qkv, self.hooked, strict=True):
            q, k, v = qkv(x).chunk(3, -1)
            out = torch.empty_like(q)
            torch.ops.cgtest.attend(q, k, v, out)
            x = hooked(F.layer_norm(x + out, (D,)))
        return x


class Subject:
    """A model with its graphs, through one of the front ends.

    Args:
        way: ``"piecewise"``, ``"full"`` or ``"auto"``: compiled; ``"breakable"`` or ``"whole"``: a
            wrapper.
        device: where it is.
        model: what is captured.
        settings: of the backend, or of the wrapper.
    """

    def __init__(self, way: str, device: str, model: Any = Model, **settings: Any) -> None:
        self.device, self.way, self.buffers = device, way, {}
        self.model = made(model, device)
        self.mode = FULL if way in ("full", "whole") else PIECEWISE
        self.compiled = way in ("piecewise", "full", "auto")
        if self.compiled:
            ops = () if way == "full" else OPS
            self.target = backend_for(**{"splitting_ops": ops, **settings})
            self.run = torch.compile(self.model, backend=self.target, dynamic=True)
        else:
            ops = OPS if way == "breakable" else ()
            config = CompilationConfig(
                **{"capture_device": "host", "splitting_ops": ops, **settings}
            )
            kind = BreakableCUDAGraphWrapper if way == "breakable" else CUDAGraphWrapper
            self.target = self.run = kind(self.model, config, self.mode)

    def __call__(self, size: int) -> Any:
        x = self.buffers.setdefault(size, torch.empty(size, 3, D, device=self.device))
        x.copy_(torch.randn(x.shape))
        if self.way == "auto":
            return self.run(x.clone())
        with step(size, self.mode):
            return self.run(x)

    def check(self, size: int) -> None:
        """One step, equal to eager."""
        result = self(size)
        assert_same(result, self.model(self.buffers[size].clone()))

    def capture(self, sizes: Any = SIZES, check: bool = True) -> cgcompile.graphs.BulkCapture:
        run = self.check if check else self
        if self.compiled:
            return self.target.capture(run, sizes)
        return capture_all(run, sizes, self.target)

    @property
    def pools(self) -> list[GraphPool]:
        """One of a wrapper; of a compiled model one for each graph that Dynamo made."""
        if not self.compiled:
            return [self.target.pool]
        return [graph.pool for graph in self.target.graphs]

    @property
    def footprint(self) -> list[tuple[int, int]]:
        """Bytes of the graphs, and of our own; of the host recorder."""
        return [(pool.memory.reserved, pool.arena.nbytes) for pool in self.pools]

    def release(self) -> None:
        if self.compiled:
            self.target.release()
        else:
            self.target.clear_all_graphs()

    @property
    def counted(self) -> tuple[int, int]:
        return self.target.counters.captures, self.target.counters.replays


WAYS = ("piecewise", "auto", "full", "breakable", "whole")
KINDS = ("piecewise", "full", "breakable", "whole")


@pytest.fixture(autouse=True)
def frozen() -> None:
    """What lives before is not looked at by each of the many collections here."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def with_operators() -> None:
    library(), operators()


@pytest.fixture(params=WAYS)
def subject(device: str, request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param, device)


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weak references to the memory of each pool that the host recorder makes."""
    lives: list[Any] = []
    make = HostDevice.new_pool

    def new_pool(self: HostDevice, *args: Any) -> Any:
        pool = make(self, *args)
        lives.append(weakref.ref(pool))
        return pool

    monkeypatch.setattr(HostDevice, "new_pool", new_pool)
    return lives


def alive(memories: list[Any]) -> int:
    gc.collect()
    return sum(memory() is not None for memory in memories)


SLACK = 1 << 16  # bytes: torch keeps two numbers of its random generator while a graph lives


def allocated(device: str) -> int:
    """Bytes that CUDA tensors and graphs hold; 0 on the host."""
    gc.collect()
    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


# ------------------------------------------------------------------ many replays


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_random_order_churn_and_poison(device: str, way: str) -> None:
    subject = Subject(way, device, debug="poison")
    assert subject.capture(random.sample(SIZES, len(SIZES))).captured == SIZES
    captures, before = subject.counted
    assert captures == len(SIZES)
    order = random.Random(0)
    for _ in range(200):
        churn(device)
        subject.check(order.choice(SIZES))
    for size in order.sample(SIZES, len(SIZES)):
        subject.check(size)
    assert subject.counted == (captures, before + 200 + len(SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_poison_shows_in_what_was_returned(device: str, way: str) -> None:
    """The test above looks at something: memory of the graphs is overwritten."""
    subject = Subject(way, device, debug="poison")
    subject.capture((4,))
    result = subject(4)
    assert not result.isnan().any()
    for pool in subject.pools:
        pool.poison()
    assert result.isnan().all() == (way != "auto")  # there the caller owns what it got
    subject.check(4)


# ------------------------------------------------------------------ what breaks are given


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
def test_memory_does_not_grow_with_depth(way: str) -> None:
    """What makes the argument of a break gives its memory back to the layers after it."""
    footprints = []
    for depth in (3, 9):
        torch._dynamo.reset()
        subject = Subject(way, "cpu", lambda depth=depth: Model(depth))
        subject.capture((4,))
        subject.check(4)
        footprints.append(subject.footprint)
    assert footprints[0] == footprints[1]
    assert footprints[0][0][0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
def test_smaller_sizes_add_no_memory(way: str) -> None:
    subject = Subject(way, "cpu")
    subject.capture((16,), check=False)
    before = subject.footprint
    subject.capture((16, 8, 3, 2), check=False)
    assert set(subject.footprint) == set(before)  # Dynamo may have made a second graph
    for size in (3, 16, 2, 8):
        subject.check(size)


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
def test_nothing_lives_in_the_pool_between_steps(way: str) -> None:
    subject = Subject(way, "cpu")
    subject.capture()
    subject.check(4)
    gc.collect()
    assert [pool.memory.live for pool in subject.pools] == [0] * len(subject.pools)


# ------------------------------------------------------------------ release


@pytest.mark.slow
def test_release_and_capture_again_20_times(subject: Subject, memories: list[Any]) -> None:
    sizes, footprints = SIZES[:2], []
    for k in range(20):
        assert subject.capture(sizes).captured == sizes
        for size in (4, 7, 4):
            subject.check(size)
        if subject.device == "cpu":
            footprints.append(tuple(subject.footprint))
            if k % 5 == 0:
                assert alive(memories) == 1
        subject.release()
        if subject.device == "cuda":
            footprints.append(allocated("cuda"))
    assert subject.counted[0] == 20 * len(sizes)
    # On CUDA the first round may make what libraries keep for good.
    assert set(footprints[1:]) == {footprints[1]}
    assert subject.device == "cuda" or footprints[0] == footprints[1]
    assert alive(memories) == 0
    assert [pool.arena.nbytes for pool in subject.pools] == [0]


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
@pytest.mark.parametrize("stage", ["kernel", "step"])
def test_a_failure_in_the_middle_of_a_bulk_capture(
    device: str, way: str, stage: str, memories: list[Any], hook
) -> None:
    inside = {"splitting_ops": OPS[:1]} if way in ("piecewise", "auto") else {}
    subject = Subject(way, device, lambda: Model(1), **inside)
    subject.capture(SIZES if device == "cuda" else SIZES[:1])
    subject.release()
    baseline = allocated(device)
    failing = SIZES[1]

    def fails(x):
        if x.shape[0] == failing and inside_capture():
            raise Asked("on purpose")
        return torch.softmax(x, -1)

    def run(size):
        if stage == "step" and size == failing and not capture_postponed():
            raise Asked("on purpose")
        subject.check(size)

    if stage == "kernel":
        hook(fails)
    target = subject.target
    captured = SIZES[:1]
    if stage == "step" or not subject.compiled:
        with pytest.raises(Asked):
            capture_all(run, SIZES, target)
    else:
        bulk = capture_all(run, SIZES, target)
        assert [size for size, _ in bulk.missing] == [failing]
        captured = bulk.captured
    replays = target.counters.replays
    order = random.Random(1)
    for _ in range(20):
        churn(device)
        subject.check(order.choice(captured))
    assert target.counters.replays == replays + 20
    hook(lambda x: torch.softmax(x, -1))
    subject.release()
    assert allocated(device) <= baseline + SLACK
    assert alive(memories) == 0
    assert subject.capture().captured == SIZES
    for size in SIZES:
        subject.check(size)


# ------------------------------------------------------------------ what others do meanwhile


@contextlib.contextmanager
def allocating(device: str) -> Iterator[threading.Thread]:
    """Another thread that makes, fills and drops tensors, and computes with them."""
    stop, errors, rounds = threading.Event(), [], []

    def work() -> None:
        try:
            while not stop.is_set():
                kept = [torch.full((n, 8), float(n), device=device) for n in (3, 50, 200)]
                total = sum(each.sum() for each in kept)
                if total.item() != 8 * (9 + 2500 + 40000):
                    errors.append(total)
                rounds.append(1)
                stop.wait(0.001)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield thread
    finally:
        stop.set()
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not errors
    assert rounds


@pytest.mark.slow
def test_another_thread_allocates_during_capture(subject: Subject) -> None:
    if subject.device == "cuda":
        subject.check(1)
    with allocating(subject.device):
        assert subject.capture().captured == SIZES
        for size in (1, 7, 2, 4) * 3:
            subject.check(size)
    for size in (1, 7, 2, 4):
        subject.check(size)
    assert subject.counted[0] == len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "whole"])
def test_another_thread_allocates_inside_of_a_captured_kernel(device: str, way: str, hook) -> None:
    def allocates(x):
        result, error = in_thread(lambda: torch.full((64, 64), 2.0, device=device).sum())
        assert error is None
        assert result.device == x.device
        return torch.softmax(x, -1)

    hook(allocates)
    subject = Subject(way, device, lambda: Model(1))
    subject.capture()
    for size in (1, 7, 2, 4):
        subject.check(size)
    assert subject.counted[0] == len(SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
def test_garbage_is_collected_inside_of_a_capture(device: str, way: str, hook) -> None:
    dead: list[Any] = []

    def collects(x):
        cycle: list[Any] = [torch.ones(100, device=device)]
        cycle.append(cycle)
        dead.append(weakref.ref(cycle[0]))
        del cycle
        if inside_capture():
            gc.collect()
            assert dead[-1]() is None
        return torch.softmax(x, -1)

    hook(collects)
    subject = Subject(way, device, lambda: Model(1))
    subject.capture()
    assert len(dead) >= len(SIZES)
    for size in (1, 7, 2, 4):
        churn(device)
        subject.check(size)
    assert subject.counted == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["full", "whole", "breakable"])
def test_garbage_with_graphs_is_collected_inside_of_a_capture(way: str, hook) -> None:
    """Of the host alone: a program that does so on CUDA ends its own capture."""
    other = Subject("breakable", "cpu", lambda: Model(1))
    other.capture()
    life = weakref.ref(other)
    other.cycle = other
    del other

    def collects(x):
        if inside_capture():
            gc.collect()
        return torch.softmax(x, -1)

    gc.disable()
    try:
        subject = Subject(way, "cpu", lambda: Model(1))
        hook(collects)
        subject.capture()
    finally:
        gc.enable()
    assert life() is None
    for size in (1, 7, 2, 4):
        subject.check(size)


# ------------------------------------------------------------------ two models


@pytest.mark.slow
@pytest.mark.parametrize("way", KINDS)
def test_one_of_two_models_is_destroyed(device: str, way: str, memories: list[Any]) -> None:
    first, second = Subject(way, device), Subject(way, device)
    for parameter in second.model.parameters():
        parameter.copy_(torch.randn_like(parameter) / 4)
    for subject in (first, second):
        subject.capture()
    for size in SIZES:
        first.check(size), second.check(size)
    life = weakref.ref(first.model)
    if first.compiled:
        first.release()
    del first, subject
    gc.collect()
    assert way in ("piecewise", "auto", "full") or life() is None  # Dynamo may keep a model
    assert device == "cuda" or alive(memories) == len(second.pools)
    order = random.Random(2)
    before = second.counted
    for _ in range(30):
        churn(device)
        second.check(order.choice(SIZES))
    assert second.counted == (before[0], before[1] + 30)


def test_wrappers_of_one_pool_of_which_one_is_destroyed(device: str) -> None:
    config = CompilationConfig(capture_device="host")
    models = [made(lambda: Model(1), device) for _ in range(2)]
    first = CUDAGraphWrapper(models[0], config, FULL)
    x = torch.randn(4, 3, D, device=device)
    with step(4, FULL):
        first(x)
        second = CUDAGraphWrapper(models[1], config, FULL, pool=first.pool)
        second(x)
        del first, models[0]
        gc.collect()
        for _ in range(10):
            x.normal_()
            churn(device)
            assert_same(second(x), models[0](x))
    assert second.counters.replays == 10


# ------------------------------------------------------------------ random numbers


class Random(nn.Module):
    def forward(self, x):
        y = torch.empty_like(x)
        torch.ops.cgtest.attend(x, x, x, y)
        y = torch.ops.cgentry.hooked(y + torch.rand_like(x))
        return F.dropout(y, 0.5, training=True) + torch.randn_like(x)


def seeded(seed: int, run: Callable[[], Any]) -> Any:
    torch.manual_seed(seed)
    result = run()
    return result.clone(), torch.rand(3, device=result.device)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_random_numbers_advance_at_each_replay(device: str, way: str) -> None:
    subject = Subject(way, device, Random)
    subject.capture(check=False)
    x = torch.randn(4, 3, D, device=device)
    subject.buffers[4].copy_(x)

    def replay() -> Any:
        if way == "auto":
            return subject.run(subject.buffers[4].clone())
        with step(4, subject.mode):
            return subject.run(subject.buffers[4])

    before = subject.counted
    draws = [replay().clone() for _ in range(4)]
    for k, draw in enumerate(draws):
        assert all(not torch.allclose(draw, other) for other in draws[:k])
    for seed in (1, 2, 1):
        assert_same(seeded(seed, replay), seeded(seed, lambda: subject.model(x)))
    torch.manual_seed(5)
    several = [replay().clone() for _ in range(3)]
    torch.manual_seed(5)
    assert_same(several, [subject.model(x) for _ in range(3)])
    assert subject.counted == (before[0], before[1] + 10)


# ------------------------------------------------------------------ threads


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_another_thread_replays(device: str, way: str) -> None:
    subject = Subject(way, device)
    subject.target.allow_threads()  # one thread waits for the other
    subject.capture()
    before = subject.counted

    def work() -> None:
        torch.set_num_threads(1)  # of this thread: eager sums in the order of the other one
        with torch.no_grad():
            for size in (2, 7, 1, 4):
                subject.check(size)
        if device == "cuda":
            torch.cuda.synchronize()

    for k in range(3):
        _, error = in_thread(work)
        assert error is None
        subject.check(SIZES[k])
    assert subject.counted == (before[0], before[1] + 3 * 5)
    assert Reason.CAPTURE_BUSY not in subject.target.counters.plain


@pytest.mark.slow
def test_a_moved_input_is_refused_and_graphs_stay_usable(device: str) -> None:
    subject = Subject("piecewise", device)
    subject.capture()
    moved = subject.buffers[4].clone()
    for _ in range(3):
        with step(4), pytest.raises(GuardError):
            subject.run(moved)
        churn(device)
        subject.check(4)
    assert subject.target.counters.failures == 3


@pytest.mark.parametrize("name", [*WRAPPERS, *MANAGERS])
def test_graphs_are_freed_without_a_collection(name: str, device: str) -> None:
    """No cycle keeps a wrapper or a manager, the memory of its graphs, or the model."""
    net = layers(device)
    served = front_end(name, net, device)
    check(served.step, net, device, steps=3)
    assert served.counters().replays >= 2
    entries = [*getattr(served.target, "entries", ())]
    lives = [weakref.ref(each) for each in (served.target, served.target.pool, net, *entries)]
    gc.collect()
    gc.disable()
    try:
        del served, net, entries
        assert [life() for life in lives] == [None] * len(lives)
    finally:
        gc.enable()


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("debug", [False, "stale"])
def test_steps_leave_nothing_to_collect(name: str, debug: bool | str, device: str) -> None:
    """With ``debug="stale"`` each step makes storages of its results."""
    if debug and not raw_memory.can_expire_storages():
        pytest.skip("this build of torch cannot make a storage raise")
    net = layers(device)
    served = column(name, net, device, debug=debug)
    check(served.step, net, device, steps=20)
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        check(served.step, net, device, steps=40)
        assert len(gc.get_objects()) < before + 40
        assert served.counters().replays >= 50
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["torch.compile, context", *WRAPPERS])
def test_a_result_outlives_its_graphs(name: str, device: str) -> None:
    """A result keeps the memory of a wrapper or compiled model that was dropped, and no graph."""
    net = layers(device)
    served = column(name, net, device)
    check(served.step, net, device, steps=3)
    assert served.counters().replays >= 1
    x = torch.randn(ROWS, WIDTH, device=device)
    with torch.inference_mode():
        result, expected = served.step(x), net(x)
    users = getattr(served.target, "graphs", (served.target,))
    lives = [weakref.ref(entry) for user in users for entry in getattr(user, "entries", (user,))]
    memories = [weakref.ref(user.pool.memory) for user in users]
    del served, users
    torch._dynamo.reset()
    gc.collect()
    assert [life() for life in lives] == [None] * len(lives)
    assert any(memory() is not None for memory in memories)
    churn(device)
    torch.testing.assert_close(result, expected)
    del result
    assert not any(memory() is not None for memory in memories)
