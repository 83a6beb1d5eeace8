// Reads the data of server-sent events from a response, as they come. Comments are skipped.

export async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (waiting + value).split("\n\n");
      waiting = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6));
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    // Whoever stops reading wants no more of it.
    reader.cancel().catch(() => {});
  }
}
