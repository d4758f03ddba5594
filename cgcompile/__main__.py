"""``python -m cgcompile``: the command line, :mod:`cgcompile.cli`."""

import sys

from cgcompile.cli import main

if __name__ == "__main__":
    sys.exit(main())
