"""Versions, machine, cache and settings of this process: what an issue should contain."""

import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cgcompile import torch_compat as compat
from cgcompile.config import CompilationConfig
from cgcompile.debug.output import Result
from cgcompile.pieces.cache import Store, cache_folder
from cgcompile.settings import ENV_PREFIX
from cgcompile.version import __version__


@dataclass(frozen=True)
class Environment(Result):
    """What this process runs on."""

    versions: Mapping[str, str]
    private: Mapping[str, bool]  # undocumented names of torch: whether they exist in this build
    cache: Mapping[str, str | int | None]  # of compiled pieces: folder, entries, bytes
    settings: Mapping[str, str]  # environment variables

    def __str__(self) -> str:
        missing = [name for name, exists in self.private.items() if not exists]
        present = len(self.private) - len(missing)
        rows = [f"{name}: {value}" for name, value in self.versions.items()]
        rows.append(f"private names of torch: {present} of {len(self.private)} there")
        rows += [f"  missing: {name}" for name in missing]
        counts = f"{self.cache['entries']} entries, {self.cache['bytes']} bytes"
        folder = self.cache["folder"]
        rows.append("cache: off" if folder is None else f"cache: {counts} in {folder}")
        rows += [f"{name}={value}" for name, value in self.settings.items()] or ["no settings"]
        return "\n".join(rows)


def environment() -> Environment:
    """Return what this process runs on."""
    folder = cache_folder(CompilationConfig())
    entries = [] if folder is None else list(Store(folder).entries())
    cache = {
        "folder": None if folder is None else str(folder),
        "entries": len(entries),
        "bytes": sum(entry.size for entry in entries),
    }
    names = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    settings = {name: os.environ[name] for name in names}
    return Environment(versions(), compat.private_names(), cache, settings)


def versions() -> dict[str, str]:
    """Return the versions of cgcompile, torch, Python and the driver, and the machine."""
    result = {"cgcompile": __version__, **compat.versions()}
    result["python"] = platform.python_version()
    result["system"] = platform.platform()
    result["driver"], result["gpu"] = "none", "none"
    if torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version")
        text = driver.read_text(encoding="utf-8") if driver.exists() else ""
        match = re.search(r"Module.*?(\d{3,}\.[\d.]+)", text)
        result["driver"] = "unknown" if match is None else match[1]
        count, first = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
        result["gpu"] = f"{count} x {first.name}, {first.major}.{first.minor}"
    return result
