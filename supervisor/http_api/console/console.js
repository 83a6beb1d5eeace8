// Starts the page, and looks at the service twice a second while somebody looks at the page.

import { json } from "./api.js";
import { showModels, start } from "./chat.js";
import { showRequests } from "./requests.js";
import { showWorkers } from "./worker.js";

const EVERY_MS = 500;
const MOST_MS = 5000;
const connection = document.getElementById("connection");

function pause(milliseconds) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, milliseconds);
    document.addEventListener("visibilitychange", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

function visible() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

async function watch() {
  let wait = EVERY_MS;
  for (;;) {
    await visible();
    try {
      // One after the other: looks never pile up.
      const worker = await json("api/worker");
      showModels(worker.models);
      showWorkers(worker);
      showRequests(await json("api/requests"));
      wait = EVERY_MS;
      connection.classList.remove("lost");
      if (connection.textContent !== "connected") connection.textContent = "connected";
    } catch {
      wait = Math.min(MOST_MS, wait * 2);
      connection.classList.add("lost");
      connection.textContent = "connection lost, trying again";
    }
    await pause(wait);
  }
}

start();
watch();
