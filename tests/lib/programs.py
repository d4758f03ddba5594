"""Run Python programs that import cgcompile, each in a process of its own, without its imports."""

import atexit
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from lib.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]

# A process that has imported torch, cgcompile and what torch imports at its first compilation,
# which takes five seconds, and has done nothing else. It forks one process for each program, which
# ends as an interpreter does.
SERVER = """
import gc, json, os, runpy, signal, sys
import torch._inductor.compile_fx
import cgcompile

gc.collect()
gc.freeze()  # collections skip what was imported
for line in sys.stdin:
    file, environment, output, seconds = json.loads(line)
    if pid := os.fork():
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    signal.alarm(seconds)
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = [file], os.path.dirname(file)
    os.chdir(sys.path[0])
    runpy.run_path(file, run_name="__main__")
    break
"""


@cache
def _server() -> "subprocess.Popen[str]":
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True)
    atexit.register(server.communicate)  # its input ends, and so does it
    return server


def run_program(file: Path) -> tuple[int, str]:
    """Run a file in its folder and in this environment; return (exit code, all that it printed)."""
    output = file.with_suffix(".txt")
    stdin, stdout = _server().stdin, _server().stdout
    assert stdin is not None
    assert stdout is not None
    stdin.write(json.dumps([str(file), dict(os.environ), str(output), int(PATIENCE)]) + "\n")
    stdin.flush()
    code = int(stdout.readline())
    ended = "the time is up\n" if code == -signal.SIGALRM else ""
    return code, output.read_text() + ended
