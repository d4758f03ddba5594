"""``serve_llm.py`` keeps its promises on the CPU, and says so when one is broken."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lib.examples import load, run

TINY = ["--device", "cpu", "--layers", "1", "--hidden", "32", "--intermediate", "32"]
TINY += ["--requests", "6", "--max-reqs", "4", "--budget", "16", "--draft-tokens", "2"]


def test_the_engine_serves_the_same_tokens_in_all_modes() -> None:
    done = run("serve_llm.py", "--device", "cpu", "--coverage")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = done.stdout.splitlines()
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
    assert sum(row.startswith("batches") for row in rows) == 14  # a table for each manager
    (tokens,) = (row for row in rows if row.startswith("tokens: "))
    assert int(tokens.split()[6]) > 32


def test_the_engine_fails_when_a_token_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second mode gets one token wrong."""
    serve_llm = load("serve_llm.py")
    server = serve_llm.Server

    class Wrong(server):  # type: ignore[misc, valid-type]
        def run(self, mode: str, draft: str) -> Any:
            found = super().run(mode, draft)
            if mode == "breakable":
                found.requests[2].tokens[-1] += 1
                given = self._reference.requests
                parts = serve_llm.partings(given, found.requests, self.target.model)
                return serve_llm.replace(found, partings=parts)
            return found

    given = [*TINY, "--draft", "none", "--modes", "NONE", "breakable"]
    assert serve_llm.main(given) == 0
    assert "tokens identical: yes" in capsys.readouterr().out
    monkeypatch.setattr(serve_llm, "Server", Wrong)
    assert serve_llm.main(given) == 1
    printed = capsys.readouterr().out
    assert "tokens identical: no" in printed
    assert "BROKEN: breakable: tokens differ from those of NONE: request 2 from" in printed


def test_the_engine_fails_when_decoding_misses_its_graphs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An attention that may not go into FULL graphs: right tokens are not enough."""
    from llm_engine import runner

    from cgcompile import AttentionCGSupport

    monkeypatch.setattr(runner, "SUPPORT", AttentionCGSupport.NEVER)
    given = [*TINY, "--draft", "none", "--modes", "breakable"]
    assert load("serve_llm.py").main(given) == 1
    printed = capsys.readouterr().out
    assert "tokens identical: yes" in printed
    assert "BROKEN: breakable, target: only 0 of " in printed


def test_the_engine_fails_where_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Requests so few that the cache never fills; with a cache of one's own that is no promise."""
    serve_llm = load("serve_llm.py")
    given = [*TINY, "--draft", "none", "--modes", "breakable", "--requests", "1"]
    assert serve_llm.main(given) == 1
    printed = capsys.readouterr().out
    assert "BROKEN: breakable: no request was preempted" in printed
    assert "BROKEN: breakable: the cache was never full" in printed
    assert serve_llm.main([*given, "--blocks", "40"]) == 0


def test_the_engine_serves_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    serve_llm = load("serve_llm.py")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 90}
    torch.manual_seed(0)
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=1)
    config.initializer_range = 0.3
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    given = [*TINY, "--modes", "breakable", "--draft-modes", "breakable"]
    assert serve_llm.main([*given, "--draft", "none", "model", "--model", str(tmp_path)]) == 0
    assert "tokens identical: yes" in capsys.readouterr().out
    given = ["--device", "cpu", "--draft", "model", "--draft-model", str(tmp_path)]
    assert serve_llm.main(given) == 2
    assert "vocabulary of 90 tokens, the target 128" in capsys.readouterr().err
    assert serve_llm.main(["--device", "cpu", "--model", str(tmp_path / "nowhere")]) == 2
    assert "no config.json in" in capsys.readouterr().err
