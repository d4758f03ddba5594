"""Many batches at once: plain until nothing compiles, then captured, the largest first."""

import gc
import itertools
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch
from expecttest import TestCase
from lib.breakable import (
    FULL,
    NONE,
    PIECEWISE,
    Asked,
    assert_counters,
    counted,
    rand,
    same,
    soft,
)
from lib.entry import (
    HOOKED,
    Hooked,
    assert_counts,
    assert_same,
    batch,
    compiled_case,
    compiled_model,
    marked,
)
from lib.patience import PATIENCE

from cgcompile import (
    BatchDescriptor,
    BreakableCUDAGraphWrapper,
    CompilationConfig,
    CUDAGraphWrapper,
    capture_all,
    set_forward_context,
)
from cgcompile.errors import ConfigError, DispatchError
from cgcompile.graphs import BulkCapture
from cgcompile.graphs.capture import (
    bulk_capture,
    capture_postponed,
    postponed_capture,
    without_garbage_collection,
)
from cgcompile.reasons import Counters, Reason

pytestmark = pytest.mark.usefixtures("without_gradients")

MODES = [FULL, PIECEWISE]


def plain(x, cut=soft):
    return cut(x.sin() + 1) * 2 - x


class Wrapped:
    """A wrapper with buffers, and the step of a batch of it.

    Attributes:
        ran: the sizes that Python has run, in order.
    """

    def __init__(
        self,
        device: str,
        mode: Any = PIECEWISE,
        skips: tuple[int, ...] = (),
        checks: Any = True,
    ) -> None:
        self.device, self.mode, self.skips = device, mode, skips
        self.ran: list[int] = []
        self.raises = 0
        self.buffers: dict[int, torch.Tensor] = {}
        cut, _ = counted(soft)

        def model(x):
            self.ran.append(x.shape[0])
            if x.shape[0] == self.raises and not capture_postponed():
                raise Asked("on purpose")
            return plain(x, cut)

        kind = BreakableCUDAGraphWrapper if mode is PIECEWISE else CUDAGraphWrapper
        config = CompilationConfig(capture_device="host", checks=checks)
        self.wrapper = kind(model, config, mode)

    def step(self, wanted: Any) -> Any:
        descriptor = wanted if isinstance(wanted, BatchDescriptor) else BatchDescriptor(wanted)
        size = descriptor.num_tokens
        x = self.buffers.setdefault(size, rand(size, 8, device=self.device))
        x.uniform_()
        if size in self.skips:
            return None
        with set_forward_context(
            None, cudagraph_runtime_mode=self.mode, batch_descriptor=descriptor
        ):
            result = self.wrapper(x)
        assert same(result, plain(x))
        return result

    def capture(self, batches: Any, **settings: Any) -> BulkCapture:
        return capture_all(self.step, batches, self.wrapper, **settings)


@pytest.fixture(params=MODES, ids=["breakable", "full"])
def wrapped(device: str, request: pytest.FixtureRequest) -> Wrapped:
    return Wrapped(device, request.param)


# ---------------------------------------------------------------- what it tells


class Texts(TestCase):
    def test_text(self) -> None:
        bulk = BulkCapture(
            captured=(8, BatchDescriptor(4)),
            missing=((3, "unlisted_size: 3 is not in the list"), (BatchDescriptor(1, 1), "why")),
            passes=2,
            warm_seconds=1.256,
            capture_seconds=0.5,
        )
        self.assertExpectedInline(
            str(bulk),
            """\
2 batches captured in 0.50 s, after a warm-up of 1.26 s
  3: unlisted_size: 3 is not in the list
  num_tokens=1, num_reqs=1: why""",
        )
        self.assertExpectedInline(
            str(BulkCapture((), (), 1, 0.0, 12.0)),
            """0 batches to capture: all have graphs""",
        )
        lesser = BulkCapture((4,), (), 1, 0.0, 1.0, ((4, "attention_support: why"),))
        self.assertExpectedInline(
            str(lesser),
            """\
1 batch captured in 1.00 s, after a warm-up of 0.00 s
  4: captured in a lesser mode: attention_support: why""",
        )
        assert repr(lesser) == "<BulkCapture: 1 captured, 0 missing, 1 degraded>"

    def test_it_is_frozen(self) -> None:
        with pytest.raises(FrozenInstanceError):
            BulkCapture((), (), 1, 0.0, 0.0).passes = 2


