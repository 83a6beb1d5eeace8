// The workers of each model: state, memory, speed, and buttons that replace them.

import { json } from "./api.js";

const place = document.getElementById("models");
const panels = new Map();
const before = new Map(); // model → tokens and time of the last look

const FIELDS = ["Process id", "Memory", "Tokens/s", "In flight", "Queue", "Restarts", "Standby"];

function makePanel(name) {
  const panel = document.createElement("article");
  panel.className = "model";
  const title = document.createElement("h3");
  title.textContent = `${name} `;
  const state = document.createElement("span");
  state.className = "state";
  title.append(state);
  const problem = document.createElement("p");
  problem.className = "problem";
  const progress = document.createElement("progress");
  progress.max = 1;
  progress.setAttribute("aria-label", `Loading of ${name}`);
  const list = document.createElement("dl");
  const values = FIELDS.map((field) => {
    const term = document.createElement("dt");
    term.textContent = field;
    const value = document.createElement("dd");
    list.append(term, value);
    return value;
  });
  const buttons = document.createElement("div");
  buttons.className = "buttons";
  const done = document.createElement("p");
  done.setAttribute("role", "status");
  done.className = "done";
  buttons.append(
    confirmed("Restart", `Restart the worker of ${name} when its requests are done`, name, "restart", done),
    confirmed("Recycle", `Replace the worker of ${name} without a gap`, name, "recycle", done),
  );
  panel.append(title, problem, progress, list, buttons, done);
  place.append(panel);
  return { panel, state, problem, progress, values };
}

// A button that wants to be pressed twice: the second time within some seconds.
function confirmed(text, label, model, action, done) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "small quiet";
  let timer = null;
  const rest = () => {
    timer = null;
    button.textContent = text;
    button.setAttribute("aria-label", label);
    button.classList.remove("danger");
  };
  rest();
  button.addEventListener("click", async () => {
    if (timer === null) {
      button.textContent = `${text}: sure?`;
      button.setAttribute("aria-label", `${label}: press again to confirm`);
      button.classList.add("danger");
      timer = setTimeout(rest, 4000);
      return;
    }
    clearTimeout(timer);
    rest();
    try {
      await json(`api/worker/${action}`, { method: "POST", body: { model } });
      done.textContent = `${text} of ${model} was asked for.`;
    } catch (error) {
      done.textContent = error.message;
    }
  });
  return button;
}

function bytes(value) {
  return value === null || value === undefined ? "–" : `${(value / 1e6).toFixed(0)} MB`;
}

function rate(model, now) {
  const last = before.get(model.model);
  before.set(model.model, { tokens: model.tokens_total, now });
  if (!last || now <= last.now) return "–";
  return Math.max(0, ((model.tokens_total - last.tokens) * 1e9) / (now - last.now)).toFixed(1);
}

export function showWorkers({ models, now_ns: now }) {
  for (const model of models) {
    let made = panels.get(model.model);
    if (!made) panels.set(model.model, made = makePanel(model.model));
    const serving = model.workers.filter((worker) => worker.role === "serving");
    const isReady = serving.some((worker) => worker.phase === "ready");
    const isRetiring = !serving.length && model.workers.some((worker) => worker.role === "retiring");
    const waits = model.loading ? "loading" : isRetiring ? "restarting" : model.state.replaceAll("_", " ");
    set(made.state, isReady ? "ready" : waits);
    made.state.classList.toggle("bad", !isReady && (model.state === "open" || model.problem !== null));
    set(made.problem, model.problem ?? "");
    made.problem.hidden = !model.problem;
    made.progress.hidden = isReady || !model.loading;
    if (model.loading) made.progress.value = model.loading.fraction;
    const restarts = Object.entries(model.restarts);
    const memory = serving.map((worker) => worker.pss_bytes ?? worker.rss_bytes ?? 0).reduce((a, b) => a + b, 0);
    [
      serving.map((worker) => `${worker.pid}`).join(", ") || "none",
      memory ? bytes(memory) : "–",
      rate(model, now),
      `${model.in_flight} of ${model.places}`,
      `${model.queue.depth} (most ${model.queue.peak})`,
      restarts.map(([cause, count]) => `${count} × ${cause.replaceAll("_", " ")}`).join(", ") || "0",
      String(model.workers.filter((worker) => worker.role === "standby").length),
    ].forEach((text, index) => set(made.values[index], text));
  }
}

function set(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
