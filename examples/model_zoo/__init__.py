"""A zoo of architectures with random weights, and what cgcompile makes of each of them."""
