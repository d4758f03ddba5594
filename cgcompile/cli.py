"""The command line: ``python -m cgcompile``, or ``cgcompile`` where the package is installed.

Each command is a function: its docstring is the help, its parameters are the words, and it returns
the exit status. Commands with a :data:`TARGET` import and call the function that makes the model.
"""

import argparse
import difflib
import importlib
import importlib.util
import inspect
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from json import dumps
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import torch
from torch import nn

from cgcompile import debug
from cgcompile.backend import handle_of
from cgcompile.boundaries import Boundaries
from cgcompile.compile import compile
from cgcompile.config import CompilationConfig
from cgcompile.counts import text_table
from cgcompile.debug.compare import Call
from cgcompile.debug.environment import environment, environment_text, setting_meanings
from cgcompile.debug.errors import CommandError
from cgcompile.debug.explain import settings_of
from cgcompile.debug.output import plain, wrapped
from cgcompile.debug.subject import original_of, with_recorder
from cgcompile.errors import BoundaryError, CGCompileError, ConfigError
from cgcompile.graphs.wrapper import CUDAGraphWrapper
from cgcompile.pieces.cache import Entry, Store, cache_folder
from cgcompile.reasons import Reason
from cgcompile.torch_compat import torch_ops

TARGET = """\
TARGET is module:function or path/to/file.py:function. The function takes nothing and returns
  (model, args)           args: a tuple, or one tensor
  (model, args, kwargs)
  {"model": ..., "args": ..., "kwargs": ...}
  a compiled model or a manager that has run, alone (report and doctor)
CPU tensors are recorded by the CPU recorder, unless capture_device is set.

Exits with 0; with 1 after an error; with 2 for words that cannot be carried out.
"""


# ---------------------------------------------------------------- targets


class Target(NamedTuple):
    """What the function of a target returned."""

    name: str
    model: Any
    args: tuple[Any, ...] | None  # None for a model without inputs
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


# ---------------------------------------------------------------- words


class Word(NamedTuple):
    """How a parameter of a command is written; the second part of its ``Annotated`` type."""

    help: str
    metavar: str | None = None
    read: Callable[[str], Any] = str


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def _path(text: str) -> Path:
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


On = Annotated[str, Word("the function that makes the model; see below", "TARGET")]
Set = Annotated[
    list[str],
    Word("a setting, as in options of torch.compile; may be repeated", "KEY=VALUE"),
]
Json = Annotated[bool, Word("print JSON instead of text")]
Html = Annotated[Path | None, Word("write an HTML page to this file, too", "PATH", _path)]
Calls = Annotated[int, Word("calls of the model", None, _whole)]
Rtol = Annotated[float | None, Word("relative tolerance; without it: by dtype", None, float)]
Atol = Annotated[float | None, Word("absolute tolerance; without it: by dtype", None, float)]
Bisect = Annotated[bool, Word("find the smallest set of pieces, or the pass, that is wrong")]
Folder = Annotated[
    Path | None,
    Word("the folder; without it: that of CGCOMPILE_CACHE_DIR, or the default", "PATH", Path),
]


# ---------------------------------------------------------------- commands on a model


def explain(target: On, *, set: Set, json: Json = False, html: Html = None) -> int:
    """Show what would be split where, and why; the model does not run.

    Exits with 1 after a graph break, too.
    Example: cgcompile explain model.py:make --set splitting_ops=mylib::attend --html split.html
    """
    with load(target) as loaded:
        args, kwargs = loaded.call("explain")
        result = debug.explain(loaded.model, *args, config=_config(set, loaded), **kwargs)
    return _show(result, bool(result.breaks), json, html)


def verify(
    target: On,
    *,
    set: Set,
    json: Json = False,
    html: Html = None,
    sets: Annotated[int, Word("sets of inputs", None, _whole)] = 3,
    rtol: Rtol = None,
    atol: Atol = None,
    bisect: Bisect = False,
) -> int:
    """Compare eager runs with replays on several sets of inputs.

    Exits with 1 after a difference or without a replay, too.
    Example: cgcompile verify model.py:make --set compiler=aot --sets 5
    """
    with load(target) as loaded:
        args, kwargs = loaded.call("verify")
        config = _config(set, loaded)
        result = debug.verify(
            loaded.model,
            *args,
            config=config,
            sets=sets,
            rtol=rtol,
            atol=atol,
            bisect=bisect,
            **kwargs,
        )
    return _show(result, not result.ok, json, html)