def test_what_a_good_one_tells(wrapped, caplog) -> None:
    with caplog.at_level("INFO", logger="cgcompile"):
        bulk = wrapped.capture((3, 8, 5))
    assert (bulk.captured, bulk.missing, bulk.passes) == ((8, 5, 3), (), 1)
    assert bulk.warm_seconds >= 0
    assert bulk.capture_seconds >= 0
    assert str(bulk) in caplog.messages
    assert_counters(wrapped.wrapper, captures=3, plain={Reason.WARMING: 3})
    for size in (5, 3, 8, 8, 5):
        wrapped.step(size)
    assert_counters(wrapped.wrapper, captures=3, replays=5, plain={Reason.WARMING: 3})


def test_no_batches(wrapped) -> None:
    bulk = wrapped.capture(())
    assert (bulk.captured, bulk.missing, bulk.passes) == ((), (), 1)


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize(
    ("batches", "settings", "sizes"),
    [
        *[(order, {}, [6, 4, 1]) for order in [*itertools.permutations((1, 4, 6))][::2]],
        ([BatchDescriptor(n, 1, extra=(n,)) for n in (2, 7, 3)], {}, [7, 3, 2]),
        ((2, 7, 3), {"size": lambda n: -n}, [2, 3, 7]),
    ],
)
def test_the_largest_comes_first_whatever_the_order(wrapped, batches, settings, sizes) -> None:
    captured = wrapped.capture(iter(batches), **settings).captured
    assert [getattr(batch, "num_tokens", batch) for batch in captured] == sizes
    assert wrapped.ran == sizes * 2


@pytest.mark.slow
def test_the_largest_of_a_compiled_model_comes_first(device: str, hook) -> None:
    seen: list[int] = []

    def look(x):
        seen.append(x.shape[0])
        return torch.softmax(x, -1)

    model, compiled, backend = compiled_model(Hooked, device, dynamic=True)
    hook(look)  # in a piece: at a replay it does not run
    bulk = backend.capture(lambda size: compiled(batch(device, size)), (3, 9, 6))
    assert bulk.captured == (9, 6, 3)
    assert seen == [9, 6, 3] * (bulk.passes + 1)
    hook(lambda x: torch.softmax(x, -1))
    for size in (6, 3, 9):
        x = batch(device, size)
        assert_same(compiled(x), model(x))
    assert (backend.counters.captures, backend.counters.replays) == (3, 3)


# ---------------------------------------------------------------- garbage


@pytest.fixture
def frozen_are_counted(count_of_frozen, monkeypatch) -> None:
    """Who asks how many objects are frozen is told the number of now."""
    monkeypatch.setattr(gc, "get_freeze_count", count_of_frozen)


@pytest.fixture
def nothing_is_frozen(frozen_are_counted) -> Iterator[None]:
    """As in a program that froze nothing; each full collection then looks at all objects."""
    gc.unfreeze()
    yield
    gc.freeze()


def frozen() -> bool:
    """Whether someone froze what lives; Python 3.12 keeps some hundred objects apart by itself."""
    return gc.get_freeze_count() > 1000


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection that begins."""
    generations: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    gc.callbacks.append(note)
    yield generations
    gc.callbacks.remove(note)


@pytest.fixture(params=[True, False], ids=["automatic", "off"])
def automatic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether garbage is collected automatically in the program."""
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_garbage_is_collected_once(wrapped, collections) -> None:
    wrapped.capture((4,))  # what is made on first use
    gc.disable()
    try:
        del collections[:]
        wrapped.capture(range(5, 12))
        assert collections == [1]
    finally:
        gc.enable()


