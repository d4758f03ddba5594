"""Run Python programs that import cgcompile, each in a process of its own, without its imports."""

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lib.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# What a process imports before it forks. Torch is two seconds of CPU time, and what torch imports at
# its first compilation three more.
TORCH = "import torch"
COMPILERS = "import torch._inductor.compile_fx, cgcompile"
INTERPRETER = "import os; os.environ['TRITON_INTERPRET'] = '1'; import torch, triton"

# A process that has imported this, and has done nothing else. It forks one process for each program,
# which ends as an interpreter does.
SERVER = """
import gc, json, os, runpy, signal, sys
exec(sys.argv[1])

gc.collect()
gc.freeze()  # collections skip what was imported
for line in sys.stdin:
    arguments, environment, outputs, seconds = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    signal.alarm(seconds)
    for number, output in enumerate(outputs, 1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
    os.chdir(sys.path[0])
    runpy.run_path(arguments[0], run_name="__main__")
    break
"""


class Ran(NamedTuple):
    """What a program did."""

    code: int
    stdout: str
    stderr: str


@cache
def _server(imports: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER, imports]
    server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # its input ends, and so does it
    return server


def run_program(file: Path, *arguments: str, imports: str = COMPILERS, **environment: str) -> Ran:
    """Run a file in its folder and in this environment, in a process that has executed ``imports``.

    What torch reads from the environment as it is imported is that of the first program.
    """
    outputs = [file.with_suffix(suffix) for suffix in (".out", ".err")]
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    variables = {**os.environ, **environment}
    job = [[str(file), *arguments], variables, [*map(str, outputs)], int(PATIENCE)]
    server.stdin.write(json.dumps(job) + "\n")
    server.stdin.flush()
    code = int(server.stdout.readline())
    ended = "the time is up\n" if code == -signal.SIGALRM else ""
    stdout, stderr = (output.read_text() for output in outputs)
    return Ran(code, stdout, stderr + ended)


def run_code(code: str, *arguments: str, imports: str = COMPILERS, **environment: str) -> str:
    """Run a text as a program that must succeed, as ``run_program`` does; return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(code)
        done = run_program(file, *arguments, imports=imports, **environment)
    assert done.code == 0, done.stderr
    return done.stdout
