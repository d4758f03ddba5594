"""The pages of the reference, written from the code when the documentation is built.

``conf.py`` makes a directive of :data:`PAGES`. The rule: what a page lists is read from the
package, and needs no Sphinx, so that the tests can check it.
"""

import argparse
import ast
import dataclasses
import enum
import importlib
import inspect
import itertools
import json
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from cgcompile import config, errors
from cgcompile.cli import command_line
from cgcompile.debug.bisect import Bisection
from cgcompile.debug.coverage import Coverage
from cgcompile.debug.doctor import Diagnosis
from cgcompile.debug.environment import setting_meanings
from cgcompile.debug.explain import Explanation
from cgcompile.debug.output import sentence
from cgcompile.debug.report import Overview
from cgcompile.debug.verify import Verification
from cgcompile.graphs.timeline import CaptureRecord
from cgcompile.reasons import Reason
from cgcompile.settings import ENV_PREFIX

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (
    "cgcompile",
    "cgcompile.debug",
    "cgcompile.serving",
    "cgcompile.encoder",
    "cgcompile.graphs",
    "cgcompile.passes",
)


# What commands and functions return as JSON.
RESULTS = (Explanation, Verification, Diagnosis, Coverage, Overview, CaptureRecord, Bisection)


def indented(text: str, columns: int = 3) -> str:
    """Return text with each line that is not empty indented."""
    return "".join(" " * columns + line if line.strip() else line for line in text.splitlines(True))


def literal(text: str, language: str = "text") -> str:
    """Return a block of code in reStructuredText."""
    return f".. code-block:: {language}\n\n{indented(text.rstrip())}\n"


def escaped(text: str) -> str:
    """Return text in which nothing is markup of reStructuredText."""
    return re.sub(r"([\\*`|_<>])", r"\\\1", text)


def markup(text: str) -> str:
    """Return text whose code between single backquotes is code in reStructuredText."""
    return re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", text)


# ---------------------------------------------------------------- pages


def public_names(room: str) -> Iterator[str]:
    """The documentation of each name of a room, from its docstring."""
    module = importlib.import_module(room)
    earlier = ROOMS[: ROOMS.index(room)]
    for name in module.__all__:
        value = getattr(module, name)
        homes = [each for each in earlier if name in importlib.import_module(each).__all__]
        if homes:
            yield f"``{name}``\n   The same object as :py:obj:`{homes[0]}.{name}`.\n"
        elif inspect.isclass(value):
            kind = "autoexception" if issubclass(value, Exception) else "autoclass"
            options = "" if value is Reason else "   :members:\n"  # reasons have a page
            options += "   :undoc-members:\n" if options and issubclass(value, enum.Enum) else ""
            yield f".. {kind}:: {room}.{name}\n{options}"
        elif inspect.isfunction(value):
            yield f".. autofunction:: {room}.{name}\n"
        else:
            yield f".. py:data:: {room}.{name}\n\n{indented(data_text(room, name))}\n"


