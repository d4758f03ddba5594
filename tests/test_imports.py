"""The floors of the house: an import goes down, or sideways without a circle, never up."""

import ast
import importlib
import sys
from pathlib import Path

import pytest
from lib.programs import TORCH, run_code
from lib.snapshots import assert_snapshot

ROOT = Path(__file__).resolve().parents[1]

# From the ground up; a name stands for a module or for all of a sub-package.
FLOORS = (
    (
        "config",
        "counts",
        "descriptor",
        "modes",
        "settings",
        "reasons",
        "errors",
        "torch_compat",
        "locks",
        "version",
        "progress",
        "lazy",
        "ladders",
        "source_lines",
    ),
    ("boundaries", "context", "kernels"),
    ("passes", "graphs"),
    ("pieces", "testing"),
    ("adapters", "runtime", "tracing"),
    ("compile", "backend", "loops", "registry", "saved"),
    ("serving", "encoder"),
    ("debug", "cli", "__main__", "integrations"),
)
LEVEL = {name: level for level, floor in enumerate(FLOORS) for name in floor}

DISPATCH = {"descriptor", "errors", "modes", "reasons", "settings"}

# The table of settings is readable without torch, messages depend on nothing, and a scheduler
# may choose graphs in a process of its own.
STANDARD_LIBRARY_ONLY = {
    "config": {"errors", "modes", "settings"},
    "descriptor": {"errors", "modes", "settings"},
    "modes": set(),
    "settings": {"errors"},
    "errors": {"debug/errors", "encoder/errors", "lazy", "serving/errors"},
    "lazy": set(),
    "locks": set(),
    "counts": {"locks", "reasons"},
    "reasons": {"errors", "locks"},
    "encoder/budgets": {"encoder/errors", "encoder/packing", "errors", "ladders", "settings"},
    "encoder/packing": {"encoder/errors", "errors", "settings"},
    "ladders": {"errors", "modes", "settings"},
    "serving/sizes": {"errors", "ladders", "modes", "settings"},
    "version": set(),
    "serving/dispatcher": {*DISPATCH, "serving/plan", "serving/sizes"},
    "serving/plan": DISPATCH,
    "serving/statistics": {*DISPATCH, "counts", "serving/dispatcher", "serving/plan"},
}

# Modules that name what is above them, and import it when it is read.
LAZY = {"cgcompile", "cgcompile.errors"}

LONGEST = 60  # lines of a function, with its docstring
STORY = 100  # of those that tell a whole procedure, step by step
STORIES = {
    "backend.py:Backend.compile_graph",
    "compiled_graph.py:CompiledGraph.__call__",
    "steps.py:StepTable.run",
}

# Private names of torch, and modules it does not document, are compat's alone.
PRIVATE = ("torch._", "torch.fx.experimental", "torch.utils._", "functorch")


