"""Versions, machine, cache and settings of this process: what an issue should contain."""

import inspect
import os
import platform
import re
from pathlib import Path
from typing import Any

import torch

from cgcompile.config import CompilationConfig
from cgcompile.pieces.cache import Store, cache_folder
from cgcompile.settings import ENV_PREFIX
from cgcompile.torch_compat import inductor, presence
from cgcompile.version import __version__


def environment() -> dict[str, dict[str, Any]]:
    """Return versions, private names of torch and whether they exist, cache and settings."""
    folder = cache_folder(CompilationConfig())
    entries = [] if folder is None else list(Store(folder).entries())
    names = sorted(name for name in os.environ if name.startswith(ENV_PREFIX))
    return {
        "versions": versions(),
        "private": dict(presence.private_names()),
        "cache": {
            "folder": None if folder is None else str(folder),
            "entries": len(entries),
            "bytes": sum(entry.size for entry in entries),
        },
        "settings": {name: os.environ[name] for name in names},
    }


def environment_text(environment: dict[str, dict[str, Any]]) -> str:
    """Return :func:`environment` as text."""
    private, cache = environment["private"], environment["cache"]
    missing = [name for name, exists in private.items() if not exists]
    rows = [f"{name}: {value}" for name, value in environment["versions"].items()]
    rows.append(f"private names of torch: {len(private) - len(missing)} of {len(private)} there")
    rows += [f"  missing: {name}" for name in missing]
    counts = f"{cache['entries']} entries, {cache['bytes']} bytes in {cache['folder']}"
    rows.append("cache: off" if cache["folder"] is None else f"cache: {counts}")
    settings = environment["settings"].items()
    rows += [f"{name}={value}" for name, value in settings] or ["no settings"]
    return "\n".join(rows)


def setting_meanings() -> dict[str, str]:
    """Return what each setting does, by its name; nothing where docstrings are stripped."""
    text = (inspect.getdoc(CompilationConfig) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text.partition("\n\n")[0], re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def versions() -> dict[str, str]:
    """Return the versions of cgcompile, torch, Python and the driver, and the machine."""
    result = {"cgcompile": __version__, **inductor.versions()}
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
