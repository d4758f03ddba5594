"""The command line: ``python -m cgcompile``, or ``cgcompile`` where the package is installed.

The commands in :data:`_MODEL_COMMANDS` take a :data:`TARGET` that makes a model. ``env`` describes
this process, ``settings`` and ``reasons`` what there is, ``cache`` the compiled pieces on disk. The
rule: a command prints its result and returns the exit status.
"""

import argparse
import difflib
import importlib
import importlib.util
import inspect
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
from cgcompile.debug.bisect import bisect
from cgcompile.debug.compare import Call
from cgcompile.debug.coverage import coverage
from cgcompile.debug.doctor import doctor
from cgcompile.debug.environment import environment, environment_text, setting_meanings
from cgcompile.debug.explain import explain, settings_of
from cgcompile.debug.output import plain, wrapped
from cgcompile.debug.profile import profile, timeline
from cgcompile.debug.report import report
from cgcompile.debug.subject import original_of, with_recorder
from cgcompile.debug.verify import verify
from cgcompile.errors import BoundaryError, CGCompileError, CommandError, ConfigError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Entry, Store, cache_folder
from cgcompile.reasons import Reason
from cgcompile.serving.statistics import text_table

TARGET = """\
TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report, coverage, timeline and doctor)
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
    return _compare(options, "verify", verify)


def _bisect(options: argparse.Namespace) -> int:
    return _compare(options, "bisect", bisect)


def _compare(options: argparse.Namespace, command: str, function: Any) -> int:
    with load(options.target) as target:
        args, kwargs = target.call(command)
        chosen = {name: getattr(options, name) for name in ("sets", "rtol", "atol")}
        config = _config(options, target)
        result = function(target.model, *args, config=config, **chosen, **kwargs)
    return _show(options, result, not result.ok)


def _report(options: argparse.Namespace) -> int:
    with ExitStack() as stack:
        with profile() as measured:
            model, call = stack.enter_context(_ran(options, "report", calls=options.speed))
        speed = _speed(model, *call) if options.speed else None
        result = report(model, speed=speed, profile=measured)
    return _show(options, result, not result.counters.replays)


def _coverage(options: argparse.Namespace) -> int:
    with _ran(options, "coverage") as (model, _):
        result = coverage(model)
    return _show(options, result, not result.counters.replays)


def _timeline(options: argparse.Namespace) -> int:
    with _ran(options, "timeline") as (model, _):
        result = timeline(model)
    if options.trace:
        result.to_trace(options.trace)
    return _show(options, result, all(record.why is not None for record in result))


def _profile(options: argparse.Namespace) -> int:
    with profile() as result, _ran(options, "profile", calls=True):
        pass
    return _show(options, result, not result.steps)


@contextmanager
def _ran(
    options: argparse.Namespace, command: str, *, calls: bool = False
) -> Iterator[tuple[Any, Call]]:
    """Give a model that has run, and its inputs: called unless it is alone and need not be."""
    with load(options.target) as target, torch.inference_mode():
        config = _config(options, target, recorded=True)
        model = target.model if config is None else compile(target.model, config)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if calls or target.args is not None or config is not None:
            args, kwargs = target.call(command)
            for _ in range(options.calls):
                model(*args, **kwargs)
        yield model, (args, kwargs)


def _speed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of an eager call and of one of the compiled model: medians of ten."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(24):  # in turns, so that both meet the same machine; the first ones warm up
        compiled = bool(number % 2)
        start = time.perf_counter()
        (model if compiled else original_of(model))(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[compiled].append(time.perf_counter() - start)
    eager, replayed = (statistics.median(seconds[compiled][2:]) for compiled in (False, True))
    return eager, replayed


class _Command(NamedTuple):
    """A command on a model."""

    run: Callable[[argparse.Namespace], int]
    about: str
    example: str
    bad: str  # the cause of exit status 1
    options: tuple[str, ...] = ()  # names in _OPTIONS, beside those of all


_MODEL_COMMANDS = {
    "explain": _Command(
        _explain,
        "what would be split where, and why; runs nothing",
        "model.py:make --set splitting_ops=mylib::attend --html split.html",
        "a graph break",
        ("html",),
    ),
    "doctor": _Command(
        _doctor,
        "what CUDA graphs cannot hold, with the line and the fix",
        "mylib.models:decoder --json",
        "a finding",
        ("html",),
    ),
    "verify": _Command(
        _verify,
        "eager against replayed, on several inputs",
        "model.py:make --set compiler=aot --sets 5",
        "a difference",
        ("html", "sets", "rtol", "atol"),
    ),
    "bisect": _Command(
        _bisect,
        "which piece and op make a replay wrong",
        "model.py:make --set compiler=aot",
        "a difference",
        ("sets", "rtol", "atol"),
    ),
    "report": _Command(
        _report,
        "one page: verdict, batches, memory, split, timeline, settings",
        "model.py:make --html report.html",
        "no replay",
        ("html", "calls", "speed"),
    ),
    "coverage": _Command(
        _coverage,
        "which graph served which batches, and what had none",
        "model.py:make --calls 10",
        "no replay",
        ("calls",),
    ),
    "timeline": _Command(
        _timeline,
        "what was captured when, how long it took and how many bytes",
        "model.py:make --trace captures.json",
        "no capture",
        ("calls", "trace"),
    ),
    "profile": _Command(
        _profile,
        "host time of each segment of replayed steps",
        "model.py:make --calls 100",
        "no replay",
        ("calls",),
    ),
}


# ---------------------------------------------------------------- commands without a model


def _env(options: argparse.Namespace) -> int:
    result = environment()
    print(json.dumps(result, indent=2) if options.json else environment_text(result))
    return 0


def _settings(options: argparse.Namespace) -> int:
    settings = settings_of(_config_of(options))
    meanings = setting_meanings()
    if options.json:
        rows = [{**each._asdict(), "meaning": meanings.get(each.name)} for each in settings]
        print(json.dumps(plain(rows), indent=2))
        return 0
    for name, value, origin in settings:
        meaning = wrapped("", meanings[name], 4) if meanings else []
        print(f"{name} = {value!r} ({origin})", *meaning, sep="\n")
    return 0


def _reasons(options: argparse.Namespace) -> int:
    reasons = options.names or [*Reason]
    if options.json:
        facts = {
            reason.value: {"when": reason.when, "remedy": reason.remedy, "page": reason.page}
            for reason in reasons
        }
        print(json.dumps(facts, indent=2))
        return 0
    for reason in reasons:
        print(reason.value, *wrapped("  when", reason.when, 10), sep="\n")
        print(
            *wrapped("  remedy", reason.remedy, 10), *wrapped("  page", reason.page, 10), sep="\n"
        )
    return 0


def _show(options: argparse.Namespace, result: Any, bad: bool) -> int:
    """Write the page and print the result as text or JSON."""
    page = getattr(options, "html", None)
    if page:
        try:
            result.to_html(page)
        except OSError as error:
            why = error.strerror or str(error)
            raise CommandError.no_page(path=str(page), why=why) from error
    if options.json:
        print(result.to_json())
    else:
        print(result)
        if page:
            print(f"page: {page}")
    return int(bad)


def _config(
    options: argparse.Namespace, target: Target, recorded: bool = False
) -> CompilationConfig | None:
    """Return the settings of a model that is to be compiled; None of one that is."""
    config = _config_of(options)
    if _is_compiled(target.model):
        if options.set:
            raise CommandError.settings_are_fixed(target=target.name)
        return None
    return with_recorder(config) if recorded and _on_cpu(target) else config


def _config_of(options: argparse.Namespace) -> CompilationConfig:
    """Return the settings of the environment, and of ``--set``."""
    pairs = [pair.partition("=") for pair in options.set]
    for pair, (key, equals, _) in zip(options.set, pairs, strict=True):
        if not (key and equals):
            raise CommandError.bad_setting(given=pair)
    config = CompilationConfig.resolve(options={key: value for key, _, value in pairs})
    try:
        Boundaries(config.splitting_ops)
    except BoundaryError as error:
        raise CommandError.bad_splitting_ops(why=str(error)) from error
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
    for name, command in _MODEL_COMMANDS.items():
        _add_model_command(commands, name, command)
    env = _add_command(
        commands, "env", _env, "versions, machine, cache and settings, for an issue", "env --json"
    )
    settings = _add_command(
        commands, "settings", _settings, "all settings, what they do and where each comes from"
    )
    reasons = _add_command(
        commands,
        "reasons",
        _reasons,
        "why steps run without a graph, and what to do",
        "reasons warming host_sync",
    )
    _add_options(env, "json")
    _add_options(settings, "set", "json")
    _add_options(reasons, "json")
    help = "which ones; none: all"
    reasons.add_argument("names", nargs="*", metavar="REASON", type=_reason, help=help)
    _add_cache_commands(commands.add_parser("cache", help="what is kept on disk"))
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


def _reason(text: str) -> Reason:
    known = {reason.value: reason for reason in Reason}
    if text not in known:
        likely = difflib.get_close_matches(text, known, 1, 0.5) or known
        raise argparse.ArgumentTypeError(f"{text!r}; expected {' or '.join(likely)}")
    return known[text]


_OPTIONS: dict[str, dict[str, Any]] = {
    "set": {
        "action": "append",
        "default": [],
        "metavar": "KEY=VALUE",
        "help": "a setting, as in options of torch.compile; may be repeated",
    },
    "json": {"action": "store_true", "help": "as JSON, not as text"},
    "html": {"type": _page, "metavar": "PATH", "help": "write a page there as well"},
    "sets": {"type": _count, "default": 3, "help": "sets of inputs (default: 3)"},
    "rtol": {"type": float, "help": "relative tolerance; left out: by dtype"},
    "atol": {"type": float, "help": "absolute tolerance; left out: by dtype"},
    "calls": {"type": _count, "default": 4, "help": "calls of the model (default: 4)"},
    "speed": {
        "action": "store_true",
        "help": "time eager and compiled calls too (recorded CPU tensors are slower than eager)",
    },
    "trace": {
        "type": _page,
        "metavar": "PATH",
        "help": "write a trace there as well, for ui.perfetto.dev or chrome://tracing",
    },
}


def _add_options(parser: argparse.ArgumentParser, *names: str) -> None:
    for name in names:
        parser.add_argument(f"--{name}", **_OPTIONS[name])


def _add_command(
    commands: Any, name: str, run: Any, about: str, example: str = "", notes: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Add a command whose help ends with notes and an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n".join([*notes, f"Example: cgcompile {example or name}"]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def _add_model_command(commands: Any, name: str, command: _Command) -> None:
    runs = {"calls", "sets"} & {*command.options}
    notes = [TARGET, CPU] if runs else [TARGET.rstrip()]
    notes.append(STATUS.format(command.bad))
    example = f"{name} {command.example}"
    parser = _add_command(commands, name, command.run, command.about, example, notes)
    parser.add_argument("target", metavar="TARGET", help="what makes the model; see below")
    _add_options(parser, "set", "json", *command.options)


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
