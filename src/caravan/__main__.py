"""`python -m caravan` is the `caravan` command."""

import sys

from caravan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
