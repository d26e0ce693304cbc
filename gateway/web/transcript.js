/**
 * The lines of a conversation on the page: who said what, and a small note under it.
 *
 * Text is set as text, never as markup. A line is announced to screen readers once, when it is finished.
 */

const NAMES = { user: "You", assistant: "Agent" };

export class Transcript {
  /** @param list the element that holds the lines; @param announcer an aria-live element */
  constructor(list, announcer) {
    this.list = list;
    this.announcer = announcer;
    this.lines = new Map();
  }

  /** The line with this id; a new one at the end when there is none. */
  line(who, id) {
    let line = this.lines.get(id);
    if (line === undefined) {
      line = new Line(who, this);
      this.lines.set(id, line);
      this.list.append(line.element);
      this.follow();
    }
    return line;
  }

  /** A sentence between the lines. */
  remark(text) {
    const element = document.createElement("li");
    element.className = "remark";
    element.textContent = text;
    this.list.append(element);
    this.announcer.textContent = text;
    this.follow();
  }

  clear() {
    this.lines.clear();
    this.list.replaceChildren();
  }

  /** Stay at the end, unless the reader scrolled up. */
  follow() {
    const { list } = this;
    const end = list.scrollHeight - list.clientHeight;
    if (end - list.scrollTop < 160) list.scrollTop = end;
  }
}

class Line {
  constructor(who, transcript) {
    this.who = who;
    this.transcript = transcript;
    this.element = document.createElement("li");
    this.element.className = `line ${who}`;
    this.element.dataset.state = "open";
    const name = document.createElement("span");
    name.className = "who";
    name.textContent = NAMES[who];
    this.body = document.createElement("p");
    this.foot = document.createElement("small");
    this.element.append(name, this.body, this.foot);
  }

  get text() {
    return this.body.textContent;
  }

  set text(text) {
    this.body.textContent = text;
    this.transcript.follow();
  }

  /** A word about the line, behind those that it already has. */
  note(text) {
    this.foot.textContent = [this.foot.textContent, text].filter(Boolean).join(" · ");
    this.transcript.follow();
  }

  /** @param {"done" | "cut" | "failed"} state */
  finish(state) {
    if (this.element.dataset.state !== "open") return;
    this.element.dataset.state = state;
    if (this.text) this.transcript.announcer.textContent = `${NAMES[this.who]}: ${this.text}`;
  }
}
