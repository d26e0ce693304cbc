/**
 * Microphone -> mono pcm16 frames of 20 ms at the rate that the server takes.
 *
 * Runs on the audio thread. Out, per frame: {pcm: ArrayBuffer of int16, level: RMS 0..1}.
 * A silent or muted microphone gives frames of zeros: the server's turn detection needs to hear the silence.
 */

import { Resampler } from "./resampler.js";

const FRAME_MS = 20;

class Capture extends AudioWorkletProcessor {
  constructor({ processorOptions: { rateHz } }) {
    super();
    this.resampler = new Resampler(sampleRate, rateHz);
    this.frame = new Float32Array((rateHz * FRAME_MS) / 1000);
    this.filled = 0;
  }

  process([channels]) {
    if (channels.length === 0) return true; // the source is not connected yet
    this.resampler.push(mono(channels));
    while ((this.filled += this.resampler.pull(this.frame.subarray(this.filled))) === this.frame.length) this.#send();
    return true;
  }

  #send() {
    let energy = 0;
    const pcm = Int16Array.from(this.frame, (sample) => {
      energy += sample * sample;
      return Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
    });
    this.filled = 0;
    this.port.postMessage({ pcm: pcm.buffer, level: Math.sqrt(energy / pcm.length) }, [pcm.buffer]);
  }
}

function mono(channels) {
  if (channels.length === 1) return channels[0];
  return channels[0].map((_, i) => channels.reduce((sum, channel) => sum + channel[i], 0) / channels.length);
}

registerProcessor("capture", Capture);
