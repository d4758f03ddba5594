"""What ``compare.py`` is made of; read ``decoder``, ``variant``, ``worker``, ``budget``."""
