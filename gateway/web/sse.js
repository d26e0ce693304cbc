/**
 * Server-sent events over fetch: EventSource can neither POST nor send a key.
 *
 * Yields the data of each event as text. A comment (keep-alive) yields nothing.
 */

export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    let text = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const blocks = text.split(/\r?\n\r?\n/);
      text = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(line[5] === " " ? 6 : 5));
        if (data.length > 0) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // an aborted fetch rejects; there is nothing left to stop
  }
}
