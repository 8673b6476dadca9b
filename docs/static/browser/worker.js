// Loads Python, NumPy and xformer in a Web Worker, so that the page stays alive, and trains there.
// Messages in: "train", "stop". Messages out: {status}, {model}, {step, loss, names}, {stopped}, {error}.

const CDN = "https://cdn.jsdelivr.net/npm";
const PYODIDE = "pyodide@0.25.1"; // Python 3.11
const NUMPY = "@emscripten-forge/numpy@2.1.1-py311hc8e14bb-0"; // this Pyodide's own is NumPy 1
const NUMPY_FILE = "pkg/numpy-2.1.1-py311hc8e14bb_0.tar.gz";
const STEPS = 500;
const NAMES_EVERY = 25; // steps

let run; // the model, once it is loaded
let training = false; // what the reader wants
let busy = false;

async function bytes(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(`${url}: HTTP ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

async function load() {
  postMessage({ status: "Loading Python, NumPy and xformer (about 16 MB) ..." });
  const here = (name) => bytes(new URL(name, import.meta.url));
  const { loadPyodide } = await import(`${CDN}/${PYODIDE}/pyodide.mjs`);
  const [python, numpy, packages, program] = await Promise.all([
    loadPyodide({ indexURL: `${CDN}/${PYODIDE}/` }),
    bytes(`${CDN}/${NUMPY}/${NUMPY_FILE}`),
    here("packages.zip"),
    here("train.py"),
  ]);
  postMessage({ status: "Starting ..." });
  python.unpackArchive(numpy, "gztar", { extractDir: "/numpy" });
  python.unpackArchive(packages, "zip", { extractDir: "/packages" });
  python.FS.writeFile("/packages/train.py", program);
  python.runPython(`
    import sys
    sys.path[:0] = ["/packages", "/numpy/lib/python3.11/site-packages"]
  `);
  const begun = python.runPython("import train; train.Run()");
  postMessage({ model: { params: begun.n_params, names: begun.names.length, steps: STEPS } });
  return begun;
}

async function train() {
  run ??= await load();
  while (training && run.step < STEPS) {
    const loss = run.train();
    const step = run.step;
    const names = step % NAMES_EVERY === 0 ? run.invented().toJs() : null;
    postMessage({ step, loss, names });
    await new Promise((turn) => setTimeout(turn)); // lets a "stop" arrive
  }
  postMessage({ stopped: run.step, finished: run.step === STEPS });
}

onmessage = async ({ data }) => {
  training = data === "train";
  if (busy || !training) return;
  busy = true;
  try {
    await train();
  } catch (error) {
    postMessage({ error: error.message });
  }
  busy = false;
};
