"""`_static/browser/packages.zip`: what the page docs/browser.md imports, from this Python.

NumPy is not in it: it is compiled, and comes from where Pyodide comes from.
"""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xformer

if TYPE_CHECKING:
    from sphinx.application import Sphinx

OTHERS = ("array-api-compat", "threadpoolctl")  # pure Python; METADATA names the licence
BACKENDS = ("torch", "jax", "cupy", "numba", "mkl", "array_api_strict")  # not in a browser


def pack(path: Path) -> None:
    """Write the archive of xformer and the packages that it needs for NumPy's arrays."""
    root = Path(xformer.__file__).parent
    sources = {
        file: Path("xformer", folder, file.relative_to(start))
        for folder, start in (("", root), ("backends", (root / "backends").resolve()))
        for file in start.rglob("*.py")
        if not {*file.relative_to(start).parts} & {*BACKENDS}
    }
    for name in OTHERS:
        for file in metadata.files(name) or ():
            if file.suffix == ".py" or file.name in ("METADATA", "LICENSE"):
                sources[Path(str(file.locate()))] = Path(file)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for source, target in sorted(sources.items()):
            archive.write(source, target)


def written(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        pack(Path(app.outdir, "_static", "browser", "packages.zip"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", written)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
