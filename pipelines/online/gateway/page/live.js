// The live metrics: polls /v1/live every two seconds while the page is visible, and updates the tiles.

import { getJson } from "./api.js";
import { setCaveats } from "./caveats.js";
import { bars, columns, shares } from "./charts.js";
import { byId, element, setText } from "./dom.js";
import { amount, clock, count, withNoun, decimals, dollars, percent, seconds, span } from "./format.js";

const POLL_S = 2;
const LONGEST_WAIT_S = 30;
const NUM_POLLS_SHOWN = 30;
const MAX_PIPS = 24;
const STATES = ["running", "starting", "stopping"];
const MIN_SHARE = 0.0005; // smaller shares of the cost are not shown
const FOR_OPERATORS = "only shown to operators";
const SHARES = { busy: "busy", idle: "idle", load: "loading", compile: "compiling", lost: "in progress or lost" };

export class Live {
  #timer = 0;
  #wait_s = POLL_S;
  #requestCounts = [];
  #window_s = 60;
  #round = 0;

  /** `onError(error)` receives each ApiError first; it asks for a key and returns true if the key is the problem. */
  constructor(onError) {
    this.onError = onError;
    this.cards = new Map();
    byId("window").addEventListener("change", (event) => {
      this.#window_s = Number(event.target.value);
      this.start();
    });
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
    addEventListener("online", () => this.start());
  }

  /** Set the models of the endpoint, by name. */
  setModels(cards) {
    this.cards = cards;
    showModels({}, cards);
  }

  start() {
    this.stop();
    this.#wait_s = POLL_S;
    this.#poll(this.#round);
  }

