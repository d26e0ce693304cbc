/**
 * A spoken conversation: server events in; sound, transcript and state out.
 *
 * Knows the Realtime protocol: OpenAI's GA events, and of ours `streamrt.turn_timings` and `streamrt.caption`. The server decides where
 * turns begin and end; the page alone knows what was heard, so it stops playback on `speech_started` and tells the server how much of
 * the reply that was.
 *
 * Rules
 * - Playback stops before anything else happens when the user starts to speak.
 * - Audio of a reply that was cut off is never played, however late it arrives.
 * - A reply's text appears as it is spoken, and what was not spoken is not shown.
 */

import { Audio, RATE_HZ, decodePcm16, encodeBase64 } from "./audio.js";
import { Captions } from "./captions.js";
import { Connection } from "./realtime.js";

const KEPT_LINES = 20; // of the conversation that a new connection is told

/** What the badge says. Pure. */
export function stateOf({ on, connected, hearing, playing, responding, awaiting }) {
  if (!on) return "off";
  if (!connected) return "connecting";
  if (hearing) return "hearing";
  if (playing) return "speaking";
  return responding || awaiting ? "thinking" : "listening";
}

const IDLE = { on: false, connected: false, hearing: false, playing: false, responding: false, awaiting: false };

/** One reply while it is heard. */
class Reply {
  constructor({ item_id, response_id }, line) {
    this.id = item_id;
    this.responseId = response_id;
    this.line = line;
    this.captions = new Captions();
    this.isCut = false;
  }
}

export class Talk {
  /**
   * @param transcript a Transcript
   * @param view {state(name), level(0..1), turn({responseId, firstAudioMs}), timings(event), counters({...}), problem(text)}
   */
  constructor(transcript, view) {
    this.transcript = transcript;
    this.view = view;
    this.facts = { ...IDLE };
    this.counters = { samplesSent: 0, samplesPlayed: 0, framesDropped: 0, underruns: 0, flushes: 0, turns: 0 };
    this.history = []; // {role, text} of finished lines
    this.muted = false;
    this.attempt = 0; // number of starts and stops: the browser may ask for the microphone for longer than the user waits
    this.audio = null;
    this.connection = null;
    this.replies = new Map(); // item id -> Reply that is being received or heard
    this.latest = null; // the newest Reply
    this.stoppedAtMs = 0; // when the user's turn ended; 0 once its reply is heard
  }

  /** Raises: MicrophoneError. */
  async start({ model, key, session }) {
    const attempt = ++this.attempt;
    this.view.problem("");
    this.#set({ ...IDLE, on: true });
    let audio;
    try {
      audio = await Audio.open();
    } catch (error) {
      if (attempt === this.attempt) this.#set(IDLE);
      throw error;
    }
    if (attempt !== this.attempt) return audio.close();
    this.audio = audio;
    this.session = session;
    this.audio.muted = this.muted;
    this.audio.onLost = () => this.stop("The microphone is gone.");
    this.audio.onFrame = (frame) => this.#sendFrame(frame);
    this.player = this.audio.player;
    this.player.onStarted = (item) => this.#replyStarted(item);
    this.player.onProgress = (item, played) => this.#replyHeard(item, played);
    this.player.onDrained = (item, played) => this.#replyEnded(item, played);
    const url = new URL("v1/realtime", document.baseURI);
    url.protocol = url.protocol.replace("http", "ws");
    url.search = new URLSearchParams({ model, streamrt: "1" });
    this.connection = new Connection({
      url,
      key,
      onEvent: (event) => this.on[event.type]?.(event),
      onLost: () => this.#lost(),
      onGone: (reason) => this.stop(reason),
    });
  }

  async stop(problem = "") {
    if (!this.facts.on) return;
    const { audio, connection } = this;
    this.attempt += 1;
    this.audio = this.connection = null;
    connection?.close();
    for (const reply of this.replies.values()) this.#finish(reply, "cut");
    this.#set(IDLE);
    this.view.level(0);
    if (problem) this.view.problem(problem);
    await audio?.close();
  }

  mute(muted) {
    this.muted = muted;
    if (this.audio) this.audio.muted = muted;
  }