def test_a_capture_of_its_own_collects_garbage(wrapped, collections) -> None:
    wrapped.step(4)
    gc.disable()
    try:
        del collections[:]
        if wrapped.mode is FULL:
            wrapped.step(5)
            assert collections == [1]
        wrapped.capture((6, 7))
        assert collections[-1:] == [1]
    finally:
        gc.enable()


def test_a_capture_takes_the_memory_of_results_that_are_garbage() -> None:
    """Of recent steps: older garbage is left to the program."""
    wrapper = CUDAGraphWrapper(lambda x: x + 1, CompilationConfig(capture_device="host"))
    buffers = rand(2, 64, 8, device="cpu")

    def step(index: int) -> Any:
        descriptor = BatchDescriptor(64 + index)
        with set_forward_context(cudagraph_runtime_mode=FULL, batch_descriptor=descriptor):
            return wrapper(buffers[index])

    gc.disable()
    try:
        cycle: list[Any] = [step(0)]
        cycle.append(cycle)
        assert wrapper.pool is not None
        taken = wrapper.pool.nbytes
        del cycle
        step(1)
        assert wrapper.pool.nbytes == taken > 0
    finally:
        gc.enable()
    for index in (0, 1):
        buffers[index].uniform_()
        assert same(step(index), buffers[index] + 1)
    assert wrapper.counters.replays == 2


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_frozen")
def test_collection_is_off_inside_and_as_before_after(device, automatic) -> None:
    wrapped, inside = Wrapped(device), []

    def step(size):
        inside.append((capture_postponed(), gc.isenabled(), frozen()))
        wrapped.step(size)

    capture_all(step, (4, 2), wrapped.wrapper)
    assert inside == [(True, automatic, False)] * 2 + [(False, False, True)] * 2
    assert gc.isenabled() is automatic
    assert not frozen()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.usefixtures("nothing_is_frozen")
def test_one_bulk_capture_inside_of_another(automatic, fails) -> None:
    with pytest.raises(Asked) if fails else nullcontext(), bulk_capture():
        with bulk_capture():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert frozen()
        if fails:
            raise Asked
    assert gc.isenabled() is automatic
    assert not frozen()


@pytest.mark.slow
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.usefixtures("frozen_are_counted")
def test_frozen_objects_of_the_program_stay_frozen(automatic, fails) -> None:
    gc.collect()
    gc.freeze()
    before = gc.get_freeze_count()
    assert frozen()
    try:
        with bulk_capture():
            inside = gc.get_freeze_count(), gc.isenabled()
            if fails:
                raise Asked
    except Asked:
        pass
    assert not inside[1]
    for after in (inside[0], gc.get_freeze_count()):
        assert before - 50 < after <= before  # what dies is counted no more
    assert gc.isenabled() is automatic


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_are_counted")
def test_frozen_objects_stay_frozen_in_a_real_capture(wrapped) -> None:
    wrapped.capture((4,))
    gc.freeze()
    before = gc.get_freeze_count()
    wrapped.capture((3, 5))
    assert before - 2000 < gc.get_freeze_count() <= before


# ---------------------------------------------------------------- what has no graph


def test_a_batch_whose_step_does_not_call_the_model(device: str) -> None:
    wrapped = Wrapped(device, skips=(5,))
    bulk = wrapped.capture((3, 5, 8))
    assert bulk.captured == (8, 3)
    assert bulk.missing == ((5, "the model was not called"),)
    with pytest.raises(DispatchError, match="batch 5") as caught:
        Wrapped(device, skips=(5,)).capture((3, 5, 8), strict=True)
    assert "the model was not called" in str(caught.value)


