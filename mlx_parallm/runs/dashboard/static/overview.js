// View 1: what the run does, in words and curves.
import { html, useCalm, useData, useMemo, useState, Problem } from "./ui.js";
import { beganAndNow, duration, short, smoothed, visible, writePlace } from "./lib.js";
import { Chart } from "./chart.js";

// A chart is hidden while none of its numbers is there.
const CHARTS = [
  { section: "Policy" },
  { title: "Loss", note: "as the optimizer minimised it", keys: { loss: "loss" } },
  { title: "KL to the reference", note: "nats a token", keys: { kl: "KL" } },
  { title: "KL to the teacher", note: "nats a token", keys: { teacher_kl: "sampled tokens", distill_loss: "divergence in the loss" } },
  { title: "Teacher agrees", note: "share of tokens that are its best", keys: { teacher_agreement: "share" }, percent: true },
  { title: "Entropy", note: "nats a token", keys: { rollout_entropy: "of the rollouts", entropy: "in training" } },
  { title: "Clipped tokens", keys: { clip_fraction: "share" }, percent: true },
  { title: "Gradient norm", keys: { grad_norm: "norm" } },
  { title: "Importance ratio", note: "mean; 1 = the policy that sampled", keys: { ratio_mean: "mean" } },
  { title: "Trainer against engine", note: "mean |log-probability difference|", keys: { logprob_diff_mean: "difference" } },
  { section: "Experts" },
  { title: "Load of the busiest expert", note: "times the average; 1 = all alike", keys: { expert_load_max: "mean over layers" } },
  { title: "Entropy of the experts' load", note: "1 = all alike", keys: { expert_load_entropy: "of its highest" }, percent: true },
  { title: "Experts", keys: { experts_unused: "without a token", experts_differing: "other than the engine's", prompt_experts_differing: "the same, of prompts" }, percent: true },
  { title: "Tokens of an expert", note: "in a step, mean", keys: { expert_tokens: "tokens" } },
  { section: "Answers" },
  { title: "Length", note: "tokens of an answer", keys: { completion_tokens_mean: "tokens" } },
  { title: "How answers end", keys: { eos_fraction: "by themselves", truncated_fraction: "cut off" }, percent: true },
  { title: "Groups that teach nothing", keys: { groups_all_right: "all right", groups_all_wrong: "all wrong", groups_same_answer: "same answer" }, percent: true },
  { title: "Rows", note: "by what their next group is expected to be", keys: { rows_learnable: "learnable", rows_easy: "easy", rows_hopeless: "hopeless", rows_unseen: "not seen" } },
  { section: "Machine" },
  { title: "Tokens per second", keys: { serve_tok_s: "served", trained_tok_s: "trained" } },
  { title: "Tokens of a step", keys: { tokens: "all", trained_tokens: "trained on" } },
  { title: "Seconds of a step", keys: { time_rollout_s: "waiting for rollouts", time_train_s: "training", time_publish_s: "publishing", teacher_seconds: "asking teachers" } },
  { title: "Memory", note: "GB, the peak of a step and what the process has after it", keys: { memory_gb: "MLX's arrays", footprint_gb: "the process" } },
  { title: "Staleness", note: "policy versions", keys: { staleness: "mean", staleness_max: "most" } },
  { title: "Learning rate", keys: { learning_rate: "rate" } },
];

/** Of each judge of groups: whether it can be trusted. */
const JUDGED = ["order_agreement", "length_correlation", "score_spread"].map((kind) => `/${kind}/mean`);
/** What the page asks for: the numbers of the first chart and of the answers, and those of the charts. */
export const KEYS = [
  ...JUDGED.map((end) => `metrics/*${end}`),
  "headline", "reward_std", "reward_p25", "reward_p75", "reward_max", "reward_by_environment/*", "rewards/*/mean", "heldout_score",
  ...CHARTS.flatMap(({ keys }) => Object.keys(keys ?? {})),
];

const known = (values) => values && values.some((value) => value !== null && value !== undefined);

