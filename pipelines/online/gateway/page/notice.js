// Error messages next to the form they belong to. Their space is reserved, so that the layout does not shift.

import { setText } from "./dom.js";

const TITLES = {
  0: "No connection",
  401: "The API key was not accepted",
  403: "Not allowed",
  404: "Not found",
  413: "Request too large",
  429: "Limit reached",
  503: "All engines are busy",
  504: "Timeout",
};

export class Notice {
  #timer = 0;

  constructor(node) {
    this.node = node;
  }

  clear() {
    clearInterval(this.#timer);
    this.node.classList.remove("bad");
    setText(this.node, "");
  }

  info(text) {
    this.clear();
    setText(this.node, text);
  }

  /** Show an ApiError, with a countdown if the request can be retried later. */
  error(error) {
    this.clear();
    const text = `${TITLES[error.status] ?? "The request failed"}: ${sentence(error.message)}`;
    this.node.classList.add("bad");
    if (error.retryAfter_s === null || error.retryAfter_s === undefined) return setText(this.node, text);
    const until = performance.now() + error.retryAfter_s * 1000;
    const tick = () => {
      const left_s = Math.max(0, Math.ceil((until - performance.now()) / 1000));
      setText(this.node, `${text} ${left_s ? `Try again in ${left_s} s.` : "Try again now."}`);
      if (!left_s) clearInterval(this.#timer);
    };
    tick();
    this.#timer = setInterval(tick, 500);
  }
}

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
