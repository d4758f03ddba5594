"""How long a test waits for a thread, a process or a collective before it counts as hung."""

PATIENCE = 600.0  # seconds; no assertion is about them
