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
repository = ""  # its public address: Install, the footer and the buttons of a page link to it

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.linkcode",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "api_reference",
    "browser_packages",
    "repository_files",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
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
html_title = f"xformer {version}"
html_favicon = "static/logo.svg"
html_theme_options: dict[str, Any] = {"light_logo": "logo.svg", "dark_logo": "logo-dark.svg"}
if repository:
    link = {"name": "Repository", "url": repository, "html": "Repository", "class": ""}
    html_theme_options |= {"footer_icons": [link], "source_repository": repository}
    html_theme_options |= {"source_branch": "main", "source_directory": ""}
html_static_path = ["static", f"{_mathjax}/static/mathjax/tex-svg.js"]
html_css_files = ["site.css"]
html_search_scorer = str(pathlib.Path(__file__).parent / "static/scorer.js")
html_additional_pages = {"index": "redirect.html"}
templates_path = ["templates"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
smartquotes = False  # docstrings are plain text with code in it
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # of code, not of output

# The subpages of a page in the sidebar. docs/index.md lists the pages of the first level.
CHILDREN = {
    "docs/api/README": ["xformer", "ops", "*"],
    "docs/backward": ["attribution-patching", "private-training"],
    "docs/command-line": ["look"],
    "docs/compile": ["speed", "../benchmarks/README", "../benchmarks/notes"],
    "docs/cuda": ["cuda-*"],
    "docs/derivations/README": ["*"],
    "docs/derivatives": ["accuracy"],
    "docs/errata": ["documents/*"],
    "docs/families": ["tokenizers", "onnx"],
    "docs/lectures/README": ["*"],
    "docs/results": ["without-norm", "reformer", "transformer-xl"],
    "docs/scaling": ["tensor-parallel", "scaling-model"],
    "docs/sentence-embeddings": ["retrieval"],
    "docs/training": ["data", "optimisers", "schedules", "checkpointing"],
    "CONTRIBUTING": [
        "docs/add-a-layer",
        "docs/add-a-family",
        "docs/bring-your-own-array",
        "SECURITY",
        "CHANGELOG",
    ],
    "benchmarks/README": ["results/**"],
}
NO_SEARCH = ("CHANGELOG", "benchmarks/results/", "benchmarks/notes")


def complete(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add what only the site needs: subpages, titles of measured tables, the repository."""
    if docname in CHILDREN:
        pages = "\n".join(CHILDREN[docname])
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:glob:\n\n{pages}\n```\n"
    if docname.startswith("benchmarks/results/"):
        source[0] = f"# {docname.rpartition('/')[2]}\n\n{source[0]}"
    if docname.startswith(NO_SEARCH):
        source[0] = f"---\nno-search: true\n---\n\n{source[0]}"
    if docname == "docs/install" and repository:
        source[0] = source[0].replace("ADDRESS", repository)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
