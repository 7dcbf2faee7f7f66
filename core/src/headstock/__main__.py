"""`python -m headstock`, for where the console script is not on the path."""

import sys

from headstock.cli.main import main

if __name__ == "__main__":  # a process that another one spawns imports this file again
    sys.exit(main())