/** The first chart follows each step; the rest is drawn in peace, for drawing is most of what an open page costs. */
export function Overview({ run, info, metrics: newest, words, smooth, setSmooth, theme, go }) {
  const metrics = useCalm(newest, run);
  const health = useData(metrics ? "health" : "", { run }, words?.health);
  const evaluated = useData("evaluations", { run }, words?.evaluations);
  const evaluations = evaluated.data?.evaluations ?? [];
  const [band, setBand] = useState(localStorage.getItem("mlx_parallm.band") ?? "deviation");
  const chooseBand = (event) => { localStorage.setItem("mlx_parallm.band", event.target.value); setBand(event.target.value); };
  const steps = metrics?.steps ?? [], columns = metrics?.columns ?? {}, marks = metrics?.marks ?? [];
  const pick = (step) => go(writePlace("step", [step]));
  const judged = info?.judged_by ?? "reward", title = judged[0].toUpperCase() + judged.slice(1);
  const first = useMemo(() => firstOf({ metrics: newest, judged, title, smooth, band, theme, pick }), [newest, judged, smooth, band, theme]);
  const rest = useMemo(() => curvesOf({ metrics, evaluations, title, smooth, theme, pick }), [metrics, evaluated.data, judged, smooth, theme]);
  return html`
    <section class="top">
      <${Health} answer=${health} steps=${steps.length} />
      <${Figures} ...${{ info, steps, columns, evaluations, title }} />
    </section>
    ${steps.length === 0 && html`<p class="empty">No step is finished yet. The curves begin with the first one.</p>`}
    <section aria-label="learning">
      <div class="heading"><h2>Learning</h2>
        ${known(columns.reward_p25) && html`<label class="quiet">band <select aria-label="band of the reward" value=${band} onChange=${chooseBand}>${Object.keys(BANDS).map((name) => html`<option value=${name} selected=${name === band}>${name}</option>`)}</select></label>`}
        <label class="quiet">smooth <input type="range" min="0" max="0.98" step="0.02" value=${smooth} aria-label="smoothing of the curves"
          onInput=${(event) => setSmooth(Number(event.target.value))} /> <output>${smooth.toFixed(2)}</output></label></div>
      <div class="charts">${first}${rest.learning}</div>
    </section>
    ${rest.sections}
    <${Marks} marks=${marks} pick=${pick} />
    <${Problem} error=${health.error ?? evaluated.error} />`;
}

function firstOf({ metrics, judged, title, smooth, band, theme, pick }) {
  const { steps = [], columns = {}, marks = [] } = metrics ?? {}, shown = known(columns.reward_p25) ? band : "deviation";
  return known(columns.headline) && html`<${Chart} key=${title} title=${title} note=${shown === "deviation" && known(columns.reward_std) && rightOrWrong(columns) ? "mean of a step, and its course; every answer earned 0 or 1" : `mean of a step, and its course; the band: ${BANDS[shown]}`} steps=${steps}
    series=${[withBand(columns, smooth, judged, shown)]} marks=${marks} onPick=${pick} theme=${theme} />`;
}

/** All other charts: made anew when their numbers are new, and not with every word of the stream. */
function curvesOf({ metrics, evaluations, title, smooth, theme, pick }) {
  const { steps = [], columns = {}, marks = [] } = metrics ?? {};
  const line = (key, label) => known(columns[key])
    && (smooth ? { label, raw: columns[key], values: smoothed(columns[key], smooth) } : { label, values: columns[key] });
  const chart = (title, series, rest = {}) => series.length > 0
    && html`<${Chart} key=${title} title=${title} steps=${steps} series=${series} marks=${marks} onPick=${pick} theme=${theme} ...${rest} />`;
  const sections = [];
  for (const { section, title, note, keys, percent } of CHARTS) {
    if (section) sections.push({ section, charts: [] });
    else {
      const shown = Object.entries(keys).map(([key, label]) => line(key, label)).filter(Boolean);
      if (shown.length) sections.at(-1).charts.push(chart(title, shown, { note, percent }));
    }
  }
  const named = (prefix, end = "") => Object.keys(columns).filter((key) => key.startsWith(prefix) && key.endsWith(end))
    .map((key) => line(key, key.slice(prefix.length, key.length - end.length))).filter(Boolean);
  const judges = JUDGED.flatMap((end) => named("metrics/", end).map((each) => ({ ...each, label: `${each.label} ${end.split("/")[1].replace("_", " ")}` })));
  return {
    learning: html`${chart(`${title} by environment`, named("reward_by_environment/"))}
      ${chart("Parts of the reward", named("rewards/", "/mean"))}
      ${chart("Judges of groups", judges, { note: "agreement in two orders, correlation with length, spread of the scores" })}
      ${evaluations.length > 0 && html`<${HeldOut} ...${{ evaluations, theme, pick }} />`}
      ${chart("Held-out score", [line("heldout_score", "score")].filter(Boolean))}`,
    sections: sections.filter(({ charts }) => charts.length).map(({ section, charts }) => html`<section aria-label=${section}>
      <div class="heading"><h2>${section}</h2></div><div class="charts">${charts}</div></section>`),
  };
}

/** Whether all rewards are 0 or 1: then their deviation is √(m(1 − m)), which the mean says already. */
function rightOrWrong({ headline, reward_std: deviations }) {
  return headline.every((mean, row) => mean === null || deviations[row] === null || (mean >= 0 && mean <= 1 && Math.abs(deviations[row] ** 2 - mean * (1 - mean)) < 1e-6));
}

const BANDS = { deviation: "one standard deviation of its answers", quartiles: "the middle half of its answers" };

function withBand(columns, smooth, label, band) {
  const values = smoothed(columns.headline, smooth), one = { label, values, raw: smooth ? columns.headline : undefined };
  if (band === "quartiles") return { ...one, low: smoothed(columns.reward_p25, smooth), high: smoothed(columns.reward_p75, smooth) };
  if (!known(columns.reward_std) || rightOrWrong(columns)) return one;
  const spread = smoothed(columns.reward_std, smooth);
  const unit = Math.max(...(columns.reward_max ?? [2])) <= 1 && Math.min(...columns.headline.filter((value) => value !== null)) >= 0;
  const within = (value) => (unit ? Math.min(1, Math.max(0, value)) : value);
  const at = (sign) => values.map((value, row) => (value === null || spread[row] === null ? null : within(value + sign * spread[row])));
  return { ...one, low: at(-1), high: at(1) };
}

