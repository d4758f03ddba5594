"""A manager beside others: weights, pools, threads, streams and captures."""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lib.manager
import pytest
import torch
from lib.encoders import (
    BUDGETS,
    TABLES,
    C,
    H,
    Rows,
    Tower,
    check,
    close,
    counts,
    images,
    manager,
    new_pool,
    one_by_one,
    patches,
    rows,
)
from lib.manager import requests

import cgcompile
from cgcompile.encoder import PatchEncoder
from cgcompile.errors import AddressChangedError, CaptureError, DispatchError
from cgcompile.reasons import Reason


def replace_weight(tower: Any) -> None:
    tower.merge.weight = torch.nn.Parameter(torch.randn_like(tower.merge.weight))


@pytest.mark.slow
def test_new_values_of_weights_are_read_and_new_weights_refused(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device)
    call = images((4, 4), device=device)
    before = check(encoder, model, call)[0]
    tower: Any = model.tower
    cgcompile.update_weights(tower, {k: v * 2 for k, v in tower.state_dict().items()})
    assert not torch.equal(check(encoder, model, call)[0], before)
    replace_weight(tower)
    with pytest.raises(AddressChangedError, match=r"merge\.weight"):
        encoder.execute(call)
    encoder.clear()
    encoder.capture()
    check(encoder, model, call)
    assert encoder.pool is not None
    encoder.pool.release()  # the graphs that read the weights are gone
    replace_weight(tower)
    check(encoder, model, call)
    encoder.capture()
    check(encoder, model, call)
    assert counts(encoder) == (4, 1)


class Called:
    __slots__ = ("_tower",)

    def __init__(self, tower: Any) -> None:
        self._tower = tower

    def __call__(self, buffers: Any) -> Any:
        return self._tower(buffers)


