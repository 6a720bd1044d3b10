// Sets up the page: key, models, the four sections, and their shared parts.

import { getJson, keyStore } from "./api.js";
import { setCaveats } from "./caveats.js";
import { Compare } from "./compare.js";
import { byId, element } from "./dom.js";
import { Keys } from "./keys.js";
import { Live } from "./live.js";
import { Notice } from "./notice.js";
import { Playground } from "./playground.js";
import { Spend } from "./spend.js";

const RETRY_S = 5;

const keys = new Keys(start);
const live = new Live(askForKey);
const playground = new Playground(askForKey);
const compare = new Compare(askForKey);
const spend = new Spend(askForKey);
const notices = ["playground-notice", "compare-notice"].map((id) => new Notice(byId(id)));
let retry = 0;

/** Open the key dialog if an ApiError is about the key. Returns whether it is. */
function askForKey(error) {
  if (error.status !== 401) return false;
  live.needsKey();
  keys.ask(keyStore.get() ? "This key is not valid." : "");
  return true;
}

async function start() {
  clearTimeout(retry);
  live.stop();
  try {
    const { requires_key: requiresKey } = await getJson("health");
    if (requiresKey) keys.showButton();
    if (requiresKey && !keyStore.get()) return void askForKey({ status: 401 });
    const { data } = await getJson("v1/models");
    setModels(new Map(data.map((card) => [card.id, card])));
    for (const notice of notices) notice.clear();
  } catch (error) {
    if (askForKey(error)) return;
    for (const notice of notices) notice.error(error);
    retry = setTimeout(start, RETRY_S * 1000);
  } finally {
    document.documentElement.classList.remove("starting");
  }
  live.start();
  spend.start();
}

function setModels(cards) {
  live.setModels(cards);
  setCaveats({ isFake: [...cards.values()].some((card) => card.peagle?.stand_in) });
  for (const id of ["playground-model", "compare-left", "compare-right"]) {
    const select = byId(id);
    const previous = select.value;
    select.replaceChildren(...[...cards.values()].map((card) => element("option", { value: card.id }, label(card))));
    if (cards.has(previous)) select.value = previous;
    select.disabled = false;
  }
  compare.setModels(cards);
}

function label(card) {
  const k = card.peagle?.num_speculative_tokens;
  return `${card.id} · ${k ? `drafts K=${k}` : "no drafter"}`;
}

for (const form of [byId("playground-form"), byId("compare-form")]) {
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
}

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkScheme.matches ? "dark" : "light")) === "dark";
const showTheme = () => byId("theme-button").setAttribute("aria-pressed", String(isDark()));
byId("theme-button").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem("peagle-theme", document.documentElement.dataset.theme);
  showTheme();
});
darkScheme.addEventListener("change", showTheme);
showTheme();

await start();