def files() -> list[Path]:
    paths = [*ROOT.glob("cgcompile/*.py"), *ROOT.glob("cgcompile/pieces/*.py")]
    paths += [*ROOT.glob("cgcompile/*/*.py"), *ROOT.glob("passes/*.py")]
    return sorted({path.resolve() for path in paths})


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "cgcompile" else ("cgcompile", *parts)
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> list[str]:
    """Every imported module, those inside functions included."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: use absolute imports"
            # `from cgcompile import torch_compat` imports the module cgcompile.torch_compat
            whole = node.module == "cgcompile"
            names += [f"cgcompile.{a.name}" for a in node.names] if whole else [str(node.module)]
    return names


def room(module: str) -> str:
    return module.split(".")[1]


def test_files_are_found() -> None:
    assert len(files()) > 25


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_imports_go_down(path: Path) -> None:
    module = module_of(path)
    if module in LAZY:
        return  # the names of floors above are imported when they are read
    for imported in imports_of(path):
        if imported.startswith("cgcompile."):
            up = LEVEL[room(imported)] > LEVEL[room(module)]
            assert not up, f"{module} imports {imported}, which is above it"


def test_no_circles() -> None:
    edges = {
        module_of(path): {i for i in imports_of(path) if i.startswith("cgcompile.")}
        for path in files()
        if module_of(path) not in LAZY
    }
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module in done:
            return
        for target in edges.get(module, ()):
            visit(target, (*path, module))
        done.add(module)

    for module in edges:
        visit(module, ())


@pytest.mark.parametrize("path", files(), ids=module_of)
def test_private_torch_only_in_compat(path: Path) -> None:
    if module_of(path).startswith("cgcompile.torch_compat"):
        return
    private = [name for name in imports_of(path) if name.startswith(PRIVATE)]
    assert not private, f"move {private} behind cgcompile/torch_compat/"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            hidden = node.value.id == "torch" and node.attr.startswith("_")
            assert not hidden, f"{path.name}:{node.lineno} torch.{node.attr}: go through compat"


@pytest.mark.parametrize("name", STANDARD_LIBRARY_ONLY)
def test_ground_floor_needs_no_torch(name: str) -> None:
    allowed = {*sys.stdlib_module_names, *STANDARD_LIBRARY_ONLY[name]}
    one = ROOT / "cgcompile" / f"{name}.py"
    paths = [one] if one.exists() else sorted((ROOT / "cgcompile" / name).glob("*.py"))
    assert paths
    for imported in [found for path in paths for found in imports_of(path)]:
        parts = imported.split(".")
        ours = parts[0] == "cgcompile"
        rooms = {parts[1], "/".join(parts[1:])} if ours else {parts[0]}
        assert rooms & allowed, f"{name} imports {imported}"


def functions(path: Path) -> dict[str, int]:
    """The lines of each function, by the names of its file and of what it is defined in."""
    lines = {}

    def visit(node: ast.AST, within: str) -> None:
        for inner in ast.iter_child_nodes(node):
            name = f"{within}.{getattr(inner, 'name', '')}".strip(".")
            if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                lines[f"{path.name}:{name}"] = (inner.end_lineno or 0) - inner.lineno
            visit(inner, name if hasattr(inner, "name") else within)

    visit(ast.parse(path.read_text()), "")
    return lines


def test_functions_stay_small() -> None:
    lines = {name: count for path in files() for name, count in functions(path).items()}
    assert lines.keys() >= STORIES
    long = {n: c for n, c in lines.items() if c > (STORY if n in STORIES else LONGEST)}
    assert not long, "split what does two things"


VAGUE = {"found", "each", "given", "made", "place"}  # for variables of more than one line
ONE_LINE = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.Lambda


def test_variables_say_what_they_are() -> None:
    vague = []
    others = [path for top in ("examples", "tests") for path in (ROOT / top).rglob("*.py")]
    for path in [*files(), *others]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = [
            (node, node.arg if isinstance(node, ast.arg) else node.id)
            for node in nodes
            if isinstance(node, ast.arg)
            or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        ]
        named = [(node, name) for node, name in named if name in VAGUE]
        within = {
            id(inner)
            for node in (nodes if named else ())
            if isinstance(node, ONE_LINE) and node.lineno == node.end_lineno
            for inner in ast.walk(node)
        }
        vague += [f"{path.name}:{n.lineno}: {name}" for n, name in named if id(n) not in within]
    assert not vague


@pytest.mark.slow
def test_importing_changes_nothing() -> None:
    """No registration, no settings, no handlers: definitions only."""
    code = (
        "import gc, logging, os, torch, torch._dynamo\n"
        "before = (dict(os.environ), logging.root.handlers[:], gc.isenabled(),\n"
        "          torch.is_grad_enabled(), torch._dynamo.config.save_config_portable())\n"
        "import cgcompile\n"
        "names = [getattr(cgcompile, name) for name in cgcompile.__all__]\n"
        "after = (dict(os.environ), logging.root.handlers[:], gc.isenabled(),\n"
        "         torch.is_grad_enabled(), torch._dynamo.config.save_config_portable())\n"
        "assert before == after\n"
        "import sys; assert 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    run_code(code, imports=TORCH)


PACKAGES = (
    "cgcompile",
    *(f"cgcompile.{room}" for room in ("debug", "encoder", "graphs", "serving")),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_imported_when_they_are_read(package: str) -> None:
    module = importlib.import_module(package)
    assert sorted(module.modules_of_names) == sorted(module.__all__)
    assert {*module.__all__} <= {*dir(module)}
    for name in module.__all__:
        at = importlib.import_module(module.modules_of_names[name])
        assert getattr(module, name) is getattr(at, name)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'other'"):
        module.other  # noqa: B018


# What each room loads of the others: modules of folders, and of these files.
FILES = {"backend", "cli", "compile", "loops", "registry"}
_COMPILER = {"adapters", "graphs", "kernels", "passes", "pieces", "runtime", "torch_compat"}
_TOP = {*_COMPILER, "backend", "compile", "registry", "tracing"}
LOADS: dict[str, set[str]] = {
    "torch_compat": set(),
    "kernels": {"torch_compat"},
    "passes": {"kernels", "torch_compat"},
    "graphs": {"torch_compat"},
    "pieces": {"graphs", "kernels", "passes", "torch_compat"},
    "testing": {"graphs", "torch_compat"},
    "runtime": _COMPILER - {"adapters"},
    "adapters": _COMPILER,
    "tracing": _COMPILER,
    "registry": _COMPILER - {"adapters"},
    "backend": {*_COMPILER, "registry"},
    "compile": _TOP,
    "loops": {"graphs", "torch_compat"},
    "serving": _TOP,
    "encoder": {"graphs", "torch_compat"},
    "debug": {*_TOP, "encoder", "loops", "serving"},
    "integrations": {*_COMPILER, "backend", "loops", "registry"},
}


def loaded_by(code: str, imports: str = TORCH) -> set[str]:
    """Return the modules that a program loads, in a process that has executed ``imports``."""
    return set(run_code(f"{code}\nimport sys\nprint(*sys.modules)", imports=imports).split())


def test_every_room_has_its_loads() -> None:
    folders = {path.parent.name for path in ROOT.glob("cgcompile/*/__init__.py")}
    assert folders == LOADS.keys() - FILES


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_a_room_loads_no_other_than_listed(name: str) -> None:
    modules = [module_of(path) for path in files()]
    modules = [module for module in modules if f"{module}.".startswith(f"cgcompile.{name}.")]
    modules = [module for module in modules if not module.endswith("_triton")]
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    rooms = {room(module) for module in loaded if module.startswith("cgcompile.")}
    assert modules
    assert rooms & (LOADS.keys() | FILES) == {name, *LOADS[name]}
    assert not loaded & {"torch._dynamo", "torch._inductor.compile_fx", "transformers", "triton"}


@pytest.mark.slow
def test_plans_and_settings_load_no_torch() -> None:
    names = [name.replace("/", ".") for name in STANDARD_LIBRARY_ONLY]
    loaded = loaded_by("\n".join(f"import cgcompile.{name}" for name in names), imports="")
    assert "cgcompile.serving.dispatcher" in loaded
    assert "torch" not in loaded


@pytest.mark.slow
def test_a_user_of_one_layer_loads_no_other() -> None:
    assert {name for name in loaded_by("import cgcompile") if name.startswith("cgcompile")} == {
        "cgcompile",
        "cgcompile.lazy",
    }
    wrapper = loaded_by("from cgcompile import CUDAGraphWrapper")
    compiled = loaded_by(COMPILES)
    above = {"cgcompile.compile", "cgcompile.tracing", "cgcompile.cli", "cgcompile.debug"}
    above |= {"cgcompile.serving", "cgcompile.encoder", "cgcompile.testing"}
    assert "cgcompile.graphs.wrapper" in wrapper
    assert not wrapper & {*above, "cgcompile.passes", "cgcompile.backend", "cgcompile.runtime"}
    assert "cgcompile.runtime.compiled_graph" in compiled
    assert not compiled & above


COMPILES = """
import torch
model = torch.compile(torch.nn.Linear(2, 2), backend="cgcompile", options={"compiler": "eager"})
with torch.inference_mode():
    model(torch.ones(1, 2))
