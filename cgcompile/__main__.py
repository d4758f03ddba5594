"""The command line: ``python -m cgcompile``, or ``cgcompile`` where the package is installed."""

import argparse
import difflib
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from cgcompile.config import CompilationConfig
from cgcompile.errors import CGCompileError, CommandError, ConfigError
from cgcompile.observe.commands import Answer, add_commands
from cgcompile.piecewise.store import Entry, Store, cache_folder

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
    given = command_line().parse_args(arguments)
    try:
        answer = given.run(given)
        for line in answer.lines:
            print(line)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 0
    except SystemExit as error:  # of the user's code, whose statuses are not ours
        print(f"cgcompile: {_told(error)}", file=sys.stderr)
        if given.traceback:
            traceback.print_exception(error)
        return 1
    except Exception as error:  # of the user's code as well
        if given.traceback:
            raise
        print(f"cgcompile: {_told(error)}", file=sys.stderr)
        return 2 if isinstance(error, (CommandError, ConfigError)) else 1
    return int(answer.status)


def _told(error: BaseException) -> str:
    """An error in words; of one that is not ours, where it comes from."""
    if isinstance(error, CGCompileError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f"\n  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    )
    return f"{type(error).__name__}: {error}{where}\n  --traceback shows all of it."


def command_line() -> argparse.ArgumentParser:
    """All words of the program."""
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
    listing.set_defaults(run=lambda given: Answer(_list(given)))
    clear = actions.add_parser("clear", parents=[folder], help="remove entries; asks nothing")
    clear.add_argument("keys", nargs="*", metavar="KEY", help="beginnings of keys; none: all")
    clear.set_defaults(run=lambda given: Answer(_clear(given)))
    why = actions.add_parser(
        "why", parents=[folder], help="what an entry depends on, or in what two entries differ"
    )
    why.add_argument("key", metavar="KEY", help="the beginning of a key")
    why.add_argument("other", metavar="KEY2", nargs="?", help="of another one")
    why.add_argument("--full", action="store_true", help=f"facts of more than {_LINES} lines too")
    why.set_defaults(run=lambda given: Answer(_why(given)))
    return parser


# ---------------------------------------------------------------- the actions


def _list(given: argparse.Namespace) -> Iterator[str]:
    store = _store(given)
    entries = sorted(store.entries(), key=lambda each: -each.created)
    rows = [("key", "kind", "bytes", "age", "what", "line")]
    rows += [
        (
            each.key[:_SHOWN],
            each.kind,
            str(each.size),
            _age(time.time() - each.created),
            _what(each),
            each.notes.get("line", ""),
        )
        for each in entries
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows if entries else []:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    total = sum(each.size for each in entries)
    yield f"{len(entries)} entries, {total} bytes in {store.folder}"


def _clear(given: argparse.Namespace) -> Iterator[str]:
    store = _store(given)
    entries = list(store.entries())
    wanted = [_find(store, entries, prefix) for prefix in given.keys] if given.keys else entries
    removed = [each for each in wanted if store.remove(each)]
    for each in removed:
        yield f"removed {each.kind} {each.key[:_SHOWN]}  {each.notes.get('line', '')}".rstrip()
    yield f"{len(removed)} entries removed from {store.folder}"
    if not given.keys:
        yield f"{store.remove_rubbish()} damaged or half written files removed"
        yield f"{store.remove_work()} folders of kernels removed"
    kept = [each for each in wanted if each not in removed]
    for each in kept:
        yield f"could not remove {each.kind} {each.key[:_SHOWN]}"


def _why(given: argparse.Namespace) -> Iterator[str]:
    store = _store(given)
    entries = list(store.entries())
    one = _find(store, entries, given.key)
    if given.other is None:
        yield f"{one.kind} {one.key}"
        for title, rows in (("depends on", one.facts), ("notes", one.notes)):
            yield f"{title}:"
            for name, text in rows.items():
                yield from _fact(name, text, given.full)
        return
    other = _find(store, entries, given.other)
    names = dict.fromkeys([*one.facts, *other.facts])
    differing = [name for name in names if one.facts.get(name) != other.facts.get(name)]
    if one.kind != other.kind:
        yield f"kind: {one.kind}, {other.kind}"
    for name in differing:
        yield from _difference(name, one.facts.get(name, ""), other.facts.get(name, ""))
    same = [name for name in names if name not in differing]
    yield f"equal: {', '.join(same) or '(none)'}"


# ---------------------------------------------------------------- their parts


def _store(given: argparse.Namespace) -> Store:
    folder = given.dir or cache_folder(CompilationConfig())
    if folder is None:
        raise CommandError.caching_is_off()
    return Store(folder)


def _find(store: Store, entries: Sequence[Entry], prefix: str) -> Entry:
    found = [each for each in entries if each.key.startswith(prefix)]
    if not found:
        raise CommandError.unknown_entry(prefix=prefix, folder=str(store.folder))
    if len(found) > 1:
        raise CommandError.ambiguous_entry(
            prefix=prefix, keys=[each.key[: max(_SHOWN, 16)] for each in found]
        )
    return found[0]


def _what(entry: Entry) -> str:
    """What was compiled, in a few words."""
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
