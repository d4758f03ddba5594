"""Run an example on its own or in this process, or load it for its functions."""

import contextlib
import importlib
import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def outside(program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a program on its own, offline, with no setting of this machine and no path of tests."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CGCOMPILE_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CGCOMPILE_CACHE_DIR": "off"}
    environment["PYTHONPATH"] = str(EXAMPLES.parent)
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Call ``main`` of an example in this process, which has imported torch already.

    The module stays: some define operators, which a process can do once.
    """
    path = EXAMPLES / script
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = importlib.import_module(path.stem).main(list(arguments))
    return subprocess.CompletedProcess([script, *arguments], code, out.getvalue(), err.getvalue())


def load(script: str) -> ModuleType:
    """An example as a module, for its functions."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
