"""Adapters: conversions of inputs and results around a compiled graph (``adapter.py``)."""
