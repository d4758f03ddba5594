"""Print the figures of the design for this tree: ``python tests/figures.py [PART OF A NAME ...]``.

Each figure is measured by code, and each may only fall: ``tests/data/figures.txt`` has their upper
bounds, which ``tests/test_figures.py`` compares.

Three figures count names: the state machines of a call, what compares before a replay (with every
class of ``graphs`` that has a method ``check(what, batch)``), and what decides what Python objects
hold. What only writes rows or lines of a ``Contract`` (``Weights``, ``Fits``) compares nothing
itself. A name counts while a class or function of it exists anywhere in the library.
What takes over for several of them stands in the same table, once. ``tests/test_figures.py`` fails
where a name exists no more: remove it, or write its new name. The generators of checks are the
modules that make functions of text: by ``exec``, or by ``eval`` of a text that begins with
``lambda``.

The files of a call are those with a Python call in them, of the library alone, on one thread, with
the CPU recorder and uncompiled pieces.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = {ROOT / "cgcompile", ROOT / "passes"}

# Whether a call may have a graph, whether there is one, and what happens else. Dispatch of batches
# and items (CudagraphDispatcher, EncoderCalls._dispatch) runs nothing and is not one.
STATE_MACHINES = ("StepTable.run",)
# What compares anything with the time of a capture or a trace, before a replay.
GUARDS = (
    "Contract",
    "Rebinding",
    "SameStorages",
    "WeightSets.find",
    "ArgumentChecks",
    "CompiledTrace.replaced",
    "_Unwrapping._check_parts",
    "SameOnHost",
)
# What decides what a value holds. Visitors of ``reads.parts`` count no more, and neither does
# ``torch_ops.tree_leaves``, torch's pytree.
WALKERS = (
    "reads.parts",
    "inductor._held",
)

LOADS = {
    "torch.compile": """
import torch
model = torch.compile(
    torch.nn.Linear(2, 2),
    backend="cgcompile",
    options={"compiler": "eager", "capture_device": "host"},
)
with torch.inference_mode():
    for _ in range(3):
        model(torch.ones(1, 2))
""",
    "CUDAGraphWrapper": """
import torch
from cgcompile import CUDAGraphWrapper
wrapper = CUDAGraphWrapper(torch.nn.Linear(2, 2))
""",
}
NAMES = "\nimport sys\nprint(*(name for name in sys.modules if name.split('.')[0] == 'cgcompile'))"


# ------------------------------------------------------------------ what the source says


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the library, by the path below the root."""
    paths = [*ROOT.glob("cgcompile/**/*.py"), *ROOT.glob("passes/**/*.py")]
    files = {path.resolve().relative_to(ROOT).as_posix(): path for path in paths}
    return {name: ast.parse(path.read_text()) for name, path in sorted(files.items())}


