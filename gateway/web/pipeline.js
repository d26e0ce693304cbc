/**
 * The live picture of the pipeline: stages as boxes in columns, edges from left to right, states as they change.
 *
 * `layout` is pure; `Picture` builds the SVG when the shape changes and only sets texts and classes otherwise, so that nothing flickers.
 * States are told by word and by colour, never by colour alone.
 */

import { call } from "./api.js";
import { readEvents } from "./sse.js";

const SVG = "http://www.w3.org/2000/svg";
const GATE = 30; // width of the gateway's bar
const BOX = { minWidth: 116, maxWidth: 184, height: 92 };
const ROW_GAP = 16;
const MARGIN = 2;
const RETRY_MS = { first: 500, most: 8000 };

/** Call `onPipeline(pipeline)` per change and `onLost(message)` when the stream breaks; goes on for the life of the page. */
export async function watch(onPipeline, onLost) {
  for (let waitMs = RETRY_MS.first; ; waitMs = Math.min(2 * waitMs, RETRY_MS.most)) {
    try {
      for await (const data of readEvents(await call("api/pipeline/events"))) {
        waitMs = RETRY_MS.first;
        onPipeline(JSON.parse(data));
      }
      onLost("The gateway closed the connection.");
    } catch (error) {
      onLost(error.message); // a gateway that restarts must not end the picture
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
}

/** The stages of an event of /api/pipeline/events, each with its replicas and the names of the stages that feed it. */
export function stagesOf({ stages, edges, replicas }) {
  return stages.map((stage) => ({
    ...stage,
    inputs: [...new Set(edges.filter((edge) => edge.to === stage.name).map((edge) => edge.from))],
    replicas: replicas.filter((replica) => replica.stage === stage.name),
  }));
}

/** A stage's state, from its replicas'. */
export function stageState({ replicas }) {
  const states = new Set(replicas.map((replica) => replica.state));
  if (states.has("ready")) return replicas.some((replica) => replica.running > 0) ? "busy" : "ready";
  return ["loading", "starting", "waiting", "draining", "failed"].find((state) => states.has(state)) ?? "down";
}

/** Where everything is, for a picture of at most `width` (wider when the boxes need it). */
export function layout(stages, width) {
  const byName = new Map(stages.map((stage) => [stage.name, stage]));
  const sources = (stage) => stage.inputs.map((name) => byName.get(name));
  const column = (stage) => 1 + Math.max(-1, ...sources(stage).map(column));
  const columns = [];
  for (const stage of stages) (columns[column(stage)] ??= []).push(stage);

  const count = columns.length;
  const inner = width - 2 * MARGIN - GATE;
  const minGap = count * (BOX.minWidth + 54) > inner ? 22 : 54;
  const boxWidth = Math.max(BOX.minWidth, Math.min(BOX.maxWidth, inner / count - minGap));
  const gap = Math.max(minGap, Math.min(96, inner / count - boxWidth));
  const rows = Math.max(...columns.map((boxes) => boxes.length));
  const height = 2 * MARGIN + rows * (BOX.height + ROW_GAP) - ROW_GAP;

  const gate = { x: MARGIN, y: MARGIN, width: GATE, height: height - 2 * MARGIN };
  const boxes = new Map();
  columns.forEach((members, index) => {
    const top = (height - members.length * (BOX.height + ROW_GAP) + ROW_GAP) / 2;
    members.forEach((stage, row) => {
      const x = MARGIN + GATE + gap + index * (boxWidth + gap);
      boxes.set(stage.name, { x, y: top + row * (BOX.height + ROW_GAP), width: boxWidth, height: BOX.height });
    });
  });
  const edges = stages.flatMap((stage) => {
    const to = boxes.get(stage.name);
    const from = sources(stage).map((source) => [source.name, boxes.get(source.name)]);
    // From the gateway an edge leaves the bar at the height where it arrives.
    return (from.length > 0 ? from : [["", { ...gate, y: to.y, height: to.height }]]).map(([name, box]) => ({
      from: name,
      to: stage.name,
      path: curve(box.x + box.width, box.y + box.height / 2, to.x, to.y + to.height / 2),
    }));
  });
  return { columns: count, width: MARGIN + GATE + count * (gap + boxWidth) + MARGIN, height, gate, boxes, edges };
}

function curve(x1, y1, x2, y2) {
  const bend = (x2 - x1) / 2;
  return `M${x1} ${y1} C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`;
}

export class Picture {
  /** @param frame the element that holds the SVG */
  constructor(frame) {
    this.frame = frame;
    this.shape = "";
    this.stages = [];
    new ResizeObserver(() => this.show(this.stages)).observe(frame);
  }

  /** @param stages see `stagesOf` */
  show(stages) {
    this.stages = stages;
    const width = this.frame.clientWidth;
    if (width === 0 || stages.length === 0) return;
    const shape = JSON.stringify([width, stages.map(({ name, inputs, replicas }) => [name, inputs, replicas.length])]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.#build(stages, width);
    }
    for (const stage of stages) this.#update(stage);
    this.svg.setAttribute("aria-label", describe(stages));
  }

  #build(stages, width) {
    const plan = layout(stages, width);
    document.body.classList.toggle("deep", plan.columns > 3);
    this.svg = make("svg", { width: plan.width, height: plan.height, viewBox: `0 0 ${plan.width} ${plan.height}`, role: "img" });
    this.edges = plan.edges.map((edge) => ({ ...edge, element: make("path", { d: edge.path, class: "edge" }, this.svg) }));
    const { gate } = plan;
    make("rect", { ...gate, rx: 10, class: "gate" }, this.svg);
    const [x, y] = [gate.x + gate.width / 2, gate.y + gate.height / 2];
    make("text", { x, y, transform: `rotate(-90 ${x} ${y})`, class: "gate-name" }, this.svg).textContent = "gateway";
    this.boxes = new Map(stages.map((stage) => [stage.name, this.#box(stage, plan.boxes.get(stage.name))]));
    this.frame.replaceChildren(this.svg);
  }

  #box(stage, { x, y, width, height }) {
    const group = make("g", { transform: `translate(${x} ${y})` }, this.svg);
    const title = make("title", {}, group);
    make("rect", { width, height, rx: 12, class: "box" }, group);
    make("circle", { cx: 16, cy: 20, r: 4.5, class: "dot" }, group);
    const fit = (text, pixels) => ellipsis(text, Math.floor((width - 26) / pixels));
    make("text", { x: 28, y: 24.5, class: "name" }, group).textContent = fit(stage.name, 8.4);
    make("text", { x: 14, y: 42, class: "use" }, group).textContent = fit(shortUse(stage.use), 6);
    const state = make("text", { x: 14, y: 60, class: "state" }, group);
    const counts = make("text", { x: 14, y: 76, class: "counts" }, group);
    make("rect", { x: 14, y: 82, width: width - 28, height: 3, rx: 1.5, class: "meter" }, group);
    const load = make("rect", { x: 14, y: 82, width: 0, height: 3, rx: 1.5, class: "load" }, group);
    const replicas = stage.replicas.length < 2 ? [] : stage.replicas.map((_, i) => make("circle", { cx: width - 14 - 9 * i, cy: 20, r: 3 }, group));
    return { group, title, state, counts, load, replicas, width, fit };
  }

  #update(stage) {
    const box = this.boxes.get(stage.name);
    const state = stageState(stage);
    const running = sum(stage, "running");
    const queued = sum(stage, "queued");
    const ready = stage.replicas.filter((replica) => replica.state === "ready").length;
    const progress = stage.replicas.find((replica) => replica.state === "loading")?.progress;
    box.group.setAttribute("class", `stage is-${state}`);
    const count = stage.replicas.length;
    const words = count === 1 ? state : `${state} · ${ready}/${count}`;
    box.state.textContent = box.fit(state === "loading" && progress ? progress : words, 7.2);
    box.counts.textContent = box.width < 150 ? `run ${running} · queue ${queued}` : `${running} running · ${queued} queued`;
    const capacity = Math.max(1, sum(stage, "max_requests"));
    box.load.setAttribute("width", Math.min(1, running / capacity) * (box.width - 28));
    box.replicas.forEach((dot, i) => dot.setAttribute("class", `replica is-${stageState({ replicas: [stage.replicas[i]] })}`));
    box.title.textContent = [`${stage.name}: ${stage.use} ${stage.model}`, ...stage.replicas.map(sentence)].join("\n");
    for (const edge of this.edges) {
      if (edge.to === stage.name) edge.element.setAttribute("class", state === "busy" ? "edge flows" : "edge");
    }
  }
}

const sentence = ({ name, state, running, queued, max_requests, restarts, error }) =>
  `${name}: ${state}, ${running} of ${max_requests} running, ${queued} queued, ${restarts} restarts${error && `, last error: ${error}`}`;

/** The picture in words. */
function describe(stages) {
  const one = (stage) => `${stage.name} ${stageState(stage)}, ${sum(stage, "running")} running, ${sum(stage, "queued")} queued`;
  return `Pipeline: ${stages.map(one).join("; ")}`;
}

const sum = (stage, field) => stage.replicas.reduce((total, replica) => total + replica[field], 0);

/** "speech.vad.silero" -> "vad.silero", "package.module:Class" -> "Class" */
const shortUse = (use) => (use.includes(":") ? use.split(":")[1] : use.split(".").slice(-2).join("."));

const ellipsis = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function make(name, attributes, parent) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}
