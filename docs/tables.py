"""Sphinx directive ``generated``: tables of settings, reasons, errors and commands, from the code."""

import argparse
import inspect
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import cgcompile
from cgcompile import errors
from cgcompile.cli import command_line
from cgcompile.errors import Template


def settings() -> Iterable[str]:
    """Return a definition of each field of :class:`cgcompile.CompilationConfig`."""
    for field in fields(cgcompile.CompilationConfig):
        name = f"CGCOMPILE_{field.name.upper()}"
        yield f"(setting-{field.name})=\n## `{field.name}`\n"
        yield f"Default: `{cgcompile.CompilationConfig.default(field.name)!r}`. Environment: `{name}`.\n"
        yield f"{field.metadata['help']}\n"


def reasons() -> Iterable[str]:
    """Return a section for each :class:`cgcompile.Reason`."""
    for reason in cgcompile.Reason:
        yield f"(reason-{reason.value})=\n## `{reason.value}`\n\n{reason.text}\n\n{reason.remedy}\n"


def error_classes() -> list[type[errors.CGCompileError]]:
    found = [item for item in vars(errors).values() if inspect.isclass(item)]
    return [item for item in found if issubclass(item, errors.CGCompileError)]


def error_pages() -> Iterable[str]:
    """Return a section for each class of errors, with its messages."""
    for kind in error_classes():
        yield f"(error-{kind.__name__})=\n## `{kind.__name__}`\n\n{inspect.getdoc(kind) or ''}\n"
        for name, value in vars(kind).items():
            if isinstance(value, Template):
                yield f"* `{name}`: {_plain(value._text)}"
        yield ""


def _plain(text: str) -> str:
    """Return the text of a template with its fields as ``<name>``."""
    parts = []
    for literal, name, _, _ in string.Formatter().parse(text):
        parts.append(re.sub(r"([<>*_`|])", r"\\\1", " ".join(literal.split())))
        parts.append(f" *{name}* " if name else "")
    return re.sub(r" +", " ", "".join(parts)).strip()


def commands() -> Iterable[str]:
    """Return the help of each command."""
    parser = command_line()
    (actions,) = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for name, command in actions.choices.items():
        yield f"(command-{name})=\n## `cgcompile {name}`\n\n```text\n{command.format_help()}```\n"


GENERATORS: dict[str, Callable[[], Iterable[str]]] = {
    "settings": settings,
    "reasons": reasons,
    "errors": error_pages,
    "command_line": commands,
}


class Generated(SphinxDirective):
    """Insert the output of a generator as MyST."""

    required_arguments = 1
    has_content = False

    def run(self) -> list[nodes.Node]:
        text = "\n".join(GENERATORS[self.arguments[0]]())
        return self.parse_text_to_nodes(text, allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("generated", Generated)
    return {"parallel_read_safe": True}
