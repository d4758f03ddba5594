"""The command line: ``python -m cgcompile``, or ``cgcompile`` where the package is installed.

``explain``, ``doctor``, ``verify`` and ``report`` take a :data:`TARGET` that makes a model. ``env``
describes this process, ``cache`` the compiled pieces on disk. The rule: a command prints its result
and returns the exit status.
"""

import argparse
import difflib
import importlib
import importlib.util
import inspect
import json
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
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
from cgcompile.debug.doctor import check_arguments, doctor
from cgcompile.debug.environment import environment, environment_text
from cgcompile.debug.explain import explain
from cgcompile.debug.report import report
from cgcompile.debug.subject import original_of
from cgcompile.debug.verify import verify
from cgcompile.errors import BoundaryError, CGCompileError, CommandError, ConfigError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Entry, Store, cache_folder
from cgcompile.serving.statistics import text_table

TARGET = """\
TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report and doctor)
"""
STATUS = "Exit status: 0 fine; 1 {}, or an error; 2 words that cannot be."
CPU = "Tensors on the CPU are recorded by the host recorder, unless capture_device is set."


# ---------------------------------------------------------------- targets


class Target(NamedTuple):
    """What the function of a target returned."""

    name: str
    model: Any
    args: tuple[Any, ...] | None  # None for a model alone
    kwargs: dict[str, Any]

    def call(self, command: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call."""
        if self.args is None:
            raise CommandError.no_inputs(target=self.name, command=command)
        return self.args, self.kwargs


@contextmanager
def load(target: str) -> Iterator[Target]:
    """Import the module of a target with its folder on the path, and call the function."""
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise CommandError.target_form(target=target)
    path = Path(where) if where.endswith(".py") else None
    folder = str(Path.cwd() if path is None else path.resolve().parent)
    before, known = list(sys.path), set(sys.modules)
    sys.path.insert(0, folder)
    try:
        module = _import_name(where) if path is None else _import_file(path)
        yield _target(target, _call(target, _function(module, where, name)))
    finally:
        sys.path[:] = before
        if path is not None and path.stem not in known:
            sys.modules.pop(path.stem, None)


def _import_name(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise CommandError.no_module(name=name, why=str(error)) from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise CommandError.no_module(name=str(path), why="there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # Dynamo looks up the module of a function
    spec.loader.exec_module(module)
    return module


def _function(module: ModuleType, where: str, name: str) -> Any:
    function = getattr(module, name, None)
    if not callable(function):
        functions = {known: v for known, v in vars(module).items() if inspect.isfunction(v)}
        own = [known for known, v in functions.items() if v.__module__ == module.__name__]
        raise CommandError.no_function(module=where, name=name, known=sorted(own))
    return function


def _call(target: str, function: Any) -> Any:
    """Call a function that takes nothing; a decorator may pass what the inner function takes."""
    inner = original_of(function)
    try:
        inner = inner.forward if isinstance(inner, nn.Module) else inner
        signature = inspect.signature(inner, follow_wrapped=False)
    except ValueError:  # it is not written in Python
        return function()
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError.takes_arguments(target=target, signature=str(signature)) from error
    return function()


def _target(name: str, result: Any) -> Target:
    """Return the target that a result of the function stands for."""
    model: Any = result
    args: Any = None
    kwargs: Any = {}
    wrong = ""
    if isinstance(result, dict):
        if "model" not in result or set(result) - {"model", "args", "kwargs"}:
            wrong = f"a dict with the keys {sorted(result)}"
        model, kwargs = result.get("model"), result.get("kwargs", {})
        args = result.get("args", () if "kwargs" in result else None)
    elif isinstance(result, tuple) and len(result) not in (2, 3):
        wrong = f"a tuple of {len(result)}"
    elif isinstance(result, tuple):
        model, args, kwargs = (*result, {})[:3]
    args = (args,) if isinstance(args, torch.Tensor) else args
    if args is not None and not isinstance(args, (tuple, list)):
        wrong = wrong or f"args of type {type(args).__name__}"
    if not isinstance(kwargs, dict):
        wrong = wrong or f"kwargs of type {type(kwargs).__name__}"
    if model is None or isinstance(model, (str, int, float, torch.Tensor)):
        wrong = wrong or f"a model of type {type(model).__name__}"
    if wrong:
        raise CommandError.bad_result(target=name, found=wrong)
    return Target(name, model, None if args is None else tuple(args), kwargs)


# ---------------------------------------------------------------- commands on a model


def _explain(options: argparse.Namespace) -> int:
    with load(options.target) as target:
        args, kwargs = target.call("explain")
        result = explain(target.model, *args, config=_config(options, target), **kwargs)
    return _show(options, result, bool(result.breaks))


def _doctor(options: argparse.Namespace) -> int:
    with load(options.target) as target, torch.no_grad():
        config = _config(options, target)
        args, kwargs = ((), {}) if config is None and target.args is None else target.call("doctor")
        result = doctor(target.model, *args, config=config, **kwargs)
    return _show(options, result, not result.ok)


def _verify(options: argparse.Namespace) -> int:
    with load(options.target) as target:
        args, kwargs = target.call("verify")
        inputs: Any = check_arguments(target.model, args, kwargs) if kwargs else args
        config = _config(options, target, recorded=True)
        tolerance = {"rtol": options.rtol, "atol": options.atol}
        result = verify(target.model, inputs, config=config, sets=options.sets, **tolerance)
    return _show(options, result, not result.ok)


def _report(options: argparse.Namespace) -> int:
    with load(options.target) as target, torch.inference_mode():
        config = _config(options, target, recorded=True)
        model = target.model if config is None else compile(target.model, config)
        if target.args is not None or config is not None:
            args, kwargs = target.call("report")
            for _ in range(options.calls):
                model(*args, **kwargs)
        result = report(model)
    text = f"{result.title}:\n{result.coverage}"
    return _show(options, result, not result.counters.replays, text)


# By name: what runs, the help, an example, and the cause of exit status 1.
_MODEL_COMMANDS = {
    "explain": (
        _explain,
        "what would be split where, and why; runs nothing",
        "model.py:make --set splitting_ops=mylib::attend --html split.html",
        "a graph break",
    ),
    "doctor": (
        _doctor,
        "what CUDA graphs cannot hold, with the line and the fix",
        "mylib.models:decoder --json",
        "a finding",
    ),
    "verify": (
        _verify,
        "eager against replayed, on several inputs",
        "model.py:make --set compiler=aot --sets 5",
        "a difference",
    ),
    "report": (
        _report,
        "one page: split, graphs, coverage, timeline, settings",
        "model.py:make --html report.html",
        "no replay",
    ),
}


def _env(options: argparse.Namespace) -> int:
    result = environment()
    print(json.dumps(result, indent=2) if options.json else environment_text(result))
    return 0


def _show(options: argparse.Namespace, result: Any, bad: bool, text: str | None = None) -> int:
    """Write the page and print the result as text or JSON; ``text`` replaces its own."""
    if options.html:
        try:
            result.to_html(options.html)
        except OSError as error:
            why = error.strerror or str(error)
            raise CommandError.no_page(path=str(options.html), why=why) from error
    if options.json:
        print(result.to_json())
    else:
        print(result if text is None else text)
        if options.html:
            print(f"page: {options.html}")
    return int(bad)


def _config(
    options: argparse.Namespace, target: Target, recorded: bool = False
) -> CompilationConfig | None:
    """Return the settings of a model that is to be compiled; None of one that is."""
    pairs = [pair.partition("=") for pair in options.set]
    for pair, (key, equals, _) in zip(options.set, pairs, strict=True):
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
    default = config.origins["capture_device"] == "default"
    if recorded and default and config.cudagraph_mode and _on_cpu(target):
        return CompilationConfig.resolve(config, options={"capture_device": "host"})
    return config


def _is_compiled(model: Any) -> bool:
    """Return whether a target has settings of its own, as managers do."""
    if isinstance(model, CUDAGraphWrapper) or handle_of(model) is not None:
        return True
    return not isinstance(model, nn.Module) and not inspect.isroutine(model)


def _on_cpu(target: Target) -> bool:
    module = getattr(target.model, "__self__", target.model)
    weights = [*module.parameters()] if isinstance(module, nn.Module) else []
    tensors = [*weights, *compat.tree_tensors((target.args, target.kwargs))]
    return all(tensor.device.type == "cpu" for tensor in tensors)


# ---------------------------------------------------------------- commands on the cache

_KEY_LENGTH = 12  # characters of a key that are printed
_FACT_LENGTH = 40  # lines of a fact that are printed


def _list(options: argparse.Namespace) -> int:
    store = _store(options)
    entries = sorted(store.entries(), key=lambda entry: -entry.created)
    rows = [("key", "kind", "bytes", "created", "what", "line")]
    for entry in entries:
        created = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.created))
        size, line = str(entry.size), entry.notes.get("line", "")
        rows.append((_short(entry), entry.kind, size, created, _what(entry), line))
    if entries:
        print(*text_table(rows), sep="\n")
    total = sum(entry.size for entry in entries)
    print(f"{len(entries)} entries, {total} bytes in {store.folder}")
    return 0


def _clear(options: argparse.Namespace) -> int:
    store = _store(options)
    entries = list(store.entries())
    chosen = [_find(store, entries, prefix) for prefix in options.keys] if options.keys else entries
    removed = [entry for entry in chosen if store.remove(entry)]
    for entry in removed:
        line = entry.notes.get("line", "")
        print(f"removed {entry.kind} {_short(entry)}  {line}".rstrip())
    print(f"{len(removed)} entries removed from {store.folder}")
    if not options.keys:
        print(f"{store.remove_rubbish()} damaged or half written files removed")
        print(f"{store.remove_work()} folders of kernels removed")
    for entry in chosen:
        if entry not in removed:
            print(f"could not remove {entry.kind} {_short(entry)}")
    return 0


def _why(options: argparse.Namespace) -> int:
    """Print what an entry depends on, or in what two entries differ."""
    store = _store(options)
    entries = list(store.entries())
    one = _find(store, entries, options.key)
    if options.other is None:
        print(f"{one.kind} {one.key}")
        _print_facts("depends on", one.facts, options.full)
        _print_facts("notes", one.notes, options.full)
        return 0
    other = _find(store, entries, options.other)
    if one.kind != other.kind:
        print(f"kind: {one.kind}, {other.kind}")
    equal = []
    for name in dict.fromkeys([*one.facts, *other.facts]):
        if one.facts.get(name) == other.facts.get(name):
            equal.append(name)
        else:
            _print_difference(name, one.facts.get(name, ""), other.facts.get(name, ""))
    print(f"equal: {', '.join(equal) or '(none)'}")
    return 0


def _store(options: argparse.Namespace) -> Store:
    folder = options.dir or cache_folder(CompilationConfig())
    if folder is None:
        raise CommandError.caching_is_off()
    return Store(folder)


def _find(store: Store, entries: Sequence[Entry], prefix: str) -> Entry:
    """Return the entry whose key starts with a prefix."""
    matching = [entry for entry in entries if entry.key.startswith(prefix)]
    if not matching:
        raise CommandError.unknown_entry(prefix=prefix, folder=str(store.folder))
    if len(matching) > 1:
        keys = [entry.key[:16] for entry in matching]
        raise CommandError.ambiguous_entry(prefix=prefix, keys=keys)
    return matching[0]


def _short(entry: Entry) -> str:
    return entry.key[:_KEY_LENGTH]


def _what(entry: Entry) -> str:
    """Return the number of ops, the compiler and the version of torch."""
    calls = entry.facts.get("graph", "").count(" -> ")
    what = [f"{calls} ops"] if calls else []
    what += [entry.facts[name].split()[0] for name in ("compiler", "torch") if name in entry.facts]
    return ", ".join(what)


def _print_facts(title: str, facts: Mapping[str, str], full: bool) -> None:
    print(f"{title}:")
    for name, text in facts.items():
        lines = text.splitlines()
        if len(lines) <= 1:
            print(f"  {name}: {text}")
            continue
        shown = lines if full else lines[:_FACT_LENGTH]
        print(f"  {name}:", *shown, sep="\n    ")
        if len(shown) < len(lines):
            print(f"    ... and {len(lines) - len(shown)} more lines (--full)")


def _print_difference(name: str, one: str, other: str) -> None:
    lines, others = one.splitlines(), other.splitlines()
    if max(len(lines), len(others)) <= 1:
        print(f"{name}: {one or '(none)'}, {other or '(none)'}")
    else:
        diff = difflib.unified_diff(lines, others, lineterm="", n=1)
        print(f"{name}:", *list(diff)[2:], sep="\n  ")


# ---------------------------------------------------------------- the program


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the program."""
    parser = argparse.ArgumentParser(
        prog="cgcompile",
        description="See what cgcompile does to a model. Also: python -m cgcompile.",
        epilog="cgcompile COMMAND --help tells more, with an example.",
    )
    parser.add_argument("--traceback", action="store_true", help="of an error, show where it was")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_model_commands(commands)
    env = commands.add_parser(
        "env",
        help="versions, machine, cache and settings, for an issue",
        description="Versions, machine, cache and settings: a text to paste into an issue.",
        epilog="Example: cgcompile env --json",
    )
    env.add_argument("--json", action="store_true", help="as JSON, not as text")
    env.set_defaults(run=_env)
    _add_cache_commands(commands.add_parser("cache", help="what is kept on disk"))
    return parser


def _add_model_commands(commands: Any) -> None:
    for name, (run, about, example, bad) in _MODEL_COMMANDS.items():
        replays = name in ("verify", "report")
        notes = [TARGET, CPU] if replays else [TARGET.rstrip()]
        notes += [STATUS.format(bad), f"Example: cgcompile {name} {example}"]
        parser = commands.add_parser(
            name,
            help=about,
            description=f"{about[0].upper()}{about[1:]}.",
            epilog="\n".join(notes),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(run=run)
        parser.add_argument("target", metavar="TARGET", help="what makes the model; see below")
        help = "a setting, as in options of torch.compile; may be repeated"
        parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=help)
        parser.add_argument("--json", action="store_true", help="as JSON, not as text")
        parser.add_argument("--html", type=_page, metavar="PATH", help="write a page there as well")
        if name == "verify":
            parser.add_argument(
                "--sets", type=_count, default=3, help="sets of inputs (default: 3)"
            )
            parser.add_argument("--rtol", type=float, help="relative tolerance; left out: by dtype")
            parser.add_argument("--atol", type=float, help="absolute tolerance; left out: by dtype")
        if name == "report":
            help = "calls of the model before the report (default: 4)"
            parser.add_argument("--calls", type=_count, default=4, help=help)


def _add_cache_commands(cache: argparse.ArgumentParser) -> None:
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    folder = argparse.ArgumentParser(add_help=False)
    help = "the folder; left out: that of CGCOMPILE_CACHE_DIR, or the default"
    folder.add_argument("--dir", type=Path, help=help)
    listing = actions.add_parser("list", parents=[folder], help="one line per entry")
    listing.set_defaults(run=_list)
    clear = actions.add_parser("clear", parents=[folder], help="remove entries at once")
    clear.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys; none: all")
    clear.set_defaults(run=_clear)
    help = "what an entry depends on, or in what two entries differ"
    why = actions.add_parser("why", parents=[folder], help=help)
    why.add_argument("key", metavar="KEY", help="the beginning of a key")
    why.add_argument("other", metavar="KEY2", nargs="?", help="of another one")
    help = f"facts of more than {_FACT_LENGTH} lines too"
    why.add_argument("--full", action="store_true", help=help)
    why.set_defaults(run=_why)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _page(text: str) -> Path:
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; expected the path of a file")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of this process or of ``arguments``, and return the exit status.

    The status is 0; 1 after a finding, a difference or an error, which was printed; 2 after words
    that cannot be, such as a target, a setting or a key that does not exist.
    """
    options = command_line().parse_args(arguments)
    try:
        status: int = options.run(options)
        return status
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 0
    except (Exception, SystemExit) as error:  # also of the user's code, whose statuses are not ours
        print(f"cgcompile: {_error_text(error)}", file=sys.stderr)
        if options.traceback:
            traceback.print_exception(error)
        return 2 if isinstance(error, (CommandError, ConfigError)) else 1


def _error_text(error: BaseException) -> str:
    """Return the message of an error, and where it was raised if it is not ours."""
    if isinstance(error, CGCompileError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"\n  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {error}{where}\n  --traceback shows all of it."


if __name__ == "__main__":
    sys.exit(main())
