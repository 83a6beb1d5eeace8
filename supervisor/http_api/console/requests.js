// The table of requests: what runs, what ran, and a way to stop it.

import { json } from "./api.js";
import { seconds } from "./chat.js";
import { draw, empty } from "./waterfall.js";

const MOST_ROWS = 40;
const SHORTEST_S = 5;
const LONGEST_S = 120;
const LABELS = ["", "Phase", "Time", "Tokens", "Tokens/s", "First token", "End", ""];

const body = document.getElementById("rows");
const nothing = document.getElementById("nothing");
const rows = new Map();

function makeRow(entry) {
  const row = document.createElement("tr");
  const cells = LABELS.map((label, index) => {
    const cell = document.createElement(index === 0 ? "th" : "td");
    if (label) cell.dataset.label = label;
    if (index >= 3 && index <= 5) cell.className = "number";
    row.append(cell);
    return cell;
  });
  cells[0].className = "id";
  cells[0].scope = "row";
  cells[0].textContent = entry.id.replace("req-", "").slice(0, 10);
  cells[0].title = entry.id;
  const what = document.createElement("span");
  what.textContent = `${entry.endpoint.replace("/v1/", "")} · ${entry.model}`;
  cells[0].append(what);
  const svg = empty();
  cells[2].append(svg);
  const stop = document.createElement("button");
  stop.type = "button";
  stop.className = "small danger";
  stop.textContent = "Cancel";
  stop.setAttribute("aria-label", `Cancel request ${cells[0].title}`);
  stop.addEventListener("click", () => {
    stop.disabled = true;
    json(`api/requests/${entry.id}/cancel`, { method: "POST", body: {} }).catch((error) => {
      stop.disabled = false;
      document.getElementById("note").textContent = `Not cancelled: ${error.message}`;
    });
  });
  cells[7].append(stop);
  return { row, cells, svg, stop };
}

// Of several answers, the one that is least far, or took longest.
function shownOf(entry) {
  return entry.choices.find((choice) => choice.phase === entry.phase) ?? entry.choices[0];
}

export function showRequests({ requests, now_ns: now }) {
  const shown = requests.filter((entry) => entry.choices.length).slice(0, MOST_ROWS);
  nothing.hidden = shown.length > 0;
  const ages = shown.slice(0, 12).map((entry) => (now - entry.choices[0].report.time_points_ns.queued) / 1e9);
  const span = Math.min(LONGEST_S, Math.max(SHORTEST_S, ...ages)) * 1e9;
  for (const [id, { row }] of rows) {
    if (!shown.some((entry) => entry.id === id)) {
      row.remove();
      rows.delete(id);
    }
  }
  let before = null;
  for (const entry of shown) {
    let made = rows.get(entry.id);
    if (!made) rows.set(entry.id, made = makeRow(entry));
    const place = before ? before.nextSibling : body.firstChild;
    if (made.row !== place) body.insertBefore(made.row, place);
    before = made.row;
    fill(made, entry, now - span, now);
  }
}

function fill({ cells, svg, stop }, entry, from, now) {
  const { report } = shownOf(entry);
  const tokens = entry.choices.reduce((sum, choice) => sum + Math.max(
    choice.report.usage.completion_tokens, choice.report.tokens), 0);
  const { figures } = report;
  set(cells[1], entry.choices.length > 1 ? `${entry.phase} (${entry.choices.length})` : entry.phase);
  set(cells[3], tokens ? String(tokens) : "–");
  set(cells[4], figures.tokens_per_s ? figures.tokens_per_s.toFixed(1) : "–");
  set(cells[5], seconds(figures.ttft_s));
  const release = figures.release_s !== null && report.stage ? ` · ${seconds(figures.release_s)}` : "";
  set(cells[6], report.end_reason ? `${report.end_reason.replaceAll("_", " ")}${release}` : "");
  draw(svg, report, from, now);
  const isOver = entry.finished || report.end_reason !== null;
  // What is hidden loses the focus, and the keyboard its place.
  if (isOver && document.activeElement === stop) stop.closest(".scroll").focus();
  stop.hidden = isOver;
}

function set(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}