  stop() {
    this.#round++;
    clearTimeout(this.#timer);
  }

  /** Stop polling until there is a key. */
  needsKey() {
    this.stop();
    byId("tiles").classList.add("stale");
    showState("waiting for an API key", true);
  }

  async #poll(round) {
    try {
      const report = await getJson(`v1/live?window_s=${this.#window_s}`);
      if (round !== this.#round) return;
      this.#show(report);
      this.#wait_s = POLL_S;
    } catch (error) {
      if (round !== this.#round) return;
      byId("tiles").classList.add("stale");
      if (this.onError(error)) return;
      this.#wait_s = Math.min(LONGEST_WAIT_S, Math.max(this.#wait_s * 2, error.retryAfter_s ?? 0));
      showState(`${error.status ? error.message : "no connection"}; retrying in ${this.#wait_s} s`, true);
    }
    this.#timer = setTimeout(() => this.#poll(round), this.#wait_s * 1000);
  }

  #show(report) {
    byId("tiles").classList.remove("stale");
    showState(`as of ${clock(report.ends_at_s)}${report.load ? "" : ", only this key's requests"}`);
    for (const node of document.querySelectorAll(".ago")) setText(node, `${span(report.window_s)} ago`);
    showSpeed(report);
    showMoney(report);
    showAcceptance(report);
    showFirstToken(report);
    showEngines(report.load);
    this.#showRequests(report.load);
    showModels(report, this.cards);
  }

  #showRequests(load) {
    const inProgress = sum(load, "num_requests_under_way");
    setText(byId("requests"), count(inProgress));
    setText(byId("requests-sub"), waitingText(load));
    this.#requestCounts = [...this.#requestCounts, inProgress].slice(-NUM_POLLS_SHOWN);
    const values = [...new Array(NUM_POLLS_SHOWN - this.#requestCounts.length).fill(null), ...this.#requestCounts];
    byId("requests-chart").replaceChildren(bars(values, `requests in progress, now ${count(inProgress)}`));
  }
}

function showState(text, isBad = false) {
  byId("live-state").classList.toggle("bad", isBad);
  setText(byId("live-state"), text);
}

function showSpeed({ total, series, window_s }) {
  const peak = Math.max(...series.output_tokens_per_s);
  setText(byId("speed"), amount(total.output_tokens_per_s));
  const summary = `${withNoun(total.num_requests, "request")} in ${span(window_s)}, peak ${amount(peak)}`;
  setText(byId("speed-sub"), total.num_requests ? summary : `no request finished in the last ${span(window_s)}`);
  byId("speed-chart").replaceChildren(bars(series.output_tokens_per_s, `output tokens/s, peak ${amount(peak)}`));
}

function showMoney({ total, account }) {
  const tokensPerUsd = account ? account.tokens_per_usd : total.tokens_per_busy_usd;
  setText(byId("money"), amount(tokensPerUsd));
  const perMillion = dollars(account ? account.usd_per_million_tokens : total.busy_usd_per_million_tokens);
  const busy = account ? `busy time only: ${amount(total.tokens_per_busy_usd)}` : "busy time only";
  setText(byId("money-sub"), tokensPerUsd ? `${perMillion} per million; ${busy}` : "no tokens in this window");
  setText(byId("price"), account ? priceOf(account.price) : "");
  setCaveats({ isAssumed: account?.price.basis === "assumed" });
  const whole = account?.usd.total;
  const parts = Object.keys(SHARES)
    .map((name) => [name, whole ? account.usd[name] / whole : 0])
    .filter(([, share]) => share > MIN_SHARE);
  const words = parts.map(([name, share]) => `${SHARES[name]} ${percent(share)}`);
  const label = `cost by engine state: ${words.join(", ")}`;
  byId("money-chart").replaceChildren(...(parts.length ? [shares(parts, label)] : []));
  byId("money-legend").replaceChildren(
    ...parts.map(([name], index) => element("li", {}, element("i", { class: `share-${name}` }), words[index])),
  );
}

/** Describe a machine's price, and whether the price was set, detected or assumed. */
function priceOf({ usd_per_hour, num_devices, device, accelerator, instance_type, basis }) {
  const kind = device === "vcpu" ? "vCPU" : (accelerator ?? device);
  return `Costs are based on ${dollars(usd_per_hour)} an hour for ${num_devices} ${kind} (${instance_type}, ${basis}).`;
}

function showAcceptance({ total }) {
  const drafted = total.num_draft_tokens;
  setText(byId("acceptance"), decimals(total.acceptance_length, 2));
  const accepted = percent(total.num_accepted_tokens / drafted);
  const lookedUp = percent(total.num_lookup_tokens / total.num_accepted_tokens);
  const source = total.num_lookup_tokens ? `, ${lookedUp} of them from prompt lookup` : "";
  const dropped = total.num_dropped_tokens ? `; ${count(total.num_dropped_tokens)} more were not worth verifying` : "";
  const share = drafted
    ? `${accepted} of ${count(drafted)} verified drafts accepted${source}${dropped}`
    : "no drafts verified in this window";
  setText(byId("acceptance-sub"), share);
  byId("acceptance-chart").replaceChildren(...(drafted ? [columns(total.acceptance_rates)] : []));
}

function showFirstToken({ total, series }) {
  setText(byId("ttft"), seconds(total.ttft_p50_s));
  const isKnown = total.ttft_p95_s !== null;
  setText(byId("ttft-sub"), isKnown ? `p95 ${seconds(total.ttft_p95_s)}, measured in the engine` : "no answers in this window");
  byId("ttft-chart").replaceChildren(bars(series.ttft_p50_s, `time to first token, p50 ${seconds(total.ttft_p50_s)}`));
}

function showEngines(load) {
  const numbers = STATES.map((name) => sum(load, `num_${name}_replicas`) ?? 0);
  const [running, starting, stopping] = numbers;
  const maximum = sum(load, "max_replicas");
  setText(byId("engines"), load ? `${count(running)} of ${count(maximum)}` : "–");
  const changing = [starting && `${starting} starting`, stopping && `${stopping} stopping`].filter(Boolean).join(", ");
  setText(byId("engines-sub"), load ? changing || scalingText(running, maximum) : FOR_OPERATORS);
  const kinds = STATES.flatMap((name, index) => new Array(numbers[index]).fill(name));
  const length = Math.max(maximum ?? 0, kinds.length);
  const pips = Array.from({ length: length <= MAX_PIPS ? length : 0 }, (_, index) => kinds[index] ?? "off");
  byId("engines-pips").replaceChildren(...pips.map((kind) => element("li", { class: kind })));
}

function showModels({ by_model, load }, cards) {
  byId("models-rows").replaceChildren(
    ...[...cards].map(([name, card]) => {
      const figures = by_model ? (by_model[name] ?? { output_tokens_per_s: 0 }) : {};
      const cells = [
        load ? `${count(load[name]?.num_running_replicas)} of ${count(load[name]?.max_replicas)}` : "–",
        count(load?.[name]?.num_requests_under_way),
        amount(figures.output_tokens_per_s),
        decimals(figures.acceptance_length, 2),
        seconds(figures.ttft_p50_s),
        amount(figures.tokens_per_busy_usd),
      ];
      return element(
        "tr",
        {},
        element("th", { scope: "row" }, name),
        element("td", {}, drafterOf(card)),
        ...cells.map((cell) => element("td", { class: "number" }, cell)),
      );
    }),
  );
}

/** Describe a model's drafter. */
export function drafterOf(card) {
  const { drafter, num_speculative_tokens: k } = card.peagle ?? {};
  return k ? `${drafter}, K=${k}` : "none";
}

function waitingText(load) {
  if (!load) return FOR_OPERATORS;
  const waiting = sum(load, "num_requests_waiting");
  return waiting ? `${count(waiting)} of them waiting for an engine` : "none waiting for an engine";
}

function scalingText(running, maximum) {
  if (!running) return "scaled to zero; a request starts an engine";
  return running < maximum ? `up to ${count(maximum - running)} more under load` : "at the maximum";
}

const sum = (load, name) => (load ? Object.values(load).reduce((total, counts) => total + counts[name], 0) : null);
