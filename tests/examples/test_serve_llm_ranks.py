"""``serve_llm.py`` on four gloo processes: the tokens of one, and a named error when one dies."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lib.examples import EXAMPLES, run
from lib.patience import PATIENCE

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--layers", "1", "--sizes", "8", "32"]
RANKS = [*SMALL, "--tensor-parallel", "2", "--data-parallel", "2"]

# Rank 3 is killed inside of its first attention while it serves: between two all-reduces. The ranks
# are forked from one process, which has imported torch; each writes its errors to a file.
DYING = """
import json, os, signal, sys
folder, examples = sys.argv[1:3]
del sys.argv[1:3]
sys.path.insert(0, examples)
import gc, serve_llm, torch._inductor.compile_fx
from llm_engine import attention
from llm_engine.engine import Engine

def serving(engine, requests):
    attention.gather_attention = dying
    serve(engine, requests)

def dying(*arguments):
    if os.environ["RANK"] == "3":
        os.kill(os.getpid(), signal.SIGKILL)
    gather(*arguments)

serve, gather = Engine.serve, attention.gather_attention
Engine.serve = serving
ranks = []
gc.freeze()
for rank in range(4):
    ranks.append(os.fork())
    if not ranks[-1]:
        os.environ["RANK"] = str(rank)
        errors = os.open(os.path.join(folder, str(rank)), os.O_WRONLY | os.O_CREAT)
        os.dup2(errors, 2)
        sys.exit(serve_llm.main())
codes = {3: os.waitpid(ranks[3], 0)[1]}
codes |= {rank: os.waitpid(ranks[rank], 0)[1] for rank in range(3)}
print(json.dumps([os.waitstatus_to_exitcode(codes[rank]) for rank in range(4)]))
"""


def start(*command: str, **environment: str) -> "subprocess.Popen[str]":
    """Start a Python process with one thread, on the network of this machine alone."""
    more = {"OMP_NUM_THREADS": "1", "CGCOMPILE_CACHE_DIR": "off", "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **more, **environment, "PYTHONPATH": str(EXAMPLES.parent)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command], env=env, **pipes)


def free_port() -> str:
    """Below those that the system gives to connections of other tests."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return str(port)


def digest(rows: list[str]) -> str:
    (row,) = (row for row in rows if row.startswith("tokens: "))
    return row


def test_two_nodes_of_two_ranks_give_the_tokens_of_one_process() -> None:
    port = free_port()
    script = [str(EXAMPLES / "serve_llm.py"), *RANKS, "--modes", "FULL_AND_PIECEWISE"]
    address = ["--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port]
    nodes = [
        start("-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", n, *address, *script)
        for n in "01"
    ]
    alone = run("serve_llm.py", *SMALL, "--modes", "NONE", "--draft", "none")
    texts = [node.communicate(timeout=PATIENCE) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    rows = texts[0][0].splitlines()
    assert "tokens identical: yes" in rows
    assert "promises kept: yes" in rows
    assert digest(rows) == digest(alone)
    assert texts[1][0] == ""  # the first rank prints
    replicas = [row for row in rows if row.startswith("  target: ")]
    assert len(replicas) == 2
    shares = r"(\d+) steps, FULL ([1-9]\d*)%, PIECEWISE ([1-9]\d*)%, NONE 0%, (\d+) replays"
    matches = [re.search(shares, row) for row in replicas]
    first, second = (match.groups() for match in matches if match is not None)
    assert first == second  # the replicas take the same graphs, one without requests as well
    assert first[0] == first[3]


def test_a_killed_rank_ends_the_others_with_a_named_error(tmp_path: Path) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "4"}
    places = [str(tmp_path), str(EXAMPLES)]
    group = start("-c", DYING, *places, *RANKS, "--modes", "breakable", **store)
    output = group.communicate(timeout=PATIENCE)
    texts = [(tmp_path / rank).read_text() for rank in "012"]
    codes = json.loads(output[0].splitlines()[-1])
    assert codes == [3, 3, 3, -signal.SIGKILL], texts
    does = ["requests the graph of a step"] * 2 + ["runs a collective of the model"]
    for rank, text in enumerate(texts):
        error = rf"AgreementError: rank {rank} {does[rank]} \(step \d+\), and waited for all ranks"
        assert re.search(error, text), text
        assert "torch.distributed raised: " in text
    assert "not there: rank 3." in texts[2]  # it has a connection to the killed one


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tensor-parallel", "2"], 2, "2 x 1 ranks need as many processes, not 1: torchrun"),
        (["--data-parallel", "2", "--draft", "model"], 2, "--draft model: ranks"),
    ],
)
def test_what_cannot_run_is_named(arguments: list[str], code: int, message: str) -> None:
    done = start(str(EXAMPLES / "serve_llm.py"), *arguments)
    assert message in done.communicate(timeout=PATIENCE)[1]
    assert done.returncode == code
