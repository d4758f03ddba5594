"""Results that are objects are compared by their fields; what cannot be compared is listed."""

import collections
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lib.cases import D
from lib.faulty_models import config
from torch import nn

import cgcompile
from cgcompile import CUDAGraphMode, CUDAGraphWrapper, set_forward_context, verify
from cgcompile.debug.compare import Tolerance, alike, named_values, uncompared
from cgcompile.debug.subject import Subject
from cgcompile.debug.verify import Verification


@dataclasses.dataclass
class Scores:
    scores: torch.Tensor
    more: Any = None
    count: int = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen:
    scores: torch.Tensor


class Bag:
    def __init__(self, scores: torch.Tensor, **more: Any) -> None:
        self.scores = scores
        for name, value in more.items():
            setattr(self, name, value)


class Slotted:
    __slots__ = ("scores",)

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


class Empty:
    """Has no fields, and no ``==`` of its own."""


class Equal:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


class Torn:
    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = None  # type: ignore[assignment]


class Returns(nn.Module):
    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.pack = nn.Linear(D, D), pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.linear(x))


Pair = collections.namedtuple("Pair", "first second")

PACKS = {
    "dataclass": lambda y: Scores(y),
    "nested": lambda y: Scores(y, Scores(y + 1, {"k": [Frozen(y * 2)]})),
    "in containers": lambda y: {"a": [Scores(y), Pair(y, Frozen(y - 1))]},
    "plain object": lambda y: Bag(y),
    "object in an object": lambda y: Bag(y, more=[Bag(y * 2, kind="b")]),
}


def returning(pack: Callable[[torch.Tensor], Any]) -> tuple[nn.Module, torch.Tensor]:
    return Returns(pack).eval(), torch.randn(3, D)


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS.keys())
def test_right_models_are_right(pack: Any) -> None:
    model, x = returning(pack)
    verdict = verify(model, x, config=config())
    assert verdict.ok, str(verdict)
    assert (verdict.checks[0].compared, verdict.replays) == (3, 3)
    assert verdict.checks[0].uncompared == ()
    assert verify(model, x, config=config(), bisect=True).ok


def test_padded_runs_are_compared() -> None:
    model, x = returning(lambda y: Scores(y, {"k": Frozen(y)}))
    verdict = verify(model, x, config=config(), sets=1, padded_sizes=(5,))
    assert verdict.ok, str(verdict)
    assert [check.replays for check in verdict.checks] == [1, 1]


@pytest.mark.parametrize("pack", [Scores, Bag])
def test_what_differs_inside_is_found(pack: Any) -> None:
    def double(gm: Any, inputs: Any) -> Any:
        return lambda *args: tuple(output * 2 for output in gm(*args))

    model, x = returning(pack)
    verdict = verify(model, x, config=config(compiler=double), sets=1)
    (difference,) = verdict.differences
    assert (difference.stage, difference.op) == ("compilation", "torch._C._nn.linear")
    subject = Subject(model, config(compiler=double))
    call = ((x,), {})
    subject.until_replayed(call)
    outcomes = [subject.outcome(run, call) for run in (subject.original, subject.call)]
    difference = Tolerance(True).first("the result", *outcomes)
    assert (difference.value, difference.rows) == ("result.scores", (0, 1, 2))
    subject.close()


def in_full(
    pack: Callable[[torch.Tensor], Any], change: Callable[[], Any] = lambda: None
) -> Verification:
    """Verify a wrapper that has replayed, after a change."""
    model, x = returning(pack)
    wrapper = CUDAGraphWrapper(
        model, dataclasses.replace(config(), checks="-state"), CUDAGraphMode.FULL
    )
    batch = cgcompile.BatchDescriptor(len(x))
    with (
        torch.inference_mode(),
        set_forward_context(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=batch),
    ):
        for _ in range(3):
            wrapper(x)
        assert wrapper.counters.replays == 2
        change()
        return verify(wrapper, x, sets=1)


@pytest.mark.parametrize("pack", [Scores, Bag, Frozen, lambda y: {"k": Scores(y, Bag(y))}])
def test_of_a_wrapper(pack: Any) -> None:
    verdict = in_full(pack)
    assert verdict.ok, str(verdict)


def test_of_a_wrapper_that_is_wrong() -> None:
    scale = [1.0]
    verdict = in_full(lambda y: Scores(y * scale[0]), lambda: scale.insert(0, 2.0))
    (difference,) = verdict.differences
    assert (difference.piece, difference.value) == ("the result", "result.scores")
    assert difference.rows == (0, 1, 2)


# ---------------------------------------------------------------- what cannot be compared


