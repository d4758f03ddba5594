"""Measures variants and their floors in turn, and checks that they are right and did replay."""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from rivals.decoder import SWITCH, counted
from rivals.timing import Call, Probe, burst_seconds, gpu_seconds, wall_seconds
from rivals.variant import Setup, Variant

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.06}
BURST = 3


class Broken(Exception):
    """A variant is wrong, or did not replay; the message has the details."""


def error_limit(setup: Setup) -> float:
    """The relative L2 error of logits that is allowed: rounding adds up over layers."""
    return LIMITS[setup.dtype] * max(1.0, math.sqrt(setup.dims.layers / 32))


def distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2."""
    wanted = expected.float()
    return float((actual.float() - wanted).norm() / wanted.norm())


def check(setup: Setup, variant: Variant, batch: int) -> float:
    """Compare with eager on fresh tokens, twice; the larger relative L2 error.

    Raises:
        Broken: it is above the limit, results do not follow the tokens, or it did not replay.
    """
    step, limit, errors = variant.step(batch), error_limit(setup), []
    last: torch.Tensor | None = None
    before = variant.replays()
    for seed in (2 * batch, 2 * batch + 1):
        setup.steps.draw(seed)
        expected = setup.model(*setup.steps.views(batch)).clone()
        result = step().clone()
        errors.append(distance(result, expected))
        if not errors[-1] <= limit:
            raise Broken(f"batch {batch}: relative L2 {errors[-1]:.3g}, allowed {limit:.3g}")
        if last is not None and distance(result, last) < 5 * limit:
            raise Broken(f"batch {batch}: fresh tokens give the same logits")
        last = result
    calls = counted(step)
    if calls != variant.attention_calls:
        raise Broken(
            f"batch {batch}: attention was called {calls} times in a step, "
            f"not {variant.attention_calls}"
        )
    after = variant.replays()
    if before is not None and after != before + 3:
        raise Broken(f"batch {batch}: 3 steps made {(after or 0) - before} replays")
    why = variant.why_not_replayed()
    if why is not None:
        raise Broken(f"batch {batch}: {why}")
    return max(errors)


@dataclass
class Row:
    """A function that is timed, and its samples in seconds by metric."""

    call: Call
    takes_no_op: bool = True
    samples: dict[str, list[float]] = field(default_factory=dict)
    error: str | None = None
    is_too_long: bool = False  # for the queue of the GPU

    def add(self, metric: str, seconds: float | None) -> None:
        if seconds is not None:
            self.samples.setdefault(metric, []).append(seconds)

    def result(self) -> dict[str, Any]:
        """Medians in microseconds by metric, and what was raised if anything was."""
        medians: dict[str, Any] = {
            name: statistics.median(seconds) * 1e6 for name, seconds in self.samples.items()
        }
        return medians if self.error is None else {**medians, "error": self.error}


def rows_of(variants: Iterable[Variant], batch: int) -> tuple[dict[str, Row], dict[str, str]]:
    """All functions to time, each once; and for each variant the name of its floor's row."""
    rows: dict[str, Row] = {}
    floors: dict[str, str] = {}
    for variant in variants:
        rows[variant.name] = Row(variant.step(batch), variant.takes_no_op)
        floor = variant.floor(batch)
        if floor is None:
            continue
        same = [name for name, row in rows.items() if row.call == floor]
        floors[variant.name] = same[0] if same else f"floor of {variant.name}"
        if not same:
            rows[floors[variant.name]] = Row(floor, variant.takes_no_op)
    return rows, floors


def beside_floors(rows: dict[str, Row], floors: dict[str, str]) -> list[list[Row]]:
    """All rows, those together that have one floor, with that floor."""
    groups: dict[str, list[Row]] = {}
    for name, row in rows.items():
        groups.setdefault(floors.get(name, name), []).append(row)
    return list(groups.values())


def one_round(groups: list[list[Row]], device: str, repeats: int) -> None:
    """A few samples of each metric, group after group, the rows of one in turn.

    They go there and back, so that none always follows the same one and what that leaves in caches.
    """
    there_and_back = [
        row
        for group in groups
        for turn in range(repeats)
        for row in group[:: -1 if turn % 2 else 1]
    ]

    def in_turn(sample: Callable[[Row], None]) -> None:
        for row in there_and_back:
            if row.error is None:
                try:
                    sample(row)
                except Exception as error:
                    row.error = f"{type(error).__name__}: {error}"

    def host_noop(row: Row) -> None:
        if row.takes_no_op:
            row.add("host_noop", burst_seconds(row.call, device, BURST))

    def host(row: Row) -> None:
        row.add("host", burst_seconds(row.call, device, BURST))

    def gpu(row: Row) -> None:
        if not row.is_too_long:
            seconds = gpu_seconds(row.call, statistics.median(row.samples["host"]))
            row.add("gpu", seconds)
            row.is_too_long = seconds is None and "gpu" not in row.samples

    SWITCH.on = False
    try:
        in_turn(host_noop)
    finally:
        SWITCH.on = True
    in_turn(host)
    if device == "cuda":
        in_turn(gpu)
        in_turn(lambda row: row.add("wall", wall_seconds(row.call, device)))


def measure(
    setup: Setup,
    variants: list[Variant],
    batch: int,
    *,
    rounds: int,
    repeats: int,
    until: float,
    probe: Probe | None,
) -> dict[str, Any]:
    """Time all variants at one batch, in rounds.

    Args:
        setup: of the process.
        variants: those that were checked.
        batch: the batch.
        rounds: at most so many.
        repeats: samples of each metric and row in a round.
        until: a time of ``time.monotonic`` by which rounds should have ended; the first may not.
        probe: tells the pace.

    Returns:
        ``pace``: the probe relative to its first time, before each round; ``steps``: samples of a
        metric; ``rows``: by variant, microseconds by metric, its own and its floor's.
    """
    rows, floors = rows_of(variants, batch)
    groups = beside_floors(rows, floors)
    paces: list[float] = []
    done, longest = 0, 0.0
    for _ in range(rounds):
        begun = time.monotonic()
        if probe is not None:
            paces.append(probe.pace())
        one_round(groups, setup.device, repeats)
        done += 1
        longest = max(longest, time.monotonic() - begun)
        if time.monotonic() + longest > until:
            break
    results: dict[str, Any] = {}
    for variant in variants:
        row = rows[variant.name]
        results[variant.name] = row.result()
        floor = rows.get(floors.get(variant.name, ""))
        if floor is not None:
            results[variant.name]["floor"] = floor.result()
    return {"pace": paces, "steps": done * repeats, "rows": results}
