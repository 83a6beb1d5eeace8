// The chat: asks, shows the answer as it comes, stops it, and tells what the service measured of it.

import { json, send } from "./api.js";
import { eventsOf } from "./event_stream.js";

const form = document.getElementById("ask");
const prompt = document.getElementById("prompt");
const sendButton = document.getElementById("send");
const stopButton = document.getElementById("stop");
const list = document.getElementById("messages");
const note = document.getElementById("note");
const announced = document.getElementById("announced"); // heard, not seen: the answer is above
const model = document.getElementById("model");

let messages = [];
let running = null;

export function showModels(models) {
  const names = models.map((each) => each.model);
  const shown = [...model.options].map((option) => option.value);
  if (names.join("\n") === shown.join("\n")) return;
  const chosen = model.value;
  model.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(chosen)) model.value = chosen;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return "<1 ms";
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(2)} s`;
}

function add(role, text) {
  const item = document.createElement("li");
  item.className = role;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = role === "user" ? "You" : "Model";
  const body = document.createElement("span");
  body.className = "text";
  body.textContent = text;
  item.append(who, body);
  list.append(item);
  toEnd();
  return { item, body };
}

function isAtEnd() {
  return list.scrollHeight - list.scrollTop - list.clientHeight < 40;
}

function toEnd() {
  list.scrollTop = list.scrollHeight;
}

function tell(item, text, kind = "") {
  const follows = isAtEnd();
  const what = document.createElement("span");
  what.className = `what ${kind}`;
  what.textContent = text;
  item.append(what);
  if (follows) toEnd();
}

// The one sentence about an end, from the report.
export function sentence(report) {
  const { figures, stage, end_reason: reason, resumes } = report;
  const parts = [];
  for (const resume of resumes) {
    parts.push(`the worker was lost (${resume.cause}), went on after ${seconds(resume.pause_s)}`);
  }
  if (reason === "client_disconnected" || reason === "cancelled") {
    parts.push(report.time_points_ns.submitted === null
      ? "stopped · it never reached the worker"
      : `stopped · released after ${seconds(figures.release_s)}${stage ? ` (${stage})` : ""}`);
  } else {
    parts.push(`${reason.replaceAll("_", " ")} · first token ${seconds(figures.ttft_s)}`);
    if (figures.tokens_per_s) parts.push(`${figures.tokens_per_s.toFixed(1)} tokens/s`);
    parts.push(`${report.usage.completion_tokens} tokens`);
  }
  return parts.join(" · ");
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// A request that was left can still be looked at, under the id that this page gave it.
async function reportOf(clientId) {
  for (let tries = 0; tries < 60; tries += 1) {
    const { requests } = await json("api/requests?limit=40");
    const mine = requests.find((entry) => entry.client_request_id === clientId);
    if (mine?.finished) return mine.choices[0].report;
    await new Promise((resolve) => setTimeout(resolve, tries < 10 ? 30 : 200));
  }
  return null;
}

function number(id) {
  const value = document.getElementById(id).valueAsNumber;
  return Number.isNaN(value) ? undefined : value;
}

async function ask(text) {
  const clientId = newId();
  const abort = new AbortController();
  // Race "a new chat begins meanwhile": what comes belongs to the old one.
  const chat = messages;
  const say = (what) => { if (chat === messages && running === null) note.textContent = what; };
  chat.push({ role: "user", content: text });
  add("user", text);
  const { item, body } = add("assistant", "");
  item.setAttribute("aria-busy", "true");
  running = abort;
  stopButton.disabled = false;
  sendButton.disabled = true;
  note.textContent = "Waiting for the first token."; // whatever it waits for: the table says what
  announced.textContent = "";
  let answer = "";
  let report = null;
  let failed = null;
  let whole = false;
  try {
    const response = await send("v1/chat/completions", {
      method: "POST",
      signal: abort.signal,
      headers: { "X-Client-Request-Id": clientId, "X-Infervisor-Priority": String(number("priority") ?? 0) },
      body: {
        model: model.value || undefined, messages: chat, stream: true,
        temperature: number("temperature"), max_tokens: number("max-tokens"),
      },
    });
    if (!response.ok) {
      failed = (await response.json())?.error?.message ?? `status ${response.status}`;
    } else {
      for await (const data of eventsOf(response)) {
        if (data === "[DONE]") { whole = true; continue; }
        const event = JSON.parse(data);
        report = event.x_infervisor?.[0] ?? report;
        if (event.error) { failed = event.error.message; continue; }
        const piece = event.choices[0]?.delta?.content;
        if (piece) {
          const follows = isAtEnd();
          answer += piece;
          body.textContent = answer;
          note.textContent = "";
          if (follows) toEnd();
        }
      }
      if (!whole && !failed) failed = "The answer broke off.";
    }
  } catch (error) {
    if (!abort.signal.aborted) failed = `The service can't be reached: ${error.message}`;
  }
  running = null;
  if (document.activeElement === stopButton) prompt.focus(); // a button that is off loses the focus
  stopButton.disabled = true;
  sendButton.disabled = false;
  item.removeAttribute("aria-busy");
  if (answer) chat.push({ role: "assistant", content: answer });
  else chat.pop();
  if (abort.signal.aborted) {
    say("Stopping.");
    report = await reportOf(clientId).catch(() => null);
    const told = report ? sentence(report) : "stopped";
    tell(item, told, "stopped");
    say("");
    announced.textContent = told;
  } else if (failed) {
    // Somebody else stopped it: what was measured says more.
    const told = report?.end_reason === "cancelled" ? sentence(report) : failed;
    tell(item, told, "failed");
    say("");
    announced.textContent = told;
  } else {
    if (report) tell(item, sentence(report));
    say("");
    announced.textContent = `Answer: ${answer}`;
  }
}

function stop() {
  running?.abort();
}

export function start() {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value.trim();
    if (!text || running) return;
    prompt.value = "";
    ask(text);
  });
  // A setting that can't be sent must be seen.
  form.addEventListener("invalid", () => { form.querySelector("details").open = true; }, true);
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
  });
  stopButton.addEventListener("click", stop);
  document.getElementById("clear").addEventListener("click", () => {
    stop();
    messages = [];
    list.replaceChildren();
    note.textContent = "";
    prompt.focus();
  });
}