def module_name(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("cgcompile") else f"cgcompile.{name}"


def defined() -> set[str]:
    """Classes, and functions as ``module.name`` and methods as ``Class.name``."""
    names = set()
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                names |= {node.name, *(f"{node.name}.{method.name}" for method in methods)}
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        names |= {f"{Path(path).stem}.{function.name}" for function in functions}
    return names


def comparing() -> set[str]:
    """The classes of ``graphs`` with a method ``check`` that takes ``what`` and ``batch``."""
    trees = [tree for path, tree in modules().items() if path.startswith("cgcompile/graphs/")]
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    return {
        node.name
        for node in classes
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "check"
        if {"what", "batch"} <= {argument.arg for argument in method.args.args}
    }


def gone() -> list[str]:
    """Names above that the library has no more."""
    return sorted({*STATE_MACHINES, *GUARDS, *WALKERS} - defined())


def is_generator(node: ast.AST) -> bool:
    """Whether a node makes functions of text."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return False
    if node.func.id != "eval":
        return node.func.id == "exec"
    text = node.args[0]
    first = text.values[0] if isinstance(text, ast.JoinedStr) else text
    return isinstance(first, ast.Constant) and str(first.value).startswith("lambda")


def generators() -> list[str]:
    return [path for path, tree in modules().items() if any(map(is_generator, ast.walk(tree)))]


def fallbacks() -> int:
    """Functions outside of ``passes`` that return a fallback instead of a result."""
    from test_size import returns_a_fallback

    trees = [tree for path, tree in modules().items() if not path.startswith("passes/")]
    return sum(returns_a_fallback(node) for tree in trees for node in ast.walk(tree))


def private() -> list[int]:
    from cgcompile.torch_compat.presence import PRIVATE_ATTRIBUTES, PRIVATE_NAMES

    tables = (PRIVATE_NAMES, PRIVATE_ATTRIBUTES)
    return [sum(len(names.split()) for names in table.values()) for table in tables]


def public() -> dict[str, Any]:
    """The names in ``__all__`` of the package and its rooms."""
    names = {}
    for path in modules():
        if path.endswith("/__init__.py"):
            module = importlib.import_module(module_name(path))
            names |= {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    return names


def arguments(kind: Any) -> int:
    """How many arguments a class takes; 0 for anything else."""
    if not inspect.isclass(kind) or "__init__" not in vars(kind):
        return 0
    parameters = list(inspect.signature(kind).parameters.values())
    return sum(each.kind is not each.VAR_KEYWORD for each in parameters)


def surface() -> list[int]:
    from cgcompile import CompilationConfig

    names = public()
    objects = [value for value in names.values() if value is not CompilationConfig]
    return [len(fields(CompilationConfig)), len(names), max(map(arguments, objects))]


def stale() -> list[int]:
    """Cells of the table of hazards on the CPU that are stale, but those that the docs name."""
    from hazards.table import TABLE
    from lib.front_ends import COLUMNS
    from lib.hazards import STALE

    rows = [row for row in TABLE if "cpu" in row.devices]
    cells = [row.outcome(name, "cpu") for row in rows for name in COLUMNS]
    return [cells.count(STALE)]


# ------------------------------------------------------------------ what a call runs


@contextlib.contextmanager
def files_called() -> Iterator[set[str]]:
    """Collect the library files in which a function is called."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no class, no module
            files.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(before)
        paths = {Path(name).resolve() for name in files if not name.startswith("<")}
        kept = {path.relative_to(ROOT).as_posix() for path in paths if {*path.parents} & LIBRARY}
        files.clear()
        files |= kept


def _layers() -> Any:
    """Three layers of attention between projections, f32[rows, 8] to f32[rows, 8]."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).unsqueeze(0).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(0))

    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer()).requires_grad_(False).eval()


def _files_of_steps() -> dict[str, set[str]]:
    """The files of a compilation, a capture and a replay of one compiled graph."""
    import torch
    from lib.front_ends import context, settings

    import cgcompile

    backend, results = cgcompile.Backend(settings("cpu")), {}
    compile_graph = backend.compile_graph

    def noted(*args: Any, **kwargs: Any) -> Any:
        with files_called() as results["compile"]:
            return compile_graph(*args, **kwargs)

    backend.compile_graph = noted
    model, x = torch.compile(_layers(), backend=backend), torch.randn(4, 8)
    for name in ("call", "capture", "first replay", "replay"):
        mode = cgcompile.CUDAGraphMode.PIECEWISE
        with torch.inference_mode(), context(4, mode, {}), files_called() as results[name]:
            model(x)
    assert (backend.counters.captures, backend.counters.replays) == (1, 2)
    return results


def _files_of_an_encoder_item() -> set[str]:
    """The files of a call of two items, which one graph replays."""
    from lib.encoders import images, manager

    encoder, call = manager(token_budgets=(8,)), images((4, 4), (4, 4))
    encoder.execute(call)
    with files_called() as files:
        encoder.execute(call)
    assert encoder.statistics.hits == 4, encoder.statistics
    return files


def _files_of_a_manager_step() -> set[str]:
    """The files of a step in mode FULL."""
    import torch
    from lib.front_ends import front_end

    front, x = front_end("CudaGraphManager", _layers(), "cpu"), torch.randn(4, 8)
    with torch.inference_mode():
        front.step(x)
        with files_called() as files:
            front.step(x)
    assert front.counters().replays == 2
    return files


@cache
def called() -> dict[str, set[str]]:
    """The files of each kind of call, in a process that has done nothing else before."""
    for path in modules():
        with contextlib.suppress(ImportError):  # Triton, in the modules of kernels
            importlib.import_module(module_name(path))
    steps = _files_of_steps()
    return {
        **{name: steps[name] for name in ("replay", "capture", "compile")},
        "encoder item": _files_of_an_encoder_item(),
        "manager step": _files_of_a_manager_step(),
    }


def loaded() -> list[int]:
    """Modules of the library in a process that compiles a model, and in one with a wrapper."""
    environment, numbers = {**os.environ, "PYTHONPATH": str(ROOT)}, []
    for program in LOADS.values():
        command = [sys.executable, "-c", program + NAMES]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        numbers.append(len(done.stdout.split()))
    return numbers


# ------------------------------------------------------------------ the table


def names_left(names: tuple[str, ...]) -> int:
    return len({*names} & defined())


# Of each figure: what it measures, and what it must reach.
CHEAP: dict[str, tuple[Callable[[], list[int]], str]] = {
    "state machines of a call": (lambda: [names_left(STATE_MACHINES)], "1"),
    "guard classes": (lambda: [names_left((*GUARDS, *comparing()))], "1"),
    "object walkers": (lambda: [names_left(WALKERS)], "1"),
    "generators of checks": (lambda: [len(generators())], "2"),
    "functions outside passes that return a fallback": (lambda: [fallbacks()], "20"),
    "private torch names, attributes": (private, "50, 8"),
    "stale cells in the table of hazards": (stale, "0"),
    "settings, public names, arguments of the largest object": (surface, "22, 90, 9"),
}
COSTLY: dict[str, tuple[Callable[[], list[int]], str]] = {
    "files called: replay": (lambda: [len(called()["replay"])], "8"),
    "files called: capture": (lambda: [len(called()["capture"])], "18"),
    "files called: compile": (lambda: [len(called()["compile"])], "30"),
    "files called: encoder item": (lambda: [len(called()["encoder item"])], "12"),
    "files called: manager step": (lambda: [len(called()["manager step"])], "10"),
    "modules loaded by torch.compile, CUDAGraphWrapper": (loaded, "80, 30"),
}


def main() -> None:
    sys.path.insert(0, str(ROOT))
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", help="parts of the names of figures")
    parser.add_argument("--files", action="store_true", help="list the files of each call, too")
    options = parser.parse_args()
    print(f"{'figure':57}{'here':>14}{'at the end':>13}")
    for name, (measure, end) in {**CHEAP, **COSTLY}.items():
        if options.parts and not any(part in name for part in options.parts):
            continue
        print(f"{name:57}{', '.join(map(str, measure())):>14}{end:>13}", flush=True)
    if options.files:
        for name, files in called().items():
            print(f"{name}:", *sorted(files), sep="\n  ")


if __name__ == "__main__":
    main()
