/**
 * Plays items (one reply each) one after the other, and says what was really played.
 *
 * Runs on the audio thread; the only one who knows which sample left the queue. Counts are in samples of the item's own rate.
 *
 * In    {do: "push", item, samples: Float32Array}   {do: "end", item}: no more samples   {do: "flush"}: silence, now
 * Out   {is: "started", item}                       its first sample plays
 *       {is: "progress", item, played, underruns}   about every 40 ms while something plays
 *       {is: "drained", item, played, underruns}    it ended and all of it was played
 *       {is: "flushed", cuts: [{item, played}]}     what a flush cut off, the one that was playing first
 *
 * Rules
 * - Exactly one `drained` or one mention in `flushed` per item.
 * - A flush takes effect within one block of 128 frames, faded so that it does not click.
 * - An underrun is silence inside an item that has not ended; it is counted once, and START_MS is gathered before going on.
 */

import { Resampler } from "./resampler.js";

const START_MS = 80; // gathered before an item starts: hides the jitter of a stream that comes in small pieces
const PROGRESS_FRAMES = 2048;

class Item {
  constructor(id, rateHz) {
    this.id = id;
    this.resampler = new Resampler(rateHz, sampleRate);
    this.startSamples = (rateHz * START_MS) / 1000;
    this.ended = false;
    this.playing = false;
    this.started = false;
  }

  get waiting() {
    return this.resampler.received - this.resampler.consumed;
  }
}

class Playback extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz } }) {
    super();
    this.rateHz = rateHz;
    this.items = [];
    this.flushing = false;
    this.underruns = 0;
    this.sinceProgress = 0;
    this.port.onmessage = ({ data }) => this.#take(data);
  }

  #take(message) {
    switch (message.do) {
      case "push":
        this.#item(message.item).resampler.push(message.samples);
        break;
      case "end": {
        const item = this.#item(message.item);
        if (!item.ended) item.resampler.end();
        item.ended = true;
        break;
      }
      case "flush":
        this.flushing = true;
        break;
    }
  }

  #item(id) {
    let item = this.items.find((known) => known.id === id);
    if (item === undefined) this.items.push((item = new Item(id, this.rateHz)));
    return item;
  }

  process(_, [[out]]) {
    const frames = this.#render(out);
    if (this.flushing) {
      for (let i = 0; i < frames; i++) out[i] *= 1 - (i + 1) / frames;
      this.port.postMessage({ is: "flushed", cuts: this.items.map((item) => ({ item: item.id, played: item.resampler.consumed })) });
      this.items = [];
      this.flushing = false;
    } else if (frames > 0 && this.items.length > 0 && (this.sinceProgress += frames) >= PROGRESS_FRAMES) {
      this.sinceProgress = 0;
      this.#say("progress", this.items[0]);
    }
    return true;
  }

  /** Returns how many frames hold sound. */
  #render(out) {
    let filled = 0;
    while (filled < out.length && this.items.length > 0) {
      const item = this.items[0];
      item.playing ||= item.ended || item.waiting >= item.startSamples;
      if (!item.playing) break;
      const frames = item.resampler.pull(out.subarray(filled));
      filled += frames;
      if (frames > 0 && !item.started) {
        item.started = true;
        this.port.postMessage({ is: "started", item: item.id });
      }
      if (filled === out.length) break;
      if (item.ended) {
        this.items.shift();
        this.#say("drained", item);
      } else {
        item.playing = false;
        this.underruns += 1;
      }
    }
    return filled;
  }

  #say(is, item) {
    this.port.postMessage({ is, item: item.id, played: item.resampler.consumed, underruns: this.underruns });
  }
}

registerProcessor("playback", Playback);
