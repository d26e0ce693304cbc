/**
 * Sound in and out: one AudioContext, a microphone node and a player node.
 *
 * Knows pcm16 and items. Knows nothing of the protocol or of the page.
 * The browser's echo canceller hears what the player plays, so the agent does not interrupt itself.
 */

export const RATE_HZ = 24_000; // of the protocol's pcm16, in both directions

/** Why there is no microphone, in words for the person at the screen. */
export class MicrophoneError extends Error {}

const REASONS = {
  NotAllowedError: "The browser did not allow the microphone. Allow it in the site settings (the icon beside the address), then press Talk again.",
  NotFoundError: "No microphone was found. Plug one in, then press Talk again.",
  NotReadableError: "The microphone is in use by another program. Close that program, then press Talk again.",
};

export class Audio {
  /**
   * Ask for the microphone and start both nodes. Must be called from a click: browsers start sound only then.
   *
   * Raises: MicrophoneError.
   */
  static async open() {
    if (!window.isSecureContext || !navigator.mediaDevices) {
      throw new MicrophoneError(
        "Browsers give a microphone only to pages on localhost or over HTTPS. Open this page as http://localhost, or start the gateway with " +
          "tls_cert and tls_key. Chat works without it.",
      );
    }
    const context = new AudioContext({ latencyHint: "interactive" });
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({
        audio: { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true },
      });
      await Promise.all(["capture", "playback"].map((name) => context.audioWorklet.addModule(new URL(`${name}-worklet.js`, import.meta.url))));
      await context.resume();
    } catch (error) {
      for (const track of stream?.getTracks() ?? []) track.stop();
      await context.close();
      if (!(error instanceof DOMException)) throw error;
      throw new MicrophoneError(REASONS[error.name] ?? `The microphone could not be opened: ${error.message}`);
    }
    return new Audio(context, stream);
  }

  constructor(context, stream) {
    this.context = context;
    this.stream = stream;
    const options = { processorOptions: { rateHz: RATE_HZ } };
    this.capture = new AudioWorkletNode(context, "capture", { ...options, numberOfOutputs: 0 });
    context.createMediaStreamSource(stream).connect(this.capture);
    const playback = new AudioWorkletNode(context, "playback", { ...options, numberOfInputs: 0, outputChannelCount: [1] });
    playback.connect(context.destination);
    this.player = new Player(playback.port, () => context.outputLatency || context.baseLatency);
    // A phone suspends the sound while the page is hidden.
    this.wake = () => document.visibilityState === "visible" && context.state !== "running" && context.resume();
    document.addEventListener("visibilitychange", this.wake);
  }

  /** `take({pcm: ArrayBuffer, level})` per 20 ms. */
  set onFrame(take) {
    this.capture.port.onmessage = ({ data }) => take(data);
  }

  /** Called when the microphone is unplugged or taken away. */
  set onLost(take) {
    for (const track of this.stream.getTracks()) track.onended = take;
  }

  /** A muted microphone goes on as silence. */
  set muted(muted) {
    for (const track of this.stream.getTracks()) track.enabled = !muted;
  }

  async close() {
    document.removeEventListener("visibilitychange", this.wake);
    for (const track of this.stream.getTracks()) {
      track.onended = null;
      track.stop();
    }
    await this.context.close();
  }
}

/** The queue of what is to be heard; the worklet behind `port` holds it. All counts are samples at RATE_HZ. */
export class Player {
  onStarted = (_item) => {};
  onProgress = (_item, _played) => {};
  onDrained = (_item, _played) => {};

  /** @param latencyS how long a played sample takes to be heard, in seconds */
  constructor(port, latencyS) {
    this.port = port;
    this.latencyS = latencyS;
    this.underruns = 0;
    this.played = 0; // of all items
    this.counted = new Map(); // item -> what of it is in `played`
    this.flushes = []; // resolvers of flushes that the worklet has not answered
    port.onmessage = ({ data }) => this.#take(data);
  }

  /** Samples as floats; their buffer is handed over. */
  push(item, samples) {
    this.port.postMessage({ do: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.port.postMessage({ do: "end", item });
  }

  /** Silence at once. Resolves to [{item, played}] of what was cut off; `played` counts what was heard, not what was queued. */
  flush() {
    return new Promise((resolve) => {
      this.flushes.push(resolve);
      this.port.postMessage({ do: "flush" });
    });
  }

  #take(message) {
    this.underruns = message.underruns ?? this.underruns;
    switch (message.is) {
      case "started":
        return this.onStarted(message.item);
      case "progress":
        return this.onProgress(message.item, this.#heard(message));
      case "drained":
        this.#count(message);
        this.counted.delete(message.item);
        return this.onDrained(message.item, message.played);
      case "flushed": {
        const cuts = message.cuts.map(({ item, played }) => ({ item, played: this.#heard({ item, played }) }));
        this.counted.clear();
        return this.flushes.shift()(cuts);
      }
    }
  }

  /** What left the queue is still on its way to the ear. */
  #heard({ item, played }) {
    return this.#count({ item, played: Math.max(0, played - Math.round(this.latencyS() * RATE_HZ)) });
  }

  #count({ item, played }) {
    this.played += Math.max(0, played - (this.counted.get(item) ?? 0));
    this.counted.set(item, played);
    return played;
  }
}

/** Little-endian pcm16 in base64 -> floats. */
export function decodePcm16(base64) {
  const binary = atob(base64);
  const samples = new Float32Array(binary.length >> 1);
  for (let i = 0; i < samples.length; i++) {
    samples[i] = (((binary.charCodeAt(2 * i) | (binary.charCodeAt(2 * i + 1) << 8)) << 16) >> 16) / 32768;
  }
  return samples;
}

/** @param {ArrayBuffer} pcm a short frame */
export const encodeBase64 = (pcm) => btoa(String.fromCharCode(...new Uint8Array(pcm)));
