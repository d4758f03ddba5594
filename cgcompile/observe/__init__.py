"""Looking at a model, at what was compiled of it, and at what its graphs were worth."""