def data_text(room: str, name: str) -> str:
    """Return the docstring below the assignment of a public name that is data."""
    folder = Path(importlib.import_module(room).__file__ or "").resolve().parent
    for path in sorted(folder.glob("*.py")):
        body = ast.parse(path.read_text()).body
        for node, after in itertools.pairwise(body):
            if isinstance(node, ast.Assign):
                targets = [ast.unparse(target) for target in node.targets]
            else:
                targets = [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []
            if name in targets and isinstance(after, ast.Expr):
                return inspect.cleandoc(ast.literal_eval(after.value))
    raise LookupError(f"{room}.{name} has no docstring below its assignment")


def settings() -> Iterator[str]:
    """Each setting with its default, variable and meaning."""
    table = (inspect.getdoc(config.CompilationConfig) or "").partition("Attributes:\n")[0]
    yield "Which combinations are possible:" + table.partition("are possible:")[2]
    meanings = setting_meanings()
    for spec in dataclasses.fields(config.CompilationConfig):
        default = spec.metadata["default"]
        shown = default.name if isinstance(default, enum.Enum) else repr(default)
        yield (
            f".. confval:: {spec.name}\n   :default: ``{shown}``\n\n"
            f"   {sentence(meanings[spec.name])}\n\n"
            f"   Environment: ``{ENV_PREFIX}{spec.name.upper()}``\n"
        )
    yield "Earlier names work for one release, with a ``FutureWarning``:\n"
    for name, earlier in config.EARLIER.items():
        yield f"* ``{name}``: now :confval:`{earlier.setting}`, such as ``{earlier.advice}``"


def reasons() -> Iterator[str]:
    """Each reason: when it is counted, and what to do."""
    for reason in Reason:
        yield (
            f".. reason:: {reason.value}\n\n   {markup(sentence(reason.when))}\n\n"
            f"   *Remedy:* {markup(reason.remedy)}.\n"
        )


def error_tree() -> Iterator[str]:
    """Each class of errors, with an example of each of its messages: the cause and the remedy."""
    examples = (ROOT / "tests" / "data" / "errors.txt").read_text()
    messages = re.findall(r"^(\w+)\.(\w+): (.*(?:\n  .*)*)", examples, re.MULTILINE)
    for name in dict.fromkeys([*vars(errors), *dir(errors)]):  # those of other folders last
        value = getattr(errors, name)
        if not (inspect.isclass(value) and issubclass(value, errors.CGCompileError)):
            continue
        yield f".. autoexception:: cgcompile.errors.{name}\n   :show-inheritance:\n"
        for owner, message, text in messages:
            if owner == name:
                cause, _, remedy = text.partition("\n")
                lines = [f"``{message}``", f"   {escaped(cause)}"]
                if remedy:
                    lines += ["", f"   *Remedy:* {escaped(' '.join(remedy.split()))}"]
                yield indented("\n".join(lines)) + "\n"


def commands(
    parser: argparse.ArgumentParser | None = None, above: tuple[str, ...] = ()
) -> Iterator[str]:
    """The help of the program and of each of its commands."""
    parser = parser or command_line()
    if above:
        yield f"{parser.prog}\n{'-' * len(parser.prog)}\n"
    yield literal(parser.format_help())
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield from commands(command, (*above, name))


def schemas() -> Iterator[str]:
    """The JSON Schema of what each command and ``to_json()`` write."""
    for result in RESULTS:
        name = result.__name__
        yield f".. _json-{name}:\n\n{name}\n{'-' * len(name)}\n"
        yield literal(json.dumps(schema(result), indent=2), "json")


# ---------------------------------------------------------------- JSON Schema

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def schema(kind: type) -> dict[str, Any]:
    """Return the JSON Schema of a result; classes inside of it are ``$defs``."""
    defs: dict[str, Any] = {}
    top = _record(kind, defs)
    return {"title": kind.__name__, **top} | ({"$defs": dict(sorted(defs.items()))} if defs else {})


def _record(kind: type, defs: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass or named tuple, of the fields that ``to_json`` writes."""
    hints = typing.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        fields = {
            field.name: hints[field.name] for field in dataclasses.fields(kind) if field.compare
        }
        for name in getattr(kind, "computed", ()):
            getter = getattr(kind, name)
            function = getattr(getter, "fget", None) or getattr(getter, "func", None)
            returned = typing.get_type_hints(function) if function else {"return": type(getter)}
            fields[name] = returned["return"]
    else:
        fields = {name: hints[name] for name in kind._fields}  # type: ignore[attr-defined]
    properties = {name: _schema_of(hint, defs) for name, hint in fields.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _schema_of(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of(part, defs) for part in parts]}
    if hint in _SIMPLE:
        # inf and NaN are null
        return {"type": ["number", "null"] if hint is float else _SIMPLE[hint]}
    kind = origin or hint
    if not isinstance(kind, type):
        return {}
    if issubclass(kind, enum.Enum):
        return {"enum": [m.value if isinstance(m.value, str) else m.name for m in kind]}
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        if kind.__name__ not in defs:
            defs[kind.__name__] = {}
            defs[kind.__name__] = _record(kind, defs)
        return {"$ref": f"#/$defs/{kind.__name__}"}
    if issubclass(kind, Mapping):
        values = _schema_of(parts[1], defs) if len(parts) == 2 else {}
        return {"type": "object", "additionalProperties": values}
    if kind is tuple and parts[-1:] != (Ellipsis,):
        return {"type": "array", "prefixItems": [_schema_of(part, defs) for part in parts]}
    if issubclass(kind, Collection):
        return {"type": "array", "items": _schema_of(parts[0], defs) if parts else {}}
    return {}


# ---------------------------------------------------------------- all pages

PAGES = {
    "settings": settings,
    "reasons": reasons,
    "errors": error_tree,
    "commands": commands,
    "schemas": schemas,
    **{room: lambda room=room: public_names(room) for room in ROOMS},
}
