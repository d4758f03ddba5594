"""The benchmark of talkers: its loops make the codes of ``generate``, by one replay a frame."""

import re
from typing import Any

import pytest
import torch
from lib.examples import call, load

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--dtype", "float32", "--tiny", "--rows", "2", "--compiler", "eager"]
SMALL += ["--frames", "3", "--timed", "1"]


@pytest.mark.parametrize(
    ("ways", "more"),
    [(["steps", "loop"], ["--sample"]), (["loop, compiled"], ["--talkers", "qwen3-omni"])],
)
def test_a_loop_makes_the_codes_of_generate(ways: list[str], more: list[str]) -> None:
    done = call(load("benchmarks/talker_time.py"), *SMALL, "--ways", *ways, *more)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [re.split(r"\s{2,}", line) for line in done.stdout.splitlines() if "100.0%" in line]
    talkers = [("Qwen3-Omni", "5"), ("CSM", "7")][: 1 if "--talkers" in more else 2]
    assert [row[:4] for row in rows] == [[*talker, "2", way] for talker in talkers for way in ways]
    assert "all right: yes" in done.stdout


@pytest.mark.parametrize("name", ["qwen3-omni", "csm"])
def test_frames_differ_and_each_is_one_replay(name: str) -> None:
    module = load("benchmarks/talker_time.py")
    torch.manual_seed(0)
    talker = module.TALKERS[name](True, False)
    talker.model.eval()
    args = module.parsed(SMALL)
    seen = []
    with torch.inference_mode():
        frame, loop = module.looped(talker, args)
        state = talker.state(2)
        module.codes_of(frame, talker, state, 0)
        captures = loop.counters.captures
        for seed in range(4):
            codes = module.codes_of(frame, talker, state, seed)
            assert torch.equal(codes, module.codes_of(talker.generate, talker, state, seed))
            seen.append(codes.flatten().tolist())
            assert state["caches"] == []
    assert len({tuple(row) for row in seen}) == 4
    assert (loop.counters.captures, loop.counters.replays) == (captures + 1, 3)


def test_what_is_wrong_is_named() -> None:
    module = load("benchmarks/talker_time.py")
    good: dict[str, Any] = {"talker": "CSM", "rows": 2, "way": "loop", "least": 1.0, "replays": 1.0}
    assert module.problems(good) == []
    assert module.problems({**good, "least": 0.9, "replays": 0.5}) == [
        "CSM, 2 rows, loop: codes differ from those of generate",
        "CSM, 2 rows, loop: 0.50 replays a frame",
    ]
    assert module.problems({**good, "way": "loop, compiled", "least": 0.9}) == []
