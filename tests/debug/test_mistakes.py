"""What the functions that look at a model say of things that are none, by the name of each."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from lib.cases import D
from lib.faulty_models import config
from lib.manager import manager, requests
from torch import nn

import cgcompile
from cgcompile import CompilationConfig, verify
from cgcompile.debug import Diagnosis
from cgcompile.errors import ArgumentsError, CGCompileError, ConfigError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.linear(x).sin() * scale


class TwoSizes(Model):
    def forward(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.linear(x) + self.linear(more).sum(0)


class Odd:
    pass


X = torch.ones(4, D)
CONFIG = config()


def refused(kind: type[CGCompileError], call: Callable[[], Any]) -> str:
    """The first line of an error, of which nothing is left behind: a good call works after it."""
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    return str(caught.value).splitlines()[0]


MODEL = "expected a module, a bound method of one, or a function."


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("verify", verify),
        ("explain", cgcompile.explain),
        ("doctor", cgcompile.debug.doctor),
    ],
)
def test_no_model(name: str, function: Any) -> None:
    for value, text in ((None, f"None; {MODEL}"), (3, f"3; {MODEL}"), (Model, "the class Model; ")):
        message = refused(ConfigError, lambda value=value: function(value, X))
        assert message.startswith(f"cgcompile.{name}(): found {text}")


SETS = "sets = 0; expected a whole number from 1 to 1048576."
SIZES = "positive whole numbers, as a sequence or as text '1,2,4'."
DIMS = "compile: dynamic_dims = ['x']; expected dimensions by parameter, such as {'x': 0}."
CONFIGS = "config = 'eager'; expected a CompilationConfig, a Backend, or a mapping of settings."
PREPARE = "doctor: prepare = 3; expected a function that makes the inputs of a call."


@pytest.mark.parametrize(
    ("function", "arguments", "text"),
    [
        (verify, {"sets": 0}, f"verify: {SETS}"),
        (verify, {"padded_sizes": ("a",)}, f"verify: padded_sizes = ('a',); expected {SIZES}"),
        (cgcompile.explain, {"sizes": [-8]}, f"explain: sizes = [-8]; expected {SIZES}"),
        (cgcompile.explain, {"dynamic_dims": ["x"]}, DIMS),
        (cgcompile.explain, {"config": "eager"}, f"explain: {CONFIGS}"),
        (cgcompile.debug.doctor, {"config": "eager"}, f"doctor: {CONFIGS}"),
    ],
)
def test_arguments_that_cannot_be(function: Any, arguments: dict[str, Any], text: str) -> None:
    model = Model().eval()
    assert refused(ConfigError, lambda: function(model, X, **arguments)) == text
    assert not [name for name in vars(model) if "cgcompile" in name]


def test_other_arguments_that_cannot_be() -> None:
    model, expected = Model(), "Diagnosis.of_error: error = None; expected an exception."
    assert refused(ConfigError, lambda: cgcompile.compile(model, dynamic_dims=["x"])) == DIMS
    assert refused(ConfigError, lambda: cgcompile.debug.doctor(model, prepare=3)) == PREPARE
    assert refused(ConfigError, lambda: Diagnosis.of_error(None)) == expected


@pytest.mark.slow
def test_sizes_may_be_one_number_or_text() -> None:
    for sizes in (8, "8", [8], (8,), range(8, 9)):
        explanation = cgcompile.explain(Model(), X, dynamic_dims={"x": 0}, sizes=sizes)
        assert explanation.totals.static.at == ((8, explanation.totals.static.traced),)
    explanation = cgcompile.explain(Model(), X, dynamic_dims={"x": 0}, sizes="16,8,16")
    assert [size for size, _ in explanation.pieces[0].bytes_out.at] == [16, 8]
    assert [number for _, number in explanation.pieces[0].bytes_out.at] == [16 * D * 4, 8 * D * 4]
    assert verify(Model().eval(), X, config=CONFIG, sets=1, padded_sizes="6").ok


# ---------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("args", "why"),
    [((), "missing a required argument: 'x'"), ((X, 1.0, 2), "too many positional arguments")],
)
def test_inputs_that_the_model_does_not_take(args: Any, why: str) -> None:
    takes = "takes (x: torch.Tensor, scale: float = 1.0) -> torch.Tensor, and cannot be called with"
    model = Model()
    for name, look in (
        ("Model.forward", cgcompile.explain),
        ("Model", cgcompile.debug.doctor),
        ("Model", verify),
    ):
        message = refused(ArgumentsError, lambda look=look: look(model, *args))
        assert message == f"{name} {takes} these inputs: {why}."
        with pytest.raises(TypeError):
            look(model, *args)
    method = refused(ArgumentsError, lambda: cgcompile.explain(model.forward, *args))
    assert method.endswith(f"{takes} these inputs: {why}.")
    unknown = refused(ArgumentsError, lambda: cgcompile.explain(model, X, capture=3))
    assert unknown.endswith("got an unexpected keyword argument 'capture'.")


@pytest.mark.parametrize("look", [cgcompile.explain, cgcompile.debug.doctor, verify])
def test_a_setting_among_the_inputs_belongs_into_config(look: Any) -> None:
    with pytest.raises(ArgumentsError, match="unexpected keyword argument 'splitting_ops'") as no:
        look(Model(), X, splitting_ops="ns::op", on_fallback="raise")
    advice = "Settings go into config=, such as config={'splitting_ops': ..., 'on_fallback': ...}."
    assert str(no.value).splitlines()[1].strip() == advice
    with pytest.raises(ArgumentsError) as no:
        look(Model(), X, capture=3)
    assert "config=" not in str(no.value)


@pytest.mark.parametrize("look", [verify, partial(verify, bisect=True)])
def test_comparisons_are_called_like_the_model(look: Any) -> None:
    """With arguments by name, with settings as a mapping, and with inputs that are prepared."""
    verdict = look(Model().eval(), X, scale=2.0, config={"compiler": "eager"}, sets=2)
    assert (verdict.ok, verdict.replays) == (True, 2), verdict
    calls: list[int] = []

    def prepare() -> Any:
        calls.append(len(calls))
        return (torch.randn(X.shape),), {"scale": 3.0}

    verdict = look(Model().eval(), config=cgcompile.Backend(CONFIG), prepare=prepare, sets=3)
    assert (verdict.ok, verdict.replays, calls) == (True, 3, [0, 1, 2]), verdict
    for name in ("verify", "doctor"):
        look = getattr(cgcompile.debug, name)
        message = refused(ConfigError, lambda look=look: look(Model(), X, prepare=prepare))
        assert "expected None where the arguments are given" in message


def test_a_manager_is_verified_with_batches() -> None:
    message = refused(ConfigError, lambda: verify(manager(), [requests(1)]))
    assert message.endswith("expected batches, for a manager.")
    assert refused(ConfigError, lambda: verify(manager(), requests(1), x=X)) is not None


def test_a_type_error_of_the_model_is_a_finding() -> None:
    def adds(x: torch.Tensor) -> Any:
        return x + [1] @ 3  # type: ignore[operator]

    (finding,) = [
        reported
        for reported in cgcompile.debug.doctor(adds, X).findings
        if reported.severity == "error"
    ]
    assert (finding.kind, finding.op) == ("forward_raised", "TypeError")
    assert finding.source is not None
    assert "[1] @ 3" in finding.source.code


# ---------------------------------------------------------------- sizes of which dimension


BOTH = {"x": 0, "more": 0}
TWO = (X, torch.ones(6, D))


@pytest.mark.slow
def test_sizes_of_one_of_two_dimensions() -> None:
    look = lambda **more: cgcompile.explain(  # noqa: E731
        TwoSizes(), *TWO, dynamic_dims=BOTH, sizes=[8, 64], **more
    )
    message = refused(ConfigError, look)
    assert message.startswith(
        "sizes: they are sizes of one dynamic dimension of the inputs, and the"
    )
    with pytest.raises(ConfigError, match=r"sizes: capture_dim='x.size\(\)\[0\]'. There are: x.si"):
        look()
    explanation = look(capture_dim="x.size()[0]")
    (piece,) = explanation.pieces
    assert piece.bytes_out.at == ((8, 8 * D * 4), (64, 64 * D * 4))
    settings = CompilationConfig(capture_dim="x.size()[0]", cudagraph_capture_sizes=(8,))
    assert look(config=settings).pieces[0].bytes_out.at == piece.bytes_out.at
    assert look(config=settings, capture_dim="more.size()[0]").pieces[0].bytes_out.at == (
        (8, 4 * D * 4),
        (64, 4 * D * 4),
    )
    message = refused(ConfigError, lambda: look(capture_dim="y"))
    assert message == ("explain: capture_dim = 'y'; expected one of x.size()[0], more.size()[0].")
    message = refused(
        ConfigError, lambda: cgcompile.explain(Model(), X, sizes=[8], capture_dim="y")
    )
    assert message == "explain: capture_dim = 'y'; expected none, as no dimension varies."


def test_sizes_of_the_settings_are_not_called_those_of_the_user() -> None:
    settings = CompilationConfig(cudagraph_capture_sizes=(8,))
    with pytest.raises(ConfigError, match="Set capture_dim to one of: x"):
        cgcompile.explain(TwoSizes(), *TWO, dynamic_dims=BOTH, config=settings)


@pytest.mark.slow
def test_a_page_about_one_of_two_dimensions() -> None:
    model = cgcompile.compile(TwoSizes().eval(), CONFIG, dynamic_dims=BOTH)
    with torch.inference_mode():
        model(*TWO)
    message = refused(ConfigError, lambda: cgcompile.debug.report(model, sizes=[8]))
    assert message.startswith("sizes: they are sizes of one dynamic dimension")
    assert refused(ConfigError, lambda: cgcompile.debug.report(model, sizes="a,b")).startswith(
        "report: sizes = 'a,b'; expected positive"
    )
    overview = cgcompile.debug.report(model, sizes="8", capture_dim="x.size()[0]")
    assert overview.graphs[0].pieces[0].bytes_out.at == ((8, 8 * D * 4),)


# ---------------------------------------------------------------- what captures nothing


@pytest.mark.parametrize("name", ["coverage", "debug.report", "debug.timeline", "debug.profile"])
def test_what_captures_nothing(name: str) -> None:
    function = attrgetter(name)(cgcompile)
    rest = (
        ", which captures nothing; expected a compiled model, its handle (a Backend), a wrapper or "
        "a manager."
    )
    for target, described in (
        (Model(), "a Model"),
        (None, "None"),
        (Odd(), "an Odd"),
        (3, "an int"),
    ):
        message = refused(ConfigError, lambda target=target: function(target))
        assert message == f"cgcompile.{name}(): found {described}{rest}"


def test_a_profile_of_anyone() -> None:
    model = cgcompile.compile(Model().eval(), CONFIG)
    with torch.inference_mode():
        for _ in range(2):
            model(X)
        with cgcompile.debug.profile() as measured:
            model(X)
    assert measured.steps == 1


def test_the_handle_of_a_compiled_model() -> None:
    model = cgcompile.compile(Model(), CONFIG)
    with pytest.raises(
        ConfigError,
        match=r"found a CompiledModel.*\n  The handle of this one is model\.backend\.",
    ):
        cgcompile.runtime(model)
    with pytest.raises(ConfigError, match=r"runtime\(\): found an Odd; expected a module"):
        cgcompile.runtime(Odd())
    assert cgcompile.coverage(model.backend).total == 0
