"""Run an example, or a tiny Llama of the example engine."""

import contextlib
import importlib
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from llm_engine.drafts import Draft
from llm_engine.engine import Engine
from llm_engine.model import Llama, LlamaConfig, random_llama
from llm_engine.runner import Limits, Runner, configuration
from llm_engine.scheduler import BlockAllocator, Request, Scheduler
from llm_engine.workload import Workload, scarce_blocks

from lib.patience import PATIENCE

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def outside(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program in its own process: offline, without settings of this machine or test paths."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CGCOMPILE_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CGCOMPILE_CACHE_DIR": "off"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE
    )


def call(module: ModuleType, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Call ``main`` of an example in this process, which has imported torch already."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = module.main(list(arguments))
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def imported(script: str) -> ModuleType:
    """Import an example, which stays: some define operators, which a process can do once."""
    path = EXAMPLES / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


def run(script: str, *arguments: str) -> list[str]:
    """Run an example that must succeed; return the lines that it prints."""
    done = call(imported(script), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def load(script: str) -> ModuleType:
    """Load an example as a new module, for its functions."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BLOCK_SIZE, MAX_REQS, BUDGET, VOCABULARY, LONGEST = 4, 4, 16, 60, 64
NUM_BLOCKS, WIDTH = 80, LONGEST // BLOCK_SIZE


def tiny_config(**more: object) -> LlamaConfig:
    settings = {"vocab": VOCABULARY, "hidden": 32, "intermediate": 48, "layers": 2, "heads": 4}
    settings |= {"kv_heads": 2, "head_dim": 8}
    return LlamaConfig(**{**settings, **more})  # type: ignore[arg-type]


def tiny_llama(device: str, seed: int = 1) -> Llama:
    return with_caches(random_llama(tiny_config(), seed), device)


def with_caches(model: Llama, device: str) -> Llama:
    model.place(device, torch.float32).make_caches(NUM_BLOCKS, BLOCK_SIZE)
    return model


def runner(model: Llama, mode: str, query_lens: Sequence[int], **more: int) -> Runner:
    """A runner that has captured its graphs; rounds of drafts have a token of each request."""
    device = model.embed.weight.device.type
    limits = Limits(MAX_REQS, MAX_REQS if "drafts" in more else BUDGET, WIDTH)
    result = Runner(model, configuration(device, "eager"), limits)
    result.start(mode, query_lens, **more)
    return result


def workload(requests: int = 8) -> list[Request]:
    return Workload(requests, 20, 12, VOCABULARY).make()


@dataclass
class Served:
    engine: Engine
    requests: list[Request]

    @property
    def output(self) -> list[list[int]]:
        return [request.output for request in self.requests]


def serve(
    model: Llama,
    requests: list[Request],
    *,
    mode: str = "breakable",
    draft: Draft | None = None,
    k: int = 0,
) -> Served:
    """Serve requests with a cache that gets full; by default without the time of a compilation."""
    target = runner(model, mode, [1 + k], sampled=1 + k)
    blocks = scarce_blocks(requests, MAX_REQS, BLOCK_SIZE, k)
    scheduler = Scheduler(BlockAllocator(blocks), BLOCK_SIZE, WIDTH, MAX_REQS, BUDGET, k)
    engine = Engine(target, scheduler, draft)
    engine.serve(requests)
    return Served(engine, requests)
