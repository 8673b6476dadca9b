"""The documentation site: `sphinx-build -W --keep-going -c docs . site` in the root of a checkout.

The source folder is the whole checkout, so that a link between two Markdown files, or from one to
a source file, means the same here as on GitHub. The pages of the API come from docstrings.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys
from typing import Any

from sphinx.application import Sphinx

sys.path.insert(0, str(pathlib.Path(__file__).parent / "extensions"))

import xformer

project = "xformer"
version = release = xformer.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "api_reference",
    "browser_packages",
    "repository_files",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "benchmarks/*.md",
    "benchmarks/results/**.md",
]
exclude_patterns = [".*", "site", "tests", "truths", "xformer", "backends", "runs", "build", "dist"]
source_suffix = {".md": "markdown"}

# Markdown as GitHub reads it: $...$, ```math, and links to headings.
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 72
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
suppress_warnings = ["ref.python"]  # a class name in a signature that two modules have

# MathJax, as on GitHub, from a package instead of the network: one script without font files.
[_mathjax] = importlib.util.find_spec("sphinx-mathjax-offline").submodule_search_locations
mathjax_path = "tex-svg.js"

html_theme = "furo"
html_title = "xformer"
html_static_path = ["static", f"{_mathjax}/static/mathjax/tex-svg.js"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
smartquotes = False  # docstrings are plain text with code in it

# Pages that are read on GitHub too get their list of subpages here.
CHILDREN = {
    "docs/derivations/README": "*",
    "docs/lectures/README": "*",
    "benchmarks/README": "results/**",
}


def complete(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add what only the site needs: lists of subpages, and titles of measured tables."""
    if docname in CHILDREN:
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{CHILDREN[docname]}\n```\n"
    if docname.startswith("benchmarks/results/"):
        source[0] = f"# {docname.rpartition('/')[2]}\n\n{source[0]}"


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
