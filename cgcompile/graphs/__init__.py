"""Callable in, replayable out: capture devices, pools, the capture itself, and graph wrappers."""
