"""Links to files of the repository lead to pages of this site that show these files.

MyST makes a download of a link to a file, and fails on a link to a folder. Here either becomes a
link to a page `files/<path>.html`. The page of a folder lists what it holds. The API's `[source]`
links lead to the same pages.
"""

from __future__ import annotations

import html
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment.adapters.toctree import global_toctree_for_doc

LANGUAGES = {".py": "python", ".cu": "cuda", ".cuh": "cuda"}
HIDDEN = ("__pycache__", ".")

_app: Sphinx


def page_of(path: str) -> str:
    return f"files/{path.removesuffix('/')}"


def link_to(path: str, docname: str, fragment: str = "") -> str:
    """The address of a file's page, relative to the page of `docname`. The page will be made."""
    _app.env.repository_files.setdefault(docname, set()).add(path)
    return _app.builder.get_relative_uri(docname, page_of(path)) + fragment


def replace_links(app: Sphinx, doctree: nodes.document) -> None:
    docname, root = app.env.docname, Path(app.srcdir)
    folders = [n for n in doctree.findall(addnodes.pending_xref) if n["reftype"] == "myst"]
    for node in [*doctree.findall(addnodes.download_reference), *folders]:
        target = Path(os.path.normpath((root / docname).parent / node["reftarget"]))
        if node in folders and not target.is_dir():
            continue
        uri = link_to(target.relative_to(root).as_posix(), docname)
        children = [child for old in node.children for child in old.children]
        node.replace_self(nodes.reference("", "", *children, refuri=uri, internal=True))


def source_of(domain: str, info: dict[str, str]) -> str | None:
    """The address of the line where a name of the API is defined (`sphinx.ext.linkcode`)."""
    try:
        value: Any = importlib.import_module(info["module"])
        for name in info["fullname"].split("."):
            value = inspect.getattr_static(value, name, None) or getattr(value, name)
        value = getattr(value, "fget", None) or getattr(value, "__func__", None) or value
        value = inspect.unwrap(getattr(value, "reference", value))
        file = inspect.getsourcefile(value)
        _, line = inspect.getsourcelines(value)
    except (AttributeError, ImportError, OSError, TypeError):
        return None
    path = Path(file or "").resolve()
    if not path.is_relative_to(_app.srcdir):
        return None
    docname = _app.env.docname
    return link_to(str(path.relative_to(_app.srcdir)), docname, f"#line-{max(line, 1)}")


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each linked file or folder, and for each file in a linked folder."""
    root, navigation = Path(app.srcdir), Navigation(app)
    paths = set().union(*app.env.repository_files.values())
    for path in sorted(path for path in paths if (root / path).is_dir()):
        paths |= {f"{path}/{entry.name}" for entry in _entries(root / path) if entry.is_file()}
    for path in sorted(paths):
        is_folder = (root / path).is_dir()
        body = _folder(root, path, paths, app) if is_folder else _file(root / path, app)
        title = html.escape(path)
        context = {
            "title": title,
            "body": f"<h1>{title}</h1>\n{body}",
            "toctree": navigation.of(path),
        }
        yield page_of(path), context, "page.html"


class Navigation:
    """The sidebar of these pages, which is the same for all pages of one depth."""

    def __init__(self, app: Sphinx) -> None:
        self.app = app
        self.sidebars: dict[int, str] = {}

    def of(self, path: str) -> Callable[..., str]:
        def toctree(**options: Any) -> str:
            depth = path.count("/")
            if depth not in self.sidebars:
                tree = global_toctree_for_doc(
                    self.app.env, page_of(path), self.app.builder, tags=self.app.tags, **options
                )
                self.sidebars[depth] = self.app.builder.render_partial(tree)["fragment"]
            return self.sidebars[depth]

        return toctree


def _entries(folder: Path) -> list[Path]:
    entries = [entry for entry in folder.iterdir() if not entry.name.startswith(HIDDEN)]
    return sorted(entries, key=lambda entry: (entry.is_file(), entry.name))


def _folder(root: Path, path: str, pages: set[str], app: Sphinx) -> str:
    items = []
    for entry in _entries(root / path):
        item = f"<code>{html.escape(entry.name)}{'/' * entry.is_dir()}</code>"
        if (there := f"{path}/{entry.name}") in pages:
            uri = app.builder.get_relative_uri(page_of(path), page_of(there))
            item = f'<a href="{uri}">{item}</a>'
        items.append(f"<li>{item}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _file(file: Path, app: Sphinx) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return "<p>This file is not text.</p>"
    language = LANGUAGES.get(file.suffix, "text")
    return app.builder.highlighter.highlight_block(text, language, force=True, lineanchors="line")


def forget(app: Sphinx, env: Any, docname: str) -> None:
    env.repository_files.pop(docname, None)


def merge(app: Sphinx, env: Any, docnames: list[str], other: Any) -> None:
    env.repository_files.update(other.repository_files)


def start(app: Sphinx) -> None:
    global _app
    _app = app
    if not hasattr(app.env, "repository_files"):
        app.env.repository_files = {}


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("builder-inited", start)
    app.connect("env-purge-doc", forget)
    app.connect("env-merge-info", merge)
    app.connect("doctree-read", replace_links, priority=100)  # before downloads are collected
    app.connect("html-collect-pages", pages)
    app.config.linkcode_resolve = source_of
    return {
        "version": "1",
        "env_version": 1,
        "parallel_read_safe": True,
        "parallel_write_safe": True,
    }
