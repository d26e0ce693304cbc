/**
 * Which part of a reply's text has been spoken when so much of its audio was heard.
 *
 * Pure. `streamrt.caption` events say where in the audio a clause starts; inside a clause the words are spread evenly. Where no clause
 * is known they are spread over the whole audio, or, while that is still being received, told at the usual pace of speech.
 */

import { RATE_HZ } from "./audio.js";

const CHARS_PER_SAMPLE = 15 / RATE_HZ;

export class Captions {
  text = "";
  clauses = []; // {at: sample where it starts, start, end: its characters in `text`}, in order
  received = 0; // samples
  isWhole = false; // all audio was received
  shown = 0; // characters; never goes back

  /** The text spoken when `played` samples were heard. */
  spoken(played) {
    if (played > 0) this.shown = Math.max(this.shown, wordEnd(this.text, this.#reached(played)));
    return this.text.slice(0, this.shown);
  }

  #reached(played) {
    const next = this.clauses.findIndex((clause) => clause.at > played);
    const clause = this.clauses.at(next < 0 ? -1 : next - 1);
    if (this.clauses.length > 0 && next !== 0) {
      const end = this.clauses[next]?.at ?? this.received;
      const part = end > clause.at ? Math.min(1, (played - clause.at) / (end - clause.at)) : 1;
      return clause.start + Math.ceil((clause.end - clause.start) * part);
    }
    return Math.ceil(played * (this.isWhole ? this.text.length / this.received : CHARS_PER_SAMPLE));
  }
}

/** The end of the word that `index` lies in. */
function wordEnd(text, index) {
  const rest = text.slice(index).search(/\s/);
  return rest < 0 ? text.length : index + rest;
}
