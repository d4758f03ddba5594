"""What a command of the command line looks at: :func:`load` of ``module:function``.

The function takes nothing and returns a model and its inputs, in one of these forms:

=============================================== ==================================================
``(model, args)``                               ``args`` a tuple or list, or one tensor
``(model, args, kwargs)``                       ``kwargs`` a dict
``{"model": ..., "args": ..., "kwargs": ...}``  the last two may be left out
a model or a manager alone                      one that has run; for ``report`` and ``doctor``
=============================================== ==================================================
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from cgcompile.errors import CommandError
from cgcompile.observe.subject import original_of


@dataclass(frozen=True)
class Target:
    """What the function returned.

    Attributes:
        name: as it was given: ``module:function``.
        model: what to look at.
        args: of a call; None if there was a model alone.
        kwargs: of a call.
    """

    name: str
    model: Any
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]

    def call(self, command: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call.

        Raises:
            CommandError: there are none.
        """
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
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        own = [each for each in known if vars(module)[each].__module__ == module.__name__]
        raise CommandError.no_function(module=where, name=name, known=sorted(own))
    return found


def _called(target: str, function: Any) -> Any:
    inner = original_of(function)  # a model says what it takes, and is as callable as a function
    try:
        # A decorator may give what the function inside of it takes.
        taking = inner.forward if isinstance(inner, nn.Module) else inner
        signature = inspect.signature(taking, follow_wrapped=False)
    except ValueError:  # of something that is not written in Python: nobody says
        return function()
    try:
        signature.bind()
    except TypeError as error:
        raise CommandError.takes_arguments(target=target, signature=str(signature)) from error
    return function()


def _checked(target: str, found: Any) -> Target:
    if isinstance(found, dict):
        if "model" not in found or set(found) - {"model", "args", "kwargs"}:
            raise CommandError.bad_result(
                target=target, found=f"a dict with the keys {sorted(found)}"
            )
        args = found.get("args", () if "kwargs" in found else None)
        return _made(target, found["model"], args, found.get("kwargs", {}))
    if isinstance(found, tuple):
        if len(found) not in (2, 3):
            raise CommandError.bad_result(target=target, found=f"a tuple of {len(found)}")
        return _made(target, found[0], found[1], found[2] if len(found) == 3 else {})
    return _made(target, found, None, {})


def _made(target: str, model: Any, args: Any, kwargs: Any) -> Target:
    if isinstance(args, torch.Tensor):
        args = (args,)
    if args is not None and not isinstance(args, (tuple, list)):
        raise CommandError.bad_result(target=target, found=f"args of type {type(args).__name__}")
    if not isinstance(kwargs, dict):
        raise CommandError.bad_result(
            target=target, found=f"kwargs of type {type(kwargs).__name__}"
        )
    if model is None or isinstance(model, (str, int, float, torch.Tensor)):
        raise CommandError.bad_result(
            target=target, found=f"a model of type {type(model).__name__}"
        )
    return Target(target, model, None if args is None else tuple(args), kwargs)