def test_sizes_that_are_not_listed(device: str) -> None:
    _model, compiled, backend = compiled_case("sdpa", device, cudagraph_capture_sizes=(6, 3))
    bulk = backend.capture(lambda size: compiled(marked(batch(device, size))), (6, 5, 3, 4))
    assert bulk.captured == (6, 3)
    assert bulk.missing == tuple(
        (n, f"unlisted_size: {n} is not in cudagraph_capture_sizes; last call: x [{n}, 4, 16]")
        for n in (5, 4)
    )
    assert_counts(backend, 2, 0, {Reason.WARMING: 4, Reason.UNLISTED_SIZE: 6})


def test_a_context_of_mode_none(wrapped) -> None:
    wrapped.mode = NONE
    bulk = wrapped.capture((3, 4))
    why = "mode_none: the forward context has runtime mode NONE; last call: num_tokens="
    assert (bulk.captured, bulk.missing) == ((), ((4, f"{why}4"), (3, f"{why}3")))


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_batch_that_the_device_refuses(device: str, hook, mode: str) -> None:
    hook(lambda x: x * x.mean().item() if x.shape[0] == 5 else x * 2)
    model, compiled, backend = compiled_model(Hooked, device, dynamic=True, cudagraph_mode=mode)
    bulk = backend.capture(lambda size: compiled(batch(device, size)), (3, 5, 8))
    assert bulk.captured == (8, 3)
    ((size, why),) = bulk.missing
    assert size == 5
    assert why.startswith("capture_failed: ")
    for size in (8, 5, 3, 5):
        x = batch(device, size)
        assert_same(compiled(x), model(x))
    assert (backend.counters.captures, backend.counters.replays) == (2, 2)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_frozen")
def test_strict_raises_and_keeps_what_was_captured(device: str) -> None:
    model, compiled, backend = compiled_case("sdpa", device, on_fallback="raise")

    def step(size):
        if size != 5 or capture_postponed():
            compiled(marked(batch(device, size)))

    with pytest.raises(DispatchError, match="batch 5") as caught:
        backend.capture(step, (3, 5, 8))
    assert "bulk capture" not in str(caught.value).split(":")[0]
    assert (backend.counters.captures, gc.isenabled(), frozen()) == (1, True, False)
    x = batch(device, 8)
    assert_same(compiled(x), model(x))
    assert backend.counters.replays == 1
    assert backend.capture(lambda size: compiled(batch(device, size)), (3, 5, 8)).missing == ()


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_frozen")
def test_what_a_step_raises_is_raised(wrapped) -> None:
    wrapped = Wrapped(wrapped.device, wrapped.mode, checks="-state")  # ``raises`` changes below
    wrapped.raises = 4
    with pytest.raises(Asked, match="on purpose"):
        wrapped.capture((2, 4, 6))
    assert not capture_postponed()
    assert (gc.isenabled(), frozen()) == (True, False)
    entries = wrapped.wrapper.concrete_cudagraph_entries
    assert list(entries) == [BatchDescriptor(6)]
    wrapped.step(6)
    wrapped.raises = 0
    assert wrapped.capture((2, 4, 6)).captured == (6, 4, 2)
    for size in (4, 6, 2):
        wrapped.step(size)
    assert_counters(wrapped.wrapper, captures=3, replays=6, failures=1, plain={Reason.WARMING: 5})


def test_what_a_warming_step_raises_is_raised(wrapped) -> None:
    def step(size):
        wrapped.step(size)
        if size == 4:
            raise Asked

    with pytest.raises(Asked):
        capture_all(step, (2, 4, 6), wrapped.wrapper)
    assert not capture_postponed()
    assert not wrapped.wrapper.concrete_cudagraph_entries
    assert wrapped.capture((2, 4)).captured == (4, 2)


# ---------------------------------------------------------------- passes