FORWARDS = {
    "method": lambda tower: tower.forward,
    "closure": lambda tower: lambda buffers: tower(buffers),
    "partial": lambda tower: functools.partial(
        lambda held, buffers: held["it"][0](buffers), {"it": [tower]}
    ),
    "slots": Called,
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_weights_are_found_wherever_the_forward_holds_them(forward: Any, device: str) -> None:
    tower: Any = Tower().to(device).eval()
    model = PatchEncoder(
        forward(tower), merge_size=2, in_features=C, out_hidden_size=H, tables=TABLES
    )
    encoder = manager(model, device)
    call = images((4, 4), device=device)
    encoder.execute(call)
    replace_weight(tower)
    with pytest.raises(AddressChangedError, match=r"merge\.weight"):
        encoder.execute(call)


forwards: dict[str, Any] = {}


def global_forward(buffers: Any) -> Any:
    return forwards["tower"](buffers)


def test_weights_of_a_global_are_compared(device: str) -> None:
    """The replaced weight is still alive, so that its memory shows nothing."""
    tower: Any = Tower().to(device).eval()
    forwards["tower"] = tower
    model = PatchEncoder(
        global_forward, merge_size=2, in_features=C, out_hidden_size=H, tables=TABLES
    )
    encoder = manager(model, device)
    call = images((4, 4), device=device)
    encoder.execute(call)
    kept = tower.merge.weight
    replace_weight(tower)
    with pytest.raises(AddressChangedError, match=r"merge\.weight"):
        encoder.execute(call)
    assert kept is not tower.merge.weight
    forwards.clear()


# ------------------------------------------------------------------ pools


def test_two_managers_share_one_pool(device: str) -> None:
    pool = new_pool(device)
    models = patches(device), Rows().to(device)
    first, second = [manager(model, device, pool=pool) for model in models]
    assert first.pool is second.pool is pool
    for _ in range(2):
        check(first, models[0], images((4, 4), (2, 2), device=device))
        check(second, models[1], rows(5, 12, device=device))
    first.clear()
    check(second, models[1], rows(5, 12, device=device))
    check(first, models[0], images((4, 4), device=device))
    assert (counts(first), counts(second)) == ((4, 1), (6, 0))
    pool.release()  # by its owner: no graph is replayed
    check(second, models[1], rows(5, device=device))
    assert second.statistics.reasons() == {Reason.NOT_CAPTURED: 1}


def test_results_of_other_owners_of_a_pool_have_one_thread(device: str) -> None:
    """An encoder returns copies in any thread, unless it would overwrite views of another one."""
    pool, model = new_pool(device), patches(device)
    encoder = manager(model, device, pool=pool)
    config = cgcompile.CompilationConfig(capture_device="host" if device == "cpu" else "auto")
    step = cgcompile.CUDAGraphWrapper(torch.sin, config, pool=pool)
    x, call = torch.randn(4, 8, device=device), images((4, 4), device=device)

    def run_step() -> None:
        descriptor = cgcompile.BatchDescriptor(4)
        with (
            torch.inference_mode(),
            cgcompile.set_forward_context(
                cudagraph_runtime_mode="FULL", batch_descriptor=descriptor
            ),
        ):
            torch.testing.assert_close(step(x.normal_()), x.sin())

    in_thread(lambda: check(encoder, model, call))
    check(encoder, model, call)  # copies: the encoder alone has no one thread
    for _ in range(3):
        run_step()
    assert step.counters.replays == 2
    check(encoder, model, call)
    for other in (run_step, lambda: encoder.execute(call)):
        with pytest.raises(DispatchError, match="thread"):
            in_thread(other)
    step.allow_threads()
    in_thread(run_step)
    in_thread(lambda: check(encoder, model, call))


def in_thread(function: Callable[[], object]) -> None:
    """Run a function in another thread; raise what it raises."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(function).result()


def test_a_shared_pool_is_smaller_than_two() -> None:
    pool = new_pool()
    both = [manager(patches(), pool=pool, token_budgets=[64]) for _ in range(2)]
    alone = manager(patches(), token_budgets=[64])
    assert alone.pool is not None
    assert [encoder.pool for encoder in both] == [pool, pool]
    assert pool.memory.reserved < 1.5 * alone.pool.memory.reserved


@pytest.mark.slow
def test_the_pools_of_encoder_and_decoder_are_separate(device: str) -> None:
    decoder = lib.manager.manager(device=device)
    decoder.capture()
    model = patches(device)
    encoder = manager(model, device)
    assert encoder.pool is not None
    assert decoder.pool is not None
    assert encoder.pool.memory is not decoder.pool.memory
    call, batch = images((4, 4), device=device), requests(3, 2, device=device)
    expected = decoder.run(batch).clone()
    kept = decoder.run(batch)  # a view of its pool, valid until its own next step
    check(encoder, model, call)
    assert torch.equal(kept, expected)
    encoder.clear()
    assert torch.equal(decoder.run(batch), expected)
    decoder.release()
    encoder.capture()
    check(encoder, model, call)
    assert counts(encoder) == (2, 0)


def test_a_compiled_tower(device: str) -> None:
    plain = patches(device)
    model = PatchEncoder(
        torch.compile(plain.tower, backend="eager", dynamic=True),
        merge_size=2,
        in_features=C,
        out_hidden_size=H,
        tables=TABLES,
    )
    model.odd_grids = True
    encoder = manager(model, device)
    for sizes in (((4, 4), (2, 6)), ((3, 5),), ((8, 8),)):
        call = images(*sizes, device=device)
        close(encoder.execute(call), one_by_one(plain, call))
    assert counts(encoder) == (4, 0)


# ------------------------------------------------------------------ threads and streams


def test_threads(device: str) -> None:
    model = patches(device)
    encoder = manager(model, device)
    calls = [[images((4, 4), (2, 2 + 2 * n), device=device) for _ in range(6)] for n in range(3)]
    expected = [[one_by_one(model, call) for call in mine] for mine in calls]
    results: list[Any] = [None] * 3

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.cuda.stream(stream):
            if stream is not None:
                stream.wait_stream(torch.cuda.default_stream())
            results[number] = [encoder.execute(call) for call in calls[number]]
        if stream is not None:
            stream.synchronize()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    close(results, expected)
    assert counts(encoder) == (36, 0)


@pytest.mark.gpu
def test_results_are_ready_on_the_stream_of_the_caller() -> None:
    """And buffers are not written before a replay on another stream has read them."""
    model = patches("cuda")
    encoder = manager(model, "cuda", token_budgets=[16])
    calls = [images((8, 8), device="cuda") for _ in range(4)]
    expected = [one_by_one(model, call) for call in calls]
    torch.cuda.synchronize()
    doubled = []
    for call in calls:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(20_000_000)
            doubled.append([result * 2 for result in encoder.execute(call)])
    torch.cuda.synchronize()
    close(doubled, [[result * 2 for result in mine] for mine in expected])


@pytest.mark.gpu
def test_cuda_without_an_index_is_the_current_device() -> None:
    """Another thread may have another current device."""
    devices = []

    class Keeps(Rows):
        def prepare_encoder_cudagraph_capture_inputs(self, *args: Any) -> Any:
            devices.append(args[3])
            return super().prepare_encoder_cudagraph_capture_inputs(*args)

    manager(Keeps(), "cuda", token_budgets=[8])
    assert devices == [torch.device("cuda", torch.cuda.current_device())]


# ------------------------------------------------------------------ captures of others


def test_inside_a_capture_of_others_nothing_is_replayed() -> None:
    model = Rows()
    encoder = manager(model)
    call = rows(3)
    capture = cgcompile.BreakableCUDAGraphCapture(device="cpu")
    with capture, torch.inference_mode():
        results = encoder.execute(call)
    capture.replay()
    close(results, one_by_one(model, call))
    assert encoder.statistics.reasons() == {Reason.INSIDE_CAPTURE: 1}


def test_buffers_are_not_made_inside_a_capture_of_others_or_after_clear() -> None:
    """There they would be memory of that capture, without contents."""
    model = Rows()
    encoder = manager(model, captured=False)
    pool, call = encoder.pool, rows(3, 0)
    assert pool is not None
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), torch.inference_mode():
        encoder.execute(call)
    inside = pytest.raises(CaptureError, match="capture of encoder graphs")
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), inside:
        encoder.capture()
    assert pool.nbytes == 0
    encoder.capture()
    assert pool.nbytes > sum(BUDGETS) * C * 4
    inside = pytest.raises(CaptureError, match="inside of a capture")
    with cgcompile.BreakableCUDAGraphCapture(device="cpu"), inside:
        encoder.clear()
    check(encoder, model, call)  # the graphs are still there
    assert counts(encoder) == (1, 1)
    encoder.clear()
    check(encoder, model, call)
    assert pool.nbytes == 0
