// View 3: the tokens of one answer, coloured by a number of each.
import { html, useData, useRef, useState, Problem, Thumbnails } from "./ui.js";
import { visible, writePlace } from "./lib.js";
import { Chart } from "./chart.js";

/** How each number is coloured: from `from` (no colour) to `to` (full), or on both sides of `middle`. */
export const SCALES = {
  logprobs: { label: "sampler log-probability (nats)", from: 0, to: -5 },
  trainer_logprobs: { label: "trainer log-probability (nats)", from: 0, to: -5 },
  ratio: { label: "importance ratio", middle: 1, reach: 0.4 },
  entropies: { label: "entropy (nats)", from: 0, to: 2.5 },
  kl: { label: "KL to the reference (k3, nats)", from: 0, to: 1 },
  reference_logprobs: { label: "reference log-probability (nats)", from: 0, to: -5 },
  teacher_logprobs: { label: "teacher log-probability (nats)", from: 0, to: -5 },
  teacher_gap: { label: "teacher − trainer (nats)", middle: 0, reach: 2 },
  advantages: { label: "advantage", middle: 0, reach: 2 },
};

const LEVELS = 8;

/** The class of a token's background: s1 … s8 by strength (its square root: small values are many), n1 … n8 on the lower side of the middle, "" = none. */
export function shade(scale, value) {
  if (value === null || value === undefined) return "";
  if (scale.middle !== undefined) {
    const place = Math.min(1, Math.abs(value - scale.middle) / scale.reach), level = Math.round(place * LEVELS);
    return level ? `${value < scale.middle ? "n" : "p"}${level}` : "";
  }
  const level = Math.round(Math.sqrt(Math.max(0, Math.min(1, (value - scale.from) / (scale.to - scale.from)))) * LEVELS);
  return level ? `s${level}` : "";
}

export function Tokens({ run, id, number, query, theme, go }) {
  const first = Number(query.first ?? 0), segment = Number(query.segment ?? 0);
  const answer = useData("tokens", { run, id, number, segment, first }, ""), data = answer.data;
  const [at, setAt] = useState(null);
  const box = useRef(null);
  if (!data) return html`<${Problem} error=${answer.error} />`;
  const values = Object.fromEntries(Object.entries(data.values).filter(([name, column]) => column && SCALES[name]));
  const by = values[query.by] ? query.by : Object.keys(values)[0], scale = SCALES[by], column = values[by] ?? [];
  const set = (changes) => go(writePlace("tokens", [id, number], { ...query, ...changes }), true);
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -data.texts.length, End: data.texts.length }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(data.texts.length - 1, (at ?? 0) + step));
    setAt(next);
    box.current.querySelector(`[data-i="${next}"]`)?.focus();
  };
  const over = (event) => { const i = event.target.dataset?.i; if (i !== undefined) setAt(Number(i)); };
  const sampled = data.mask.map((own, i) => (own ? i : -1)).filter((i) => i >= 0);
  let version = null;
  const spans = data.texts.map((text, i) => {
    const changed = data.mask[i] && data.versions[i] !== null && version !== null && data.versions[i] !== version;
    if (data.mask[i] && data.versions[i] !== null) version = data.versions[i];
    return html`<span data-i=${i} tabindex=${i === (at ?? 0) ? 0 : -1} class=${`token ${data.mask[i] ? shade(scale, column[i]) : "masked"} ${changed ? "boundary" : ""} ${i === at ? "at" : ""}`}>${visible(text).replace(/\n/g, "⏎\n")}</span>`;
  });
  return html`
    <nav class="crumbs" aria-label="place"><a href=${writePlace("group", [id])}>${visible(data.group_id)}</a> › <span>answer ${number}</span></nav>
    <div class="filters" role="group" aria-label="colour by">
      ${Object.keys(values).map((name) => html`<button class="chip" aria-pressed=${name === by} onClick=${() => set({ by: name })}>${SCALES[name].label}</button>`)}
      ${data.segments > 1 && Array.from({ length: data.segments }, (_, n) => html`<button class="chip" aria-pressed=${n === segment} onClick=${() => set({ segment: n, first: 0 })}>segment ${n + 1}</button>`)}
    </div>
    <${Problem} error=${answer.error} />
    ${scale && html`<${Scale} scale=${scale} />`}
    <${Thumbnails} of=${data.thumbnails} />
    <div class="tokens" ref=${box} onMouseOver=${over} onFocusIn=${over} onKeyDown=${move} role="group" aria-label="tokens; arrow keys move" dir="ltr">${spans}</div>
    <${Detail} data=${data} values=${values} at=${at} />
    ${data.total > data.texts.length && html`<p class="filters"><button disabled=${first === 0} onClick=${() => set({ first: Math.max(0, first - 2048) })}>tokens before</button>
      <span class="quiet">${first + 1} to ${first + data.texts.length} of ${data.total}</span>
      <button disabled=${first + data.texts.length >= data.total} onClick=${() => set({ first: first + 2048 })}>tokens after</button></p>`}
    ${scale && sampled.length > 1 && html`<div class="charts one"><${Chart} title=${`${scale.label} by position`} of="token" steps=${sampled.map((i) => first + i + 1)} theme=${theme}
      series=${[{ label: scale.label, values: sampled.map((i) => column[i] ?? null) }]} onPick=${(place) => { setAt(place - 1 - first); box.current.querySelector(`[data-i="${place - 1 - first}"]`)?.focus(); }} /></div>`}`;
}

const round = (value) => String(Number(value.toPrecision(3)));

export function Scale({ scale }) {
  const levels = Array.from({ length: LEVELS }, (_, n) => n + 1);
  if (scale.middle !== undefined) {
    return html`<p class="scale quiet"><span>${round(scale.middle - scale.reach)}</span>${levels.toReversed().map((n) => html`<i class=${`n${n}`}></i>`)}<span>${round(scale.middle)}</span>${levels.map((n) => html`<i class=${`p${n}`}></i>`)}<span>${round(scale.middle + scale.reach)}</span></p>`;
  }
  return html`<p class="scale quiet"><span>${round(scale.from)}</span>${levels.map((n) => html`<i class=${`s${n}`}></i>`)}<span>${round(scale.to)} and beyond</span></p>`;
}

/** Every number of the token under the pointer or the focus; its place is kept so that nothing jumps. */
function Detail({ data, values, at }) {
  const shown = at === null || at >= data.texts.length ? null : at;
  return html`<dl class="detail" aria-live="polite">
    <div><dt>token</dt><dd><code>${shown === null ? "–" : visible(JSON.stringify(data.texts[shown]))}</code></dd></div>
    <div><dt>id</dt><dd>${shown === null ? "–" : data.ids[shown]}</dd></div>
    <div><dt>sampled by version</dt><dd>${shown === null ? "–" : !data.mask[shown] ? "not sampled" : data.versions[shown] ?? "?"}</dd></div>
    ${Object.entries(values).map(([name, column]) => html`<div key=${name}><dt>${SCALES[name].label}</dt><dd data-value=${name}>${shown === null || column[shown] === null ? "–" : Number(column[shown].toPrecision(8))}</dd></div>`)}
  </dl>`;
}