def test_postponed_captures_nest(wrapped) -> None:
    with postponed_capture():
        with postponed_capture():
            wrapped.step(4)
        wrapped.step(4)
    assert not capture_postponed()
    assert_counters(wrapped.wrapper, plain={Reason.WARMING: 2})
    wrapped.step(4)
    assert_counters(wrapped.wrapper, captures=1, plain={Reason.WARMING: 2})


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_each_batch_runs_plain_as_often_as_is_asked(wrapped, warmups) -> None:
    bulk = wrapped.capture((2, 3), warmups=warmups)
    assert bulk.passes == max(warmups, 1)
    assert wrapped.ran == [3, 2] * (bulk.passes + 1)


@pytest.mark.slow
def test_passes_repeat_until_nothing_compiles(device: str) -> None:
    """A static graph, then a dynamic one, then one for a batch of one."""
    model, compiled, backend = compiled_case("sdpa", device)
    bulk = backend.capture(lambda size: compiled(batch(device, size)), (6, 1, 3, 4))
    assert (bulk.captured, bulk.missing) == ((6, 4, 3, 1), ())
    assert bulk.passes == 2
    assert len(backend.graphs) >= 2
    counters = backend.counters
    assert counters.captures == 4
    for size in (1, 6, 3, 4, 6):
        x = batch(device, size)
        assert_same(compiled(x), model(x))
    assert (backend.counters.captures, backend.counters.replays) == (4, 5)
    assert backend.counters.plain == counters.plain


def test_two_passes_of_a_marked_batch(device: str) -> None:
    _model, compiled, backend = compiled_case("sdpa", device, num_warmups=2)
    bulk = backend.capture(lambda size: compiled(marked(batch(device, size))), (6, 3))
    assert (bulk.captured, bulk.passes) == ((6, 3), 2)
    assert_counts(backend, 2, 0, {Reason.WARMING: 4})


def test_what_never_settles_is_captured_after_some_passes(wrapped, caplog) -> None:
    count = itertools.count()
    with caplog.at_level("WARNING", logger="cgcompile"):
        bulk = wrapped.capture((2,), settled=lambda: next(count))
    assert (bulk.passes, bulk.captured) == (8, (2,))
    assert "after 8 passes something still compiles" in caplog.messages


def test_what_has_graphs_already_is_captured(wrapped) -> None:
    assert wrapped.capture((2, 4)).captured == (4, 2)
    before = dict(wrapped.wrapper.concrete_cudagraph_entries)
    assert wrapped.capture((2, 4, 3)).captured == (4, 3, 2)
    after = wrapped.wrapper.concrete_cudagraph_entries
    assert len(after) == 3
    assert all(after[key] is entry for key, entry in before.items())


