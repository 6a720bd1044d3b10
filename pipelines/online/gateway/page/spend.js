// Spend of a month by day and by key, model or tag, and budgets. Requests /v1/cost when the section is visible, at most
// once a minute.

import { getJson } from "./api.js";
import { showBudgets } from "./budgets.js";
import { meter, stacks } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { clock, count, dollars } from "./format.js";

const FRESH_S = 60;
const MAX_ROWS = 20;
const KINDS = { attributed: "busy", overhead: "idle", lost: "lost" }; // the share whose colour is used
const WORDS = { attributed: "attributed", overhead: "overhead (loading, idle)", lost: "lost" };
const COUNTS = ["num_requests", "num_output_tokens"];

export class Spend {
  #requested_at_s = Number.NEGATIVE_INFINITY;
  #isReady = false;
  #isVisible = false;
  #round = 0;

  /** `onError(error)` receives each ApiError first; it asks for a key and returns true if the key is the problem. */
  constructor(onError) {
    this.onError = onError;
    byId("spend-form").addEventListener("change", () => this.start());
    const observer = new IntersectionObserver((entries) => {
      this.#isVisible = entries.at(-1).isIntersecting;
      this.#request();
    });
    observer.observe(byId("spend"));
  }

  /** Start requesting: the endpoint is up and accepts the key. */
  start() {
    this.#isReady = true;
    this.#requested_at_s = Number.NEGATIVE_INFINITY;
    this.#request();
  }

  async #request() {
    if (!this.#isReady || !this.#isVisible || Date.now() / 1000 < this.#requested_at_s + FRESH_S) return;
    this.#requested_at_s = Date.now() / 1000;
    const round = ++this.#round;
    const { by, month } = Object.fromEntries(new FormData(byId("spend-form")));
    try {
      const [start, end] = days(Number(month));
      const paths = [`v1/cost?start=${start}&end=${end}&by=day,${by}`, "v1/cost"];
      const [statement, report] = await Promise.all(paths.map(getJson));
      if (round !== this.#round) return;
      show(statement, by, daysBetween(start, end));
      showBudgets(report);
    } catch (error) {
      if (round !== this.#round || this.onError(error)) return;
      this.#requested_at_s = Number.NEGATIVE_INFINITY;
      showState(error.message, true);
    }
  }
}

function show({ rows, total }, by, dates) {
  showState(`as of ${clock(Date.now() / 1000)}, UTC days`);
  for (const kind of [...Object.keys(KINDS), "total"]) setText(byId(`spend-${kind}`), dollars(total.usd[kind]));
  setText(byId("spend-saved"), savedBy(total.saved.speculation));
  const byDay = sumsBy(rows, "day");
  const columns = dates.map((day) => Object.keys(KINDS).map((kind) => [KINDS[kind], byDay.get(day)?.[kind] ?? 0]));
  const sums = Object.keys(KINDS).map((kind) => `${WORDS[kind]} ${dollars(total.usd[kind])}`);
  byId("spend-chart").replaceChildren(stacks(columns, `dollars by day: ${sums.join(", ")}`));
  byId("spend-axis").replaceChildren(element("span", {}, dates[0]), element("span", {}, dates.at(-1)));
  setText(byId("spend-by-name"), by);
  byId("spend-rows").replaceChildren(...groupRows(rows, by));
}

/** Return table rows for the largest groups, and one row for the others. */
function groupRows(rows, by) {
  const groups = [...sumsBy(rows, by)].sort((one, other) => other[1].total - one[1].total);
  const others = groups.slice(MAX_ROWS);
  const shown = groups.slice(0, MAX_ROWS).map(([name, sums]) => [name || `no ${by}`, sums]);
  if (others.length) shown.push([`${count(others.length)} others`, others.map(([, sums]) => sums).reduce(addSums)]);
  const maximum = Math.max(...shown.map(([, sums]) => sums.total), Number.MIN_VALUE);
  return shown.map(([name, sums]) => {
    const money = [...Object.keys(KINDS), "total"].map((kind) => dollars(sums.isPriced ? sums[kind] : null));
    const cells = [count(sums.num_requests), count(sums.num_output_tokens), ...money];
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      ...cells.map((cell) => element("td", { class: "number" }, cell)),
      element("td", { class: "meter" }, meter(sums.total / maximum, `${name}: ${dollars(sums.total)}`)),
    );
  });
}

/** Sum the rows by a dimension. Rows without a price count as 0 and set `isPriced` to false. */
function sumsBy(rows, dimension) {
  const groups = new Map();
  for (const row of rows) {
    const sums = { isPriced: row.usd.total !== null };
    for (const kind of [...Object.keys(KINDS), "total"]) sums[kind] = row.usd[kind] ?? 0;
    for (const name of COUNTS) sums[name] = row[name];
    const previous = groups.get(row[dimension]);
    groups.set(row[dimension], previous ? addSums(previous, sums) : sums);
  }
  return groups;
}

function addSums(one, other) {
  const sums = { isPriced: one.isPriced && other.isPriced };
  for (const name of [...Object.keys(KINDS), "total", ...COUNTS]) sums[name] = one[name] + other[name];
  return sums;
}

function savedBy({ usd, error_usd: error, unknown_usd: unknown }) {
  if (usd === null) return unknown ? "Savings by drafters are unknown: their step times were not measured." : "";
  const range = error === null ? "(error unknown)" : `± ${dollars(error)}`;
  return `Drafters ${usd < 0 ? "lost" : "saved"} ${dollars(Math.abs(usd))} ${range}.`;
}

/** Return the first and last day of the month `monthsAgo` months ago, in UTC. */
function days(monthsAgo) {
  const now = new Date();
  const day = (months, date) => new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() + months, date));
  return [day(-monthsAgo, 1), day(1 - monthsAgo, 0)].map((date) => date.toISOString().slice(0, 10));
}

function daysBetween(first, last) {
  const number = Number(last.slice(8));
  return Array.from({ length: number }, (_, index) => `${first.slice(0, 8)}${String(index + 1).padStart(2, "0")}`);
}

function showState(text, isBad = false) {
  byId("spend-state").classList.toggle("bad", isBad);
  setText(byId("spend-state"), text);
}
