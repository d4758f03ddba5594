"""The loop in every mode, the report of a run, and steps without a scheduler."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from lib.examples import BLOCK_SIZE, VOCABULARY, WIDTH, runner, serve, tiny_llama, workload
from llm_engine.drafts import NgramDraft, RandomDraft
from llm_engine.engine import Drafted
from llm_engine.judge import Parting, partings, plain_logits
from llm_engine.model import shallow_copy
from llm_engine.report import Model, Run, broken_promises
from llm_engine.runner import Tally, decode_batch, ladder
from llm_engine.scheduler import Pressure, Request

from cgcompile.serving import capture_sizes

DRAFTS = {"none": None, "random": RandomDraft(VOCABULARY, 0), "ngram": NgramDraft()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAFTS)
def test_every_request_gets_what_it_gets_alone(kind: str, device: str) -> None:
    model = tiny_llama(device)
    served = serve(model, workload(), draft=DRAFTS[kind], k=0 if kind == "none" else 3)
    assert served.engine.scheduler.pressure.preemptions > 0
    assert served.engine.mixed_steps > 0
    alone = [
        Request(request.number, request.prompt, request.max_new_tokens, 1000 * request.number)
        for request in served.requests
    ]
    expected = serve(model, alone)
    assert expected.engine.runner.tally.decode_sizes.keys() == {1}
    assert served.output == expected.output
    assert len({token for output in served.output for token in output}) > 15


@pytest.mark.slow
def test_a_prompt_that_repeats_itself_is_guessed() -> None:
    served = serve(tiny_llama("cpu"), workload(), draft=NgramDraft(), k=3)
    assert 0 < served.engine.drafted.accepted < served.engine.drafted.proposed


@pytest.mark.slow
@pytest.mark.parametrize("query_len", [1, 3])
def test_a_decode_step_without_a_scheduler(query_len: int, device: str) -> None:
    """A graph and the plain step see the same context; unwritten memory is NaN."""
    target = runner(tiny_llama(device), "breakable", [query_len])
    for num_reqs, length in ((1, 30), (3, 17), (4, 64)):
        batch = decode_batch(num_reqs, length, BLOCK_SIZE, WIDTH, query_len=query_len)
        assert batch.uniform_decode
        tables = batch.inputs["block_tables"]
        assert tables is not None
        used = tables[tables > 0]
        assert len(used) == len(used.unique()) == num_reqs * -(-length // BLOCK_SIZE)
        for layer in target.model.layers:
            for cache in (layer.attention.k_cache, layer.attention.v_cache):
                cache.normal_(generator=torch.Generator(device).manual_seed(length))
                cache[0] = float("nan")
        result = target.run(batch).clone()
        plain = target.manager.run(batch, valid_modes=())
        torch.testing.assert_close(result, plain, rtol=1e-4, atol=1e-4)
        assert result.isfinite().all()
    assert target.tally.uniform_full == target.replays == 3


def test_a_shallow_copy_shares_what_it_computes() -> None:
    model = tiny_llama("cpu")
    copy = shallow_copy(model, 1)
    assert len(copy.layers) == 1
    assert torch.equal(copy.head.weight, model.head.weight)
    assert torch.equal(copy.layers[0].gate_up.weight, model.layers[0].gate_up.weight)
    assert not torch.equal(copy.layers[0].gate_up.weight, model.layers[1].gate_up.weight)


def test_rotary_frequencies_stay_float32() -> None:
    model = tiny_llama("cpu").place("cpu", torch.bfloat16)
    assert model.embed.weight.dtype == model.layers[0].attention.qkv.weight.dtype == torch.bfloat16
    assert model.inverse_frequencies.dtype == torch.float32


def run(**more: Any) -> Run:
    """Make a run that kept all promises."""
    request = Request(0, [1, 2], 2)
    request.accept([3, 4])
    tally = Tally()
    tally.modes.update({"FULL": 20, "PIECEWISE": 5})
    tally.uniform = tally.uniform_full = 20
    tally.decode_sizes.update({1: 10, 2: 5, 3: 5})
    model = Model("target", tally, 25, 1.0, 0, "")
    settings = {"mode": "FULL_AND_PIECEWISE", "draft": "none", "requests": [request]}
    settings |= {"models": [model], "pressure": Pressure(1, 1), "drafted": Drafted()}
    return Run(**{**settings, "mixed_steps": 1, "seconds": 2.0, **more})


def models(**more: Any) -> list[Model]:
    (good,) = run().models
    counts = {k: v for k, v in more.items() if k != "replays"}
    tally = replace(good.tally, **counts)
    return [replace(good, tally=tally, replays=more.get("replays", good.replays))]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"partings": (Parting(4, 7, 0.02),)},
            r"differ from those of NONE: request 4 from output token 7 on, by 0\.02 standard",
        ),
        ({"requests": [Request(0, [1, 2], 2)]}, r"requests that are not done: \[0\]"),
        ({"leaked_blocks": 3}, "3 blocks were not given back"),
        ({"models": models(uniform_full=18)}, "only 18 of 20 uniform decode steps were FULL"),
        ({"models": models(replays=24)}, "25 steps with graphs made 24 replays"),
        ({"draft": "ngram", "drafted": Drafted(20, 0)}, "no n-gram was accepted"),
        ({"mixed_steps": 0}, "no step mixed chunks of prompts and decoding"),
        ({"pressure": Pressure(0, 1)}, "no request was preempted"),
        ({"pressure": Pressure(1, 0)}, "the cache was never full"),
        ({"models": models(decode_sizes={1: 20})}, "fewer than 3 batch sizes"),
    ],
)
def test_each_broken_promise_is_named(more: dict[str, Any], message: str) -> None:
    assert broken_promises(run(), "NONE", scarce=True, close=0.0) == []
    broken = broken_promises(run(**more), "NONE", scarce=True, close=0.01)
    assert re.search(message, "\n".join(broken))


def test_what_is_not_promised() -> None:
    close = run(partings=(Parting(4, 7, 0.02),))
    assert broken_promises(close, "NONE", scarce=True, close=0.02) == []
    assert broken_promises(run(mixed_steps=0), "NONE", scarce=False, close=0.0) == []
    plain = run(mode="PIECEWISE", models=models(uniform_full=0))
    assert broken_promises(plain, "NONE", scarce=True, close=0.0) == []
    almost = run(models=models(uniform_full=19))
    assert broken_promises(almost, "NONE", scarce=True, close=0.0) == []


@pytest.mark.slow
def test_where_runs_part_and_how_close_it_was() -> None:
    model = tiny_llama("cpu")
    expected, requests = (serve(model, workload()).requests for _ in range(2))
    assert partings(expected, requests, model) == ()
    changed, shorter = requests[1].tokens, requests[3].tokens
    index = len(requests[1].prompt) + 2
    logits = plain_logits(model, changed[:index])[-1]
    assert int(logits.argmax()) == changed[index]  # alone and at once, it is the same token
    changed[index] = int(logits.argmin())
    del shorter[-1]
    one, other = partings(expected, requests, model)
    assert (one.number, one.position) == (1, 2)
    assert one.gap == pytest.approx(float((logits.max() - logits.min()) / logits.std()), rel=1e-4)
    largest = logits.abs().max()  # of either of the two
    spacing = float((largest.nextafter(largest.new_tensor(math.inf)) - largest) / logits.std())
    assert one.spacing == pytest.approx(spacing, rel=1e-4)
    assert (other.number, other.position) == (3, len(requests[3].output))
    assert other.gap == float("inf")


def test_the_ladder_of_sizes() -> None:
    assert ladder(6) == (1, 2, 4, 6)
    assert ladder(256) == capture_sizes(256)
    assert ladder(1000) == (*capture_sizes(256), 512, 768, 1000)
    assert ladder(512) == (*capture_sizes(256), 512)


def test_the_text_of_a_run() -> None:
    lines = run(draft="ngram", drafted=Drafted(20, 5, 10)).text().splitlines()
    assert lines == [
        "FULL_AND_PIECEWISE + ngram draft: 1 requests, 2 tokens in 2.00 s: 1.0 tokens/s, "
        "0.00 ms per output token, 80.00 ms per step",
        "  start 1.00 s, graphs 0 MiB",
        "  target: 25 steps, FULL 80%, PIECEWISE 20%, NONE 0%, 25 replays; uniform decode 20 in 3 "
        "sizes, 20 of them FULL",
        "  mixed steps 1, preemptions 1, steps with a full cache 1",
        "  drafts: 5 of 20 accepted (25.0%), 0.50 a round",
    ]
