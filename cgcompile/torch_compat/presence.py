"""Which of the private torch names that ``compat`` speaks of exist in this torch."""

import ast
import importlib
from collections.abc import Iterator
from importlib.resources import files

_UNDOCUMENTED = ("torch.fx.experimental", "functorch")


def private_names() -> dict[str, bool]:
    """Each private name of torch that this package reads, and whether it is there.

    Read from the source of this package, so that none is forgotten. Names that are there on CUDA
    builds alone are missing on others. Imports what is named.
    """
    folder = files("cgcompile.torch_compat")
    found = {
        name
        for each in sorted(folder.iterdir(), key=lambda path: path.name)
        if each.name.endswith(".py")
        for name in _spoken_of(ast.parse(each.read_text(encoding="utf-8")))
    }
    return {name: _exists(name) for name in sorted(found)}


def _spoken_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [_dotted(node)]
        elif isinstance(node, ast.Call) and _dotted(node.func) == "getattr":
            of, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                names = [f"{_dotted(of)}.{name.value}"]
        yield from filter(_is_private, names)


def _dotted(node: ast.AST) -> str:
    """``torch._C.name``; the empty text of what is no chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        of = _dotted(node.value)
        return f"{of}.{node.attr}" if of else ""
    return ""


def _is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in ("torch", "functorch") or parts[-1].startswith("__"):
        return False
    return name.startswith(_UNDOCUMENTED) or any(part.startswith("_") for part in parts)


def _exists(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