def doctor(target: On, *, set: Set, json: Json = False, html: Html = None) -> int:
    """Find what CUDA graphs cannot hold, with the line and the fix.

    Exits with 1 after a finding, too.
    Example: cgcompile doctor mylib.models:decoder --json
    """
    with load(target) as loaded, torch.no_grad():
        config = _config(set, loaded)
        args, kwargs = ((), {}) if config is None and loaded.args is None else loaded.call("doctor")
        result = debug.doctor(loaded.model, *args, config=config, **kwargs)
    return _show(result, not result.ok, json, html)


def report(
    target: On,
    *,
    set: Set,
    json: Json = False,
    html: Html = None,
    calls: Calls = 4,
    speed: Annotated[
        bool,
        Word("time eager and compiled calls (recorded CPU tensors are slower than eager)"),
    ] = False,
    trace: Annotated[
        Path | None,
        Word("write the captures to this file, for ui.perfetto.dev", "PATH", _path),
    ] = None,
) -> int:
    """Show on one page: verdict, batches, memory, split, captures, settings.

    Exits with 1 without a replay, too.
    Example: cgcompile report model.py:make --html report.html
    """
    with ExitStack() as stack:
        with debug.profile() as measured:
            ran = _ran(target, set, "report", calls, must_call=speed)
            model, call = stack.enter_context(ran)
        seconds = _speed(model, *call) if speed else None
        result = debug.report(model, speed=seconds, profile=measured)
        if trace:
            debug.timeline(model).to_trace(trace)
    return _show(result, not result.counters.replays, json, html)


def profile(target: On, *, set: Set, json: Json = False, calls: Calls = 4) -> int:
    """Measure the host time of each segment of replayed steps.

    Exits with 1 without a replay, too.
    Example: cgcompile profile model.py:make --calls 100
    """
    with debug.profile() as result, _ran(target, set, "profile", calls, must_call=True):
        pass
    return _show(result, not result.steps, json, None)


@contextmanager
def _ran(
    target: str, set: list[str], command: str, calls: int, *, must_call: bool
) -> Iterator[tuple[Any, Call]]:
    """Give a model that has run, and its inputs: called unless it is alone and need not be."""
    with load(target) as loaded, torch.inference_mode():
        config = _config(set, loaded, recorded=True)
        model = loaded.model if config is None else compile(loaded.model, config)
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if must_call or loaded.args is not None or config is not None:
            args, kwargs = loaded.call(command)
            for _ in range(calls):
                model(*args, **kwargs)
        yield model, (args, kwargs)


