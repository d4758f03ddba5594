"""Kernels of our own, as ops of torch that a pass puts into pieces, and where they are used."""

# One rule for all settings of kernels. ``auto`` uses them where a device of the graph can run them.
# True from an argument or option is an error elsewhere; True from the environment, which is for all
# models, is the same as ``auto``.

from collections.abc import Callable, Iterable

import torch

from cgcompile.config import CompilationConfig
from cgcompile.errors import ConfigError


def is_on(
    config: CompilationConfig,
    name: str,
    devices: Iterable[torch.device],
    why_unsupported: Callable[[torch.device], str | None],
) -> bool:
    """Return whether a graph uses the kernels of a setting.

    Args:
        config: the settings.
        name: of the setting, which is ``"auto"``, True or False.
        devices: of the tensors of the graph.
        why_unsupported: returns why the kernels do not run on a device, or None.

    Raises:
        ConfigError: the setting is True, and no device can run the kernels.
    """
    if getattr(config, name) is False:
        return False
    reasons = list(map(why_unsupported, sorted(set(devices), key=str, reverse=True)))
    if None in reasons:
        return True
    if reasons and config.insists(name):  # the first is that of a GPU, if there is one
        raise ConfigError.impossible(
            what=f"{name} = True",
            because=reasons[0],
            instead=f"Leave {name} out: its kernels are used where a device can run them.",
        )
    return False
