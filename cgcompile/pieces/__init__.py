"""Compile time of pieces: compilers, artifacts per size range, the cache, the stitched function."""
