"""The hand-written layer computes what eager computes, in Triton's interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"
PROGRAM = """
import torch
from decode_layer import Dims, HandWritten, Tile, eager, make_layers

dims = Dims(layers=2, hidden=128, heads=4, kv_heads=2, size=32, intermediate=64, context=32)
tiles = dict.fromkeys(("qkv", "out", "gate_up", "down"), Tile(depth=64))
for rows in (1, 13):
    layers, x, position = make_layers(dims, rows, "cpu", torch.float32)
    expected = eager(dims, layers, x, position, torch.float64)
    step = HandWritten(dims, layers, x, position, tiles, dependent=False, block=16, split=2)
    for _ in range(2):
        torch.testing.assert_close(step().double(), expected, rtol=1e-4, atol=1e-4)
    assert not step.count.any()
print("equal")
"""


def test_the_hand_written_layer_equals_eager(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1", "PYTHONPATH": str(BENCHMARKS), "HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "equal", run.stderr
