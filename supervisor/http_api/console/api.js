// How this page asks the service: relative paths, so that it works wherever it is mounted, and a key if one is wanted.

const STORED = "infervisor-key";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key");
const wrong = document.getElementById("key-wrong");

let asking = null; // one dialog, however many answers say 401
let isDismissed = false; // then only what the person does asks again

export function headersOf(more = {}) {
  const key = sessionStorage.getItem(STORED);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

function askForKey() {
  asking ??= new Promise((resolve) => {
    wrong.textContent = sessionStorage.getItem(STORED) ? "That key is not known here." : "";
    input.value = "";
    dialog.showModal();
    dialog.returnValue = "";
    dialog.addEventListener("close", () => {
      asking = null;
      const isGiven = dialog.returnValue === "use" && input.value !== "";
      if (isGiven) sessionStorage.setItem(STORED, input.value);
      isDismissed = !isGiven;
      input.value = "";
      resolve(isGiven);
    }, { once: true });
  });
  return asking;
}

// Answers the response, whatever its status but 401; that one asks the person and tries again.
// isWatching: whether the page asks by itself.
export async function send(path, { method = "GET", body, headers = {}, signal, isWatching = false } = {}) {
  for (;;) {
    const told = body === undefined ? headers : { "Content-Type": "application/json", ...headers };
    const used = sessionStorage.getItem(STORED);
    const response = await fetch(path, {
      method, signal, headers: headersOf(told), cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
    if (response.status !== 401) return response;
    if (used !== sessionStorage.getItem(STORED)) continue;
    if ((isWatching && isDismissed) || !await askForKey()) return response;
    // Race "the question took longer than the patience of a look": it is made again by itself.
    signal?.throwIfAborted();
  }
}

export async function json(path, options) {
  const response = await send(path, options);
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
  return body;
}
