"""Random schedules: whatever comes, and in whatever order, each step does what the contract says.

A step is a batch of a menu (mode, size, uniform or not, an extra axis), with fresh metadata and
new numbers, under no_grad or in inference mode, from this thread or another one. Between steps
weights are written, replaced and moved, memory is allocated and freed, graphs are released. Some
steps carry a fault. ``lib.schedules.Engine`` says of each step what it must do: a replay, a
capture, a plain run for a reason, an error of one class; and compares with eager.
"""

import operator
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from lib.schedules import (
    FULL,
    PIECEWISE,
    Batch,
    Do,
    Engine,
    Scenario,
    batches,
    things_to_do,
)

from cgcompile import AttentionCGSupport

ALWAYS, UNIFORM = AttentionCGSupport.ALWAYS, AttentionCGSupport.UNIFORM_BATCH
DECODE, NEVER = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionCGSupport.NEVER

SLOTS = 3  # batches of a menu
EXAMPLES = 1  # of each scenario
# What is done once (warming, captures) must be few of the steps; wrappers do less of it. What is
# drawn hangs on the modules that were imported before as well, so there must be some to spare.
STEPS = {"compiled": 600, "auto": 600, "breakable": 450}

SCENARIOS = {
    "compiled-uniform": Scenario("compiled", "attend", UNIFORM),
    "compiled-always": Scenario("compiled", "attend", ALWAYS, {"num_warmups": 0}),
    "compiled-fresh": Scenario("compiled", "fresh", DECODE),
    "compiled-copy": Scenario(
        "compiled", "attend", UNIFORM, {"on_input_change": "copy"}, more={"moved": 100}
    ),
    "compiled-recapture": Scenario(
        "compiled", "fresh", ALWAYS, {"on_input_change": "recapture", "num_warmups": 0}
    ),
    "compiled-eager": Scenario(
        "compiled", "attend", ALWAYS, {"on_input_change": "eager"}, more={"moved": 2}
    ),
    "breakable-uniform": Scenario("breakable", "attend", UNIFORM),
    "breakable-fresh": Scenario(
        "breakable", "fresh", NEVER, modes=(PIECEWISE,), runtime_mode=PIECEWISE
    ),
    "breakable-full": Scenario("breakable", "fresh", ALWAYS, modes=(FULL,), runtime_mode=FULL),
    "breakable-recapture": Scenario(
        "breakable", "attend", ALWAYS, {"on_input_change": "recapture"}
    ),
    "breakable-eager": Scenario(
        "breakable", "fresh", ALWAYS, {"on_input_change": "eager"}, more={"moved": 2}
    ),
    "auto-full": Scenario("auto", "attend", ALWAYS, modes=(PIECEWISE,), more={"raises": 100}),
    "auto-fresh": Scenario("auto", "fresh", ALWAYS, modes=(PIECEWISE,)),
}

LEGAL = ("replay", "capture", "plain")


def menus(scenario: Scenario) -> st.SearchStrategy[list[Batch]]:
    """A batch, one that differs in its mode, its requests or its axis alone, and any other.

    The first two are served, where strict settings or wrappers refuse some.
    """
    every = batches(scenario.modes)
    served = [each for each in every if scenario.serves(each)]

    def others(first: Batch) -> st.SearchStrategy[tuple[Batch, ...]]:
        near = [each for each in served if sum(map(operator.ne, first, each)) == 1]
        near = [each for each in near if each.size == first.size]
        return st.tuples(st.just(first), st.sampled_from(near), st.sampled_from(every))

    return st.sampled_from(served).flatmap(others).map(lambda menu: list(dict.fromkeys(menu)))


def schedule_of(scenario: Scenario, device: str, totals: dict[str, int]) -> type[Any]:
    """The state machine of one scenario; ``totals`` counts what its steps did."""

    class Schedule(RuleBasedStateMachine):
        @initialize(
            # Hypothesis begins with the simplest example, which would repeat one step for ever.
            any_at_all=st.sampled_from((False,) + (True,) * 99),
            menu=menus(scenario),
            inference=st.booleans(),
            on_fallback=st.sampled_from(("warn", "raise")),
            debug=st.sampled_from((False, "poison")),
        )
        def begin(self, any_at_all, menu, inference, on_fallback, debug) -> None:
            assume(any_at_all)
            settings = f"inference={inference}, on_fallback={on_fallback}, debug={debug}"
            self.log = [f"{settings}, menu: {', '.join(map(str, menu))}"]
            self.engine = Engine(
                scenario, device, menu, inference=inference, on_fallback=on_fallback, debug=debug
            )

            if "raises" in scenario.more:
                self.do(do=Do("raises", 0))  # by chance all others may come after the captures

        @rule(do=st.sampled_from(things_to_do(SLOTS, scenario.more)))
        def do(self, do: Do) -> None:
            if hasattr(self.engine, f"_{do.what}"):
                self.log.append(f"({do.what})")
                return self.engine.between(do.what)
            batch = self.engine.menu[do.slot % len(self.engine.menu)]
            self.log.append(f"{do.what}: {batch}")
            try:
                done, outcome = self.engine.step(do)
            except Exception as error:
                raise AssertionError(f"{error}\n{self.schedule()}") from error
            self.log[-1] = f"{done.what}: {batch} -> {outcome}"

        def schedule(self) -> str:
            """What was done, equal lines in one."""
            rows: list[tuple[str, int]] = []
            for line in self.log[1:]:
                if rows and rows[-1][0] == line:
                    rows.append((line, rows.pop()[1] + 1))
                else:
                    rows.append((line, 1))
            shown = [line + (f"  x{times}" if times > 1 else "") for line, times in rows[-40:]]
            return "\n  ".join([self.log[0], *shown])

        def teardown(self) -> None:
            if hasattr(self, "engine"):
                for name, number in self.engine.outcomes.items():
                    totals[name] = totals.get(name, 0) + number

    return Schedule


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More threads are slower for tensors of this size, by far where others compute too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_schedules(device: str, name: str) -> None:
    totals: dict[str, int] = {}
    steps = STEPS[SCENARIOS[name].driver]
    schedule = seed(zlib.crc32(name.encode()))(schedule_of(SCENARIOS[name], device, totals))
    run_state_machine_as_test(
        schedule,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=steps,
            derandomize=True,
            phases=(Phase.generate,),  # to make a schedule shorter takes minutes: add Phase.shrink
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    legal = sum(totals.get(kind, 0) for kind in LEGAL)
    assert totals["steps"] >= EXAMPLES * steps * 0.8, totals
    assert legal >= totals["steps"] * 0.4, totals
    assert totals["replay"] >= 0.95 * legal, totals
    assert totals["raise"] > 0, totals
