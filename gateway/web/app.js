/**
 * The page: joins the elements of index.html to talk, chat and the picture. Holds no logic of its own.
 *
 * What the page did is counted in data attributes of <body> (state, samplesSent, samplesPlayed, underruns, flushes, turns).
 */

import { call, key } from "./api.js";
import { MicrophoneError, RATE_HZ } from "./audio.js";
import { Chat } from "./chat.js";
import { Images } from "./image.js";
import { Picture, stageState, stagesOf, watch } from "./pipeline.js";
import { Talk } from "./talk.js";
import { Transcript } from "./transcript.js";
import { Turns } from "./turns.js";

const $ = (id) => document.getElementById(id);

const STATE_TEXTS = {
  off: "Off",
  connecting: "Connecting …",
  listening: "Listening",
  hearing: "Hearing you",
  thinking: "Thinking",
  speaking: "Speaking",
};

const announcer = $("announcer");
const transcript = new Transcript($("talk-lines"), announcer);
const turns = new Turns($("turns"));
const chat = new Chat(new Transcript($("chat-lines"), announcer));
const images = new Images($("image"), $("image-note"));
const picture = new Picture($("picture"));
let model = "";
let imageModel = "";

// Talk

const talk = new Talk(transcript, {
  state(name) {
    document.body.dataset.state = name;
    $("state").textContent = STATE_TEXTS[name];
    const isOn = name !== "off";
    $("talk").setAttribute("aria-pressed", isOn);
    $("talk-label").textContent = isOn ? "End" : "Talk";
    $("mute").disabled = !isOn;
  },
  level: (level) => $("talk").style.setProperty("--level", Math.min(1, level * 6).toFixed(3)),
  turn: (turn) => turns.add(turn),
  timings: (event) => turns.explain(event),
  counters: (counters) => Object.assign(document.body.dataset, counters),
  problem: showProblem,
});

$("talk").addEventListener("click", async () => {
  if (talk.facts.on) return talk.stop();
  try {
    await talk.start({ model, key: key.get(), session: sessionSettings() });
  } catch (error) {
    if (!(error instanceof MicrophoneError)) throw error;
    showProblem(error.message);
  }
});

$("mute").addEventListener("click", () => {
  const isMuted = $("mute").getAttribute("aria-pressed") !== "true";
  $("mute").setAttribute("aria-pressed", isMuted);
  $("mute-label").textContent = isMuted ? "Muted" : "Mute";
  talk.mute(isMuted);
});

/** What is left empty is the pipeline's own default. */
function sessionSettings() {
  const instructions = $("instructions").value.trim();
  const voice = $("voice").value.trim();
  const format = { type: "audio/pcm", rate: RATE_HZ };
  return {
    type: "realtime",
    output_modalities: ["audio"],
    ...(instructions && { instructions }),
    audio: {
      input: {
        format,
        transcription: { model },
        turn_detection: { type: "server_vad", create_response: true, interrupt_response: true },
      },
      output: { format, ...(voice && { voice }) },
    },
  };
}

function showProblem(text) {
  $("problem").hidden = !text;
  $("problem-text").textContent = text;
}

$("problem-close").addEventListener("click", () => showProblem(""));

// Chat

$("chat-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (chat.isBusy) return chat.stop();
  const text = $("chat-text").value.trim();
  if (!text) return;
  $("chat-text").value = "";
  $("chat-send").textContent = "Stop";
  await chat.send(text, { model, instructions: $("instructions").value.trim() });
  $("chat-send").textContent = "Send";
});

sendOnEnter($("chat-text"), $("chat-form"), chat);

function sendOnEnter(text, form, sender) {
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!sender.isBusy) form.requestSubmit();
  });
}

$("chat-clear").addEventListener("click", () => {
  chat.clear();
  $("chat-text").focus();
});

// Image

$("image-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (images.isBusy) return images.stop();
  const prompt = $("image-text").value.trim();
  if (!prompt) return;
  $("image-draw").textContent = "Stop";
  await images.draw(prompt, { model: imageModel });
  $("image-draw").textContent = "Draw";
});

sendOnEnter($("image-text"), $("image-form"), images);

// Tabs

const tabs = [...document.querySelectorAll("[role=tab]")];

function select(tab) {
  for (const other of tabs) {
    const isSelected = other === tab;
    other.setAttribute("aria-selected", isSelected);
    other.tabIndex = isSelected ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = !isSelected;
  }
  tab.focus();
}

for (const tab of tabs) {
  tab.addEventListener("click", () => select(tab));
  tab.addEventListener("keydown", ({ key: pressed }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[pressed];
    if (!step) return;
    const shown = tabs.filter((other) => !other.hidden);
    select(shown[(shown.indexOf(tab) + step + shown.length) % shown.length]);
  });
}

// Settings

$("settings-open").addEventListener("click", () => openSettings());

function openSettings() {
  $("key").value = key.get();
  $("settings").showModal();
}

$("settings").addEventListener("close", () => {
  key.set($("key").value.trim());
  loadModel();
});

async function loadModel() {
  try {
    const { data } = await (await call("v1/models")).json();
    model = (data.find(({ tasks }) => tasks.includes("respond")) ?? data[0]).id;
    imageModel = data.find(({ tasks }) => tasks.includes("image"))?.id ?? "";
    $("tab-image").hidden = !imageModel;
    if (imageModel && !data.some(({ tasks }) => tasks.includes("respond"))) select($("tab-image"));
    showProblem("");
  } catch (error) {
    showProblem(error.status === 401 ? "This gateway asks for an API key. Enter it in the settings." : error.message);
  }
}

// Pipeline

function showPipeline(pipeline) {
  document.title = `${pipeline.name} · streamrt`;
  $("name").textContent = pipeline.name;
  const stages = stagesOf(pipeline);
  const states = stages.map(stageState);
  const ready = states.filter((state) => state === "ready" || state === "busy").length;
  $("readiness").dataset.state = ready === states.length ? "ready" : "loading";
  $("readiness").textContent = ready === states.length ? "Ready" : `${ready} of ${states.length} ready`;
  picture.show(stages);
}

function showLost(message) {
  $("readiness").dataset.state = "down";
  $("readiness").textContent = "Offline";
  $("readiness").title = message;
}

loadModel();
watch(showPipeline, showLost);
