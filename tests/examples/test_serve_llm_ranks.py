"""``serve_llm.py`` on four gloo processes: the tokens of one, and a named error when one dies."""

import contextlib
import json
import random
import re
import signal
import socket
from pathlib import Path

import pytest
from lib.examples import EXAMPLES, run
from lib.programs import Ran, run_program

pytestmark = pytest.mark.slow

SMALL = ["--device", "cpu", "--layers", "1", "--sizes", "8", "32"]
RANKS = [*SMALL, "--tensor-parallel", "2", "--data-parallel", "2"]

# All ranks are forked from one process, which has imported this.
EXAMPLE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import serve_llm, torch._inductor.compile_fx, torch.distributed.run
"""

# Two nodes of torchrun; the file and the words of the example are its arguments.
NODES = """
import os, sys
from torch.distributed.run import main

words, port = sys.argv[2:], sys.argv[1]
address = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1"]
forked = ["--run-path", "--start-method", "fork", "--master-port", port]
child = os.fork()
main([*address, *forked, "--node-rank", "0" if child else "1", *words])
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""

# Rank 3 is killed inside of its first attention while it serves: between two all-reduces. Each rank
# writes its errors to a file.
DYING = """
import json, os, signal, sys
folder = sys.argv.pop(1)
import serve_llm
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


def started(path: Path, code: str, *arguments: str, **environment: str) -> Ran:
    """Run a program that uses the example, on the network of this machine alone."""
    program = path / "program.py"
    program.write_text(code)
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    return run_program(program, *arguments, imports=EXAMPLE, **environment)


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


def test_two_nodes_of_two_ranks_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "serve_llm.py"), *RANKS, "--modes", "FULL_AND_PIECEWISE"]
    alone = run("serve_llm.py", *SMALL, "--modes", "NONE", "--draft", "none")
    nodes = started(tmp_path, NODES, free_port(), *script)
    assert nodes.code == 0, nodes
    rows = nodes.stdout.splitlines()
    assert "tokens identical: yes" in rows
    assert "promises kept: yes" in rows
    assert digest(rows) == digest(alone)  # once: the first rank prints
    replicas = [row for row in rows if row.startswith("  target: ")]
    assert len(replicas) == 2
    shares = r"(\d+) steps, FULL ([1-9]\d*)%, PIECEWISE ([1-9]\d*)%, NONE 0%, (\d+) replays"
    matches = [re.search(shares, row) for row in replicas]
    first, second = (match.groups() for match in matches if match is not None)
    assert first == second  # the replicas take the same graphs, one without requests as well
    assert first[0] == first[3]


def test_a_killed_rank_ends_the_others_with_a_named_error(tmp_path: Path) -> None:
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "4"}
    words = [str(tmp_path), *RANKS, "--modes", "breakable"]
    group = started(tmp_path, DYING, *words, **store)
    texts = [(tmp_path / rank).read_text() for rank in "012"]
    codes = json.loads(group.stdout.splitlines()[-1])
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
def test_what_cannot_run_is_named(
    tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    done = started(tmp_path, "import serve_llm, sys; sys.exit(serve_llm.main())", *arguments)
    assert message in done.stderr
    assert done.code == code
