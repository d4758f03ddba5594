"""What the command line says of words that cannot be, and with which exit status."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lib.command_line import HERE, runner

from cgcompile.cli import main

EAGER = ("--set", "compiler=eager")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    return runner(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("function", "words", "status", "said"),
    [
        ("par", (), 2, "FILE has no function 'par'. Did you mean 'pair'?"),
        ("number", (), 2, "FILE:number returned a model of type int; expected a model and its"),
        (
            "sized",
            (),
            2,
            "FILE:sized takes arguments, (size: int, *, deep: bool = False) -> Any; ex",
        ),
        (
            "Wide",
            (),
            2,
            "FILE:Wide takes arguments, (width: int) -> None; expected a function that",
        ),
        ("net", (), 2, "FILE:net takes arguments, (x: torch.Tensor, scale: float = 1.0) -> torch."),
        ("confuses", (), 1, "TypeError: sized() missing 1 required positional argument: 'size'\n"),
        ("four", (), 2, "FILE:four returned a tuple of 4; expected a model and its inputs."),
        ("ran", (), 2, "FILE:ran returned a model without inputs, and verify calls it."),
        ("wrong", EAGER, 2, "--set for a model that FILE:wrong has compiled already: its"),
        ("pair", ("--set", "compilr=eager"), 2, "options: there is no setting 'compilr'. Did"),
        ("pair", ("--set", "compiler"), 2, "--set compiler: expected key=value, such as --set"),
        ("pair", ("--set", "num_warmups=-1"), 2, "options: num_warmups = '-1'; expected a whole"),
        (
            "pair",
            ("--set", "splitting_ops=aten::nonsense"),
            2,
            "splitting_ops: splitting op 'aten::nonsense': no operator, higher-order op or functi",
        ),
        ("raises", (), 1, "RuntimeError: boo\n  at FILE:"),
        ("leaves", (), 1, "SystemExit: 5\n  at FILE:"),
    ],
)
def test_mistakes(run: Any, function: str, words: Any, status: int, said: str) -> None:
    before = list(sys.path)
    found, out, err = run("verify", function, *words)
    assert (found, out) == (status, "")
    assert err.startswith(f"cgcompile: {said}")
    assert "Traceback" not in err
    assert sys.path == before


def test_a_decorator_gives_what_the_target_takes(run: Any) -> None:
    status, out, _ = run("explain", "decorated")
    assert (status, out.startswith("Net: 3 pieces: 2 captured, 1 eager")) == (0, True)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        (
            "model.py",
            "'model.py' is no target; expected module:function or path/to/file.py:function",
        ),
        ("nowhere.py:f", "cannot import 'nowhere.py': there is no such file."),
        ("no_such_module:f", "cannot import 'no_such_module': No module named 'no_such_module'."),
    ],
)
def test_targets_that_are_none(target: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", target]) == 2
    assert capsys.readouterr().err.startswith(f"cgcompile: {said}")


def test_a_traceback_is_there_for_those_who_ask(run: Any) -> None:
    with pytest.raises(RuntimeError, match="boo"):
        main(["--traceback", "explain", f"{HERE}:raises"])


@pytest.mark.parametrize("command", ["explain", "doctor", "report"])
def test_a_splitting_op_that_does_not_exist(run: Any, command: str) -> None:
    status, out, err = run(command, "pair", "--set", "splitting_ops=aten::nonsense")
    assert (status, out) == (2, "")
    assert err.startswith("cgcompile: splitting_ops: splitting op 'aten::nonsense': no operator")


def test_inputs_that_the_model_does_not_take(run: Any) -> None:
    said = "takes (x: torch.Tensor, scale: float = 1.0) -> torch.Tensor, and cannot be called with"
    for command, name in (("explain", "Net.forward"), ("doctor", "Net")):
        status, out, err = run(command, "misses")
        assert (status, out) == (1, "")
        assert err.startswith(f"cgcompile: {name} {said} these inputs: missing a required argu")
    status, _, err = run("doctor", "alone")
    assert status == 2
    assert err.startswith("cgcompile: FILE:alone returned a model without inputs, and doctor calls")


def test_a_page_that_cannot_be_written(
    run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("explain", "doctor", "verify", "report"):
        with pytest.raises(SystemExit) as stopped:
            main([command, f"{HERE}:pair", "--html", str(tmp_path)])
        assert stopped.value.code == 2
        assert "is a folder; expected the path of a file" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    status, out, err = run("explain", "pair", "--html", str(tmp_path / "file" / "page.html"))
    assert (status, out) == (2, "")
    assert re.match(r"cgcompile: --html .*page.html: no page can be written there: ", err)


def test_who_leaves_leaves_with_a_traceback_for_those_who_ask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--traceback", "explain", f"{HERE}:leaves"]) == 1
    assert "in leaves\n    sys.exit(5)" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_numbers_that_are_none(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["verify", f"{HERE}:pair", f"--sets={number}"])
    assert stopped.value.code == 2
    said = f"argument --sets: {number!r}; expected a whole number of at least 1"
    assert said in capsys.readouterr().err
