"""`xformer info`: the backends with version and device, or the reason why one does not work.

The libraries that a backend also calls follow, each with its version or what is missing.
"""

from __future__ import annotations

import argparse
import platform
from typing import Any

import xformer
from xformer import backends


def add_parser(subparsers: Any) -> None:
    """Add `xformer info`."""
    parser = subparsers.add_parser("info", help="show the backends that work here")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one row for each backend, and one for each library that a backend also calls."""
    print(f"xformer {xformer.__version__}, Python {platform.python_version()}")
    rows = [("backend", "version", "device", "computes in")]
    for name in backends.names():
        try:
            backend = backends.get(name)
        except backends.Unusable as error:
            rows.append((name, "-", "-", str(error)))
        else:
            computes_in = ", ".join(backend.dtypes)
            rows.append((name, backend.version, backend.device_name(), computes_in))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[3]]))
    for name in backends.names():
        for library, description in backends.beside(name).items():
            print(f"{name}, {library}: {description}")
    return 0
