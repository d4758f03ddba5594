"""Host data reaches the buffer whole, in order, and without the rows of a larger batch."""

import itertools
import random
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cgcompile.errors import CaptureError, ConfigError
from cgcompile.graphs import pinned_buffers as module
from cgcompile.graphs.capture import capture
from cgcompile.graphs.pinned_buffers import HostStaging
from cgcompile.torch_compat.raw_memory import StorageLife

LONG = 50_000_000  # cycles; tens of milliseconds
SHORT = 2_000_000  # about a millisecond, far more than the host needs for a fill


def buffer_of(device, rows=8, *trailing, dtype=torch.int64, value=9):
    return torch.full((rows, *trailing), value, dtype=dtype, device=device)


def rows_of(count, *trailing, start=100, dtype=torch.int64):
    size = torch.Size((count, *trailing))
    return torch.arange(start, start + size.numel()).reshape(size).to(dtype)


class Uploads(TorchDispatchMode):
    """The sources of the copies to a buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.start, self.sources = buffer.data_ptr(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and args[0].data_ptr() == self.start:
            self.sources.append(args[1])
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.complex64]
)
def test_rows_arrive_in_any_dtype(device, dtype) -> None:
    buffer = buffer_of(device, 5, 2, 3, dtype=dtype, value=1)
    rows = rows_of(4, 2, 3, start=0).remainder(3).to(dtype)
    staged = HostStaging(buffer).fill(rows)
    assert torch.equal(staged.cpu(), rows)
    assert torch.equal(buffer[4].cpu(), torch.ones(2, 3, dtype=dtype))


def test_the_front_of_the_buffer_holds_rows_of_any_layout(device) -> None:
    wide, buffer = rows_of(6, 4), buffer_of(device, 8, 6)
    staging = HostStaging(buffer)
    expected = wide.t().clone()
    staged = staging.fill(wide.t())
    wide.zero_()  # the caller may overwrite its rows
    assert torch.equal(staged.cpu(), expected)
    assert staging.buffer is buffer
    assert staged._base is buffer
    assert staged.data_ptr() == buffer.data_ptr()
    lazy = torch.randn(4, dtype=torch.complex64).conj()
    staged = HostStaging(buffer_of(device, 4, dtype=torch.complex64)).fill(lazy)
    assert torch.equal(staged.cpu(), lazy)


def test_buffer_without_rows(device) -> None:
    staging = HostStaging(buffer_of(device, 0, 3), sentinel=-1)
    assert staging.fill(rows_of(0, 3)).shape == (0, 3)


def test_fill_feeds_a_recorded_graph(device, pool) -> None:
    buffer = buffer_of(device)
    graph, result = capture(lambda: buffer * 2, pool, "doubled")
    staging = HostStaging(buffer, num_slots=2, sentinel=0)
    for count in (8, 3, 5, 0, 1):
        staging.fill(rows_of(count, start=count))
        graph.replay()
        assert result.tolist() == [2 * (count + i) for i in range(count)] + [0] * (8 - count)


# ---------------------------------------------------------------- tails

MANY = random.Random(0).choices([0, 1, 2, 5, 7, 8], k=60)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
@pytest.mark.parametrize("sentinel", [None, -1])
@pytest.mark.parametrize("counts", [(0,), (2,), (8, 0), (4, 2, 0), MANY], ids=len)
def test_batches_that_shrink_and_grow(device, num_slots, sentinel, counts) -> None:
    buffer = buffer_of(device, 8, 2)
    staging = HostStaging(buffer, num_slots=num_slots, sentinel=sentinel)
    expected = buffer.cpu().clone()
    for step, count in enumerate(counts):
        rows = rows_of(count, 2, start=100 * step)
        staged = staging.fill(rows)
        if sentinel is not None:
            expected.fill_(sentinel)
        expected[:count] = rows
        assert torch.equal(buffer.cpu(), expected)
        assert torch.equal(staged.cpu(), rows)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_slots_take_turns_and_upload_rows_without_data_once(device, num_slots) -> None:
    staging = HostStaging(buffer_of(device), num_slots=num_slots, sentinel=-1)
    with Uploads(staging.buffer) as uploads:
        for count in (2, 5, 3, 3, 0, 0, 1):
            staging.fill(rows_of(count))
    extents = [len(source) for source in uploads.sources]
    assert extents == [8, 5, 5, 3, 3, 1]  # one each, and none for nothing after nothing
    assert {source.is_pinned() for source in uploads.sources} == {device == "cuda"}
    starts = [source.data_ptr() for source in uploads.sources]
    assert starts == list(itertools.islice(itertools.cycle(starts[:num_slots]), 6))
    assert len(set(starts)) == num_slots


@pytest.mark.parametrize(
    ("dtype", "sentinel"),
    [
        (torch.bool, True),
        (torch.uint8, 255),
        (torch.int32, -1),
        (torch.int64, False),
        (torch.float16, 0.1),
        (torch.float32, float("nan")),
        (torch.bfloat16, float("-inf")),
    ],
)
def test_sentinels(device, dtype, sentinel) -> None:
    buffer = buffer_of(device, 3, dtype=dtype, value=0)
    HostStaging(buffer, sentinel=sentinel).fill(torch.zeros(1, dtype=dtype))
    expected = torch.full((3,), sentinel, dtype=dtype)
    expected[0] = 0
    torch.testing.assert_close(buffer.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# ---------------------------------------------------------------- modes of autograd


@pytest.mark.parametrize("made_in", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_one_staging_serves_every_mode(device, made_in) -> None:
    with made_in():
        buffer = buffer_of(device, dtype=torch.float32)
        staging = HostStaging(buffer, num_slots=2, sentinel=-1)
        rows = rows_of(8, dtype=torch.float32)
    for count, mode in enumerate([torch.enable_grad, torch.no_grad, torch.inference_mode] * 2):
        with mode():
            staged = staging.fill(rows[:count])
        assert staged.tolist() == rows_of(count).tolist()
    staged = staging.fill(rows_of(3, dtype=torch.float32).requires_grad_())
    assert not staged.requires_grad


@pytest.mark.parametrize("sentinel", [None, -1])
def test_rows_that_require_grad_are_not_kept(device, sentinel) -> None:
    buffer = buffer_of(device, dtype=torch.float32)
    staging = HostStaging(buffer, num_slots=2, sentinel=sentinel)
    for count in (5, 3, 4):
        rows = rows_of(count, dtype=torch.float32).requires_grad_()
        life = StorageLife(rows)
        with torch.enable_grad():
            staged = staging.fill(rows)
        del rows
        assert life.ended  # a graph of autograd would hold them
        assert staged.tolist() == rows_of(count).tolist()


# ---------------------------------------------------------------- refusals

BAD_ROWS = {
    "list": ([1, 2], "rows = [1, 2]; expected a torch.Tensor on the CPU"),
    "many": (rows_of(9, 2), "rows.shape = [9, 2]; expected [n, 2] with n at most 8"),
    "trailing": (rows_of(3, 3), "rows.shape = [3, 3]; expected [n, 2]"),
    "dims": (rows_of(3), "rows.shape = [3]; expected [n, 2]"),
    "scalar": (torch.tensor(3), "rows.shape = []; expected [n, 2]"),
    "dtype": (rows_of(3, 2).int(), "rows.dtype = torch.int32; expected torch.int64"),
    "meta": (rows_of(3, 2).to("meta"), "rows.device = 'meta'; expected 'cpu'"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
@pytest.mark.parametrize("used", [False, True])
def test_bad_rows_change_nothing(device, case, used) -> None:
    rows, message = BAD_ROWS[case]
    staging = HostStaging(buffer_of(device, 8, 2), num_slots=2, sentinel=-1)
    if used:
        staging.fill(rows_of(4, 2))
    before = staging.buffer.clone()
    with pytest.raises(ConfigError, match=re.escape(f"HostStaging.fill(): {message}")):
        staging.fill(rows)
    assert torch.equal(staging.buffer, before)
    for _ in range(3):
        staging.fill(rows_of(1, 2))
        assert staging.buffer.tolist() == [[100, 101], *[[-1, -1]] * 7]


@pytest.mark.gpu
def test_rows_on_the_device_are_refused() -> None:
    staging = HostStaging(buffer_of("cuda"))
    with pytest.raises(ConfigError, match=r"rows\.device = 'cuda:0'; expected 'cpu'"):
        staging.fill(buffer_of("cuda"))


def test_refused_inside_of_a_capture(device, pool) -> None:
    staging = HostStaging(buffer_of(device), sentinel=-1)
    with pytest.raises(CaptureError, match=r"HostStaging\.fill\(\): .* not permitted"):
        capture(lambda: staging.fill(rows_of(3)), pool, "filling")
    assert staging.buffer.tolist() == [9] * 8
    staging.fill(rows_of(1))
    assert staging.buffer.tolist() == [100, *[-1] * 7]


BAD_SENTINELS = {
    torch.int64: [0.5, "0"],
    torch.uint8: [-1],
    torch.int8: [200],
    torch.int32: [float("nan")],
    torch.bool: [2],
}


def test_buffers_slots_and_sentinels_that_cannot_serve(device) -> None:
    contiguous = r"buffer\.stride\(\) = \({}\); expected a contiguous tensor"
    slots = "num_slots = {}; expected .* at least 1"
    buffer = buffer_of(device)
    cases = [
        (buffer_of(device, 4, 2).t(), {}, contiguous.format("1, 2")),
        (buffer[::2], {}, contiguous.format("2,")),
        (buffer[0], {}, r"buffer\.shape = \[\]; expected at least one dimension"),
        (buffer_of("meta"), {}, r"buffer\.device = 'meta'; expected 'cuda' or 'cpu'"),
        ([1, 2], {}, r"buffer = \[1, 2\]; expected a torch\.Tensor"),
        *((buffer, {"num_slots": n}, slots.format(n)) for n in (0, -1, 1.5, None)),
    ]
    for dtype, sentinels in BAD_SENTINELS.items():
        typed, message = buffer_of(device, dtype=dtype, value=0), "sentinel = .*a value that torch"
        cases += [(typed, {"sentinel": sentinel}, message) for sentinel in sentinels]
    for buffer, more, message in cases:
        with pytest.raises(ConfigError, match=f"HostStaging: {message}"):
            HostStaging(buffer, **more)


# ---------------------------------------------------------------- races


class CountedEvent:
    """An event that comes once it is waited for."""

    def __init__(self) -> None:
        self.done, self.waits, self.records = True, 0, 0

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waits, self.done = self.waits + 1, True

    def record(self, stream) -> None:
        self.records, self.done = self.records + 1, False


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 2])
def test_waits_only_for_the_upload_of_the_same_slot(num_slots, monkeypatch) -> None:
    events = [CountedEvent() for _ in range(num_slots)]
    monkeypatch.setattr(torch.cuda, "Event", iter(events).__next__)
    staging = HostStaging(buffer_of("cuda"), num_slots=num_slots)
    for _ in range(num_slots):
        staging.fill(rows_of(3))
    assert [(event.waits, event.records) for event in events] == [(0, 1)] * num_slots
    staging.fill(rows_of(3))
    assert [event.waits for event in events] == [1] + [0] * (num_slots - 1)
    for event in events:
        event.done = True
    staging.fill(rows_of(3))
    assert sum(event.waits for event in events) == 1


@pytest.mark.gpu
def test_free_slot_never_synchronises() -> None:
    staging = HostStaging(buffer_of("cuda"), num_slots=2, sentinel=-1)
    staging.fill(rows_of(8))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    busy = torch.cuda.Event()
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (3, 5):  # one slot each
            staging.fill(rows_of(count))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not busy.query(), "the fill waited for the device"
    staging.fill(rows_of(1))
    assert busy.query(), "a slot was overwritten before its upload was done"
    assert staging.buffer.tolist() == [100, *[-1] * 7]


def race(num_slots, steps=200):
    """Fills that outrun the device, each followed by a reader: how many were right, and outran."""
    buffer = buffer_of("cuda", 64, 16)
    staging = HostStaging(buffer, num_slots=num_slots, sentinel=-1)
    rows = torch.empty(64, 16, dtype=torch.int64)
    copies = [torch.empty_like(buffer) for _ in range(steps)]  # beforehand: cudaMalloc may wait
    counts = [(step * 37) % 65 for step in range(steps)]
    torch.cuda.synchronize()
    outran = 0
    for step, count in enumerate(counts):
        rows.fill_(step)
        torch.cuda._sleep(SHORT)
        busy = torch.cuda.Event()
        busy.record()
        staging.fill(rows[:count])
        rows.fill_(-7)
        copies[step].copy_(buffer)
        outran += not busy.query()
    torch.cuda.synchronize()
    right = 0
    for step, count in enumerate(counts):
        expected = torch.full((64, 16), -1)
        expected[:count] = step
        right += torch.equal(copies[step].cpu(), expected)
    return right, outran


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_host_that_runs_ahead(num_slots) -> None:
    right, outran = race(num_slots)
    assert right == 200
    assert outran, "nothing was raced"


@pytest.mark.gpu
def test_the_race_is_real(monkeypatch) -> None:
    slots = itertools.cycle(range(2))
    monkeypatch.setattr(module.UploadRing, "begin", lambda ring: next(slots))  # without waiting
    right, _ = race(2)
    assert right < 200


@pytest.mark.gpu
def test_fills_on_several_streams_come_in_order() -> None:
    buffer = buffer_of("cuda")
    staging = HostStaging(buffer, num_slots=2, sentinel=-1)
    staging.fill(rows_of(0))
    copies = [torch.empty_like(buffer) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for step, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(LONG // (step + 1))
            staging.fill(rows_of(3 - step, start=step))
            torch.cuda._sleep(LONG // (step + 1))
            copies[step].copy_(buffer)  # a late reader: the next upload waits for it, too
    torch.cuda.synchronize()
    for step in range(3):
        assert copies[step].tolist() == [*range(step, 3), *[-1] * (5 + step)]
    assert torch.equal(buffer, copies[2])


@pytest.mark.gpu
def test_empty_fill_on_another_stream_comes_after_the_last_one() -> None:
    buffer = buffer_of("cuda")
    staging, copy = HostStaging(buffer), torch.empty_like(buffer)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    staging.fill(rows_of(8))
    with torch.cuda.stream(torch.cuda.Stream()):
        staging.fill(rows_of(0))  # uploads nothing, as there is no sentinel
        copy.copy_(buffer)
    torch.cuda.synchronize()
    assert torch.equal(copy.cpu(), rows_of(8))
