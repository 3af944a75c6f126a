"""`python -m sparse_cache`, the same as the command `sparse-cache`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
