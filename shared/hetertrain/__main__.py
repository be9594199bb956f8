"""``python -m hetertrain`` is the command ``hetertrain``."""

import sys

from hetertrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