"""
SAME_NAMES = """
import cgcompile.compile, cgcompile.runtime.dispatch, cgcompile.debug.verify, types
import cgcompile.debug as debug
for name in (cgcompile.compile, cgcompile.runtime, debug.verify, debug.explain, cgcompile.explain):
    assert isinstance(name, types.FunctionType), name
assert cgcompile.passes.base.PassRecord is cgcompile.passes.PassRecord
assert cgcompile.errors.CGCompileError is cgcompile.CGCompileError
"""


@pytest.mark.slow
def test_functions_stay_where_submodules_have_their_names() -> None:
    run_code(SAME_NAMES, imports=TORCH)


READ_IN_TRACED_CODE = """
import torch, cgcompile
def model(x):
    with cgcompile.eager_region():
        x = x.sin()
    return x * 2
backend = cgcompile.Backend(compiler="eager", capture_device="host")
compiled = torch.compile(model, backend=backend, fullgraph=True)
assert "eager_region" not in vars(cgcompile)
with torch.inference_mode():
    for _ in range(4):
        x = torch.randn(4)
        torch.testing.assert_close(compiled(x), x.sin() * 2)
assert backend.counters.captures == 1 and backend.counters.replays == 2
"""


@pytest.mark.slow
def test_a_public_name_may_be_read_in_traced_code_first() -> None:
    run_code(READ_IN_TRACED_CODE, imports=TORCH)


def test_public_face() -> None:
    import cgcompile

    for name in cgcompile.__all__:
        assert getattr(cgcompile, name).__doc__ or name == "__version__"
    assert_snapshot("public_names", "\n".join(cgcompile.__all__))


@pytest.mark.parametrize(
    ("room", "name", "module"),
    [
        ("encoder", "pack", "encoder.packing"),
        ("serving", "checked_sizes", "ladders"),
        ("graphs", "EagerSegment", "graphs.sequence"),
        ("debug", "Check", "debug.verify"),
        ("debug", "Coverage", "debug.coverage"),
        ("passes", "SplitGraph", "passes.split"),
    ],
)
def test_names_that_packages_export_no_longer_warn(room: str, name: str, module: str) -> None:
    package = importlib.import_module(f"cgcompile.{room}")
    told = f"cgcompile.{room}.{name} is deprecated: import it from cgcompile.{module}$"
    for _ in range(2):
        with pytest.warns(FutureWarning, match=told):
            value = getattr(package, name)
    assert value is getattr(importlib.import_module(f"cgcompile.{module}"), name)
    assert name not in package.__all__
