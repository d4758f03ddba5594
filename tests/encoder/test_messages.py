"""What a manager tells of a tower that does not fit: budgets, lines, bytes, causes."""

import re
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.encoders import BUDGETS, TABLES, C, Rows, images, manager, patches, rows
from torch import nn

import cgcompile
from cgcompile.debug import doctor
from cgcompile.encoder import (
    EncoderCudaGraphManager,
    GraphKey,
    PatchEncoder,
    PatchOffsets,
    PatchTable,
)
from cgcompile.encoder.errors import EncoderError
from cgcompile.encoder.patches import frame_offsets
from cgcompile.errors import ConfigError, DispatchError
from cgcompile.reasons import Fallback, Reason, warn_of

notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="no notes of exceptions")
CALL = {"pixel_values": torch.randn(32, C), "image_grid_thw": [(1, 4, 8)]}


def of(forward: Any, **more: Any) -> PatchEncoder:
    settings: dict[str, Any] = {"merge_size": 1, "in_features": C, "out_hidden_size": C}
    return PatchEncoder(forward, **{"offsets": {}, **settings, **more})


def whole_images(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return buffers["pixel_values"].view(-1, 16, C).flatten(0, 1)


def no_empty_sequences(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    lengths = buffers["cu_seqlens"].diff()
    if bool((lengths == 0).any()):
        raise RuntimeError("an empty sequence")
    return buffers["pixel_values"]


@notes
@pytest.mark.parametrize("limit", [None, 2**30])
@pytest.mark.parametrize(
    ("forward", "more", "budget"),
    [(whole_images, {}, 20), (no_empty_sequences, {"offsets": None}, 16)],
    ids=["budget", "offsets"],
)
def test_an_error_of_the_warm_up_has_the_budget(
    forward: Any, more: Any, budget: int, limit: int | None
) -> None:
    encoder = manager(of(forward, **more), captured=False, token_budgets=[budget])
    with pytest.raises(RuntimeError) as caught:
        encoder.capture(max_graph_bytes=limit)
    (note,) = caught.value.__notes__
    assert f"budget {budget}" in note
    assert f"pixel_values [{budget}, {C}] of float32" in note
    assert "empty sequences" in note
    assert "path" not in note


def test_a_failed_capture_names_the_line_of_the_tower() -> None:
    def reads(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        buffers["pixel_values"].sum().tolist()
        return buffers["pixel_values"]

    encoder = manager(of(reads), captured=False)
    missing = encoder.capture().missing
    encoder.execute(CALL)
    for text in (missing[0][1], encoder.coverage(), str(encoder.capture())):
        assert "test_messages.py" in text
        assert 'buffers["pixel_values"].sum().tolist()' in text
    assert "extra=" not in str(encoder.capture())
    assert "encoder" in next(iter(encoder.statistics.reasons())).remedy
    with torch.inference_mode():
        diagnosis = doctor(reads, encoder.graph_inputs(GraphKey("default", 8)))
    assert [finding.kind for finding in diagnosis.findings] == ["host_sync"]


def test_the_remedies_of_an_encoder(caplog: pytest.LogCaptureFixture) -> None:
    def reads(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        buffers["pixel_values"].sum().item()
        return buffers["pixel_values"]

    model = of(reads)
    encoder = manager(model, captured=False)
    encoder.capture()
    caplog.clear()
    encoder.execute(CALL)
    manager(patches()).execute(images((30, 30)))
    failed, oversize = [record.getMessage() for record in caplog.records]
    assert "Remedy: encoder graphs are not split: keep the value" in failed
    assert "Remedy: add a token budget >= 225." in oversize
    with torch.inference_mode():
        buffers = encoder.graph_inputs(GraphKey("default", 8))
        (finding,) = doctor(model.encoder_cudagraph_forward, buffers).findings
    for remedy in (failed, finding.fix):
        assert "tables=" in remedy
        assert not re.search("eager|splitting", remedy.partition("Remedy")[2] or remedy)


def keywords(pixel_values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    return pixel_values


def first_of_four(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return buffers["pixel_values"][::4]


def reads_missing(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
    return buffers["starts"]


def order(grids: Any) -> torch.Tensor:
    return torch.arange(sum(t * h * w for t, h, w in grids)).flip(0)


PERMUTATION = PatchTable(order, dtype=torch.long)
LIST = PatchTable(lambda grids: [order(grids)], dtype=torch.long)  # type: ignore[arg-type, return-value]
STARTS = PatchOffsets(frame_offsets, most=lambda tokens, items, frames: 1)
WRONG: dict[str, tuple[Any, str]] = {
    "keywords": (lambda: of(keywords), r"keywords\(pixel_values.*lambda buffers: tower\(\*\*buff"),
    "a module": (lambda: of(nn.Bilinear(2, 2, 2)), r"Bilinear\(input1.*lambda buffers: tower\("),
    "merge": (lambda: of(first_of_four), r"4 times too few rows: check merge_size="),
    "missing": (
        lambda: of(reads_missing),
        r"'starts'; its buffers are pixel_values.*tables= and off",
    ),
    "list": (
        lambda: patches(tables={**TABLES, "x": LIST}),
        r"'x': the value is list.*torch\.cat\(",
    ),
    "order": (
        lambda: patches(tables={**TABLES, "x": PERMUTATION}),
        r'x.*permutation of its rows, 11, 10.*tail="positions"',
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_to_give_instead(case: str) -> None:
    make, words = WRONG[case]
    with pytest.raises(EncoderError, match=f"(?s){words}"):
        manager(make())


def test_a_permutation_with_a_tail() -> None:
    manager(patches(tables={**TABLES, "x": replace(PERMUTATION, tail="positions")}))
    mine = replace(PERMUTATION, tail=lambda dst, src: dst[: len(src)].copy_(src))
    manager(patches(tables={**TABLES, "x": mine}))


def test_pixels_of_bytes() -> None:
    call = images((4, 4))
    call["pixel_values"] = torch.zeros(16, C, dtype=torch.uint8)
    with pytest.raises(EncoderError, match=r"(?s)uint8.*\.float\(\) / 255"):
        manager(patches()).execute(call)


def test_too_few_sequences_are_declared() -> None:
    model = patches(offsets={"cu_seqlens": replace(STARTS, longest_padding=None)})
    words = r"(?s)'cu_seqlens' of budget 8: 3 offsets fill it.*holds: 1\..*most= of Patch"
    with pytest.raises(EncoderError, match=words):
        manager(model).execute(images((4, 2), (4, 2)))


def test_the_limit_of_items_by_its_name() -> None:
    with pytest.raises(EncoderError, match="max_batch_size = 9; it must be <= the smallest"):
        manager(max_batch_size=9, captured=False)
    with pytest.raises(EncoderError, match="max_batch_size = 0"):
        manager(max_batch_size=0, captured=False)


@notes
def test_the_dtypes_of_weights_and_buffers() -> None:
    tower = nn.Linear(C, C, dtype=torch.float64)
    encoder = manager(
        of(lambda buffers: tower(buffers["pixel_values"]), tower=tower), captured=False
    )
    with pytest.raises(RuntimeError) as caught:
        encoder.capture()
    (note,) = caught.value.__notes__
    assert "dtype=torch.float32, and weights are of torch.float64." in note


def test_dropout_at_capture(caplog: pytest.LogCaptureFixture) -> None:
    tower = nn.Sequential(nn.Linear(C, C), nn.Dropout(0.5))
    model = of(lambda buffers: tower(buffers["pixel_values"]), tower=tower)
    manager(model)
    manager(of(lambda buffers: tower(buffers["pixel_values"]), tower=tower.eval()))
    (record,) = caplog.records
    assert record.getMessage().startswith("dropout is on in Sequential, 1: results are random.")


def test_doctor_tells_what_to_give() -> None:
    with pytest.raises(ConfigError, match=r"doctor\(forward, manager\.graph_inputs"):
        doctor(manager(patches()), images((4, 4)))


def test_a_second_capture_has_nothing_to_do() -> None:
    assert str(manager(Rows()).capture()) == "0 batches to capture: all have graphs"


def test_the_bytes_that_the_largest_needs() -> None:
    largest = manager(patches(), token_budgets=[64])
    pool = largest.pool
    assert pool is not None
    needed = pool.nbytes
    encoder = manager(patches(), captured=False)
    (why,) = {why for _, why in encoder.capture(max_graph_bytes=needed - 1).missing}
    assert why.endswith(f"; budget 64 alone needs {needed} or more")
    assert repr(pool) == f"<GraphPool on cpu: {needed} bytes>"


def test_a_table_of_too_few_rows_is_refused_at_capture() -> None:
    short = PatchTable(lambda grids: TABLES["scale"].make(grids)[:-1], (1,), torch.float32)
    encoder = manager(patches(tables={**TABLES, "scale": short}), captured=False)
    with pytest.raises(EncoderError, match=r"'scale'.*\[11, 1\].*12 rows, the patches of 2 items"):
        encoder.capture()


def test_settings_may_be_a_mapping() -> None:
    settings = {"on_fallback": "raise", "capture_device": "host"}
    options: dict[str, Any] = {"dtype": torch.float32, "token_budgets": BUDGETS}
    encoder = EncoderCudaGraphManager(patches(), device="cpu", config=settings, **options)
    encoder.capture()
    with pytest.raises(DispatchError, match="225 output tokens") as caught:
        encoder.execute(images((30, 30)))
    assert "path" not in str(caught.value)
    with pytest.raises(ConfigError, match="strikt"):
        EncoderCudaGraphManager(patches(), device="cpu", config={"strikt": True}, **options)
    for name, value in {"splitting_ops": "a::b", "max_weight_sets": 3, "mode": "NONE"}.items():
        with pytest.raises(ConfigError, match=f"{name} = .* of an encoder manager is impossible"):
            EncoderCudaGraphManager(patches(), device="cpu", config={name: value}, **options)
    for name, value in {"small_batch_kernels": False, "builtin_splitting_ops": False}.items():
        with (
            pytest.warns(FutureWarning, match=f"{name} is deprecated"),
            pytest.raises(ConfigError, match=r"= .* of an encoder manager is impossible"),
        ):
            EncoderCudaGraphManager(patches(), device="cpu", config={name: value}, **options)
    default = {"splitting_ops": (), "on_fallback": "warn"}
    EncoderCudaGraphManager(patches(), device="cpu", config=default, **options)


def test_groups_and_items_are_told_apart() -> None:
    encoder = manager(Rows(), captured=False)
    encoder.execute(rows(3, 3, 5))
    assert "eager: not_captured: 3 items, 11 tokens a group" in encoder.coverage()
    encoder.execute(rows(4))
    table = encoder.coverage()
    assert "eager: not_captured: 4 items, 4..11 tokens a group" in table
    assert "on default" not in table


def test_verify_names_the_cause() -> None:
    state = [0]

    def counts_up(buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        state[0] += 1
        return buffers["pixel_values"] + state[0]

    encoder = manager(of(counts_up), captured=False)
    text = str(cgcompile.verify(encoder, CALL))
    assert "wrong by replay" not in text  # nothing was replayed
    assert "wrong by grouping" in text
    encoder.capture()
    text = str(cgcompile.verify(encoder, CALL))
    assert "wrong by replay" in text
    assert "a weight was replaced" in text


def test_a_warning_ends_its_detail_once(caplog: Any) -> None:
    warn_of("a group", Fallback(Reason.CAPTURE_FAILED, "It was not computed."))
    assert "It was not computed. Remedy: replace the op" in caplog.records[-1].getMessage()
