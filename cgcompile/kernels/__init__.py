"""Kernels of our own, as ops of torch that a pass puts into pieces."""
