"""docs/browser.md: its program trains here, and in a headless Chromium with Pyodide.

The second test needs Chromium, and a folder XFORMER_BROWSER with the two files that this writes:

    npm pack pyodide@0.25.1 @emscripten-forge/numpy@2.1.1-py311hc8e14bb-0
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hanging import SECONDS

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "browser.md").read_text(encoding="utf-8")
SOURCES = DOCS / "static/browser"
CDN = "https://cdn.jsdelivr.net/npm"
TYPES = {".html": "text/html", ".js": "text/javascript", ".mjs": "text/javascript"}
TYPES |= {".wasm": "application/wasm", ".json": "application/json"}

if not SOURCES.is_dir():
    pytest.skip("docs/static is not in a source distribution", allow_module_level=True)

WORKER = (SOURCES / "worker.js").read_text(encoding="utf-8")

# Clicks as a reader would, and posts what the page shows.
READER = """
const box = document.querySelector("#train-a-gpt");
const seen = { errors: [] };
const state = () => ({
  status: box.querySelector("output").textContent,
  button: box.querySelector("button").textContent,
  rows: [...box.querySelectorAll("tbody tr")].map((row) => row.innerText),
  points: (box.querySelector("polyline.each")?.getAttribute("points") ?? "").split(" ").length,
});
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const post = () => fetch("/seen", { method: "POST", body: JSON.stringify(seen) });
async function until(test) {
  while (!test(state())) {
    if (/not work/.test(state().status)) throw new Error(state().status);
    await wait(20);
  }
}
try {
  seen.first = state();
  box.querySelector("button").click();
  let ticks = 0;
  const clock = setInterval(() => ticks++, 20);
  await until((s) => s.rows.length >= 2);
  clearInterval(clock);
  seen.ticks = ticks;
  seen.training = state();
  box.querySelector("button").click();
  await until((s) => s.button === "Continue" && /Stopped after/.test(s.status));
  seen.stopped = state();
  await wait(1000);
  seen.later = state();
  for (let i = 0; i < 3; i++) box.querySelector("button").click(); // train, stop, train
  await until((s) => s.rows.length >= 3);
  seen.continued = state();
} catch (error) {
  seen.errors.push(String(error));
}
await post();
"""


def test_the_program() -> None:
    run = runpy.run_path(str(SOURCES / "train.py"))["Run"]()
    assert f"{run.n_params:,} parameters" in PAGE
    assert len(run.names) > 1000
    losses = [run.train() for _ in range(60)]
    assert 3.2 < losses[0] < 4
    assert sum(losses[-10:]) / 10 < 2.75
    invented = run.invented(20)
    assert len(set(invented)) > 15
    assert all(re.fullmatch("[a-z_.]{0,15}", name) for name in invented)


def test_the_program_needs_no_safetensors() -> None:
    """It is compiled, and not among what the page loads."""
    code = "import sys, runpy; sys.modules |= dict.fromkeys(('safetensors', 'tqdm'))\n"
    code += f"run = runpy.run_path({str(SOURCES / 'train.py')!r})['Run']()\n"
    code += "run.train(); assert run.invented(2)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_page_says_which_versions_it_loads() -> None:
    pyodide, numpy = constant("PYODIDE"), constant("NUMPY")
    assert WORKER.count(CDN) == 1
    assert f"Pyodide](https://pyodide.org) {pyodide.partition('@')[2]}" in PAGE
    assert f"NumPy {numpy.rpartition('@')[2].partition('-')[0]}" in PAGE
    assert f"{pyodide} {numpy}" in (__doc__ or "")


def test_the_page_in_a_browser(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("XFORMER_BROWSER: chromium is not installed")
    if "XFORMER_BROWSER" not in os.environ:
        pytest.skip("XFORMER_BROWSER: the folder with Pyodide and NumPy is not set")
    with served(Path(os.environ["XFORMER_BROWSER"]), tmp_path) as (address, answered, seen):
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--incognito"]
        command += [f"--user-data-dir={tmp_path / 'profile'}", f"{address}/docs/browser.html"]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        browser = subprocess.Popen(command, start_new_session=True, **quiet)
        try:
            assert answered.wait(SECONDS), "the page did not answer"
        finally:
            os.killpg(browser.pid, 9)
            browser.wait()
    assert seen["errors"] == []
    assert seen["first"]["button"] == "Train"
    assert seen["ticks"] > 20  # the page is alive while the worker trains
    names = ("training", "stopped", "later", "continued")
    training, stopped, later, continued = (seen[name] for name in names)
    assert training["button"] == "Stop"
    assert f"{re.findall('[0-9,]+ parameters', PAGE)[0]}" in training["status"]
    assert [row.split()[0] for row in training["rows"]] == ["50", "25"]
    assert later == stopped  # stopped means stopped
    assert stopped["points"] >= 50
    assert continued["points"] >= 75
    assert [row.split()[0] for row in continued["rows"]] == ["75", "50", "25"]
    losses = [float(re.findall(r"loss ([\d.]+)", s["status"])[0]) for s in (training, continued)]
    assert losses[0] < 3
    assert losses[1] < 2.9


def constant(name: str) -> str:
    return re.findall(rf'const {name} = "(.*)";', WORKER)[0]


@contextmanager
def served(packages: Path, folder: Path) -> Iterator[tuple[str, threading.Event, dict[str, Any]]]:
    """A server with the page as the site has it, and with the CDN's files from `packages`."""
    spec: Any = importlib.util.spec_from_file_location(
        "browser_packages", DOCS / "extensions/browser_packages.py"
    )
    pack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    pack.pack(folder / "packages.zip")
    [html] = re.findall(r"^<div id=.*?</script>$", PAGE, re.DOTALL | re.MULTILINE)
    static = "/_static/browser"
    files = {f"{static}/{path.name}": path.read_bytes() for path in SOURCES.iterdir()}
    files[f"{static}/worker.js"] = WORKER.replace(CDN, "/npm").encode()
    files[f"{static}/packages.zip"] = (folder / "packages.zip").read_bytes()
    script = f'<script type="module">{READER}</script>'
    files["/docs/browser.html"] = f"<!doctype html><body>{html}{script}".encode()
    for package in (constant("PYODIDE"), constant("NUMPY")):
        file = package.removeprefix("@").replace("@", "-").replace("/", "-") + ".tgz"
        with tarfile.open(packages / file) as archive:
            for member in archive.getmembers():
                path = member.name.removeprefix("package")
                data = archive.extractfile(member)
                if data is not None:
                    files[f"/npm/{package}{path}"] = data.read()
    answered, seen = threading.Event(), {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            kind = TYPES.get(Path(self.path).suffix, "application/octet-stream")
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(data or b"")

        def do_POST(self) -> None:
            seen.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()
            answered.set()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", answered, seen
    finally:
        server.shutdown()
        server.server_close()
