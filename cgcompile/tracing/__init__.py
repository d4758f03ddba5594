"""One trace of a function, and when it serves a call. ``cgcompile/compile.py`` is what users call.

``dims`` says which sizes vary, ``arguments`` what of a call a trace depends on, ``variant`` is one
trace, ``variants`` keeps those of a function and finds the one of a call.
"""
