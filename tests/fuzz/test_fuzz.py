"""The bounded part of the fuzzer that the suite runs; ``python -m fuzz`` runs more."""

import gc
import os
from collections import Counter
from collections.abc import Callable

import pytest

from fuzz import states
from fuzz.number_programs import fuzz as fuzz_numbers
from fuzz.running import Options, fuzz
from fuzz.soak import soak
from fuzz.subclass_programs import fuzz as fuzz_subclasses

pytestmark = pytest.mark.slow


@pytest.fixture
def frozen() -> None:
    """Keep what is there out of the garbage collection of each capture."""
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(("compiler", "seeds"), [("eager", 20), ("aot", 6)])
def test_random_programs_on_random_schedules_equal_eager(
    compiler: str, seeds: int, device: str
) -> None:
    totals: Counter[str] = Counter()
    for seed in range(seeds):
        totals += fuzz(seed, Options(device, compiler, steps=60))
    assert totals["refused"] <= 1, totals  # torch itself fixes a size that is to vary
    assert totals["captures"] >= seeds, totals
    assert totals["replays"] >= 0.4 * totals["graph_steps"] >= 10 * seeds, totals


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize("kind", [states.StateProgram, states.MetadataProgram])
def test_state_and_metadata_that_change_between_calls(kind: type, device: str) -> None:
    seeds = 12
    totals = sum(
        (states.fuzz(kind, seed, Options(device, steps=20)) for seed in range(seeds)), Counter()
    )
    assert totals["replayed_programs"] == seeds, totals
    assert totals["replays"] >= 0.6 * totals["steps"] > 0, totals
    changes = totals["captures"] - seeds if kind is states.StateProgram else totals["guard_errors"]
    assert changes > 0, totals


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(("run", "seeds"), [(fuzz_numbers, 10), (fuzz_subclasses, 10)])
def test_numbers_and_subclasses_that_change_between_calls(
    run: Callable[[int, Options], Counter[str]], seeds: int, device: str
) -> None:
    totals: Counter[str] = Counter()
    for seed in range(seeds):
        totals += run(seed, Options(device, steps=20))
    assert totals["refused"] <= seeds // 2, totals  # torch alone differs from eager
    assert totals["replays"] >= 0.15 * totals["steps"] > 0, totals


def test_a_hundredth_of_the_soak_leaves_nothing_behind(device: str) -> None:
    grown = soak(device, 0.01)
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        # other workers use the device too
        grown = [name for name in grown if not name.startswith("device ")]
    assert grown == []
