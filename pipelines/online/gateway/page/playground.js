// The playground: a conversation with one model, with metrics for each answer.

import { receive } from "./answer.js";
import { byId, element, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { Notice } from "./notice.js";

export class Playground {
  #turns = [];
  #stop = null;

  /** `onError(error)` receives each ApiError first; it asks for a key and returns true if the key is the problem. */
  constructor(onError) {
    this.onError = onError;
    this.notice = new Notice(byId("playground-notice"));
    this.log = byId("playground-log");
    this.empty = byId("playground-empty");
    byId("playground-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#stop) this.#send();
    });
    byId("playground-send").addEventListener("click", (event) => {
      if (!this.#stop) return;
      event.preventDefault();
      this.#stop.abort();
    });
    byId("playground-form").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop?.abort();
    });
    byId("playground-new").addEventListener("click", () => this.#clear());
  }

  #clear() {
    this.#stop?.abort();
    this.#turns = [];
    this.notice.clear();
    this.log.replaceChildren(this.empty);
    byId("playground-message").focus();
  }

  async #send() {
    const field = byId("playground-message");
    const message = { role: "user", content: field.value };
    const [question, turn] = [userTurn(field.value), new AnswerTurn()];
    this.notice.clear();
    this.empty.remove();
    this.log.append(question, turn.node);
    this.log.scrollTop = this.log.scrollHeight;
    field.value = "";
    try {
      const answer = await this.#receive([...this.#turns, message], turn);
      this.#turns.push(message, { role: "assistant", content: answer.text });
    } catch (error) {
      if (error.name === "AbortError") return turn.end("stopped");
      if (turn.isEmpty) this.#undo(question, turn, message.content);
      else turn.end("interrupted");
      if (!this.onError(error)) this.notice.error(error);
    }
  }

  async #receive(messages, turn) {
    const system = byId("playground-system").value.trim();
    const body = {
      model: byId("playground-model").value,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      max_tokens: Number(byId("playground-tokens").value),
      temperature: Number(byId("playground-temperature").value),
    };
    this.#stop = new AbortController();
    setText(byId("playground-send"), "Stop");
    this.log.setAttribute("aria-busy", "true");
    try {
      const answer = await receive(body, this.#stop.signal, (partial) => this.#follow(() => turn.show(partial)));
      if (answer.finishReason === "length") this.#follow(() => turn.end("stopped at max tokens"));
      return answer;
    } finally {
      this.#stop = null;
      setText(byId("playground-send"), "Send");
      this.log.setAttribute("aria-busy", "false");
    }
  }

  /** Change the log, and keep it scrolled to the end if it was. */
  #follow(change) {
    const { log } = this;
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 24;
    change();
    if (isAtEnd) log.scrollTop = log.scrollHeight;
  }

  #undo(question, turn, text) {
    question.remove();
    turn.node.remove();
    if (!this.log.children.length) this.log.append(this.empty);
    const field = byId("playground-message");
    if (!field.value) field.value = text;
  }
}

const userTurn = (text) => element("div", { class: "turn user text" }, text);

class AnswerTurn {
  constructor() {
    this.thought = element("p", { class: "thought text" });
    this.text = element("p", { class: "text" });
    this.figures = new Figures();
    this.node = element("div", { class: "turn" }, this.thought, this.text, this.figures.node);
  }

  get isEmpty() {
    return !this.text.textContent && !this.thought.textContent;
  }

  show(answer) {
    setText(this.thought, answer.thought);
    setText(this.text, answer.text);
    this.figures.show(answer);
  }

  end(reason) {
    this.node.append(element("p", { class: "failed" }, reason));
  }
}
