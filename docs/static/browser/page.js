// The part of docs/browser.md that works: a button, the loss curve, and the invented names.

const WIDTH = 640;
const HEIGHT = 260;
const LEFT = 40; // of the curve, in units of the drawing
const BOTTOM = 230;
const TOP = 12;
const GUESSING = Math.log(28); // nats a letter of a model that gives 28 letters the same probability
const SMOOTH = 20; // steps

const box = document.querySelector("#train-a-gpt");
box.innerHTML = `
  <p><button type="button">Train</button> <output>Nothing is loaded yet.</output></p>
  <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" aria-label="Loss by step" hidden></svg>
  <table hidden><thead><tr><th>step</th><th>names that the model invents</th></tr></thead>
  <tbody></tbody></table>`;
const [button, status, svg, table] = ["button", "output", "svg", "table"].map((name) =>
  box.querySelector(name),
);

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
const losses = [];
let steps = 500;
let model = "";
let started = { step: 0, time: 0 };

function say(training, text) {
  button.textContent = training ? "Stop" : losses.length ? "Continue" : "Train";
  status.textContent = text;
}

button.onclick = () => {
  const training = button.textContent !== "Stop";
  started = { step: losses.length, time: 0 };
  worker.postMessage(training ? "train" : "stop");
  say(training, training ? "Starting ..." : "Stopping ...");
};

worker.onmessage = ({ data }) => {
  if (data.error) say(false, `It does not work here: ${data.error}`);
  else if (data.status) status.textContent = data.status;
  else if (data.model) {
    steps = data.model.steps;
    model = `${data.model.params.toLocaleString("en")} parameters, ${data.model.names} names. `;
  } else if (data.stopped !== undefined) {
    say(false, `${model}${data.finished ? "Finished" : "Stopped"} after step ${data.stopped}.`);
    button.disabled = data.finished;
  } else show(data);
};
worker.onerror = (event) => say(false, `It does not work here: ${event.message ?? "no worker"}`);

function show({ step, loss, names }) {
  losses.push(loss);
  if (!started.time) started = { step, time: performance.now() };
  const rate = (1000 * (step - started.step)) / (performance.now() - started.time);
  const speed = step > started.step ? `, ${rate.toFixed(1)} steps a second` : "";
  if (button.textContent === "Stop")
    status.textContent = `${model}Step ${step} of ${steps}: loss ${loss.toFixed(2)} nats a letter${speed}.`;
  draw();
  if (!names) return;
  table.hidden = false;
  const row = table.tBodies[0].insertRow(0);
  row.insertCell().textContent = step;
  row.insertCell().textContent = names.join(", ");
}

// The mean of the last SMOOTH losses, for each step.
function smoothed() {
  return losses.map((_, i) => {
    const last = losses.slice(Math.max(0, i + 1 - SMOOTH), i + 1);
    return last.reduce((a, b) => a + b) / last.length;
  });
}

function draw() {
  svg.removeAttribute("hidden");
  const low = Math.floor(2 * Math.min(...losses)) / 2;
  const high = Math.ceil(2 * Math.max(...losses, GUESSING)) / 2;
  const x = (step) => LEFT + ((WIDTH - LEFT) * step) / steps;
  const y = (loss) => TOP + ((BOTTOM - TOP) * (high - loss)) / (high - low);
  const line = (values) => values.map((value, i) => `${x(i + 1)},${y(value)}`).join(" ");
  const text = (x, y, anchor, words) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${words}</text>`;
  const across = (loss, kind) =>
    `<line class="${kind}" x1="${LEFT}" x2="${WIDTH}" y1="${y(loss)}" y2="${y(loss)}"/>`;
  let marks = "";
  for (let loss = low; loss <= high; loss += 0.5)
    marks += across(loss, "grid") + text(LEFT - 6, y(loss) + 4, "end", loss.toFixed(1));
  for (let step = 0; step <= steps; step += 100)
    marks += text(Math.min(x(step), WIDTH - 12), BOTTOM + 20, "middle", step);
  marks += across(GUESSING, "guess") + text(WIDTH, y(GUESSING) - 5, "end", "guessing: log 28");
  svg.innerHTML = `${marks}<polyline class="each" points="${line(losses)}"/>
    <polyline class="mean" points="${line(smoothed())}"/>`;
}