  on = {
    "session.created": () => {
      this.connection.send({ type: "session.update", session: this.session });
      for (const { role, text } of this.history) {
        const type = role === "user" ? "input_text" : "output_text";
        this.connection.send({ type: "conversation.item.create", item: { type: "message", role, content: [{ type, text }] } });
      }
    },
    "session.updated": () => this.#set({ connected: true }),

    // The user's side.
    "input_audio_buffer.speech_started": ({ item_id }) => {
      this.#interrupt();
      this.#set({ hearing: true, awaiting: false });
      this.transcript.line("user", item_id);
    },
    "input_audio_buffer.speech_stopped": () => {
      this.stoppedAtMs = performance.now();
      this.#set({ hearing: false, awaiting: true });
    },
    "conversation.item.input_audio_transcription.delta": ({ item_id, delta }) => {
      const line = this.transcript.line("user", item_id);
      line.text += delta ?? "";
    },
    "conversation.item.input_audio_transcription.completed": ({ item_id, transcript }) => {
      const line = this.transcript.line("user", item_id);
      line.text = transcript.trim();
      if (!line.text) line.note("nothing understood");
      line.finish("done");
      this.#remember("user", line.text);
      if (!line.text) this.#set({ awaiting: false });
    },
    "conversation.item.input_audio_transcription.failed": ({ item_id, error }) => {
      const line = this.transcript.line("user", item_id);
      line.note(error.message);
      line.finish("failed");
      this.#set({ awaiting: false });
    },

    // The agent's side.
    "response.created": () => this.#set({ responding: true, awaiting: false }),
    "response.output_audio_transcript.delta": (event) => {
      this.#reply(event).captions.text += event.delta;
    },
    // A pipeline that can not speak answers in text.
    "response.output_text.delta": (event) => {
      const reply = this.#reply(event);
      reply.captions.text += event.delta;
      reply.line.text = reply.captions.text;
    },
    "streamrt.caption": (event) => {
      const at = (event.audio_start_ms * RATE_HZ) / 1000;
      this.#reply(event).captions.clauses.push({ at, start: event.text_start, end: event.text_end });
    },
    "response.output_audio.delta": (event) => {
      const reply = this.#reply(event);
      const samples = decodePcm16(event.delta);
      if (reply.isCut || samples.length === 0) return;
      reply.captions.received += samples.length;
      this.player.push(reply.id, samples);
    },
    "response.output_audio.done": ({ item_id }) => this.#endAudio(item_id),
    "response.done": ({ response }) => {
      this.#set({ responding: false, awaiting: false });
      for (const item of response.output ?? []) this.#endAudio(item.id);
      if (response.status !== "failed") return;
      const reason = response.status_details?.error?.message ?? "The reply failed.";
      const reply = this.latest;
      if (reply?.line.element.dataset.state === "open") reply.line.note(reason);
      else this.transcript.remark(reason);
    },
    "streamrt.turn_timings": (event) => this.view.timings(event),

    error: ({ error }) => {
      // A truncate may meet a reply that the server has already cut; nothing is lost by that.
      if (!error.event_id?.startsWith("truncate")) this.view.problem(error.message);
    },
  };

  #sendFrame({ pcm, level }) {
    this.view.level(level);
    if (!this.facts.connected) return;
    const isSent = this.connection.trySend({ type: "input_audio_buffer.append", audio: encodeBase64(pcm) });
    if (isSent) this.#count({ samplesSent: this.counters.samplesSent + pcm.byteLength / 2 });
    else this.#count({ framesDropped: this.counters.framesDropped + 1 });
  }

  /** The reply that an event belongs to; the newest is known even after it was cut off. */
  #reply(event) {
    if (this.latest?.id !== event.item_id) {
      this.latest = new Reply(event, this.transcript.line("assistant", event.item_id));
      this.replies.set(event.item_id, this.latest);
    }
    return this.latest;
  }

  #endAudio(id) {
    const reply = this.replies.get(id);
    if (reply === undefined || reply.isCut) return;
    reply.captions.isWhole = true;
    if (reply.captions.received > 0) this.player.end(id);
    else this.#finish(reply, "done"); // nothing to say, or nothing that can be spoken
  }

  #replyStarted(id) {
    const reply = this.replies.get(id);
    if (reply === undefined) return;
    this.#set({ playing: true });
    if (this.stoppedAtMs === 0) return;
    const firstAudioMs = performance.now() - this.stoppedAtMs + this.player.latencyS() * 1000;
    this.stoppedAtMs = 0;
    reply.line.note(`first audio after ${Math.round(firstAudioMs)} ms`);
    this.#count({ turns: this.counters.turns + 1 });
    this.view.turn({ responseId: reply.responseId, firstAudioMs });
  }

  #replyHeard(id, played) {
    const reply = this.replies.get(id);
    if (reply === undefined) return;
    reply.line.text = reply.captions.spoken(played);
    this.#count({ samplesPlayed: this.player.played, underruns: this.player.underruns });
  }

  #replyEnded(id, played) {
    const reply = this.replies.get(id);
    if (reply === undefined) return;
    this.#replyHeard(id, played);
    this.#finish(reply, "done");
    this.#set({ playing: false });
  }

  /** The user speaks: silence, then tell the server what of each reply was heard. */
  async #interrupt() {
    const cutOff = [...this.replies.values()];
    if (cutOff.length === 0) return;
    for (const reply of cutOff) reply.isCut = true;
    const { connection } = this;
    const cuts = await this.player.flush();
    this.#count({ flushes: this.counters.flushes + 1, samplesPlayed: this.player.played });
    for (const { item, played } of cuts) {
      const reply = cutOff.find(({ id }) => id === item);
      if (reply !== undefined) reply.line.text = reply.captions.spoken(played);
      const audio_end_ms = Math.floor((played * 1000) / RATE_HZ);
      connection.send({ type: "conversation.item.truncate", event_id: `truncate_${item}`, item_id: item, content_index: 0, audio_end_ms });
    }
    for (const reply of cutOff) this.#finish(reply, "cut");
    this.#set({ playing: false });
  }

  #finish(reply, state) {
    if (state === "done") reply.line.text = reply.captions.text;
    if (state === "cut") reply.line.note("interrupted");
    reply.line.finish(state);
    this.#remember("assistant", reply.line.text);
    this.replies.delete(reply.id);
  }

  #remember(role, text) {
    if (text) this.history = [...this.history, { role, text }].slice(-KEPT_LINES);
  }

  #lost() {
    this.#interrupt();
    if (this.facts.connected) this.transcript.remark("Connection lost. Reconnecting …");
    this.#set({ connected: false, hearing: false, responding: false, awaiting: false });
  }

  #set(facts) {
    Object.assign(this.facts, facts);
    this.view.state(stateOf(this.facts));
  }

  #count(counters) {
    Object.assign(this.counters, counters);
    this.view.counters(this.counters);
  }
}
