"""`python -m bijax` is `bijax`."""

import sys

from bijax.cli import main

if __name__ == "__main__":
    sys.exit(main())
