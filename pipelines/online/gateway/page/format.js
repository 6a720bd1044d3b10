// Formats numbers. Unknown values are shown as an en dash.

const UNKNOWN = "–";
const SPACE = "\u00a0"; // a number and its unit stay on one line
const isKnown = (value) => typeof value === "number" && Number.isFinite(value);
const fixed = (value, digits) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

/** 0.43, 43.0, 734,777, 1.18 M. */
export function amount(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (Math.abs(value) >= 1e9) return `${fixed(value / 1e9, 2)}${SPACE}G`;
  if (Math.abs(value) >= 1e6) return `${fixed(value / 1e6, 2)}${SPACE}M`;
  if (Math.abs(value) >= 1000) return fixed(value, 0);
  return fixed(value, Math.abs(value) >= 10 || value === 0 ? 1 : 2);
}

/** Whole numbers. */
export const count = (value) => (isKnown(value) ? fixed(value, 0) : UNKNOWN);

/** A number with this many decimal places. */
export const decimals = (value, digits) => (isKnown(value) ? fixed(value, digits) : UNKNOWN);

/** 84 ms, 0.84 s, 12.3 s. */
export function seconds(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value < 0.1) return `${fixed(value * 1000, 0)}${SPACE}ms`;
  return `${fixed(value, value < 10 ? 2 : 1)}${SPACE}s`;
}

/** $12.30, $0.851, $0.000038: below a tenth of a cent, two significant digits. */
export function dollars(value) {
  if (!isKnown(value)) return UNKNOWN;
  if (value === 0) return "$0";
  const magnitude = Math.floor(Math.log10(value));
  const digits = value >= 1 ? 2 : Math.min(12, (value < 0.001 ? 1 : 2) - magnitude);
  return `$${fixed(value, digits)}`;
}

/** 45 %. */
export function percent(share) {
  if (!isKnown(share)) return UNKNOWN;
  return share > 0 && share < 0.01 ? `<1${SPACE}%` : `${fixed(share * 100, 0)}${SPACE}%`;
}

/** A number and its noun: 1 request, 2 requests. */
export const withNoun = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;

/** 1 min, 90 s. */
export const span = (value_s) => (value_s % 60 ? `${value_s}${SPACE}s` : `${value_s / 60}${SPACE}min`);

/** Local time of day, from Unix seconds. */
export const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString("en-GB");
