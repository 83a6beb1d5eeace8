// Starts the page, and looks at the service twice a second while somebody looks at the page.

import { json } from "./api.js";
import { showModels, start } from "./chat.js";
import { showRequests } from "./requests.js";
import { showWorkers } from "./worker.js";

const EVERY_MS = 500;
const MOST_MS = 5000;
const PATIENCE_MS = 5000;
const connection = document.getElementById("connection");

function pause(milliseconds) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", done);
      resolve();
    };
    const timer = setTimeout(done, milliseconds);
    document.addEventListener("visibilitychange", done);
  });
}

// A service that hangs is as good as gone.
function look(path) {
  return json(path, { signal: AbortSignal.timeout(PATIENCE_MS), isWatching: true });
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

async function watch() {
  let wait = EVERY_MS;
  for (;;) {
    await visible();
    let worker;
    let requests;
    try {
      // One after the other: looks never pile up.
      worker = await look("api/worker");
      requests = await look("api/requests?limit=40");
    } catch {
      wait = Math.min(MOST_MS, wait * 2);
      connection.classList.add("lost");
      connection.textContent = "connection lost, trying again";
      await pause(wait);
      continue;
    }
    showModels(worker.models);
    showWorkers(worker);
    showRequests(requests);
    wait = EVERY_MS;
    connection.classList.remove("lost");
    if (connection.textContent !== "connected") connection.textContent = "connected";
    await pause(wait);
  }
}

start();
watch();
