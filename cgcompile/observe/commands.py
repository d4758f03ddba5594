"""The commands that look at a model: ``explain``, ``doctor``, ``verify``, ``report``.

And ``env``. Each makes a value that has ``to_dict()`` and prints; this file is words and choices.
The rule: a command answers with lines and a status, and prints nothing itself.
"""

import argparse
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cgcompile import compat
from cgcompile.backend import handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import compile
from cgcompile.config import CompilationConfig
from cgcompile.errors import BoundaryError, CommandError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.observe.arguments import check_arguments
from cgcompile.observe.coverage import coverage
from cgcompile.observe.doctor import doctor
from cgcompile.observe.environment import environment
from cgcompile.observe.explain import explain
from cgcompile.observe.gather import report
from cgcompile.observe.loading import Target, load
from cgcompile.observe.verify import verify

TARGET = """\
TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report and doctor)
"""
STATUS = "Exit status: 0 fine; 1 {}, or an error; 2 words that cannot be."
CPU = "Tensors on the CPU are recorded by the host recorder, unless capture_device is set."


class Answer(NamedTuple):
    """What a command has to say: lines, and the exit status."""

    lines: Iterable[str]
    status: int = 0


# ---------------------------------------------------------------- words


def add_commands(commands: Any) -> None:
    """Add the parsers.

    Args:
        commands: what ``ArgumentParser.add_subparsers`` returned.
    """
    looks = (
        ("explain", _explain, "what would be split where, and why; runs nothing", "a graph break"),
        ("doctor", _doctor, "what CUDA graphs cannot hold, with the line and the fix", "a finding"),
        ("verify", _verify, "eager against replayed, on several inputs", "a difference"),
        ("report", _report, "one page: split, graphs, coverage, timeline, settings", "no replay"),
    )
    for name, run, about, bad in looks:
        example = {
            "explain": "model.py:make --set splitting_ops=mylib::attend --html split.html",
            "doctor": "mylib.models:decoder --json",
            "verify": "model.py:make --set compiler=aot --sets 5",
            "report": "model.py:make --html report.html",
        }[name]
        last = [TARGET, CPU] if name in ("verify", "report") else [TARGET.rstrip()]
        parser = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog="\n".join([*last, STATUS.format(bad), f"Example: cgcompile {name} {example}"]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("target", metavar="TARGET", help="what makes the model; see below")
        parser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="a setting, as in options of torch.compile; may be repeated",
        )
        parser.add_argument("--json", action="store_true", help="as JSON, not as text")
        help = "write a page there as well"
        parser.add_argument("--html", type=_page, metavar="PATH", help=help)
        parser.set_defaults(run=run)
        if name in _ADD:
            _ADD[name](parser)
    env = commands.add_parser(
        "env",
        help="versions, machine, cache and settings, for an issue",
        description="Versions, machine, cache and settings: a text to paste into an issue.",
        epilog="Example: cgcompile env --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env.add_argument("--json", action="store_true", help="as JSON, not as text")
    env.set_defaults(run=_env)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _page(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected the path of a file")
    return path


def _for_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sets", type=_count, default=3, help="sets of inputs (default: 3)")
    parser.add_argument("--rtol", type=float, help="relative tolerance; left out: by dtype")
    parser.add_argument("--atol", type=float, help="absolute tolerance; left out: by dtype")


def _for_report(parser: argparse.ArgumentParser) -> None:
    help = "calls of the model before the report (default: 4)"
    parser.add_argument("--calls", type=_count, default=4, help=help)


_ADD = {"verify": _for_verify, "report": _for_report}


# ---------------------------------------------------------------- the commands


def _explain(given: argparse.Namespace) -> Answer:
    with load(given.target) as target:
        args, kwargs = target.call("explain")
        config = _config(given, target)
        found = explain(target.model, *args, config=config, **kwargs)
    return _answer(given, found, bool(found.breaks))


def _doctor(given: argparse.Namespace) -> Answer:
    with load(given.target) as target, torch.no_grad():
        config = _config(given, target)
        args, kwargs = ((), {}) if config is None and target.args is None else target.call("doctor")
        found = doctor(target.model, *args, config=config, **kwargs)
    return _answer(given, found, not found.ok)


def _verify(given: argparse.Namespace) -> Answer:
    with load(given.target) as target:
        args, kwargs = target.call("verify")
        inputs: Any = args if not kwargs else check_arguments(target.model, args, kwargs)
        config = _config(given, target, recorded=True)
        tolerance = {"rtol": given.rtol, "atol": given.atol}
        found = verify(target.model, inputs, config=config, sets=given.sets, **tolerance)
    return _answer(given, found, not found.ok)


def _report(given: argparse.Namespace) -> Answer:
    with load(given.target) as target, torch.inference_mode():
        model, config = target.model, _config(given, target, recorded=True)
        if config is not None:
            model = compile(model, config)
        if target.args is not None or config is not None:
            args, kwargs = target.call("report")
            for _ in range(given.calls):
                model(*args, **kwargs)
        found = report(model)
        served = coverage(model)
    text = f"{found.title}:\n{served}"
    return _answer(given, found, not found.counters.replays, text)


def _env(given: argparse.Namespace) -> Answer:
    found = environment()
    return Answer([json.dumps(found.to_dict(), indent=2) if given.json else str(found)])


# ---------------------------------------------------------------- their parts


def _answer(given: argparse.Namespace, found: Any, bad: bool, text: str | None = None) -> Answer:
    """A value as the words ask for it; ``text``: what is printed of it, if not itself."""
    if given.html:
        try:
            found.to_html(given.html)
        except OSError as error:
            raise CommandError.no_page(
                path=str(given.html), why=error.strerror or str(error)
            ) from error
    if given.json:
        return Answer([found.to_json()], int(bad))
    page = [f"page: {given.html}"] if given.html else []
    return Answer([str(found) if text is None else text, *page], int(bad))


def _config(
    given: argparse.Namespace, target: Target, recorded: bool = False
) -> CompilationConfig | None:
    """The settings of a model that is to be compiled; None of one that is.

    Args:
        recorded: tensors on the CPU are recorded by the host recorder, if nobody says otherwise.
    """
    pairs = [each.partition("=") for each in given.set]
    for each, (key, equals, _) in zip(given.set, pairs, strict=True):
        if not (key and equals):
            raise CommandError.bad_setting(given=each)
    config = CompilationConfig.resolve(options={key: value for key, _, value in pairs})
    try:
        Boundaries(config.splitting_ops)
    except BoundaryError as error:
        raise CommandError.bad_splitting_ops(why=str(error)) from error
    if _is_compiled(target.model):
        if pairs:
            raise CommandError.settings_are_fixed(target=target.name)
        return None
    unsaid = config.origins["capture_device"] == "default" and config.cudagraph_mode
    if recorded and unsaid and _on_cpu(target):
        return CompilationConfig.resolve(config, options={"capture_device": "host"})
    return config


def _is_compiled(model: Any) -> bool:
    """Whether it has settings of its own; managers have."""
    if isinstance(model, CUDAGraphWrapper) or handle_of(model) is not None:
        return True
    return not isinstance(model, torch.nn.Module) and not inspect.isroutine(model)


def _on_cpu(target: Target) -> bool:
    module = getattr(target.model, "__self__", target.model)
    weights = [*module.parameters()] if isinstance(module, torch.nn.Module) else []
    tensors = [*weights, *compat.tree_tensors((target.args, target.kwargs))]
    return all(each.device.type == "cpu" for each in tensors)
