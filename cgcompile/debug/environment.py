"""Versions, machine, cache and settings of this process: what an issue should tell."""

import ctypes
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
    """What this process runs on; ``print`` it into an issue.

    Attributes:
        versions: of programs, and what the machine is.
        private: names of torch that it does not document, and whether they are where cgcompile
            looks for them. Some exist on CUDA builds alone.
        cache: the folder of compiled pieces, and how many entries and bytes are in it.
        settings: the variables of the environment that are settings.
    """

    versions: Mapping[str, str]
    private: Mapping[str, bool]
    cache: Mapping[str, str | int | None]
    settings: Mapping[str, str]

    def __str__(self) -> str:
        missing = [name for name, there in self.private.items() if not there]
        there = len(self.private) - len(missing)
        rows = [f"{name}: {value}" for name, value in self.versions.items()]
        rows.append(f"private names of torch: {there} of {len(self.private)} there")
        rows += [f"  missing: {name}" for name in missing]
        if self.cache["folder"] is None:
            rows.append("cache: off")
        else:
            counts = f"{self.cache['entries']} entries, {self.cache['bytes']} bytes"
            rows.append(f"cache: {counts} in {self.cache['folder']}")
        rows += [f"{name}={value}" for name, value in self.settings.items()] or ["no settings"]
        return "\n".join(rows)


def environment() -> Environment:
    """Look at this process: versions, private names of torch, cache, settings."""
    folder = cache_folder(CompilationConfig())
    kept = [] if folder is None else list(Store(folder).entries())
    return Environment(
        versions=versions(),
        private=compat.private_names(),
        cache={
            "folder": None if folder is None else str(folder),
            "entries": len(kept),
            "bytes": sum(each.size for each in kept),
        },
        settings={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(ENV_PREFIX)
        },
    )


def versions() -> dict[str, str]:
    """Versions of all that takes part, and what the machine is; cheap."""
    result = {"cgcompile": __version__, **compat.versions()}
    result["python"] = platform.python_version()
    result["system"] = platform.platform()
    result["driver"], result["gpu"] = "none", "none"
    if torch.cuda.is_available():
        result["driver"] = _driver()
        count, first = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
        result["gpu"] = f"{count} x {first.name}, {first.major}.{first.minor}"
    return result


def _driver() -> str:
    """``580.65, CUDA 13.0``: of the driver for CUDA devices; the second is the newest it runs."""
    number = ctypes.c_int()
    result = []
    try:
        result += re.findall(
            r"Module +(\d[\d.]+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
        )[:1]
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # another system, or ROCm
        pass
    if number.value:
        result.append(f"CUDA {number.value // 1000}.{number.value % 1000 // 10}")
    return ", ".join(result) or "unknown"
