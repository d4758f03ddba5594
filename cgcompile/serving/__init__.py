"""What stands between a scheduler and the graphs: sizes, dispatch, buffers, the manager.

Reaches capture through ``cgcompile.graphs`` alone, so that all of it works on a model that was
never compiled. ``sizes.py``, ``fit.py`` and ``dispatcher.py`` are plain Python: they need no torch.
"""
