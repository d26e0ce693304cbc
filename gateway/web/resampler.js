/**
 * Streaming sample-rate conversion: windowed sinc, polyphase, state kept between pushes.
 *
 * Knows numbers. Knows nothing of audio nodes; both worklets import it.
 *
 * Rules
 * - What comes out is the same however the input was cut into pushes.
 * - `push` never drops, `pull` never invents: it gives what the input so far allows.
 * - After `end` the outputs reach to the last input sample.
 */

const ZERO_CROSSINGS = 12; // half length of the filter; 12 keep images and aliases below what a voice lets one hear
const ROLL_OFF = 0.94; // of the lower Nyquist frequency

export class Resampler {
  constructor(fromHz, toHz) {
    const divisor = gcd(fromHz, toHz);
    this.up = toHz / divisor; // one output each `down / up` inputs
    this.down = fromHz / divisor;
    const cutoff = fromHz === toHz ? 1 : ROLL_OFF * Math.min(1, toHz / fromHz);
    this.half = Math.ceil(ZERO_CROSSINGS / cutoff);
    this.filters = filterBank(this.up, this.half, cutoff);
    this.input = new Float32Array(4096);
    this.length = this.half - 1; // samples in `input`; the filter begins in silence
    this.at = 0; // index in `input` where the next output's filter begins
    this.phase = 0; // 0 <= phase < up: how far the next output lies behind that, in 1/up input samples
    this.received = 0;
    this.produced = 0;
  }

  /** Input samples whose sound has been given out. */
  get consumed() {
    return Math.min(this.received, Math.floor((this.produced * this.down) / this.up));
  }

  /** @param {Float32Array} samples */
  push(samples) {
    this.received += samples.length;
    this.#append(samples);
  }

  /** No more input. */
  end() {
    this.#append(new Float32Array(this.half));
  }

  /** Fill `out` as far as possible; returns how many samples were written. */
  pull(out) {
    const { input, filters, up, down } = this;
    const taps = 2 * this.half;
    let written = 0;
    while (written < out.length && this.at + taps <= this.length) {
      const filter = filters[this.phase];
      let sum = 0;
      for (let k = 0; k < taps; k++) sum += filter[k] * input[this.at + k];
      out[written++] = sum;
      this.phase += down;
      this.at += Math.floor(this.phase / up);
      this.phase %= up;
    }
    this.produced += written;
    return written;
  }

  #append(samples) {
    if (this.length + samples.length > this.input.length) {
      const kept = this.length - this.at;
      const needed = kept + samples.length;
      const room = needed > this.input.length / 2 ? new Float32Array(2 * needed) : this.input;
      room.set(this.input.subarray(this.at, this.length));
      this.input = room;
      this.length = kept;
      this.at = 0;
    }
    this.input.set(samples, this.length);
    this.length += samples.length;
  }
}

/** One filter per phase, each of 2 * half taps and of unit gain for a constant. */
function filterBank(phases, half, cutoff) {
  return Array.from({ length: phases }, (_, phase) => {
    const taps = new Float32Array(2 * half);
    let sum = 0;
    for (let k = 0; k < taps.length; k++) {
      const distance = phase / phases - (k - half + 1); // from this tap to the output, in input samples
      taps[k] = sinc(cutoff * distance) * blackman(distance / half);
      sum += taps[k];
    }
    return taps.map((tap) => tap / sum);
  });
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

/** Window over -1 < x < 1. */
const blackman = (x) => (Math.abs(x) >= 1 ? 0 : 0.42 + 0.5 * Math.cos(Math.PI * x) + 0.08 * Math.cos(2 * Math.PI * x));

const gcd = (a, b) => (b === 0 ? a : gcd(b, a % b));
