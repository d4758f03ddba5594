"""Fixtures of all tests: a fresh Dynamo for each, and the skip of GPU tests where there is none."""

import gc
import importlib
import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from lib.dynamo import guards_of_later_torch
from lib.patience import PATIENCE

# pytest 9.2 and later give their handlers to every logger that does not propagate: 60 loggers of
# torch, five times a test. And torch takes any handler of ``torch.__trace`` for the wish to trace:
# each graph, guard and fake tensor would be written down as JSON, a sixth of the time of tests that
# compile.
for _name in [name for name in logging.root.manager.loggerDict if name.startswith("torch")]:
    logging.getLogger(_name).propagate = True

gc.set_threshold(10_000, 50, 100)  # fewer collections that nothing asked for: 0.3 s of 10

# An example may take as long as a busy machine makes it.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    guards_of_later_torch()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """How long a run of everything takes, and what it leaves out."""
    lines = []
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        times = {
            "": "all tests: about 12",
            "not slow": "all tests but those marked slow: two and a half",
        }
        if about := times.get(config.option.markexpr):
            lines.append(f"{about} minutes on two idle cores")
    if not torch.cuda.is_available():
        lines.append("no CUDA device: tests marked gpu are skipped")
    return lines


def peak_memory() -> tuple[float, float]:
    """GiB of this process at most, and of the largest process that it started."""
    unit = 1 if sys.platform == "darwin" else 1 << 10
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    own, children = (resource.getrusage(kind).ru_maxrss * unit / 2**30 for kind in kinds)
    return own, children


PEAKS = pytest.StashKey[dict[str, tuple[float, float]]]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["peak_memory"] = peak_memory()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker of xdist hands over at its end; one that died has nothing."""
    if peak := getattr(node, "workeroutput", {}).get("peak_memory"):
        node.config.stash.setdefault(PEAKS, {})[node.gateway.id] = peak


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The peak memory of each worker, and how many tests were skipped for which reason."""
    peaks = config.stash.get(PEAKS, {}) or {"this process": peak_memory()}
    text = ", ".join(
        f"{name} {own:.1f} GiB (largest child {child:.1f})"
        for name, (own, child) in sorted(peaks.items())
    )
    terminalreporter.write_line(f"peak memory: {text}")
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
    )
    if reasons:
        counts = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {counts}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while tests are collected.

    Each worker looked at all objects of torch and of ten thousand tests again and again: 5 s.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_cuda = torch.cuda.is_available()
    beside_others = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1"
    for item in items:
        if "gpu" not in item.keywords:
            continue
        if not on_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif "alone" in item.keywords and beside_others:
            item.add_marker(pytest.mark.skip(reason="measures the whole device: run it with -n0"))


@pytest.fixture(autouse=True, scope="session")
def decompositions_are_read() -> None:
    """On 2.11 this reads every op that the dispatcher knows, and fails once ops of tests are gone.

    Not at the import of this file: the process that gives tests to workers runs none.
    """
    importlib.import_module("torch._inductor.decomposition")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models here are small: more threads only wait for each other, and for other workers."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # of the processes that tests start
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Also refuse a test that leaves ``torch.compile(dynamic=)`` to the tests behind it."""
    config = torch._dynamo.config
    torch._dynamo.reset()
    before = config.assume_static_by_default
    yield
    torch._dynamo.reset()
    if config.assume_static_by_default != before:
        config.assume_static_by_default = before
        pytest.fail("sizes would be symbols in the next tests")


@pytest.fixture(autouse=True, scope="session")
def nothing_kept() -> Iterator[None]:
    """Nothing is written into the user's home, and no test finds what another one compiled."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("CGCOMPILE_")]:
            patch.delenv(name)  # settings of the machine must not change what is tested
        patch.setenv("CGCOMPILE_CACHE_DIR", "off")
        yield


# Rooms whose tests run with ``debug="stale"``: a result that is read too late raises. No step takes a
# fast path then, so other rooms, the table of hazards and slow tests run without it, as users do.
_WITH_DEBUG = ("graphs", "hazards", "serving")
_WITHOUT_DEBUG = ("test_table.py", "test_mutations.py")


@pytest.fixture(autouse=True)
def stale_results_raise(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set ``CGCOMPILE_DEBUG`` for a test, unless it is one of those that run without it."""
    from cgcompile.torch_compat import raw_memory

    path, slow = request.path, request.node.get_closest_marker("slow")
    if path.parent.name not in _WITH_DEBUG or path.name in _WITHOUT_DEBUG or slow is not None:
        return
    if raw_memory.can_expire_storages():
        monkeypatch.setenv("CGCOMPILE_DEBUG", "stale")


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """Dynamo empties the processor's caches to time the guards of each graph, for its log.

    That is some 40 ms a graph. The guards still run, as they would for the time.
    """

    def run_only(root: Any, scope: dict[str, Any], times: int) -> float:
        root.check(scope)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._dynamo.guards, "profile_guard_manager", run_only)
        yield


@pytest.fixture(autouse=True, scope="session")
def settings_are_not_logged() -> Iterator[None]:
    """Dynamo writes all settings down as JSON for the log of each graph: 10 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_get_dynamo_config", "_scrubbed_inductor_config", "_functorch_config"):
            patch.setattr(
                torch._dynamo.utils, f"{name}_for_logging", lambda: None, raising=False
            )  # 2.11 has only two of them
        yield


@pytest.fixture(autouse=True, scope="session")
def count_of_frozen() -> Iterator[Callable[[], int]]:
    """What counts the frozen objects; tests get what it said at first.

    It looks at each of them, which are millions in the end: 0.3 s, once a bulk capture.
    """
    gc.collect()
    gc.freeze()
    count, counted = gc.get_freeze_count, gc.get_freeze_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: counted)
        yield count


def young_collections() -> int:
    """How often Python looked at its newest objects: once for 10,000 of them that stay."""
    return gc.get_stats()[0]["collections"]


@pytest.fixture(autouse=True, scope="session")
def frozen_at(count_of_frozen: Callable[[], int]) -> list[int]:
    """``young_collections()`` when objects were frozen."""
    return [young_collections()]


@pytest.fixture(autouse=True)
def earlier_is_frozen(frozen_at: list[int]) -> None:
    """Collections skip what was there before: modules of torch, caches, objects of earlier tests.

    Each capture outside of a batch collects garbage, which took a third of the time of all tests,
    and a fifth of that of a long file when objects were frozen once a file. So they are frozen again
    after 30,000 more. Nothing is thawed at the end, which would have the next test look at all of
    it again.
    """
    if young_collections() - frozen_at[0] >= 3:
        gc.collect()
        gc.freeze()
        frozen_at[0] = young_collections()


@pytest.fixture(autouse=True, scope="session")
def absent_devices_are_not_seeded() -> Iterator[None]:
    """Else each seed is kept for them, with a traceback for each kind: 1 ms."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available():
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors of a test are: those of ``cpu`` are recorded by the host recorder."""
    return request.param


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(autouse=True, scope="session")
def patient() -> Iterator[None]:
    """A capture waits for that of another thread, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cgcompile.graphs.capture._PATIENCE", PATIENCE)
        yield


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of a wait for a capture in another thread that ends after the test: half a second."""
    monkeypatch.setattr("cgcompile.graphs.capture._PATIENCE", 0.5)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Sets what the operator of ``lib.entry.Hooked`` does."""
    from lib.entry import Hook

    def put(function: Any) -> None:
        monkeypatch.setattr(Hook, "function", staticmethod(function))

    return put
