"""Encoder graphs: images and videos packed into graphs of fixed token budgets.

A neighbour of ``cgcompile.serving``; it reaches capture through ``cgcompile.graphs`` alone, so that
it works on a model that was never compiled. Budgets and packing are plain Python: they need no
torch.
"""

from typing import TYPE_CHECKING

from cgcompile.lazy import export_lazily

if TYPE_CHECKING:
    from cgcompile.encoder.budgets import fitted_budgets, generated_budgets
    from cgcompile.encoder.graphs import GraphKey
    from cgcompile.encoder.manager import EncoderCudaGraphManager, PlannedRun
    from cgcompile.encoder.packing import Costs
    from cgcompile.encoder.patches import PatchEncoder, PatchOffsets, PatchTable
    from cgcompile.encoder.protocol import (
        EncoderBuffer,
        EncoderCudaGraphCaptureInputs,
        EncoderCudaGraphConfig,
        EncoderCudaGraphPaddingLogic,
        EncoderCudaGraphPathConfig,
        EncoderCudaGraphReplayBuffers,
        EncoderItemSpec,
        SupportsEncoderCudaGraph,
        supports_encoder_cudagraph,
    )
    from cgcompile.encoder.sharding import Sharder
    from cgcompile.encoder.statistics import EncoderStatistics

__all__ = [
    "Costs",
    "EncoderBuffer",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphManager",
    "EncoderCudaGraphPaddingLogic",
    "EncoderCudaGraphPathConfig",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "EncoderStatistics",
    "GraphKey",
    "PatchEncoder",
    "PatchOffsets",
    "PatchTable",
    "PlannedRun",
    "Sharder",
    "SupportsEncoderCudaGraph",
    "fitted_budgets",
    "generated_budgets",
    "supports_encoder_cudagraph",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = export_lazily(
        __name__,
        {
            "encoder.budgets": "fitted_budgets generated_budgets",
            "encoder.graphs": "GraphKey",
            "encoder.manager": "EncoderCudaGraphManager PlannedRun",
            "encoder.packing": "Costs",
            "encoder.patches": "PatchEncoder PatchOffsets PatchTable",
            "encoder.protocol": (
                "EncoderBuffer EncoderCudaGraphCaptureInputs EncoderCudaGraphConfig "
                "EncoderCudaGraphPaddingLogic EncoderCudaGraphPathConfig "
                "EncoderCudaGraphReplayBuffers EncoderItemSpec SupportsEncoderCudaGraph "
                "supports_encoder_cudagraph"
            ),
            "encoder.sharding": "Sharder",
            "encoder.statistics": "EncoderStatistics",
        },
        moved={
            "encoder.budgets": "Budgets resolve_budgets resolve_frames smallest_budget",
            "encoder.packing": "Capacity Group Need pack",
            "encoder.protocol": "EncoderCaptureAxis",
            "encoder.sharding": "shares_by_load",
        },
    )
