"""Split graph in, callable out: compile the pieces (``compilers``), then stitch them (``stitch``)."""
