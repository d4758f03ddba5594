"""FULL graphs at other layouts than those they were captured at."""

from typing import Any

import pytest
import torch
from manager_support import NONE, PIECEWISE, Decoder, dispatcher, manager, metadata, requests

from cgcompile import get_forward_context
from cgcompile.errors import ManagerError
from cgcompile.reasons import Reason
from cgcompile.serving.steps import Batch, Metadata
from cgcompile.serving.verifying import verify_full

LAYOUTS = ((1, 1, 1), (3, 1), (2, 2, 2, 2), (7,), (1,), (12, 4))


def layouts(device: str) -> list[Batch]:
    return [requests(*each, device=device) for each in LAYOUTS]


def test_graphs_that_hold(device: str) -> None:
    made = manager("FULL", device=device)
    made.capture()
    assert verify_full(made, layouts(device), rtol=1e-5, atol=1e-5) == []
    assert made.dispatched(requests(3, device=device)).mode.name == "FULL"


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_an_op_that_bakes_a_number_is_found(mode: str, device: str, monkeypatch: Any) -> None:
    """It scales by the longest query, which it asks the host for."""
    from manager_support import library

    library()

    def baked(q, k, v, out):
        starts = get_forward_context().attn_metadata
        longest = get_forward_context().additional["max_query_len"]
        out.copy_(v * longest + starts[-1])

    monkeypatch.setattr("manager_support.attend.__code__", baked.__code__)

    def told(batch: Batch, descriptor: Any, buffers: Any) -> Metadata:
        found = metadata(batch, descriptor, buffers)
        return Metadata(found.attn_metadata, additional={"max_query_len": batch.max_query_len})

    made = manager(mode, device=device, metadata=told)
    made.capture()
    decode = [requests(*[1] * n, device=device, decode=True) for n in (1, 3, 8)]
    assert (verify_full(made, decode, rtol=1e-5, atol=1e-5) == []) is (mode != "FULL")
    if mode == "FULL":
        made.release()
        made.capture()
        (first, *_) = verify_full(made, layouts(device), rtol=1e-5, atol=1e-5)
        assert (first.batch, first.row) == (0, 0)
        assert first.largest > 0.01
        chosen = made.dispatched(requests(3, device=device))
        assert chosen.mode is NONE
        assert chosen.why is not None
        assert chosen.why.reason is Reason.NOT_CAPTURED
        assert "read a number on the host" in chosen.why.detail
    else:
        assert made.dispatched(requests(3, device=device)).mode is PIECEWISE
    batch = requests(3, device=device)
    again, plain = made.run(batch).clone(), made.run(batch, valid_modes=())
    torch.testing.assert_close(again, plain)


def test_what_has_no_full_graph_is_not_compared() -> None:
    made = manager(dispatch=dispatcher("PIECEWISE"))
    made.capture()
    with pytest.raises(ManagerError, match="nothing was compared: batch 5"):
        verify_full(made, layouts("cpu"))
    assert made.statistics.steps == 0


def test_what_never_replays_is_no_proof() -> None:
    """A lazy manager warms, captures, and only then replays."""
    made = manager("FULL", lazily=True)
    assert verify_full(made, layouts("cpu"), rtol=1e-5, atol=1e-5) == []
    assert made.counters.replays >= len(LAYOUTS)
    with pytest.raises(ManagerError, match="nothing was compared"):
        verify_full(manager("FULL"), layouts("cpu"))


def test_results_of_one_dimension(monkeypatch: Any) -> None:
    class Ids(Decoder):
        def forward(self, input_ids, positions, inputs_embeds=None):
            return super().forward(input_ids, positions).argmax(-1)

    made = manager("FULL", model=Ids())
    made.capture()
    assert verify_full(made, layouts("cpu")) == []
    run = made.run
    monkeypatch.setattr(made, "run", lambda batch, **more: run(batch, **more) + (not more))
    assert verify_full(made, layouts("cpu"))[0].largest == 1
