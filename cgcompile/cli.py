"""The command line: ``python -m cgcompile``, or ``cgcompile`` where the package is installed.

``explain``, ``doctor``, ``verify`` and ``report`` look at a model: at what ``module:function``
makes, see :data:`TARGET`. ``env`` describes this process, ``cache`` the compiled pieces on disk.
The rule: a command returns an :class:`Answer`, lines and a status, and prints nothing itself.
"""

import argparse
import difflib
import importlib
import importlib.util
import inspect
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from cgcompile import torch_compat as compat
from cgcompile.backend import handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import compile
from cgcompile.config import CompilationConfig
from cgcompile.debug.coverage import coverage
from cgcompile.debug.doctor import check_arguments, doctor
from cgcompile.debug.environment import environment
from cgcompile.debug.explain import explain
from cgcompile.debug.output import table
from cgcompile.debug.report import report
from cgcompile.debug.subject import original_of
from cgcompile.debug.verify import verify
from cgcompile.errors import BoundaryError, CGCompileError, CommandError, ConfigError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Entry, Store, cache_folder


class Target(NamedTuple):
    """What the function of a target returned; ``args`` is None for a model alone."""

    name: str
    model: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]

    def call(self, command: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call."""
        if self.args is None:
            raise CommandError.no_inputs(target=self.name, command=command)
        return self.args, self.kwargs


@contextmanager
def load(target: str) -> Iterator[Target]:
    """Import the module, call the function; the path of Python is as before afterwards.

    Args:
        target: ``module:function`` or ``path/to/file.py:function``. The folder of the file, or the
            current one, is among those that imports look into.

    Raises:
        CommandError: no such module or function, it takes arguments, or returned something else.
        BaseException: what the module or the function raised.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise CommandError.target_form(target=target)
    path = Path(where) if where.endswith(".py") else None
    folder = str(Path.cwd() if path is None else path.resolve().parent)
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        module = _named(where) if path is None else _at(path)
        yield _checked(target, _called(target, _function(module, where, name)))
    finally:
        sys.path[:] = before
        if path is not None and path.stem not in known:
            sys.modules.pop(path.stem, None)


def _named(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CommandError.no_module(name=name, why=str(error)) from error


def _at(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError.no_module(name=str(path), why="there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if path.stem not in sys.modules:
        sys.modules[path.stem] = module  # Dynamo looks for the module of a function there
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, where: str, name: str) -> Any:
    result = getattr(module, name, None)
    if not callable(result):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        own = [each for each in known if vars(module)[each].__module__ == module.__name__]
        raise CommandError.no_function(module=where, name=name, known=sorted(own))
    return result


def _called(target: str, function: Any) -> Any:
    inner = original_of(function)
    try:
        # A decorator may give what the function inside of it takes.
        taking = inner.forward if isinstance(inner, nn.Module) else inner
        signature = inspect.signature(taking, follow_wrapped=False)
    except ValueError:  # it is not written in Python
        return function()
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError.takes_arguments(target=target, signature=str(signature)) from error
    return function()


def _checked(target: str, result: Any) -> Target:
    """Return the target that a result of the function stands for."""
    args: Any = None
    kwargs: Any = {}
    model, wrong = result, ""
    if isinstance(result, dict):
        if "model" not in result or set(result) - {"model", "args", "kwargs"}:
            raise CommandError.bad_result(
                target=target, found=f"a dict with the keys {sorted(result)}"
            )
        model, kwargs = result["model"], result.get("kwargs", {})
        args = result.get("args", () if "kwargs" in result else None)
    elif isinstance(result, tuple):
        if len(result) not in (2, 3):
            raise CommandError.bad_result(target=target, found=f"a tuple of {len(result)}")
        model, args, kwargs = result if len(result) == 3 else (*result, {})
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is not None and not isinstance(args, (tuple, list)):
        wrong = f"args of type {type(args).__name__}"
    elif not isinstance(kwargs, dict):
        wrong = f"kwargs of type {type(kwargs).__name__}"
    elif model is None or isinstance(model, (str, int, float, torch.Tensor)):
        wrong = f"a model of type {type(model).__name__}"
    if wrong:
        raise CommandError.bad_result(target=target, found=wrong)
    return Target(target, model, None if args is None else tuple(args), kwargs)


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
    """Add the parsers of the commands that look at a model, and of ``env``."""
    explain_ = _look(
        commands,
        "explain",
        "what would be split where, and why; runs nothing",
        "model.py:make --set splitting_ops=mylib::attend --html split.html",
        "a graph break",
    )
    explain_.set_defaults(run=_explain)
    doctor_ = _look(
        commands,
        "doctor",
        "what CUDA graphs cannot hold, with the line and the fix",
        "mylib.models:decoder --json",
        "a finding",
    )
    doctor_.set_defaults(run=_doctor)
    verify_ = _look(
        commands,
        "verify",
        "eager against replayed, on several inputs",
        "model.py:make --set compiler=aot --sets 5",
        "a difference",
        CPU,
    )
    verify_.add_argument("--sets", type=_count, default=3, help="sets of inputs (default: 3)")
    verify_.add_argument("--rtol", type=float, help="relative tolerance; left out: by dtype")
    verify_.add_argument("--atol", type=float, help="absolute tolerance; left out: by dtype")
    verify_.set_defaults(run=_verify)
    report_ = _look(
        commands,
        "report",
        "one page: split, graphs, coverage, timeline, settings",
        "model.py:make --html report.html",
        "no replay",
        CPU,
    )
    help = "calls of the model before the report (default: 4)"
    report_.add_argument("--calls", type=_count, default=4, help=help)
    report_.set_defaults(run=_report)
    env = commands.add_parser(
        "env",
        help="versions, machine, cache and settings, for an issue",
        description="Versions, machine, cache and settings: a text to paste into an issue.",
        epilog="Example: cgcompile env --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env.add_argument("--json", action="store_true", help="as JSON, not as text")
    env.set_defaults(run=_env)


def _look(commands: Any, name: str, about: str, example: str, bad: str, *more: str) -> Any:
    """Add the parser of a command that looks at a model; ``bad``: what exit status 1 means."""
    last = [TARGET, *more] if more else [TARGET.rstrip()]
    last += [STATUS.format(bad), f"Example: cgcompile {name} {example}"]
    parser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n".join(last),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="what makes the model; see below")
    help = "a setting, as in options of torch.compile; may be repeated"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
    parser.add_argument("--json", action="store_true", help="as JSON, not as text")
    parser.add_argument("--html", type=_page, metavar="PATH", help="write a page there as well")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _page(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected the path of a file")
    return path


# ---------------------------------------------------------------- the commands


def _explain(options: argparse.Namespace) -> Answer:
    with load(options.target) as target:
        args, kwargs = target.call("explain")
        config = _config(options, target)
        result = explain(target.model, *args, config=config, **kwargs)
    return _answer(options, result, bool(result.breaks))


def _doctor(options: argparse.Namespace) -> Answer:
    with load(options.target) as target, torch.no_grad():
        config = _config(options, target)
        args, kwargs = ((), {}) if config is None and target.args is None else target.call("doctor")
        result = doctor(target.model, *args, config=config, **kwargs)
    return _answer(options, result, not result.ok)


def _verify(options: argparse.Namespace) -> Answer:
    with load(options.target) as target:
        args, kwargs = target.call("verify")
        inputs: Any = args if not kwargs else check_arguments(target.model, args, kwargs)
        config = _config(options, target, recorded=True)
        tolerance = {"rtol": options.rtol, "atol": options.atol}
        result = verify(target.model, inputs, config=config, sets=options.sets, **tolerance)
    return _answer(options, result, not result.ok)


def _report(options: argparse.Namespace) -> Answer:
    with load(options.target) as target, torch.inference_mode():
        model, config = target.model, _config(options, target, recorded=True)
        if config is not None:
            model = compile(model, config)
        if target.args is not None or config is not None:
            args, kwargs = target.call("report")
            for _ in range(options.calls):
                model(*args, **kwargs)
        result = report(model)
        served = coverage(model)
    text = f"{result.title}:\n{served}"
    return _answer(options, result, not result.counters.replays, text)


def _env(options: argparse.Namespace) -> Answer:
    result = environment()
    return Answer([result.to_json() if options.json else str(result)])


# ---------------------------------------------------------------- their parts


def _answer(options: argparse.Namespace, result: Any, bad: bool, text: str | None = None) -> Answer:
    """Write the page, and return a result as text or JSON; ``text`` replaces its own."""
    if options.html:
        try:
            result.to_html(options.html)
        except OSError as error:
            raise CommandError.no_page(
                path=str(options.html), why=error.strerror or str(error)
            ) from error
    if options.json:
        return Answer([result.to_json()], int(bad))
    page = [f"page: {options.html}"] if options.html else []
    return Answer([str(result) if text is None else text, *page], int(bad))


def _config(
    given: argparse.Namespace, target: Target, recorded: bool = False
) -> CompilationConfig | None:
    """Return the settings of a model that is to be compiled; None of one that is."""
    pairs = [each.partition("=") for each in given.set]
    for pair, (key, equals, _) in zip(given.set, pairs, strict=True):
        if not (key and equals):
            raise CommandError.bad_setting(given=pair)
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
    """Return whether it has settings of its own; managers have."""
    if isinstance(model, CUDAGraphWrapper) or handle_of(model) is not None:
        return True
    return not isinstance(model, torch.nn.Module) and not inspect.isroutine(model)


def _on_cpu(target: Target) -> bool:
    module = getattr(target.model, "__self__", target.model)
    weights = [*module.parameters()] if isinstance(module, torch.nn.Module) else []
    tensors = [*weights, *compat.tree_tensors((target.args, target.kwargs))]
    return all(each.device.type == "cpu" for each in tensors)


_SHOWN = 12  # characters of a key
_LINES = 40  # of a fact


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; those of the process if left out.

    Returns:
        The exit status: 0; 1 after a finding, a difference or an error, which was printed; 2 after
        words that cannot be, such as a target, a setting or a key that does not exist.
    """
    options = command_line().parse_args(arguments)
    try:
        answer = options.run(options)
        for line in answer.lines:
            print(line)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 0
    except SystemExit as error:  # of the user's code, whose statuses are not ours
        print(f"cgcompile: {_told(error)}", file=sys.stderr)
        if options.traceback:
            traceback.print_exception(error)
        return 1
    except Exception as error:  # of the user's code as well
        if options.traceback:
            raise
        print(f"cgcompile: {_told(error)}", file=sys.stderr)
        return 2 if isinstance(error, (CommandError, ConfigError)) else 1
    return int(answer.status)


def _told(error: BaseException) -> str:
    """Return an error in words; of one that is not ours, where it comes from."""
    if isinstance(error, CGCompileError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    )
    return f"{type(error).__name__}: {error}{where}\n  --traceback shows all of it."


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    parser = argparse.ArgumentParser(
        prog="cgcompile",
        description="See what cgcompile does to a model. Also: python -m cgcompile.",
        epilog="cgcompile COMMAND --help tells more, with an example.",
    )
    parser.add_argument("--traceback", action="store_true", help="of an error, show where it was")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    cache = commands.add_parser("cache", help="what is kept on disk")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    folder = argparse.ArgumentParser(add_help=False)
    folder.add_argument(
        "--dir", type=Path, help="the folder; left out: that of CGCOMPILE_CACHE_DIR, or the default"
    )
    listing = actions.add_parser("list", parents=[folder], help="one line per entry")
    listing.set_defaults(run=lambda options: Answer(_list(options)))
    clear = actions.add_parser("clear", parents=[folder], help="remove entries; asks nothing")
    clear.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys; none: all")
    clear.set_defaults(run=lambda options: Answer(_clear(options)))
    why = actions.add_parser(
        "why", parents=[folder], help="what an entry depends on, or in what two entries differ"
    )
    why.add_argument("key", metavar="KEY", help="the beginning of a key")
    why.add_argument("other", metavar="KEY2", nargs="?", help="of another one")
    why.add_argument("--full", action="store_true", help=f"facts of more than {_LINES} lines too")
    why.set_defaults(run=lambda options: Answer(_why(options)))
    return parser


# ---------------------------------------------------------------- the actions


def _list(options: argparse.Namespace) -> Iterator[str]:
    store = _store(options)
    entries = sorted(store.entries(), key=lambda each: -each.created)
    rows = [("key", "kind", "bytes", "age", "what", "line")]
    for entry in entries:
        key, age = entry.key[:_SHOWN], _age(time.time() - entry.created)
        line = entry.notes.get("line", "")
        rows.append((key, entry.kind, str(entry.size), age, _what(entry), line))
    if entries:
        yield from table(rows)
    total = sum(each.size for each in entries)
    yield f"{len(entries)} entries, {total} bytes in {store.folder}"


def _clear(options: argparse.Namespace) -> Iterator[str]:
    store = _store(options)
    entries = list(store.entries())
    wanted = [_find(store, entries, prefix) for prefix in options.keys] if options.keys else entries
    removed = [each for each in wanted if store.remove(each)]
    for entry in removed:
        yield f"removed {entry.kind} {entry.key[:_SHOWN]}  {entry.notes.get('line', '')}".rstrip()
    yield f"{len(removed)} entries removed from {store.folder}"
    if not options.keys:
        yield f"{store.remove_rubbish()} damaged or half written files removed"
        yield f"{store.remove_work()} folders of kernels removed"
    kept = [each for each in wanted if each not in removed]
    for entry in kept:
        yield f"could not remove {entry.kind} {entry.key[:_SHOWN]}"


def _why(options: argparse.Namespace) -> Iterator[str]:
    store = _store(options)
    entries = list(store.entries())
    one = _find(store, entries, options.key)
    if options.other is None:
        yield f"{one.kind} {one.key}"
        for title, rows in (("depends on", one.facts), ("notes", one.notes)):
            yield f"{title}:"
            for name, text in rows.items():
                yield from _fact(name, text, options.full)
        return
    other = _find(store, entries, options.other)
    names = dict.fromkeys([*one.facts, *other.facts])
    differing = [name for name in names if one.facts.get(name) != other.facts.get(name)]
    if one.kind != other.kind:
        yield f"kind: {one.kind}, {other.kind}"
    for name in differing:
        yield from _difference(name, one.facts.get(name, ""), other.facts.get(name, ""))
    same = [name for name in names if name not in differing]
    yield f"equal: {', '.join(same) or '(none)'}"


# ---------------------------------------------------------------- their parts


def _store(options: argparse.Namespace) -> Store:
    folder = options.dir or cache_folder(CompilationConfig())
    if folder is None:
        raise CommandError.caching_is_off()
    return Store(folder)


def _find(store: Store, entries: Sequence[Entry], prefix: str) -> Entry:
    result = [each for each in entries if each.key.startswith(prefix)]
    if not result:
        raise CommandError.unknown_entry(prefix=prefix, folder=str(store.folder))
    if len(result) > 1:
        raise CommandError.ambiguous_entry(
            prefix=prefix, keys=[each.key[: max(_SHOWN, 16)] for each in result]
        )
    return result[0]


def _what(entry: Entry) -> str:
    """Return what was compiled, in a few words."""
    calls = entry.facts.get("graph", "").count(" -> ")
    what = [f"{calls} ops"] if calls else []
    what += [entry.facts[name].split()[0] for name in ("compiler", "torch") if name in entry.facts]
    return ", ".join(what)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _fact(name: str, text: str, full: bool) -> Iterator[str]:
    lines = text.splitlines()
    if len(lines) <= 1:
        yield f"  {name}: {text}"
        return
    yield f"  {name}:"
    shown = lines if full else lines[:_LINES]
    yield from (f"    {line}" for line in shown)
    if len(shown) < len(lines):
        yield f"    ... and {len(lines) - len(shown)} more lines (--full)"


def _difference(name: str, one: str, other: str) -> Iterator[str]:
    if len(one.splitlines()) <= 1 and len(other.splitlines()) <= 1:
        yield f"{name}: {one or '(none)'}, {other or '(none)'}"
        return
    yield f"{name}:"
    lines = difflib.unified_diff(one.splitlines(), other.splitlines(), lineterm="", n=1)
    yield from (f"  {line}" for line in list(lines)[2:])


if __name__ == "__main__":
    sys.exit(main())