/** What happened to the run, in words: the dashed lines of the charts. */
function Marks({ marks, pick }) {
  if (!marks.length) return null;
  return html`<section aria-label="marks"><div class="heading"><h2>Marks</h2></div><div class="panel scroll wide"><table class="numbers settings"><thead><tr><th>after step</th><th>when</th><th>what</th></tr></thead>
    <tbody>${marks.toReversed().map(({ step, time, text }) => html`<tr><td><button class="plain" onClick=${() => step > 0 && pick(step)}>${step}</button></td><td>${time ? new Date(time * 1000).toLocaleString() : ""}</td><td>${visible(text)}</td></tr>`)}</tbody></table></div></section>`;
}

/** Each environment with its 95% interval, over the steps that were evaluated. */
function HeldOut({ evaluations, theme, pick }) {
  const names = [...new Set(evaluations.flatMap(({ environments }) => Object.keys(environments)))];
  const of = (name, end = "") => evaluations.map(({ environments }) => {
    const numbers = environments[name] ?? {};
    return numbers[`accuracy${end}`] ?? numbers[`sampled_reward${end}`] ?? null;
  });
  const series = names.map((name) => ({ label: name, values: of(name), low: of(name, "_low"), high: of(name, "_high"), dots: true }));
  return html`<${Chart} title="Held-out problems" note="accuracy of the greedy answers; the bands are 95% intervals" steps=${evaluations.map(({ step }) => step)}
    series=${series} onPick=${(step) => step && pick(step)} theme=${theme} />`;
}

function Health({ answer, steps }) {
  const found = answer.data;
  if (!found?.findings) return html`<div class="health"><h2>Health</h2></div>`;
  const healthy = found.findings.every(({ good }) => good), none = !found.findings.length;
  return html`<div class=${`health ${healthy ? "well" : "ill"}`}>
    <h2>Health</h2>
    ${none && html`<p class="verdict"><i class="dot"></i>${steps ? "Nothing found that keeps it from learning." : "No step yet, and nothing that keeps it from one."}</p>`}
    ${found.findings.map(({ sentence, numbers, setting, page, steps: spans }) => html`<div class="finding">
      <p class="verdict"><i class="dot"></i>${sentence}</p>
      <p class="quiet">${Object.entries(numbers).map(([name, value]) => html`<span>${name} <b>${short(value)}</b></span> `)}
        ${spans.length > 0 && html`<span>steps <b>${spans.slice(0, 3).map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ")}</b></span>`}</p>
      <p class="quiet">Change: <b>${setting}</b> · ${page}</p></div>`)}
    ${found.to_read.map(({ prompt, answer, piece }) => html`<p class="quiet">${piece ? "a piece of its prompt" : "full marks"}: ${answer ? html`<code>${visible(answer)}</code>` : "an empty answer"} to “${visible(prompt)}”</p>`)}
    ${found.notes.map((note) => html`<p class="quiet">${note[0].toUpperCase() + note.slice(1)}.</p>`)}
  </div>`;
}

function Figures({ info, steps, columns, evaluations, title }) {
  const last = (key) => columns[key]?.at(-1) ?? null;
  const learned = beganAndNow(columns.headline ?? []), scores = evaluations.map(({ score }) => score).filter((score) => score !== null);
  const recent = (columns.time_train_s ?? []).map((value, row) => (value ?? 0) + (columns.time_rollout_s?.[row] ?? 0) + (columns.time_publish_s?.[row] ?? 0)).slice(-20);
  const pace = recent.length ? recent.reduce((sum, value) => sum + value, 0) / recent.length : null;
  const left = info?.state === "running" && info.total_steps && pace ? (info.total_steps - (steps.at(-1) ?? 0)) * pace : null;
  const figures = [
    learned && [title, short(learned[1]), `began at ${short(learned[0])}; ${learned[2] > 1 ? `means of the first and last ${learned[2]} steps` : "the first and the last step"}`],
    scores.length > 0 && ["Held out", short(scores.at(-1)), scores.length > 1 ? `began at ${short(scores[0])}` : "one evaluation"],
    last("serve_tok_s") !== null && ["Served", short(last("serve_tok_s")), "tokens a second"],
    last("trained_tok_s") !== null && ["Trained", short(last("trained_tok_s")), "tokens a second"],
    pace && ["A step", `${short(pace)} s`, left === null ? (recent.length > 1 ? `mean of ${recent.length} steps` : "the only step") : `${duration(left)} left`],
    last("staleness") !== null && ["Staleness", short(last("staleness")), "policy versions"],
  ];
  return html`<dl class="figures">${figures.filter(Boolean).map(([name, value, note]) => html`<div><dt>${name}</dt><dd>${value}</dd><dd class="quiet">${note}</dd></div>`)}</dl>`;
}
