// View 8: runs over each other, by step or by the time that their steps took, and the settings that differ.
import { html, useData, Problem } from "./ui.js";
import { overlaid, running, smoothed, writePlace } from "./lib.js";
import { Chart } from "./chart.js";

const TIMES = ["time_rollout_s", "time_train_s", "time_publish_s"];
const CHARTS = [["headline", "Reward"], ["kl", "KL to the reference"], ["rollout_entropy", "Entropy"], ["grad_norm", "Gradient norm"],
  ["completion_tokens_mean", "Length"], ["truncated_fraction", "Cut off"], ["staleness", "Staleness"], ["serve_tok_s", "Tokens per second served"]];
const KEYS = [...CHARTS.map(([key]) => key), ...TIMES].join(",");

/** One request for each run: every run of the list is asked for in the same order, so hooks stay in theirs. */
function Loaded({ runs, words, children }) {
  const answers = runs.map(({ id }) => useData("metrics", { run: id, keys: KEYS, max_points: 600 }, words[id]?.metrics));
  return children(answers);
}

/** The second at which so many steps were finished. */
const secondsAt = (data, seconds, step) => (step < data.steps[0] ? 0 : seconds[data.steps.findLastIndex((one) => one <= step)] ?? null);

export function Compare({ runs, words, query, go, theme, smooth }) {
  const settings = useData("compare", {}, words.map((one) => one.state).join());
  const by = query.by === "time" ? "time" : "step", differing = Object.entries(settings.data?.settings ?? {});
  return html`
    <div class="heading"><h2>Runs over each other</h2>
      <div class="filters" role="group" aria-label="axis">${["step", "time"].map((name) => html`<button class="chip" aria-pressed=${by === name} onClick=${() => go(writePlace("compare", [], { by: name }), true)}>by ${name}</button>`)}</div></div>
    <${Loaded} runs=${runs} words=${words}>${(answers) => {
      const place = (data) => (by === "step" ? data.steps : running(TIMES.map((key) => data.columns[key] ?? [])));
      const series = (key) => overlaid(answers.map(({ data }) => (data?.columns[key] ? { x: place(data), values: smoothed(data.columns[key], smooth) } : { x: [], values: [] })));
      return html`<div class="charts">${CHARTS.map(([key, title]) => {
        const { x, columns } = series(key);
        const marks = answers.flatMap(({ data }, number) => (data?.marks ?? []).map((mark) => ({ text: `${runs[number].name}: ${mark.text}`, colour: number, step: by === "step" ? mark.step : secondsAt(data, place(data), mark.step) })));
        return x.length > 0 && html`<${Chart} key=${key + by} title=${title} of=${by === "step" ? "step" : "second"} marks=${marks} steps=${x} theme=${theme}
          series=${runs.map(({ name }, number) => ({ label: name, values: columns[number], colour: number }))} />`;
      })}</div>
      ${answers.map(({ error }) => html`<${Problem} error=${error} />`)}`;
    }}</${Loaded}>
    <section aria-label="settings"><div class="heading"><h2>Settings that differ</h2></div>
      <${Problem} error=${settings.error} />
      ${differing.length > 0 && html`<div class="panel scroll wide"><table class="numbers settings"><thead><tr><th>setting</th>${runs.map(({ name }) => html`<th>${name}</th>`)}</tr></thead>
        <tbody>${differing.map(([key, values]) => html`<tr><th scope="row">${key}</th>${values.map((value) => html`<td>${value}</td>`)}</tr>`)}</tbody></table></div>`}
      ${settings.data && !differing.length && html`<p class="quiet">None, but for the run's name and place.</p>`}
      ${settings.data?.faults.map((fault) => fault && html`<p class="quiet">${fault}</p>`)}</section>`;
}