@pytest.mark.slow
def test_what_cannot_be_compared_is_listed(tmp_path: Path) -> None:
    model, x = returning(lambda y: {"y": y, "it": Empty()})
    verdict = verify(model, x, config=config(), sets=2)
    assert verdict.ok, str(verdict)
    assert verdict.checks[0].uncompared == ("['it'] (an Empty object)",)
    assert str(verdict).splitlines()[-1] == "not compared: ['it'] (an Empty object)"
    assert verdict.to_dict()["checks"][0]["uncompared"] == ["['it'] (an Empty object)"]
    page = verdict.to_html(tmp_path / "page.html").read_text()
    assert "not compared: [&#39;it&#39;] (an Empty object)" in page
    verdict = verify(model, x, config=config(), sets=1, bisect=True)
    assert verdict.ok
    assert verdict.checks[0].steps[-1] == "not compared: ['it'] (an Empty object)"


def test_where_nothing_can_be_compared_nothing_is_ok() -> None:
    verdict = in_full(lambda y: Empty())
    assert (verdict.ok, verdict.differences) == (False, ())
    assert verdict.checks[0].missing == "nothing that it returns can be compared"
    assert verdict.checks[0].uncompared == ("result (an Empty object)",)


# ---------------------------------------------------------------- the parts


def test_names() -> None:
    y = torch.ones(1)
    values = named_values({"k": Scores(y, [Slotted(y), 2])}, "result")
    assert list(values) == [
        "['k']",
        "['k'].scores",
        "['k'].more[0]",
        "['k'].more[0].scores",
        "['k'].more[1]",
        "['k'].count",
    ]
    assert str(values["['k']"]) == "a Scores object with count, more, scores"
    assert values["['k']"].inside == tuple(values)[1:]
    assert named_values(y, "result") == {"result": y}
    assert list(named_values(Bag(y), "result")) == ["result", "result.scores"]


def test_objects_that_lead_to_themselves() -> None:
    bag = Bag(torch.ones(1))
    bag.__dict__["parts"] = [Bag(torch.ones(1), owner=bag)]
    values = named_values(bag, "result")
    assert values["result.parts[0].owner"] == "the object 2 levels up"
    other = Bag(torch.ones(1))
    other.__dict__["parts"] = [Bag(torch.ones(1), owner=other)]
    assert Tolerance(True).first("r", values, named_values(other, "result")) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (3, 3, True),
        (3, 4, False),
        (3, 3.0, False),
        (Equal(), Equal(), True),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, {1}, False),
        (Empty(), Equal(), False),
        (Empty(), Empty(), None),
        (Torn(), Torn(), None),
        (lambda: 1, lambda: 1, None),
        (Empty().__init__, Empty().__init__, None),
    ],
)
def test_alike(one: Any, other: Any, same: bool | None) -> None:
    assert alike(one, other) is same
    assert alike(one, one) is True
    assert bool(uncompared({"a": one}, {"a": other})) is (same is None)


@pytest.mark.parametrize(
    ("plain", "replayed", "text"),
    [
        (Bag, Scores, "a Scores object with count, more, scores in the replay, a Bag object with"),
        (Bag, lambda y: Bag(y, late=1), "a Bag object with late, scores in the replay, a Bag obj"),
        (lambda y: [y, y], lambda y: [y], "nothing in the replay, a tensor (2,) with strides"),
        (lambda y: Bag(y + 1), Bag, "2 of 2 numbers differ"),
    ],
)
def test_what_is_built_otherwise_differs(plain: Any, replayed: Any, text: str) -> None:
    y = torch.ones(2)
    one, other = named_values(plain(y), "result"), named_values(replayed(y), "result")
    difference = Tolerance(True).first("the result", one, other)
    assert difference is not None
    assert difference.detail.startswith(text)


def test_an_object_that_both_runs_return_equals_itself() -> None:
    kept = Bag(torch.ones(2), calls=1)
    before = named_values([kept, 1], "result")
    kept.scores, kept.calls = torch.zeros(3), 2  # type: ignore[attr-defined]
    assert Tolerance(True).first("r", before, named_values([kept, 1], "result")) is None
    difference = Tolerance(True).first("r", before, named_values([kept, 2], "result"))
    assert difference is not None
    assert difference.value == "[1]"


@pytest.mark.parametrize(
    ("value", "exact"), [("decode_attention", False), ("auto", True), (False, True)]
)
def test_kernels_on_a_cpu_are_compared_with_a_tolerance(value: bool | str, exact: bool) -> None:
    """Ops of torch stand for them there, which round in other places."""
    settings = config(kernels=value, cudagraph_mode="FULL")
    subject = Subject(nn.Linear(4, 4), settings)
    call = ((torch.randn(2, 4),), {})
    assert subject.tolerance(call, None, None).exact == exact
