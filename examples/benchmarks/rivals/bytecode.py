"""Bytecode of packages, which pip leaves beside them, and some machines have not.

Where it is missing each start compiles some thousand modules first, which is no property of what
is compared: it adds seconds to the first call of everything that imports Inductor.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path

PACKAGES = (
    "torch",
    "triton",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "cgcompile",
    "cgcompile.passes",
)


def sources(name: str) -> Path | None:
    """The file of a package; None if it is not installed."""
    spec = find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin)


def bytecode_in(folder: str, packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Variables with which new processes find bytecode of all packages.

    Args:
        folder: where it is written, if the first package has none.
        packages: names; those that are not installed are left out.

    Returns:
        The variables; none where the first package has bytecode as it is.
    """
    files = [file for name in packages if (file := sources(name)) is not None]
    if Path(cache_from_source(str(files[0]))).exists():
        return {}
    variables = {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-m", "compileall", "-q", "-j", "0"]
    # Some files of packages are for other versions of Python, and do not compile.
    subprocess.run(
        [*command, *[str(file.parent) for file in files]],
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    return variables
