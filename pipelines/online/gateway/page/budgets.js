// Budgets in the Spend section, from /v1/cost: budgets of the endpoint, of tags and of keys.

import { meter } from "./charts.js";
import { byId, element } from "./dom.js";
import { dollars, percent } from "./format.js";

/** Show the key's own budget, or all budgets for an operator. The table is hidden if there are none. */
export function showBudgets({ budgets, shared_budgets: shared = {} }) {
  const rows = [
    ...Object.entries(shared).map(([name, state]) => budgetRow(name === "endpoint" ? "endpoint" : `tag ${name}`, state)),
    ...Object.entries(budgets).map(([name, state]) => budgetRow(`key ${name}`, state)),
  ];
  byId("budgets").hidden = !rows.length;
  byId("budget-rows").replaceChildren(...rows);
}

function budgetRow(name, { spent_usd: spent, left_usd: left, used, reset }) {
  const total = left ? spent + left : spent / used; // left_usd is 0 if the budget is overspent
  const cells = [dollars(total), dollars(spent), dollars(left), percent(used), reset ?? "never"];
  return element(
    "tr",
    {},
    element("th", { scope: "row" }, name),
    ...cells.map((cell) => element("td", { class: "number" }, cell)),
    element("td", { class: "meter" }, meter(used, `${name}: ${percent(used)} of the budget spent`)),
  );
}
