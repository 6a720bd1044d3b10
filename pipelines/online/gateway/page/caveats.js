// Warnings that dollars are not real costs, shown in every element of the class "caveat".

import { setText } from "./dom.js";

const flags = { isFake: false, isAssumed: false };

/** Update whether an engine is fake or the price is assumed, and show it. */
export function setCaveats(changes) {
  Object.assign(flags, changes);
  const fake = flags.isFake ? "FAKE ENGINE: speed and dollars are not real" : "";
  const text = [fake, flags.isAssumed ? "price assumed" : ""].filter(Boolean).join("; ");
  for (const node of document.querySelectorAll(".caveat")) setText(node, text);
}
