"""`python -m swiftcp`."""

import sys

from swiftcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
