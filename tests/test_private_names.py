"""Private names and attributes of torch: one table of them, read in ``torch_compat`` alone."""

import ast
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

import cgcompile
from cgcompile.torch_compat import presence, torch_ops
from cgcompile.torch_compat.presence import (
    DOCUMENTED_NAMES,
    PRIVATE_ATTRIBUTES,
    PRIVATE_NAMES,
    TESTED,
    warn_of_untested_torch,
)

ROOT = Path(__file__).resolve().parents[1]
COMPAT = sorted((ROOT / "cgcompile" / "torch_compat").glob("*.py"))
OTHERS = sorted({*ROOT.glob("cgcompile/**/*.py"), *ROOT.glob("passes/*.py")} - {*COMPAT})
UNDOCUMENTED = ("torch.fx.experimental", "functorch")
PYTHONS = {"_fields", "_getframe", "_shadowed_dict_from_mro_tuple"}  # of the standard library
# Modules by the names under which the package speaks of them.
ALIASES = {
    "forward_ad": "torch.autograd.forward_ad",
    "profiler": "torch.autograd.profiler",
    "dist": "torch.distributed",
}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return ALIASES.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        name = f"{owner}.{node.attr}" if owner else ""
        return ALIASES.get(name, name)
    return ""


def accesses(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(owner as dotted text, attribute) of each attribute that is read, or got by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield dotted(node.value), node.attr
        elif isinstance(node, ast.Call):
            called = [node.func, *node.args]
            if dotted(node.func) == "partial":
                called = node.args
            name = called[2] if len(called) > 2 else None
            by_name = dotted(called[0]) in ("getattr", "hasattr", "setattr", "delattr")
            if by_name and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield dotted(called[1]), name.value


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] not in ("torch", "functorch") or parts[-1].startswith("__"):
        return False
    return name.startswith(UNDOCUMENTED) or any(part.startswith("_") for part in parts)


def names_read(tree: ast.AST) -> set[str]:
    names = {f"{owner}.{attribute}" for owner, attribute in accesses(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return set(filter(is_private, names))


def attributes_read(tree: ast.AST) -> set[str]:
    """Private attributes of objects that are not torch's modules."""
    return {
        attribute
        for owner, attribute in accesses(tree)
        if attribute.startswith("_") and not attribute.startswith("__")
        if not is_private(f"{owner}.{attribute}")
    }


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file defines: functions, classes, variables, attributes of ``self``."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if dotted(node.value) == "self" else set()
    return names


def parsed(paths: list[Path]) -> list[ast.Module]:
    return [ast.parse(path.read_text(encoding="utf-8")) for path in paths]


def listed_in(*tables: Mapping[str, str]) -> list[str]:
    rows = [row for table in tables for row in table.items()]
    return [f"{owner}.{name}" for owner, names in rows for name in names.split()]


def test_each_private_name_is_in_the_table() -> None:
    read = set().union(*map(names_read, parsed(COMPAT)))
    listed = listed_in(DOCUMENTED_NAMES, PRIVATE_NAMES)
    assert len(set(listed)) == len(listed)
    prefixes = {name for name in read if any(entry.startswith(f"{name}.") for entry in listed)}
    covers = {
        name: [e for e in listed if f"{name}.".startswith(f"{e}.")] for name in read - prefixes
    }
    assert [name for name, entries in covers.items() if not entries] == []
    assert set(listed) == set().union(*covers.values())


def test_each_private_attribute_is_in_the_table() -> None:
    trees = parsed(COMPAT)
    read = set().union(*map(attributes_read, trees)) - PYTHONS
    listed = " ".join(PRIVATE_ATTRIBUTES.values()).split()
    assert len(set(listed)) == len(listed)
    assert read - set().union(*map(own_names, trees)) == set(listed)


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_attributes_are_read_in_compat_only(path: Path) -> None:
    (tree,) = parsed([path])
    listed = set(" ".join(PRIVATE_ATTRIBUTES.values()).split())
    read = (attributes_read(tree) & listed) - own_names(tree)
    assert read == set()


def test_fewer_names_are_private_than_before() -> None:
    """Lower the numbers where a name goes; a new one needs a reason in review."""
    # 72: without the use count of a storage, a replay would not notice that the program dropped it.
    # 73: without ShortenTraceback Dynamo runs a function eager that calls get_forward_context().
    # 74: without callback_handler nothing tells that Dynamo compiled nothing of a function.
    # 86: 12 read settings of torch before each replay; public names take 2 to 40 times as long.
    # 89: without a guard on ``float.hex`` a trace of 0.0 would serve -0.0, which equals it.
    # 92: pieces run without the torch function modes that their graph was traced under.
    # 93: without _new_with_weak_ptr a graph could not hold what its capture saw by weak pointers.
    # 94: without _foreach_add_ each layer with a static cache increments its counter by a kernel.
    # 98: without versions of dicts the state of 300 modules is compared in 100 us, not in 7.
    # 101: three read how products of 16-bit numbers are summed; a change was a stale result.
    # 102: _len_torch_dispatch_stack; a replay under a dispatch mode was a stale result.
    # 99: five save and load a function of aot_compile: the frame of the trace, graphs as bytes.
    assert len(listed_in(PRIVATE_NAMES)) <= 99
    # 14: _dynamo_marked_constant, for the error of get_forward_context().
    # 13: _artifacts, the graph of a function of aot_compile.
    assert len(listed_in(PRIVATE_ATTRIBUTES)) <= 13


def test_all_names_exist_in_a_tested_torch() -> None:
    if ".".join(torch.__version__.split(".")[:2]) not in TESTED:
        pytest.skip("this torch was not tested")
    missing = [name for name, exists in presence.private_names().items() if not exists]
    cuda_alone = ("torch._C._cuda", "torch._C._CUDA")
    others = (
        "_host_emptyCache",
        "_set_storage_data_ptr_access_error_msg",
        "_tensors_data_ptrs_at_indices_equal",
    )
    unexpected = [name for name in missing if not name.startswith(cuda_alone)]
    if torch.version.cuda is None:
        unexpected = [name for name in unexpected if not name.endswith(others)]
    assert unexpected == []
    assert missing == [] or torch.version.cuda is None


def test_types_that_have_no_public_name() -> None:
    kinds = (torch_ops.OpOverload, torch_ops.OpOverloadPacket, torch_ops.HigherOrderOperator)
    assert [kind.__name__ for kind in kinds] == [
        "OpOverload",
        "OpOverloadPacket",
        "HigherOrderOperator",
    ]


def test_an_untested_torch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "cgcompile"):
        for version in ("2.99.1", "2.99.1", "2.13.0+cu130", "2.15.0a0"):
            warn_of_untested_torch(version)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "cgcompile was not tested with torch 2.99.1"
    ]


def test_a_backend_checks_the_version() -> None:
    warn_of_untested_torch.cache_clear()
    cgcompile.Backend()
    cgcompile.Backend()
    assert warn_of_untested_torch.cache_info().misses == 1
