"""`python -m kvtide` is the command `kvtide`."""

from __future__ import annotations

import sys

from kvtide.cli import start

sys.exit(start())
