"""The parts of ``examples/serve_llm.py``: a small engine for Llama-style models.

Read in this order: ``attention.py`` (one splitting op over a paged cache), ``model.py``,
``runner.py`` (a model, its manager and its batches), ``scheduler.py`` (who runs in a step),
``engine.py`` (the loop). Beside it: ``checkpoint.py``, ``drafts.py``, ``workload.py``,
``judge.py`` (how close a call it was), ``report.py``.
"""
