/**
 * How long the first audio of each spoken turn took: the page's own measure, and below it where the time went, as the server tells it.
 */

const KEPT_TURNS = 6;

// Points in time of `streamrt.turn_timings`, in their usual order, and what the time up to each is spent on.
const PARTS = [
  ["stopped_ms", "end of turn"],
  ["transcript_ms", "transcript"],
  ["first_text_ms", "first words"],
  ["first_audio_ms", "voice"],
  ["heard_ms", "sending"],
];

/** The time from the end of speech to the first audio, as [{name, ms, colour}]; what was done while something else was waited for is not in it. */
export function partsOf(timings) {
  let reached = 0;
  return PARTS.flatMap(([point, name], colour) => {
    const ms = (timings[point] ?? 0) - reached;
    if (ms <= 0) return [];
    reached += ms;
    return [{ name, ms, colour }];
  });
}

export class Turns {
  /** @param list the element that holds the turns, newest first */
  constructor(list) {
    this.list = list;
    this.count = 0;
    this.byResponse = new Map();
  }

  /** Measured here: from the event that ended the user's turn to the first sample of the reply that is heard. */
  add({ responseId, firstAudioMs }) {
    const row = this.#row(responseId);
    row.total.textContent = `${Math.round(firstAudioMs)} ms`;
    row.total.title = "From the end of your turn to the first sound of the reply, measured in this page";
  }

  /** A `streamrt.turn_timings` event. */
  explain(timings) {
    const row = this.#row(timings.response_id);
    const parts = partsOf(timings);
    row.name.textContent = `${row.title}${timings.early ? " · begun before your turn was over" : ""}`;
    row.bar.replaceChildren(
      ...parts.map(({ name, ms, colour }) => {
        const part = document.createElement("span");
        part.className = `part part-${colour}`;
        part.style.flexGrow = ms;
        part.title = `${name} ${Math.round(ms)} ms`;
        return part;
      }),
    );
    row.legend.replaceChildren(
      ...parts.map(({ name, ms, colour }) => {
        const entry = document.createElement("span");
        entry.className = `key part-${colour}`;
        entry.textContent = `${name} ${Math.round(ms)} ms`;
        return entry;
      }),
    );
  }

  #row(responseId) {
    let row = this.byResponse.get(responseId);
    if (row !== undefined) return row;
    this.count += 1;
    const element = document.createElement("li");
    const head = document.createElement("div");
    head.className = "turn-head";
    const name = document.createElement("span");
    const title = `Turn ${this.count}`;
    name.textContent = title;
    row = { title, name, total: document.createElement("strong"), bar: document.createElement("div"), legend: document.createElement("div") };
    head.append(name, row.total);
    row.bar.className = "bar";
    row.legend.className = "legend";
    element.append(head, row.bar, row.legend);
    this.list.prepend(element);
    this.byResponse.set(responseId, row);
    if (this.byResponse.size > KEPT_TURNS) {
      const [oldest] = this.byResponse.keys();
      this.byResponse.get(oldest).element.remove();
      this.byResponse.delete(oldest);
    }
    return row;
  }
}
