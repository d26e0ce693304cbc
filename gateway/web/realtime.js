/**
 * One WebSocket to /v1/realtime that comes back when it is lost.
 *
 * Knows frames, keys and back-off. Knows nothing of what the events mean; `talk.js` does.
 */

const RETRY_MS = [500, 1000, 2000, 4000, 8000, 8000];
const MAX_BUFFERED_BYTES = 512 * 1024; // 8 s of audio: a network that far behind is not a conversation; frames are dropped until it recovers
const POLICY_VIOLATION = 1008; // the gateway refuses us; asking again would not help

export class Connection {
  /**
   * @param {{url: URL, key: string, onEvent: (event) => void, onLost: (retryInMs: number) => void, onGone: (reason: string) => void}} options
   * `onLost` is called per lost connection, `onGone` once, when there will be no other attempt.
   */
  constructor(options) {
    Object.assign(this, options);
    this.attempts = 0;
    this.retry = 0;
    this.#open();
  }

  get isOpen() {
    return this.socket.readyState === WebSocket.OPEN;
  }

  send(event) {
    if (this.isOpen) this.socket.send(JSON.stringify(event));
  }

  /** Audio that may be dropped. Returns whether it was sent. */
  trySend(event) {
    if (!this.isOpen || this.socket.bufferedAmount > MAX_BUFFERED_BYTES) return false;
    this.send(event);
    return true;
  }

  close() {
    clearTimeout(this.retry);
    this.socket.onclose = this.socket.onmessage = null;
    this.socket.close(1000);
  }

  #open() {
    // A browser can not set headers on a WebSocket: the key travels as a subprotocol, as the OpenAI clients do it.
    const protocols = ["realtime", ...(this.key ? [`openai-insecure-api-key.${this.key}`] : [])];
    this.socket = new WebSocket(this.url, protocols);
    this.socket.onmessage = ({ data }) => {
      this.attempts = 0;
      this.onEvent(JSON.parse(data));
    };
    this.socket.onclose = ({ code, reason }) => {
      const delayMs = RETRY_MS[this.attempts++];
      if (code === POLICY_VIOLATION || delayMs === undefined) {
        this.onGone(reason || "The gateway can not be reached. Is the pipeline up?");
        return;
      }
      this.retry = setTimeout(() => this.#open(), delayMs);
      this.onLost(delayMs);
    };
  }
}