@pytest.mark.parametrize("mode", [FULL, PIECEWISE])
def test_descriptors_of_a_compiled_model(device: str, mode: Any) -> None:
    model, compiled, backend = compiled_model(Hooked, device, dynamic=True, **HOOKED)
    buffers = {n: batch(device, n) for n in (8, 5, 2)}

    def step(descriptor: BatchDescriptor) -> Any:
        x = buffers[descriptor.num_tokens]
        x.copy_(torch.randn_like(x))
        with set_forward_context(None, cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
            assert_same(compiled(x), model(x))

    batches = [BatchDescriptor(n) for n in (2, 8, 5)]
    bulk = backend.capture(step, batches)
    assert bulk.captured == tuple(batches[k] for k in (1, 2, 0))
    for wanted in batches * 2:
        step(wanted)
    counters: Counters = backend.counters
    assert (counters.captures, counters.replays) == (3, 6)


@pytest.mark.parametrize("again", [False, True])
def test_a_batch_that_is_listed_twice_has_its_graph(wrapped, again: bool) -> None:
    if again:
        wrapped.capture([4, 8])
    bulk = capture_all(wrapped.step, [4, 8, 4], wrapped.wrapper, strict=True)
    assert (bulk.captured, bulk.missing) == ((8, 4, 4), ())
    assert wrapped.wrapper.counters.captures == 2


REPLAYED = "replayed the graph of num_tokens=8"


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_ignores_its_size_has_one_graph(wrapped, again: bool) -> None:
    def step(_: Any) -> None:
        wrapped.step(8)

    if again:
        wrapped.capture([8, 4])
    bulk = capture_all(step, [2, 8, 4], wrapped.wrapper)
    assert (bulk.captured, bulk.missing) == ((8,), ((4, REPLAYED), (2, REPLAYED)))
    bulk = capture_all(step, [16], wrapped.wrapper)
    assert (bulk.captured, bulk.missing) == ((), ((16, REPLAYED),))
    wrapped.wrapper.clear_all_graphs()
    bulk = capture_all(step, [16], wrapped.wrapper)
    assert (bulk.captured, bulk.missing) == ((), ((16, REPLAYED.replace("replay", "captur")),))
    with pytest.raises(DispatchError, match=r"batch 4 .* replayed the graph of num_tokens=8"):
        capture_all(step, [8, 4], wrapped.wrapper, strict=True)


@pytest.mark.parametrize("again", [False, True])
def test_a_compiled_step_that_ignores_its_size_or_pads_it(device: str, again: bool) -> None:
    """Without a forward context, only graphs tell batches from each other."""
    model, compiled, backend = compiled_model(Hooked, device, dynamic=True)

    def missing(step: Any, sizes: list[int]) -> list[tuple[int, str]]:
        bulk = backend.capture(lambda size: compiled(batch(device, step(size))), sizes)
        assert {*bulk.captured} == {*sizes} - {size for size, _ in bulk.missing}
        return [(size, why.partition(",")[0]) for size, why in bulk.missing]

    if again:
        assert missing(lambda size: size, [8, 4]) == []
    assert missing(lambda _: 8, [2, 8, 4]) == [(4, REPLAYED), (2, REPLAYED)]
    padded = missing(lambda size: -(-size // 4) * 4, [3, 8, 4, 7, 8])
    assert padded == [(7, REPLAYED), (3, REPLAYED.replace("8", "4"))]
    x = batch(device, 8)
    assert_same(compiled(x), model(x))


def test_a_number_that_is_no_size_is_not_compared_with_the_context(wrapped) -> None:
    sizes = {0: 8, 1: 4}
    bulk = capture_all(
        lambda index: wrapped.step(sizes[index]), [*sizes], wrapped.wrapper, size=sizes.__getitem__
    )
    assert (bulk.captured, bulk.missing) == ((0, 1), ())


@pytest.mark.parametrize("batches", [[0, 16, 4], [-1], [BatchDescriptor(0), BatchDescriptor(4)]])
def test_a_batch_without_tokens_is_refused(wrapped, batches: list[Any]) -> None:
    with pytest.raises(ConfigError, match=r"(?s)batches = .*expected batches of one token or more"):
        wrapped.capture(batches)
    assert wrapped.ran == []


def test_a_closed_backend_has_reasons_for_all(device: str) -> None:
    _model, compiled, backend = compiled_case("sdpa", device)

    def run(size: int) -> Any:
        return compiled(marked(batch(device, size)))

    run(6)
    backend.close_capture()
    bulk = backend.capture(run, (6, 3))
    assert bulk.captured == ()
    assert all(why.startswith("capture_forbidden: ") for _, why in bulk.missing)
    backend.release()
    assert backend.capture(run, (6, 3)).captured == (6, 3)


# ---------------------------------------------------------------- several threads


def test_collection_stays_off_until_the_last_one_is_done(automatic) -> None:
    """A trace that ends in one thread must not turn it on inside of another one's capture."""
    inside, done = threading.Event(), threading.Event()

    def trace() -> None:
        with without_garbage_collection():
            inside.set()
            assert done.wait(PATIENCE)

    thread = threading.Thread(target=trace)
    thread.start()
    assert inside.wait(PATIENCE)
    with without_garbage_collection():
        done.set()
        thread.join()
        assert not gc.isenabled()
    assert gc.isenabled() is automatic
