"""Graphs of encoders: budgets of output tokens, and items packed into them.

Reaches capture through ``cgcompile.graphs`` alone. Budgets and packing are plain Python: they need
no torch.
"""

from cgcompile.encoder.budgets import (
    Budgets,
    fitted_budgets,
    generated_budgets,
    resolve_budgets,
    resolve_frames,
    smallest_budget,
)
from cgcompile.encoder.packing import Capacity, Costs, Group, Need, pack

__all__ = [
    "Budgets",
    "Capacity",
    "Costs",
    "Group",
    "Need",
    "fitted_budgets",
    "generated_budgets",
    "pack",
    "resolve_budgets",
    "resolve_frames",
    "smallest_budget",
]
