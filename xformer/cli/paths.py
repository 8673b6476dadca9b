"""Options that name a file or a folder."""

from __future__ import annotations

import argparse


def nonempty(text: str) -> str:
    """The path as it was given. ArgumentTypeError for "", which would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("must name a file or a folder, got an empty path")
    return text
