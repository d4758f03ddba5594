"""Encoder graphs: images and videos packed into graphs of fixed token budgets.

A neighbour of ``cgcompile.serving``; it reaches capture through ``cgcompile.graphs`` alone, so that
it works on a model that was never compiled.
"""

from cgcompile.encoder.defs import (
    EncoderCaptureAxis,
    EncoderCudaGraphCaptureInputs,
    EncoderCudaGraphConfig,
    EncoderCudaGraphPaddingLogic,
    EncoderCudaGraphPathConfig,
    EncoderCudaGraphReplayBuffers,
    EncoderItemSpec,
)
from cgcompile.encoder.protocol import SupportsEncoderCudaGraph, supports_encoder_cudagraph

__all__ = [
    "EncoderCaptureAxis",
    "EncoderCudaGraphCaptureInputs",
    "EncoderCudaGraphConfig",
    "EncoderCudaGraphPaddingLogic",
    "EncoderCudaGraphPathConfig",
    "EncoderCudaGraphReplayBuffers",
    "EncoderItemSpec",
    "SupportsEncoderCudaGraph",
    "supports_encoder_cudagraph",
]
