// Pure functions: no page, no server. tests/dashboard/test_page.py runs them in a browser.

/** Exponential moving average, corrected for its start; null stays null. weight 0 = as it is. */
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0, norm = 0, largest = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    largest = Math.max(largest, Math.abs(value));
    const mean = sum / norm;
    return Math.abs(mean) < 1e-6 * largest ? 0 : mean; // what is left of a value long ago is no value
  });
}

/** Join an answer of /api/metrics to what is there. Both: {cursor, steps, columns, keys, marks}. */
export function merged(before, answer) {
  if (!before || answer.reset) return { ...answer };
  const known = before.steps.length, added = answer.steps.length;
  const columns = {};
  for (const key of new Set([...Object.keys(before.columns), ...Object.keys(answer.columns)])) {
    columns[key] = [
      ...(before.columns[key] ?? new Array(known).fill(null)),
      ...(answer.columns[key] ?? new Array(added).fill(null)),
    ];
  }
  return { ...answer, steps: [...before.steps, ...answer.steps], columns };
}

/** A number in few characters. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (size >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.01 || size === 0) return Number.isInteger(value) ? String(value) : value.toFixed(3);
  return value.toExponential(1);
}

export function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const hours = Math.floor(whole / 3600), minutes = Math.floor((whole % 3600) / 60), rest = whole % 60;
  const two = (number) => String(number).padStart(2, "0");
  return hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
}

/** Model text with what is not seen made visible: control characters, and marks that turn the direction of writing. */
export function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f]|[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g, (found) => {
    const code = found.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    if (code === 127) return "␡";
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** First and last mean, as `mlx_parallm explain` makes them: at most 5 values, none in both. */
export function beganAndNow(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  const count = Math.max(1, Math.min(5, Math.floor(known.length / 2)));
  const mean = (part) => part.reduce((sum, value) => sum + value, 0) / part.length;
  return [mean(known.slice(0, count)), mean(known.slice(-count)), count];
}

/** The place of the page: view, its arguments and its settings. "#/group/a%2Fb?sort=best" ⇄ object. */
export function readPlace(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/").map(decodeURIComponent);
  return { view: view || "overview", rest, query: Object.fromEntries(new URLSearchParams(query)) };
}

export function writePlace(view, rest = [], query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const path = [view, ...rest].map((part) => encodeURIComponent(part)).join("/");
  return `#/${path}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
}

/** [text, whether it was found] of each part of a text. */
export function parts(text, found) {
  if (!found) return [[text, false]];
  const out = [];
  let end = 0;
  for (const match of text.matchAll(found)) {
    if (!match[0]) continue;
    if (match.index > end) out.push([text.slice(end, match.index), false]);
    out.push([match[0], true]);
    end = match.index + match[0].length;
  }
  if (end < text.length) out.push([text.slice(end), false]);
  return out;
}

/** What was searched, as a pattern; null: nothing, or one that this browser cannot read. */
export function searched(text, regex) {
  try {
    if (regex) return new RegExp(regex, "g");
    return text ? new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"), "gi") : null;
  } catch {
    return null;
  }
}

/** Sums of several columns from the first row on: the seconds at which each step ended. */
export function running(columns) {
  let sum = 0;
  const rows = Math.max(0, ...columns.map((column) => column.length));
  return Array.from({ length: rows }, (_, row) => (sum += columns.reduce((all, column) => all + (column[row] ?? 0), 0)));
}

/** [{x, values}] of several runs → one rising x and a column for each run, null where it has no value. */
export function overlaid(runs) {
  const x = [...new Set(runs.flatMap((run) => run.x))].sort((a, b) => a - b);
  const columns = runs.map((run) => {
    const known = new Map(run.x.map((place, row) => [place, run.values[row]]));
    return x.map((place) => known.get(place) ?? null);
  });
  return { x, columns };
}

/** The number below which a share of the values lies, linear between neighbours (as numpy.quantile). */
export function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b), place = share * (sorted.length - 1), low = Math.floor(place);
  return sorted[low] + (place - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

/** Fill nulls between two known values, linear in x; what lies before the first or after the last one stays null. */
export function filled(x, values) {
  const out = [...values];
  let before = null;
  for (let row = 0; row < out.length; row++) {
    if (out[row] === null || out[row] === undefined) continue;
    for (let gap = (before ?? row) + 1; gap < row; gap++) out[gap] = out[before] + ((out[row] - out[before]) * (x[gap] - x[before])) / (x[row] - x[before]);
    before = row;
  }
  return out;
}

/** Several columns over one x as one: median, and the quartiles around it, of the columns that have a value there. */
export function together(x, columns) {
  const full = columns.map((column) => filled(x, column));
  const rows = x.map((_, row) => full.map((column) => column[row]).filter((value) => value !== null && value !== undefined));
  const at = (share) => rows.map((values) => (values.length ? quantile(values, share) : null));
  return { values: at(0.5), low: at(0.25), high: at(0.75) };
}

/**
 * Runs whose settings differ in nothing but seeds: [[place, …], …] by first place. `settings`: {key: [value of each
 * run]}; `apart`: true of a run whose settings are not known.
 */
export function seeds(count, settings, apart = []) {
  const others = Object.entries(settings).filter(([key]) => !/(^|[._])seed$/.test(key)).map(([, values]) => values);
  const alike = new Map();
  for (let run = 0; run < count; run++) {
    const same = apart[run] ? `run ${run}` : JSON.stringify(others.map((values) => values[run]));
    alike.set(same, [...(alike.get(same) ?? []), run]);
  }
  return [...alike.values()];
}
