// How this page asks the service: relative paths, so that it works wherever it is mounted, and a key if one is wanted.

const STORED = "infervisor-key";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key");
const wrong = document.getElementById("key-wrong");

let asking = null; // one dialog, however many answers say 401

export function headersOf(more = {}) {
  const key = sessionStorage.getItem(STORED);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    wrong.textContent = sessionStorage.getItem(STORED) ? "That key is not known here." : "";
    input.value = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      if (input.value) sessionStorage.setItem(STORED, input.value);
      input.value = "";
      resolve();
    }, { once: true });
  });
  return asking;
}

// Answers the response, whatever its status but 401; that one asks the person and tries again.
export async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  for (;;) {
    const told = body === undefined ? headers : { "Content-Type": "application/json", ...headers };
    const used = sessionStorage.getItem(STORED);
    const response = await fetch(path, {
      method, signal, headers: headersOf(told), cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.status !== 401) return response;
    if (used === sessionStorage.getItem(STORED)) await askForKey();
    signal?.throwIfAborted();
  }
}

export async function json(path, options) {
  const response = await send(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
  return body;
}
