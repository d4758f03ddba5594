"""Run an example on its own, or load it for its functions."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def run(script: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run an example on its own, offline, with no setting of this machine."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("CGCOMPILE_")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CGCOMPILE_CACHE_DIR": "off"}
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def load(script: str) -> ModuleType:
    """An example as a module, for its functions."""
    path = EXAMPLES / script
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
