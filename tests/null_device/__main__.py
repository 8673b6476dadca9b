"""`python tests/null_device --help`."""

from __future__ import annotations

import sys
from pathlib import Path

tests = Path(__file__).resolve().parent.parent
sys.path[:] = [str(tests), *(p for p in sys.path if Path(p).resolve() != tests / "null_device")]

from null_device.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
