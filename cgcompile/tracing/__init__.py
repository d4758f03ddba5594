"""Traces of functions, and which one serves a call. ``cgcompile/compile.py`` is what users call.

``dynamic_dims``: which sizes vary; ``argument_guards``: what of a call a trace depends on;
``trace_cache``: the traces of one function; ``preview``: a trace that is not kept.
"""
