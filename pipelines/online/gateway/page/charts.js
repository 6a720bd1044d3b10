// Small SVG charts. Each has a text label for screen readers; colours are in the style sheet.

import { element, svg } from "./dom.js";
import { percent } from "./format.js";

const HEIGHT = 40;
const MIN_HEIGHT = 1.5; // for a bar whose value is not 0

/** Bars of equal width over time; null leaves a gap. */
export function bars(values, label) {
  const maximum = Math.max(...values.map((value) => value ?? 0), Number.MIN_VALUE);
  const rects = values.map((value, index) => {
    const height = value ? Math.max(MIN_HEIGHT, (HEIGHT * value) / maximum) : 0;
    return svg("rect", { x: index + 0.14, y: HEIGHT - height, width: 0.72, height, class: "bar" });
  });
  return chart(values.length, label, rects);
}

/** One bar divided into shares: [[name, share], ...]. */
export function shares(parts, label) {
  let x = 0;
  const rects = parts.map(([name, share]) => {
    const rect = svg("rect", { x, y: 0, width: share, height: HEIGHT, class: `share-${name}` });
    x += share;
    return rect;
  });
  return chart(1, label, rects);
}

/** A column for each rate, with its number above and its position below. */
export function columns(rates) {
  const list = element("ol", { class: "columns" });
  for (const [index, rate] of rates.entries()) {
    const height = Math.max(MIN_HEIGHT, HEIGHT * rate);
    const bar = svg("rect", { x: 0, y: HEIGHT - height, width: 1, height, class: "bar" });
    const track = svg("rect", { x: 0, y: 0, width: 1, height: HEIGHT, class: "track" });
    const column = chart(1, `token ${index + 1}: accepted in ${percent(rate)} of drafts`, [track, bar]);
    list.append(
      element(
        "li",
        {},
        element("span", { "aria-hidden": "true" }, percent(rate)),
        column,
        element("span", { class: "position", "aria-hidden": "true" }, String(index + 1)),
      ),
    );
  }
  return list;
}

/** Stacked bars of equal width over time: [[[share, value], ...], ...]. */
export function stacks(groups, label) {
  const maximum = Math.max(...groups.map((parts) => parts.reduce((sum, [, value]) => sum + value, 0)), Number.MIN_VALUE);
  const rects = groups.flatMap((parts, index) => {
    let y = HEIGHT;
    return parts.map(([name, value]) => {
      const height = value ? Math.max(MIN_HEIGHT / 2, (HEIGHT * value) / maximum) : 0;
      y -= height;
      return svg("rect", { x: index + 0.14, y, width: 0.72, height, class: `share-${name}` });
    });
  });
  return chart(groups.length, label, rects);
}

/** A horizontal bar, filled to `share`. */
export function meter(share, label) {
  return chart(1, label, [
    svg("rect", { x: 0, y: 0, width: 1, height: HEIGHT, class: "track" }),
    svg("rect", { x: 0, y: 0, width: Math.min(1, Math.max(0, share)), height: HEIGHT, class: "bar" }),
  ]);
}

function chart(width, label, children) {
  const box = { viewBox: `0 0 ${width} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label };
  return svg("svg", box, ...children);
}
