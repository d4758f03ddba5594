"""Public names of a package that are imported when they are first read (PEP 562)."""

import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any


class _Package(ModuleType):
    """A package in which a public function stays when a submodule of its name is imported."""

    modules_of_names: dict[str, str]

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in self.modules_of_names):
            super().__setattr__(name, value)


def export_lazily(
    package: str, names: Mapping[str, str], moved: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: its name; its submodules are imported when they are first read, too.
        names: the public names, by the module of cgcompile that defines them.
        moved: names that the package exports no longer, by module; reading one is a FutureWarning.
    """
    modules, old = (
        {name: f"cgcompile.{at}" for at, listed in table.items() for name in listed.split()}
        for table in (names, moved)
    )
    module = sys.modules[package]
    module.__dict__["modules_of_names"] = modules
    module.__class__ = _Package

    def get(name: str) -> Any:
        if name in modules:
            value = module.__dict__[name] = getattr(import_module(modules[name]), name)
            return value
        if name in old:
            text = f"{package}.{name} is deprecated: import it from {old[name]}"
            warnings.warn(text, FutureWarning, stacklevel=2)
            return getattr(import_module(old[name]), name)
        submodule = f"{package}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(submodule)
            except ModuleNotFoundError as error:
                if error.name != submodule:
                    raise
        message = f"module {package!r} has no attribute {name!r}"
        raise AttributeError(message, name=name, obj=module)

    return get, lambda: sorted({*module.__dict__, *modules})
