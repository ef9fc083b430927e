"""`python -m serinus` is the `serinus` command."""

import sys

from serinus.cli import main

if __name__ == "__main__":
    sys.exit(main())
