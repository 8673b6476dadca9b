"""What the scripts beside this one need: files that other people published, and packages."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

DATA = Path(
    os.environ.get("XFORMER_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
)
MULTI30K = "https://github.com/multi30k/dataset, folder data/task1/raw"
# Name in the folder -> where it is published, and its SHA-256.
PUBLISHED = {
    "names.txt": (
        "https://github.com/karpathy/makemore, file names.txt",
        "0a30b5557f192f32ab962680889aac5f6fda0f4cecf40a6d0b5694f58ea8cc4d",
    ),
    "tinyshakespeare.txt": (
        "https://github.com/karpathy/char-rnn, file data/tinyshakespeare/input.txt",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ),
    "multi30k/train.de.gz": (
        MULTI30K,
        "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    ),
    "multi30k/train.en.gz": (
        MULTI30K,
        "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    ),
    "multi30k/val.de.gz": (
        MULTI30K,
        "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    ),
    "multi30k/val.en.gz": (
        MULTI30K,
        "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    ),
    "multi30k/test_2016_flickr.de.gz": (
        MULTI30K,
        "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    ),
    "multi30k/test_2016_flickr.en.gz": (
        MULTI30K,
        "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    ),
}


def require_files(folder: Path, *names: str) -> None:
    """SystemExit where files of `PUBLISHED` are not in a folder; it says how to get them."""
    missing = [name for name in names if not (folder / name).is_file()]
    if not missing:
        return
    lines = [f"{_script()} needs files that are not in {folder}:"]
    for name in missing:
        source, sha256 = PUBLISHED[name]
        lines += [f"  {name}", f"    from {source}", f"    SHA-256 {sha256}"]
    lines.append("Put them into a folder under these names, and name the folder:")
    lines.append(f"  XFORMER_DATA=FOLDER python truths/{_script()}")
    raise SystemExit("\n".join(lines))


def require_package(name: str, extra: str) -> None:
    """SystemExit where a package is not installed; it names the extra that brings it."""
    if importlib.util.find_spec(name) is None:
        raise SystemExit(f"{_script()} needs {name}: pip install -e '.[{extra}]'")


def _script() -> str:
    return Path(sys.argv[0]).name
