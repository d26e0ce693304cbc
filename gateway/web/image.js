/**
 * Images over POST /v1/images/generations, streamed: a partial image is shown until a better one comes.
 */

import { call } from "./api.js";
import { readEvents } from "./sse.js";

const PARTIALS = 3;

export class Images {
  /** `picture`: the img element that shows them; `note`: the element that says what happens. */
  constructor(picture, note) {
    this.picture = picture;
    this.note = note;
    this.abort = null; // of the image that is being made
  }

  get isBusy() {
    return this.abort !== null;
  }

  /** Ends when the image is there, was stopped, or failed; the note says which. */
  async draw(prompt, { model }) {
    this.abort = new AbortController();
    const startedAtMs = performance.now();
    this.note.textContent = "Drawing …";
    try {
      let isWhole = false;
      const response = await call("v1/images/generations", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ model, prompt, stream: true, partial_images: PARTIALS }),
        signal: this.abort.signal,
      });
      for await (const data of readEvents(response)) {
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        this.picture.src = `data:image/${event.output_format};base64,${event.b64_json}`;
        this.picture.alt = prompt;
        this.picture.hidden = false;
        isWhole = event.type === "image_generation.completed";
        if (isWhole) this.note.textContent = `${event.size}, seed ${event.seed}, ${((performance.now() - startedAtMs) / 1000).toFixed(1)} s`;
      }
      if (!isWhole) throw new Error("The image was cut off.");
    } catch (error) {
      // Whatever goes wrong with one image ends that image alone; the note tells.
      this.note.textContent = error.name === "AbortError" ? "Stopped" : error.message;
    } finally {
      this.abort = null;
    }
  }

  stop() {
    this.abort?.abort();
  }
}
