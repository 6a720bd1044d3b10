// What keeps dollars from being a bill, said wherever the page has the class "caveat".

import { say } from "./dom.js";

const known = { isStandIn: false, isAssumed: false };

/** Learn that an engine is a stand-in, or that the price is assumed; and say so. */
export function caveats(news) {
  Object.assign(known, news);
  const standIn = known.isStandIn ? "STAND-IN ENGINE: speed and dollars mean nothing" : "";
  const said = [standIn, known.isAssumed ? "price assumed" : ""].filter(Boolean).join("; ");
  for (const node of document.querySelectorAll(".caveat")) say(node, said);
}
