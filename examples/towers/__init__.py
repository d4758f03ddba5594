"""Vision and audio towers of ``transformers``, unmodified, on encoder graphs of cgcompile.

Start with ``patch_tower.py`` and ``varlen_attention.py``; the other files say what is particular
about a tower. ``encode_images.py`` shows how one is used.
"""
