"""The products of a tower in shapes that tensor cores take at full speed: :func:`align`.

The weights of Qwen2.5-VL's vision tower are 3420 wide in the middle of each block. Rows of 6840
bytes are no multiple of 16, which the fast kernels of cuBLAS need: on an H200 products of that
width take 3 times as long as those of 3424. And its patches go through a convolution as large as a
patch, which no library computes as the product that it is.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

MULTIPLE = 16


class PatchProjection(nn.Module):
    """A convolution of inputs as large as its kernel, as a linear layer.

    Args:
        conv: whose parameters it shares.
    """

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        projected = F.linear(x.flatten(1), self.weight.flatten(1), self.bias)
        return projected.view(*projected.shape, *[1] * (x.dim() - 2))


def align(tower: Any) -> Any:
    """Pad the inner width of gated MLPs by zeros, and make the patch convolution a product.

    Changes the tower in place and returns it; results are the same but for the order of sums. Load
    weights before: those of the MLPs are wider afterwards, if they were not aligned.

    Args:
        tower: a vision tower of ``transformers``, whose patches have the size of the kernel.
    """
    with torch.no_grad():
        for module in tower.modules():
            if all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")):
                _widen(module)
    embed = tower.patch_embed
    if isinstance(embed.proj, (nn.Conv2d, nn.Conv3d)):
        embed.proj = PatchProjection(embed.proj)
    return tower


def _widen(mlp: Any) -> None:
    """Add zeros to gate and up, so that their product is 0 there, and to down."""
    more = -mlp.gate_proj.out_features % MULTIPLE
    if not more:
        return
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.out_features += more
        _pad(linear, "weight", (0, 0, 0, more))
        if linear.bias is not None:
            _pad(linear, "bias", (0, more))
    mlp.down_proj.in_features += more
    _pad(mlp.down_proj, "weight", (0, more))


def _pad(linear: nn.Module, name: str, sides: tuple[int, ...]) -> None:
    old = getattr(linear, name)
    setattr(linear, name, nn.Parameter(F.pad(old, sides), requires_grad=old.requires_grad))
