"""Names that a reader knows for the inputs of a graph: ``model.layers.0.weight``, ``x.size()[0]``.

Dynamo calls an input ``L['self']._modules['model']._parameters['weight']``; printed tables,
messages and generated code use the dotted form that the user would write.
"""

import keyword
import re

from torch import fx

from cgcompile import compat

_CONTAINERS = re.compile(r"\._(?:modules|parameters|buffers)\[")
_KEY = re.compile(r"\['([^']*)'\]")
_INDEX = re.compile(r"\[(\d+)\]")


def dotted_source(placeholder: fx.Node) -> str | None:
    """Where the caller has an input, in dotted form; None if Dynamo did not make the graph."""
    source = compat.source_name(placeholder)
    if source is None:
        return None
    text = re.sub(r"^[LG]\['([^']*)'\]", r"\1", source)
    text = _KEY.sub(r".\1", _CONTAINERS.sub("[", text))
    is_size = re.search(r"\.(?:size|stride)\(\)\[\d+\]$", text)
    tail = is_size.group() if is_size else ""
    head = text[: len(text) - len(tail)]
    return _INDEX.sub(r".\1", head).removeprefix("self.") + tail


def identifier(text: str, taken: set[str]) -> str:
    """A Python identifier for ``text`` that is not in ``taken``, which it is added to."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    if name[0].isdigit() or keyword.iskeyword(name):
        name = f"_{name}"
    unique, number = name, 1
    while unique in taken:
        unique, number = f"{name}_{number}", number + 1
    taken.add(unique)
    return unique
