// The metrics of one answer, as a list that is shown before the values are known.

import { element, setText } from "./dom.js";
import { amount, count, decimals, dollars, seconds } from "./format.js";

const ROWS = [
  ["tokens/s", (answer) => amount(answer.tokens_per_s)],
  ["first token", (answer) => seconds(answer.ttft_s)],
  ["latency", (answer) => seconds(answer.total_s || null)],
  ["tokens", (answer) => count(answer.numTokens || null)],
  ["acceptance", (answer) => decimals(answer.acceptanceLength, 2)],
  ["cost", (answer) => dollars(answer.usd)],
];

export class Figures {
  /** `without`: names of metrics to omit, since they are shown elsewhere. */
  constructor(without = []) {
    this.rows = ROWS.filter(([name]) => !without.includes(name));
    this.values = this.rows.map(() => element("dd", {}, "–"));
    const rows = this.rows.map(([name], index) => element("div", {}, element("dt", {}, name), this.values[index]));
    this.node = element("dl", { class: "stats" }, ...rows);
  }

  show(answer) {
    this.rows.forEach(([, format], index) => setText(this.values[index], format(answer)));
  }
}
