"""Random programs on random schedules, compared with eager. ``python -m fuzz --help``."""