def _speed(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of an eager call and of one of the compiled model: medians of ten."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(24):  # in turns, under the same load; the first runs warm up
        compiled = bool(number % 2)
        start = time.perf_counter()
        (model if compiled else original_of(model))(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[compiled].append(time.perf_counter() - start)
    eager, replayed = (statistics.median(seconds[compiled][2:]) for compiled in (False, True))
    return eager, replayed


def _show(result: Any, bad: bool, json: bool, html: Path | None) -> int:
    """Write the page, print the result as text or JSON, and return the exit status."""
    if html is not None:
        try:
            result.to_html(html)
        except OSError as error:
            why = error.strerror or str(error)
            raise CommandError.no_page(path=str(html), why=why) from error
    print(result.to_json() if json else result)
    if html is not None and not json:
        print(f"page: {html}")
    return int(bad)


def _config(set: list[str], target: Target, recorded: bool = False) -> CompilationConfig | None:
    """Return the settings for a model; None if it is compiled already."""
    config = _config_of(set)
    if _is_compiled(target.model):
        if set:
            raise CommandError.settings_are_fixed(target=target.name)
        return None
    return with_recorder(config) if recorded and _on_cpu(target) else config


def _config_of(set: list[str]) -> CompilationConfig:
    """Return the settings of the environment, and of ``--set``."""
    pairs = [pair.partition("=") for pair in set]
    for pair, (key, equals, _) in zip(set, pairs, strict=True):
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
    tensors = [*weights, *torch_ops.tree_tensors((target.args, target.kwargs))]
    return all(tensor.device.type == "cpu" for tensor in tensors)


# ---------------------------------------------------------------- commands without a model


def settings(*, set: Set, json: Json = False) -> int:
    """List all settings: the value, where it comes from, and the meaning.

    Example: cgcompile settings --set compiler=aot
    """
    meanings = setting_meanings()
    rows = settings_of(_config_of(set))
    if json:
        facts = [{**row._asdict(), "meaning": meanings.get(row.name)} for row in rows]
        print(dumps(plain(facts), indent=2))
        return 0
    for name, value, origin in rows:
        meaning = wrapped("", meanings[name], 4) if meanings else []
        print(f"{name} = {value!r} ({origin})", *meaning, sep="\n")
    return 0


def env(*, json: Json = False) -> int:
    """Show versions, machine, cache and settings, for an issue.

    Example: cgcompile env --json
    """
    result = environment()
    print(dumps(result, indent=2) if json else environment_text(result))
    return 0


def reasons(
    names: Annotated[list[Reason], Word("the reasons; without it: all", "REASON", _reason)],
    *,
    json: Json = False,
) -> int:
    """Explain why steps run without a graph, and what to do.

    Example: cgcompile reasons warming host_sync
    """
    chosen = names or [*Reason]
    if json:
        facts = {
            reason.value: {"when": reason.when, "remedy": reason.remedy, "page": reason.page}
            for reason in chosen
        }
        print(dumps(facts, indent=2))
        return 0
    for reason in chosen:
        rows = {"  when": reason.when, "  remedy": reason.remedy, "  page": reason.page}
        lines = [line for label, text in rows.items() for line in wrapped(label, text, 10)]
        print(reason.value, *lines, sep="\n")
    return 0


# ---------------------------------------------------------------- commands on the cache

_KEY_LENGTH = 12  # characters of a key that are printed
_FACT_LENGTH = 40  # lines of a fact that are printed


def cache_list(
    path: Annotated[
        Path | None, Word("a saved model: list what it depends on", "PATH", Path)
    ] = None,
    *,
    dir: Folder = None,
) -> int:
    """List the entries, one line each, or what a saved model depends on."""
    if path is not None:
        from cgcompile.saved import contents

        facts, notes = contents(path)
        _print_facts("depends on", facts, True)
        _print_facts("has", notes, True)
        return 0
    store = _store(dir)
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


def cache_clear(
    keys: Annotated[list[str], Word("beginnings of keys; without it: all", "KEY")],
    *,
    dir: Folder = None,
) -> int:
    """Remove entries."""
    store = _store(dir)
    entries = list(store.entries())
    chosen = [_find(store, entries, prefix) for prefix in keys] if keys else entries
    removed = [entry for entry in chosen if store.remove(entry)]
    for entry in removed:
        line = entry.notes.get("line", "")
        print(f"removed {entry.kind} {_short(entry)}  {line}".rstrip())
    print(f"{len(removed)} entries removed from {store.folder}")
    if not keys:
        print(f"{store.remove_rubbish()} damaged or half written files removed")
        print(f"{store.remove_work()} folders of kernels removed")
    for entry in chosen:
        if entry not in removed:
            print(f"could not remove {entry.kind} {_short(entry)}")
    return 0


def cache_why(
    key: Annotated[str, Word("the beginning of a key", "KEY")],
    other: Annotated[str | None, Word("of a second key", "KEY2")] = None,
    *,
    dir: Folder = None,
    full: Annotated[bool, Word(f"print facts of more than {_FACT_LENGTH} lines, too")] = False,
) -> int:
    """Show what an entry depends on, or in what two entries differ."""
    store = _store(dir)
    entries = list(store.entries())
    one = _find(store, entries, key)
    if other is None:
        print(f"{one.kind} {one.key}")
        _print_facts("depends on", one.facts, full)
        _print_facts("notes", one.notes, full)
        return 0
    second = _find(store, entries, other)
    if one.kind != second.kind:
        print(f"kind: {one.kind}, {second.kind}")
    equal = []
    for name in dict.fromkeys([*one.facts, *second.facts]):
        if one.facts.get(name) == second.facts.get(name):
            equal.append(name)
        else:
            _print_difference(name, one.facts.get(name, ""), second.facts.get(name, ""))
    print(f"equal: {', '.join(equal) or '(none)'}")
    return 0


def _store(folder: Path | None) -> Store:
    folder = folder or cache_folder(CompilationConfig())
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

COMMANDS: Sequence[Callable[..., int]] = (
    explain,
    verify,
    doctor,
    report,
    profile,
    settings,
    env,
    reasons,
)
CACHE_COMMANDS: Mapping[str, Callable[..., int]] = {
    "list": cache_list,
    "clear": cache_clear,
    "why": cache_why,
}
REMOVED = {"bisect": "verify --bisect", "coverage": "report", "timeline": "report --trace PATH"}


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the program; signatures and docstrings of commands are its help."""
    parser = argparse.ArgumentParser(
        prog="cgcompile",
        description="See what cgcompile does to a model. Also: python -m cgcompile.",
        epilog="cgcompile COMMAND --help tells more, with an example.",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        _add_command(commands, command.__name__, command)
    cache = commands.add_parser("cache", help="List, clear or compare what is kept on disk")
    actions = cache.add_subparsers(required=True, metavar="ACTION")
    for name, command in CACHE_COMMANDS.items():
        _add_command(actions, name, command)
    return parser


def _add_command(commands: Any, name: str, command: Callable[..., int]) -> None:
    """Add a command: the docstring is its help, the parameters are its words."""
    about, _, notes = (inspect.getdoc(command) or "").partition("\n\n")
    parameters = inspect.signature(command).parameters
    parser = commands.add_parser(
        name,
        help=about.rstrip("."),
        description=about,
        epilog=TARGET + notes if "target" in parameters else notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=command)
    for parameter in parameters.values():
        kind, word = get_args(parameter.annotation)
        _add_word(parser, parameter, kind, word)


def _add_word(
    parser: argparse.ArgumentParser, parameter: inspect.Parameter, kind: Any, word: Word
) -> None:
    """Add a parameter of a command: an option if it is keyword-only."""
    repeated, has_default = get_origin(kind) is list, parameter.default is not parameter.empty
    if parameter.kind is not parameter.KEYWORD_ONLY:
        nargs = "*" if repeated else "?" if has_default else None
        parser.add_argument(
            parameter.name, nargs=nargs, metavar=word.metavar, type=word.read, help=word.help
        )
    elif kind is bool:
        parser.add_argument(f"--{parameter.name}", action="store_true", help=word.help)
    else:
        default = f" (default: {parameter.default})" if parameter.default and has_default else ""
        parser.add_argument(
            f"--{parameter.name}",
            action="append" if repeated else "store",
            default=parameter.default if has_default else [],
            metavar=word.metavar,
            type=word.read,
            help=word.help + default,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, of this process or of ``arguments``, and return the exit status.

    The status is 0; 1 after a finding, a difference or an error, which was printed; 2 after words
    that cannot be, such as a target, a setting or a key that does not exist.
    """
    words = sys.argv[1:] if arguments is None else arguments
    command = next((word for word in words if not word.startswith("-")), "")
    if command in REMOVED:
        error = CommandError.removed(command=command, instead=REMOVED[command])
        print(f"cgcompile: {error}", file=sys.stderr)
        return 2
    options = vars(command_line().parse_args(words))
    run, shows_traceback = options.pop("run"), options.pop("traceback")
    try:
        status: int = run(**options)
        return status
    except BrokenPipeError:  # the reader has closed the pipe
        sys.stderr.close()
        return 0
    except (Exception, SystemExit) as error:  # also of the user's code, whose statuses are not ours
        print(f"cgcompile: {_error_text(error)}", file=sys.stderr)
        if shows_traceback:
            traceback.print_exception(error)
        return 2 if isinstance(error, (CommandError, ConfigError)) else 1


def _error_text(error: BaseException) -> str:
    """Return the message of an error; of errors of other packages, also where it was raised."""
    if isinstance(error, CGCompileError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f"\n  at {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)
    return f"{type(error).__name__}: {error}{where}\n  --traceback shows all of it."


if __name__ == "__main__":
    sys.exit(main())
