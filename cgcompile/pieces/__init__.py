"""Split graph in, callable out: compile the pieces (``compilers``), stitch them (``stitch``)."""
