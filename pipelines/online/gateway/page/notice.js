// What went wrong, in words, where it happened. Its place is there before, so that nothing moves.

import { say } from "./dom.js";

const WHAT = {
  0: "No connection",
  401: "The API key was not accepted",
  403: "Not allowed",
  404: "Not found",
  413: "Too long",
  429: "Limit reached",
  503: "Every engine is busy",
  504: "It took too long",
};

export class Notice {
  #timer = 0;

  constructor(node) {
    this.node = node;
  }

  clear() {
    clearInterval(this.#timer);
    this.node.classList.remove("bad");
    say(this.node, "");
  }

  info(text) {
    this.clear();
    say(this.node, text);
  }

  /** Show an ApiError; where waiting helps, count down. */
  error(error) {
    this.clear();
    const text = `${WHAT[error.status] ?? "The request failed"}: ${sentence(error.message)}`;
    this.node.classList.add("bad");
    if (error.retryAfter_s === null || error.retryAfter_s === undefined) return say(this.node, text);
    const until = performance.now() + error.retryAfter_s * 1000;
    const tick = () => {
      const left_s = Math.max(0, Math.ceil((until - performance.now()) / 1000));
      say(this.node, `${text} ${left_s ? `Try again in ${left_s} s.` : "Try again now."}`);
      if (!left_s) clearInterval(this.#timer);
    };
    tick();
    this.#timer = setInterval(tick, 500);
  }
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
