"""Every message, as a user sees it, in ``tests/data/errors.txt``."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.snapshots import assert_snapshot

from cgcompile import errors
from cgcompile.errors import CGCompileError, Template
from cgcompile.reasons import Fallback, Reason

ROOT = Path(__file__).resolve().parents[1]

# The value that a field has in the examples, in all messages but those of ``OWN_FIELDS``.
FIELDS: dict[str, Any] = {
    "advice": "Call reset() first.",
    "after": "None",
    "axis": "tier",
    "batch": "num_tokens=64",
    "because": "of Y",
    "before": 0x7F3A00,
    "budget": 64,
    "call": "run()",
    "capacity": "Capacity(...)",
    "captured": [1, 2, 4],
    "command": "verify",
    "compiler": "inductor",
    "counts": "tokens",
    "declared": 1,
    "descriptor": "num_tokens=7",
    "detail": "item() reads a tensor",
    "dim": "x.size()[0]",
    "dims": ["x.size()[0]", "y.size()[0]"],
    "does": "runs step 3",
    "done": "read",
    "dtype": "torch.int64",
    "earlier": {},
    "ended": False,
    "entries": 9,
    "error": KeyError("x"),
    "expected": "a number",
    "extra": (3,),
    "field": "self.buf",
    "first": "FULL, 8 tokens",
    "flags": 2,
    "forward": "ViT",
    "folder": "~/.cache/cgcompile",
    "found": 3,
    "frames": 1,
    "function": "compile",
    "given": "compiler",
    "graph": "piece_0",
    "grid": "image_grid_thw",
    "guard": "Eq(Mod(s0, 4), 0)",
    "here": "MainThread",
    "instead": "Use Z.",
    "is_config": True,
    "item": 2,
    "items": 2,
    "key": "cu_seqlens",
    "keys": ["7a00", "7b00"],
    "keyword": "path",
    "known": ["attend", "mul"],
    "has_handle": False,
    "largest": 496,
    "last": 0,
    "layout": "a tensor (8, 4) with strides (4, 1) of torch.float32",
    "least": 1,
    "lengths": 3,
    "max_items": 256,
    "max_query_len": None,
    "maximum": 8,
    "meant": "batch_descriptor",
    "merge": 2,
    "method": "run",
    "missing": [1, 3],
    "mode": "FULL",
    "model": "Tower",
    "module": "model.py",
    "most": 8,
    "multiple": 6,
    "name": "atend",
    "names": "count",
    "nbytes": 4096,
    "needed": 8192,
    "node": "add",
    "now": 0x7F3A80,
    "num_reqs": 3,
    "num_tokens": 7,
    "one": "x.shape[0] is 4",
    "op": "aten.item.default",
    "other": "y.shape[0] is 5",
    "padded": (4, 4),
    "path": "model.scale",
    "paths": 2,
    "piece": "piece_0",
    "place": 0,
    "prefix": "77",
    "problem": "it has 2 outputs, expected 1",
    "queries": [3, 1],
    "rank": 1,
    "ranks": [1, 3],
    "real": (4, 6),
    "ratio": "4 times too few",
    "reason": "host_sync",
    "remedy": "clear_graphs()",
    "room": "[4]",
    "rows": 16,
    "running": "piece_0",
    "same_thread": True,
    "setting": "compile_sizes",
    "settings": "",
    "several": True,
    "shape": "[4, 8]",
    "shapes": ["[8, 4]", "[8]"],
    "shares": "rank 1: ValueError: no",
    "signature": "(x, scale=1.0)",
    "size": 6,
    "sizes": range(16, 176, 16),
    "step": 3,
    "steps": 12,
    "support": "NEVER",
    "symbols": ["u0"],
    "tail": 0.5,
    "target": "model.py:make",
    "times": "steps",
    "tokens": 5,
    "traced": "f32[4, 16]",
    "transform": "Vmap",
    "unit": "patches",
    "value": "gcc",
    "values": [1, 0, 2],
    "what": "step",
    "where": "m.py:4 in forward",
    "why": "no reason",
}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "ConfigError.not_compiled_here": {"found": "Attention"},
    "ConfigError.captures_nothing": {"found": "Linear"},
    "ConfigError.padded_away": {"padded": 8},
    "BatchError.axes": {"names": ["max_seqlen", "kernel"]},
    "DispatchError.other_breaks": {"now": ["attend"], "before": []},
    "DispatchError.other_thread": {"before": "Thread-1"},
    "GuardError.shared_counter": {"path": "input 3 'count'", "other": "input 4 'start'"},
    "InputBufferError.too_large": {"most": (8, 4)},
    "DispatchError.strict": {"why": Fallback(Reason.HOST_SYNC, "item() reads a tensor")},
    "EncoderError.older_protocol": {"found": ["get_encoder_cudagraph_num_items"]},
    "EncoderError.columns": {"found": [8, 16], "expected": 999},
    "EncoderError.modality": {"found": []},
    "EncoderError.grid": {"found": (1, 3, 3)},
    "EncoderError.item_need": {"tokens": (-1,)},
    "EncoderError.not_a_budget": {"found": True},
    "EncoderError.patches": {"expected": 16},
    "EncoderError.derive_result": {"found": 0.25, "most": 1e-3},
    "EncoderError.items_above_budget": {"name": "max_items"},
    "EncoderError.items_above_range": {"name": "max_batch_size"},
    "EncoderError.no_offset_room": {"budget": " of budget 40", "room": 4},
    "EncoderError.not_buffers": {"signature": "(pixels, cu_seqlens)"},
    "EncoderError.row_ratio": {"method": "encoder_cudagraph_forward", "found": "[10, 40]"},
    "SizesError.bytes_unknown": {"where": "fit_sizes"},
    "SizesError.no_budget": {"where": "fitted_budgets"},
    "AgreementError.missing": {
        "does": "runs a collective of the model",
        "error": "Connection closed",
    },
    "AgreementError.out_of_step": {"found": "has captured a set", "first": "runs step 3"},
    "CaptureError.rebinds": {"before": "a tensor (2,)"},
    "CaptureError.scripted": {"field": "self.encoder", "found": "RecursiveScriptModule"},
    "CaptureError.seeded": {"before": 1, "after": 2},
    "HostValueChangedError.changed": {"before": 2, "now": 3},
    "HostValueChangedError.cpu_scalar": {"before": 1.5, "now": 4.0},
    "HostValueChangedError.metadata": {
        "before": "a tensor (8, 4) with strides (16, 1) of torch.int32",
        "now": "a tensor (8, 5) with strides (16, 1) of torch.int32",
    },
    "HostValueChangedError.weight": {
        "before": "a tensor (8, 4) with strides (4, 1) of torch.float32",
        "now": "a tensor (8, 4) with strides (1, 8) of torch.float32",
    },
    "HostValueChangedError.other_arguments": {"before": "1 argument", "now": "0 arguments"},
    "HostValueChangedError.changed_in_loop": {"before": 2, "now": 3},
    "LoopRoomError.full": {"room": 3},
    "LoopStateError.changes": {"path": "state['cache'].length", "before": 7, "after": 11},
    "LoopStateError.writes": {"path": "module.seen", "where": "not in its state"},
    "LoopStateError.returns": {"now": ["i64[1]"], "before": ["i64[2]"]},
    "ManagerError.no_replay": {"why": "gradients: an input, a weight or a result requires grad"},
    "ManagerError.output": {"found": "[8, 16]", "rows": "tokens"},
    "ManagerError.presence": {"found": True},
    "PieceCompileError.bad_outputs": {"expected": 2, "found": "no list"},
    "SizesError.bad_entry": {"name": "observed", "batch": 0, "unit": "tokens", "times": "groups"},
    "SizesError.not_a_size": {"found": True},
    "SizesError.not_covered": {"batch": 500},
    "SymbolError.size_refused": {"where": " (m.py:4)"},
    "TraceError.fixed": {"dim": "x.shape[0] is 8"},
    "TraceError.no_such_dimension": {"dim": 2, "path": "x"},
    "WeightsError.shape": {"found": "(4, 2)", "expected": "(2, 4)"},
}
# Fields with which a message has another text, or nothing to list.
OTHER_TEXTS: list[tuple[str, dict[str, Any]]] = [
    ("CGCompileError.bad_value", {"where": ""}),
    ("AddressChangedError.metadata", {"now": None}),
    ("AgreementError.missing", {"missing": []}),
    ("ArgumentsError.refused", {"settings": "'on_fallback': ..., 'debug'"}),
    ("CaptureBusyError.busy", {"same_thread": False}),
    ("ConfigError.no_mapping", {"is_config": False}),
    ("ConfigError.not_compiled_here", {"found": "NoneType", "has_handle": True}),
    ("ConfigError.unknown_setting", {"name": "level", "known": []}),
    ("ConfigError.unknown_setting", {"name": "strickt", "earlier": {"strict": "on_fallback"}}),
    ("ConfigError.unknown_setting", {"name": "check_guards", "known": []}),
    ("DispatchError.other_breaks", {"now": [], "before": ["attend"]}),
    ("DispatchError.other_thread", {"ended": True}),
    ("EncoderError.modality", {"found": ["image", "video"]}),
    ("EncoderError.no_axis", {"known": []}),
    ("ForwardContextError.near_miss", {"meant": ""}),
    ("ForwardContextError.unpadded", {"most": None}),
    ("SizesError.above", {"sizes": [16]}),
]


def _classes() -> dict[str, type[CGCompileError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return {name: kind for name, kind in members if issubclass(kind, CGCompileError)}


def _constructors() -> dict[str, frozenset[str]]:
    """The fields of every template and every other constructor, by its full name."""
    fields = {}
    for name, kind in _classes().items():
        for method, value in vars(kind).items():
            if isinstance(value, Template):
                fields[f"{name}.{method}"] = value.fields
            elif isinstance(value, classmethod):
                parameters = inspect.signature(getattr(kind, method)).parameters
                fields[f"{name}.{method}"] = frozenset(parameters)
    return fields


def _examples() -> list[tuple[str, CGCompileError]]:
    examples, constructors = [], _constructors()
    for name, other in [*((name, {}) for name in sorted(constructors)), *OTHER_TEXTS]:
        kind, _, message = name.partition(".")
        own = OWN_FIELDS.get(name, {}) | other
        values = {field: own.get(field, FIELDS[field]) for field in sorted(constructors[name])}
        examples.append((name, getattr(_classes()[kind], message)(**values)))
    return examples


def test_every_message_as_a_user_sees_it() -> None:
    texts = [f"{name}: {error}" for name, error in _examples()]
    assert_snapshot("errors", "\n".join(texts))


def test_errors_are_of_the_tree_and_ascii() -> None:
    for name, error in _examples():
        assert type(error).__name__ == name.partition(".")[0]
        assert isinstance(error, (ValueError, RuntimeError, TypeError)) or "CGCompile" in name
        assert str(error).isascii()
        assert max(map(len, str(error).splitlines())) < 250, name


def _uses(tree: ast.Module) -> Iterator[tuple[str, ast.Call | None]]:
    """Each constructor that code names, and the call of it, if it is called right there."""
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    classes = _classes()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            continue
        if node.value.id in classes:
            kinds = classes[node.value.id].__mro__
            owner = next((kind for kind in kinds if node.attr in vars(kind)), kinds[0])
            yield f"{owner.__name__}.{node.attr}", calls.get(id(node))


def test_every_call_in_the_library_gives_the_fields_of_its_message() -> None:
    constructors, used = _constructors(), set()
    for path in (*ROOT.glob("cgcompile/**/*.py"), *ROOT.glob("passes/*.py")):
        for name, call in _uses(ast.parse(path.read_text())):
            assert name in constructors, f"{path}: {name}"
            assert call is not None, f"{path}: {name} must be called where it is named"
            where = f"{path}:{call.lineno} {name}"
            assert not call.args, f"{where}: give the fields by name"
            assert {keyword.arg for keyword in call.keywords} == constructors[name], where
            used.add(name)
    assert used == set(constructors), "a message that nothing raises"


class ExampleError(CGCompileError):
    attributes = ("op",)
    one = Template("{op!r} took {size:#x}{known:close {op}}\n{names:list nothing}")
    none = Template("plain {{}}")


def test_a_template_formats_and_sets() -> None:
    error = ExampleError.one(op="mul", size=16, known=("mull", "add"), names=())
    assert type(error) is ExampleError
    assert error.op == "mul"
    assert str(error) == "'mul' took 0x10 Did you mean 'mull'?\n  nothing"
    assert str(ExampleError.none()) == "plain {}"


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"op": "mul", "size": 16, "known": ()},
        {"op": "mul", "size": 16, "known": (), "names": (), "other": 1},
    ],
)
def test_a_template_refuses_other_fields(fields: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"ExampleError\.one\(\) takes known, names, op, size; it"):
        ExampleError.one(**fields)
    with pytest.raises(TypeError, match=r"takes no fields; it was given size"):
        ExampleError.none(size=1)
    with pytest.raises(TypeError, match="positional"):
        ExampleError.none("mul")


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("{x:shown}", "a" * 500, "'" + "a" * 399 + "..."),
        ("{x:type}", 3, "int"),
        ("{x:kind}", 3, "an int"),
        ("{x:a}", "Attention", "an Attention"),
        ("{x:a}", "NoneType", "None"),
        ("{x:error}", KeyError("k"), "KeyError: 'k'"),
        ("{x:address}", 255, "at 0xff"),
        ("{x:address}", None, "missing"),
        ("{x:count}", (1, 2), "2"),
        ("{x:list}", (1, 2), "1, 2"),
        ("{x:list}", (), "(none)"),
        ("{x:first 2}", (1, 2, 3), "1, 2 and 1 more"),
        ("{x:first 3}", (1, 2, 3), "1, 2, 3"),
        ("{x:plural rank}", (1,), "rank 1"),
        ("{x:plural rank}", (1, 2), "ranks 1, 2"),
        ("{x:if up to {x}|any}", 0, "up to 0"),
        ("{x:if up to {x}|any}", "a|b", "up to a|b"),
        ("{x:if up to {x}|any}", None, "any"),
        ("{x:if yes|no}", True, "yes"),
        ("{x:if yes|no}", False, "no"),
        ("{x:if yes|no}", (), "no"),
        ("{x[1]}", (1, 2), "2"),
    ],
)
def test_the_specs_of_templates(text: str, value: object, expected: str) -> None:
    error = Template(text).__get__(None, CGCompileError)(x=value)
    assert str(error) == expected
