"""`python -m longhaul` is the command `longhaul`."""

from __future__ import annotations

import sys

from longhaul.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
