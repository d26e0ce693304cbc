/**
 * A typed conversation over POST /v1/chat/completions, streamed.
 */

import { call } from "./api.js";
import { readEvents } from "./sse.js";

export class Chat {
  constructor(transcript) {
    this.transcript = transcript;
    this.messages = [];
    this.turn = 0;
    this.abort = null; // of the reply that is being streamed
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Ends when the reply has ended, was stopped, or failed; the line says which. */
  async send(text, { model, instructions }) {
    this.turn += 1;
    this.messages.push({ role: "user", content: text });
    const said = this.transcript.line("user", `user-${this.turn}`);
    said.text = text;
    said.finish("done");
    const line = this.transcript.line("assistant", `assistant-${this.turn}`);
    this.abort = new AbortController();
    const startedAtMs = performance.now();
    try {
      let isWhole = false;
      const system = instructions ? [{ role: "system", content: instructions }] : [];
      const response = await call("v1/chat/completions", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model, messages: [...system, ...this.messages], stream: true }),
        signal: this.abort.signal,
      });
      for await (const data of readEvents(response)) {
        isWhole = data === "[DONE]";
        if (isWhole) break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        const piece = chunk.choices[0]?.delta.content ?? "";
        if (piece && !line.text) line.note(`first words after ${Math.round(performance.now() - startedAtMs)} ms`);
        line.text += piece;
      }
      if (!isWhole) throw new Error("The reply was cut off.");
      line.finish("done");
    } catch (error) {
      // Whatever goes wrong in one reply ends that reply alone; the line tells.
      line.note(error.name === "AbortError" ? "stopped" : error.message);
      line.finish(error.name === "AbortError" ? "cut" : "failed");
    } finally {
      this.abort = null;
    }
    if (line.text) this.messages.push({ role: "assistant", content: line.text });
    else this.messages.pop(); // a question without an answer would come twice
  }

  stop() {
    this.abort?.abort();
  }

  clear() {
    this.stop();
    this.messages = [];
    this.transcript.clear();
  }
}
