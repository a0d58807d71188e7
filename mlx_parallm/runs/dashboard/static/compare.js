// View 8: runs over each other, by step or by the time that their steps took, and the settings that differ.
import { html, useData, useMemo, Problem } from "./ui.js";
import { overlaid, running, seeds, smoothed, together, writePlace } from "./lib.js";
import { Chart } from "./chart.js";

const TIMES = ["time_rollout_s", "time_train_s", "time_publish_s"];
const CHARTS = [["headline", ""], ["kl", "KL to the reference"], ["rollout_entropy", "Entropy"], ["grad_norm", "Gradient norm"],
  ["completion_tokens_mean", "Length"], ["truncated_fraction", "Cut off"], ["staleness", "Staleness"], ["serve_tok_s", "Tokens per second served"]];
const KEYS = [...CHARTS.map(([key]) => key), ...TIMES].join(",");
const NUMBERED = /^(.*?)[-_. ]?(?:seed|s)?[-_. ]?[0-9]+$/;

/** What a run is judged by: reward, accuracy or loss. Runs with different ones have axes of their own. */
const judgedBy = (run) => run.judged_by ?? "reward", title = (name) => name[0].toUpperCase() + name.slice(1);

const wordOf = (words, run) => words.find(({ id }) => id === run);

/** Two requests for each run: every run of the list is asked for in the same order, so hooks stay in theirs. */
const useRuns = (runs, words) => runs.map(({ id }) => [
  useData("metrics", { run: id, keys: KEYS, max_points: 600 }, wordOf(words, id)?.metrics), useData("evaluations", { run: id }, wordOf(words, id)?.evaluations),
]);

/** The second at which so many steps were finished. */
const secondsAt = (data, seconds, step) => (step < data.steps[0] ? 0 : seconds[data.steps.findLastIndex((one) => one <= step)] ?? null);

/** {key: {x, columns, low, high}} of all charts, one column for each run; `by`: "step" or "time". */
function curvesOf(answers, by, smooth) {
  const seconds = answers.map(([{ data }]) => data && running(TIMES.map((key) => data.columns[key] ?? [])));
  const places = answers.map(([{ data }], run) => (by === "step" ? data?.steps : seconds[run]));
  const placeOf = (run, step) => (by === "step" ? step : answers[run][0].data && secondsAt(answers[run][0].data, seconds[run], step));
  const none = { x: [], values: [] };
  const curves = Object.fromEntries(CHARTS.map(([key]) => [key, overlaid(answers.map(([{ data }], run) => (data?.columns[key] ? { x: places[run], values: smoothed(data.columns[key], smooth) } : none)))]));
  curves.heldout = overlaid(answers.map(([, { data }], run) => {
    const scored = (data?.evaluations ?? []).map(({ step, score }) => [placeOf(run, step), score]).filter(([place, score]) => place !== null && score !== null);
    return { x: scored.map(([place]) => place), values: scored.map(([, score]) => score) };
  }));
  const marks = answers.map(([{ data }], run) => (data?.marks ?? []).map(({ step, text }) => ({ text, step: placeOf(run, step) })));
  return { curves, marks };
}

/** A curve for each run, or for each group of runs that differ in their seeds only: the median, and the quartiles as a band. */
function seriesOf({ x, columns }, runs, groups, dots) {
  return groups.map((own, number) => {
    if (own.length === 1) return { label: runs[own[0]].name, values: columns[own[0]], colour: number, dots };
    return { label: `${nameOf(own.map((run) => runs[run].name))} (${own.length} seeds)`, ...together(x, own.map((run) => columns[run])), colour: number, dots };
  });
}

/** What the names begin with, without a number at the end. */
const nameOf = (names) => NUMBERED.exec(names[0])?.[1] || names[0];

export function Compare({ runs, words, query, go, theme, smooth }) {
  const settings = useData("compare", {}, words.map((one) => one.state).join()), answers = useRuns(runs, words);
  const by = query.by === "time" ? "time" : "step", differing = Object.entries(settings.data?.settings ?? {});
  const alike = settings.data ? seeds(runs.length, settings.data.settings, settings.data.faults.map(Boolean)) : [];
  const several = alike.some((own) => own.length > 1), joined = several && query.seeds !== "apart";
  const place = (changes) => go(writePlace("compare", [], { ...query, ...changes }), true);
  const charts = useMemo(() => {
    const { curves, marks } = curvesOf(answers, by, smooth), groups = joined ? alike : runs.map((_, run) => [run]);
    const shownMarks = groups.flatMap((own, colour) => own.flatMap((run) => marks[run].map((mark) => ({ ...mark, text: `${runs[run].name}: ${mark.text}`, colour }))));
    const judged = [...new Set(runs.map(judgedBy))].map((name) => ["headline", title(name), false, groups.filter(([run]) => judgedBy(runs[run]) === name)]);
    return [...judged, ["heldout", "Held-out problems", true, groups], ...CHARTS.slice(1)].map(([key, title, dots, own = groups]) => curves[key].x.length > 0
      && html`<${Chart} key=${key + title + by} title=${title} of=${by === "step" ? "step" : "second"} marks=${shownMarks} steps=${curves[key].x} theme=${theme} series=${seriesOf(curves[key], runs, groups, dots).filter((_, number) => own.includes(groups[number]))} />`);
  }, [...answers.flat().map(({ data }) => data), settings.data, runs.map(judgedBy).join(), by, smooth, joined, theme]);
  return html`
    <div class="heading"><h2>Runs over each other</h2>
      <div class="filters" role="group" aria-label="axis">${["step", "time"].map((name) => html`<button class="chip" aria-pressed=${by === name} onClick=${() => place({ by: name })}>by ${name}</button>`)}</div>
      ${several && html`<div class="filters" role="group" aria-label="seeds">${[["", "seeds together"], ["apart", "each run"]].map(([value, text]) => html`<button class="chip" aria-pressed=${joined === (value === "")} onClick=${() => place({ seeds: value })}>${text}</button>`)}</div>`}</div>
    <div class="charts">${charts}</div>
    ${answers.flat().map(({ error }) => html`<${Problem} error=${error} />`)}
    <section aria-label="settings"><div class="heading"><h2>Settings that differ</h2></div>
      <${Problem} error=${settings.error} />
      ${differing.length > 0 && html`<div class="panel scroll wide" tabindex="0" role="region" aria-label="settings that differ"><table class="numbers settings"><thead><tr><th>setting</th>${runs.map(({ name }) => html`<th>${name}</th>`)}</tr></thead>
        <tbody>${differing.map(([key, values]) => html`<tr><th scope="row">${key}</th>${values.map((value) => html`<td>${value}</td>`)}</tr>`)}</tbody></table></div>`}
      ${settings.data && !differing.length && html`<p class="quiet">None, but for the run's name and place.</p>`}
      ${settings.data?.faults.map((fault) => fault && html`<p class="quiet">${fault}</p>`)}</section>`;
}
