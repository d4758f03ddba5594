"""``serve_llm.py`` keeps its promises on the CPU, and names a promise that is broken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lib.examples import call, load, run
from llm_engine import runner

from cgcompile import AttentionCGSupport

pytestmark = pytest.mark.slow

TINY = ["--device", "cpu", "--layers", "1", "--hidden", "32", "--intermediate", "32"]
TINY += ["--requests", "6", "--max-reqs", "4", "--budget", "16", "--draft-tokens", "2"]


@pytest.mark.slow
def test_the_engine_serves_the_same_tokens_in_all_modes() -> None:
    rows = run("serve_llm.py", "--device", "cpu", "--coverage")
    assert "tokens identical: yes" in rows
    assert "promises kept: yes" in rows
    modes = ["NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "FULL", "breakable"]
    with_drafts = [
        f"{mode} + {draft} draft"
        for draft in ("random", "ngram", "model")
        for mode in ("NONE", "FULL_AND_PIECEWISE")
    ]
    runs = [row.split(":")[0] for row in rows if " tokens/s, " in row]
    assert runs == modes + with_drafts
    steps = [row for row in rows if row.startswith("  target: ")]
    assert "FULL 0%, PIECEWISE 0%, NONE 100%" in steps[0]
    assert "FULL 0%, PIECEWISE 100%, NONE 0%" in steps[1]
    assert "PIECEWISE 0%" in steps[2]
    assert "FULL 0%" not in steps[2]
    assert all("NONE 0%" in row and "FULL 0%" not in row for row in (steps[3], *steps[5::2]))
    assert "FULL 100%" in steps[4]
    accepted = [row for row in rows if row.startswith("  drafts: ")]
    assert len(accepted) == 6
    assert not any("(0.0%)" in row for row in accepted[2:])  # n-grams and the model
    assert sum(row.startswith("batches") for row in rows) == 16  # a table for each manager
    (tokens,) = (row for row in rows if row.startswith("tokens: "))
    assert int(tokens.split()[6]) > 32


@pytest.mark.slow
@pytest.mark.parametrize("tokens", ["1", "4"])
def test_drafts_of_a_model_are_compared_with_plain_decoding(tokens: str) -> None:
    arguments = [*TINY, "--layers", "4", "--budget", "24", "--draft-tokens", tokens]
    rows = run("serve_llm.py", "--speculative", *arguments)
    assert "tokens identical: yes" in rows
    assert "promises kept: yes" in rows
    runs = [row.split(":")[0] for row in rows if " tokens/s, " in row and "requests" in row]
    assert runs == ["FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE + model draft"]
    (summary,) = (row for row in rows if row.startswith("model draft: "))
    accepted = float(summary.split()[2])
    assert f" of {tokens} drafts accepted a round, " in summary
    assert 0.3 * int(tokens) < accepted < int(tokens)  # it is not the target
    (steps,) = (row for row in rows if row.startswith("  draft model: "))
    assert "FULL 100%" in steps


@pytest.mark.slow
def test_the_engine_fails_when_a_token_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second mode gets one token wrong."""
    serve_llm = load("serve_llm.py")
    server, runs = serve_llm.Server, []

    class Wrong(server):  # type: ignore[misc, valid-type]
        def run(self, mode: str, draft: str) -> Any:
            runs.append(super().run(mode, draft))
            if mode == "NONE":
                return runs[-1]
            runs[-1].requests[2].tokens[-1] += 1
            parts = serve_llm.partings(runs[0].requests, runs[1].requests, self.target.model)
            return serve_llm.replace(runs[1], partings=parts)

    arguments = [*TINY, "--draft", "none", "--modes", "NONE", "breakable"]
    done = call(serve_llm, *arguments)
    assert done.returncode == 0
    assert "tokens identical: yes" in done.stdout
    monkeypatch.setattr(serve_llm, "Server", Wrong)
    done = call(serve_llm, *arguments)
    assert done.returncode == 1
    assert "tokens identical: no" in done.stdout
    assert "BROKEN: breakable: tokens differ from those of NONE: request 2 from" in done.stdout


@pytest.mark.slow
def test_the_engine_fails_when_decoding_misses_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention that may not go into FULL graphs: right tokens are not enough."""
    monkeypatch.setattr(runner, "SUPPORT", AttentionCGSupport.NEVER)
    done = call(load("serve_llm.py"), *TINY, "--draft", "none", "--modes", "breakable")
    assert done.returncode == 1
    assert "tokens identical: yes" in done.stdout
    assert "BROKEN: breakable, target: only 0 of " in done.stdout


@pytest.mark.slow
def test_the_engine_fails_where_nothing_is_shown() -> None:
    """So few requests never fill the cache; the size of one's own cache is no promise."""
    serve_llm = load("serve_llm.py")
    arguments = [*TINY, "--draft", "none", "--modes", "breakable", "--requests", "1"]
    done = call(serve_llm, *arguments)
    assert done.returncode == 1
    assert "BROKEN: breakable: no request was preempted" in done.stdout
    assert "BROKEN: breakable: the cache was never full" in done.stdout
    assert call(serve_llm, *arguments, "--blocks", "40").returncode == 0


@pytest.mark.slow
def test_the_engine_serves_a_checkpoint(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    serve_llm = load("serve_llm.py")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 90}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1)
    config.initializer_range = 0.3
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    modes = [*TINY, "--modes", "breakable", "--draft-modes", "breakable"]
    done = call(serve_llm, *modes, "--draft", "none", "model", "--model", str(tmp_path))
    assert done.returncode == 0
    assert "tokens identical: yes" in done.stdout
    for arguments, message in (
        (["--draft", "model", "--draft-model", str(tmp_path)], "of 90 tokens, the target 128"),
        (["--model", str(tmp_path / "nowhere")], "no config.json in"),
    ):
        done = call(serve_llm, "--device", "cpu", *arguments)
        assert done.returncode == 2
        assert message in done.stderr
