// Side by side: send one prompt to two models, and show the speed of each and where their texts differ.

import { receive } from "./answer.js";
import { meter } from "./charts.js";
import { compare as compareTexts } from "./diff.js";
import { byId, element, setText } from "./dom.js";
import { Figures } from "./figures.js";
import { amount, withNoun, decimals } from "./format.js";
import { drafterOf } from "./live.js";
import { Notice } from "./notice.js";

export class Compare {
  #stop = null;
  #cards = new Map();

  /** `onError(error)` receives each ApiError first; it asks for a key and returns true if the key is the problem. */
  constructor(onError) {
    this.onError = onError;
    this.notice = new Notice(byId("compare-notice"));
    this.sides = ["left", "right"].map((name) => new Side(byId(`compare-${name}-side`)));
    this.selects = ["left", "right"].map((name) => byId(`compare-${name}`));
    byId("compare-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.#stop) this.#run();
    });
    byId("compare-send").addEventListener("click", (event) => {
      if (!this.#stop) return;
      event.preventDefault();
      this.#stop.abort();
    });
    byId("compare-form").addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stop?.abort();
    });
    for (const select of this.selects) select.addEventListener("change", () => this.#showNames());
  }

  /** Set the available models, and select one with a drafter (left) and the same target without a drafter (right). */
  setModels(cards) {
    this.#cards = cards;
    byId("compare-empty").hidden = cards.size >= 2;
    byId("compare-form").hidden = cards.size < 2;
    if (cards.size < 2) return;
    [this.selects[0].value, this.selects[1].value] = initialPair([...cards.values()]);
    this.#showNames();
  }

  #showNames() {
    this.sides.forEach((side, index) => side.clear(this.#cards.get(this.selects[index].value)));
  }

  async #run() {
    this.#stop = new AbortController();
    this.notice.clear();
    this.#showNames();
    verdict("…");
    setText(byId("compare-send"), "Stop");
    try {
      const answers = await this.#both(this.#stop.signal);
      this.sides.forEach((side, index) => side.scale(answers[index], answers));
      this.#judge(answers);
    } catch (error) {
      this.#stop.abort();
      verdict("No comparison.");
      if (error.name === "AbortError") this.notice.info("Stopped.");
      else if (!this.onError(error)) this.notice.error(error);
    } finally {
      this.#stop = null;
      setText(byId("compare-send"), "Compare");
    }
  }

  async #both(signal) {
    const sendTo = (index) => {
      const side = this.sides[index];
      return receive(this.#body(this.selects[index].value), signal, (answer) => side.show(answer));
    };
    if (byId("compare-form").elements.order.value === "at once") return Promise.all([sendTo(0), sendTo(1)]);
    return [await sendTo(0), await sendTo(1)];
  }

  #body(model) {
    return {
      model,
      messages: [{ role: "user", content: byId("compare-message").value }],
      max_tokens: Number(byId("compare-tokens").value),
      temperature: Number(byId("compare-temperature").value),
    };
  }

  #judge(answers) {
    const [left, right] = this.selects.map((select) => this.#cards.get(select.value));
    const texts = compareTexts(...answers.map((answer) => answer.text));
    this.sides[0].mark(texts.left.pieces);
    this.sides[1].mark(texts.right.pieces);
    const isSampled = Number(byId("compare-temperature").value) > 0;
    verdict(ratio(left, right, answers), difference(texts, isSampled, left.peagle?.target === right.peagle?.target));
  }
}

class Side {
  constructor(node) {
    this.title = element("h3", {}, "–");
    this.speed = element("p", { class: "figure" }, "–");
    this.bar = element("div", { class: "chart" }, meter(0, "no speed yet"));
    this.figures = new Figures(["tokens/s"]);
    this.text = element("div", { class: "text", tabindex: "0", role: "region", "aria-label": "Answer" });
    node.append(this.title, this.speed, this.bar, this.figures.node, this.text);
  }

  clear(card) {
    setText(this.title, `${card.id}, drafter ${drafterOf(card)}`);
    this.show({ text: "" });
    this.bar.replaceChildren(meter(0, "no speed yet"));
  }

  show(answer) {
    setText(this.text, answer.text);
    this.figures.show(answer);
    this.speed.replaceChildren(amount(answer.tokens_per_s), " ", element("small", {}, "tokens/s"));
  }

  scale(answer, answers) {
    const maximum = Math.max(...answers.map((other) => other.tokens_per_s ?? 0));
    this.bar.replaceChildren(meter(maximum ? answer.tokens_per_s / maximum : 0, `${amount(answer.tokens_per_s)} tokens/s`));
  }

  mark(pieces) {
    this.text.replaceChildren(...pieces.map(([text, differs]) => (differs ? element("mark", {}, text) : text)));
  }
}

/** Return the names of the two models to select first. */
function initialPair(cards) {
  const isPlain = (card) => drafterOf(card) === "none";
  for (const left of cards.filter((card) => !isPlain(card))) {
    const right = cards.find((card) => isPlain(card) && card.peagle?.target === left.peagle?.target);
    if (right) return [left.id, right.id];
  }
  return [cards[0].id, cards[1].id];
}

function verdict(bold, text = "") {
  byId("compare-verdict").replaceChildren(element("strong", {}, bold), " ", text);
}

function ratio(left, right, [one, two]) {
  if (!one.tokens_per_s || !two.tokens_per_s) return "One of the models generated no tokens.";
  const [fast, slow] = one.tokens_per_s >= two.tokens_per_s ? [left, right] : [right, left];
  const speeds = [one.tokens_per_s, two.tokens_per_s].sort((a, b) => b - a);
  return `${fast.id} generated ${decimals(speeds[0] / speeds[1], 2)} times as many tokens/s as ${slow.id}.`;
}

function difference({ isSame, firstDifference, left, right }, isSampled, isSameTarget) {
  if (isSame) return `The texts are identical (${withNoun(left.numWords, "word")}).`;
  const marked = `${withNoun(left.numDifferent, "word")} on the left and ${right.numDifferent} on the right are marked`;
  const where = `The texts differ starting at word ${firstDifference + 1}: ${marked}.`;
  if (!isSameTarget) return `${where} The models have different targets.`;
  return isSampled
    ? `${where} At a temperature above 0, tokens are sampled randomly.`
    : `${where} At temperature 0 this only happens if two tokens are equally likely up to rounding.`;
}
