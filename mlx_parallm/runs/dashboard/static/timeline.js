// View 7: what the run did when, as lanes, and which policy versions the tokens of each step are of.
import { html, useData, useState, Problem } from "./ui.js";
import { short, writePlace } from "./lib.js";

const LANES = { "rl.sample": "generate", "rl.reward": "score", "rl.wait": "wait", "rl.train": "train", "rl.sync": "publish", "rl.checkpoint": "checkpoint", "rl.evaluate": "evaluate" };
const STEPS = 8;

export function Timeline({ run, query, words, metrics, go }) {
  const last = metrics?.steps.at(-1) ?? 0, shown = Number(query.steps ?? STEPS);
  const end = Math.min(Number(query.last ?? last), last), first = Math.max(1, end - shown + 1);
  const newest = end === last;  // then the server says which steps those are: one request for each change of the file
  const answer = useData(last ? "timeline" : "", newest ? { run, steps: shown } : { run, steps: shown, last: end }, newest ? words?.spans : ""), data = answer.data;
  const [at, setAt] = useState(null);
  const place = (changes) => go(writePlace("timeline", [], { ...query, ...changes }), true);
  const spans = data?.spans ?? [], begin = Math.min(...spans.map(([, , from]) => from)), until = Math.max(...spans.map(([, , , to]) => to));
  const all = until - begin || 1, lanes = Object.keys(LANES).filter((name) => spans.some((span) => span[0] === name));
  const said = ([name, step, from, to]) => `${LANES[name]}, step ${step}: ${short(to - from)} s, from ${short(from - begin)} s on`;
  const move = (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); setAt(Math.max(0, Math.min(spans.length - 1, (at ?? -1) + by))); }
    else if (event.key === "Enter" && spans[at]) go(writePlace("step", [spans[at][1]]));
  };
  return html`<div class="heading steps"><h2>Timeline</h2>
      <button aria-label="earlier steps" disabled=${first <= 1} onClick=${() => place({ last: first - 1 })}>‹</button><span>steps ${first} to ${end}</span>
      <button aria-label="later steps" disabled=${end >= last} onClick=${() => place({ last: end + shown >= last ? "" : end + shown })}>›</button>
      <label class="quiet">steps shown <input type="number" min="1" max="64" value=${shown} onChange=${(event) => place({ steps: Math.max(1, Math.min(64, Number(event.target.value))) })} /></label></div>
    <${Problem} error=${answer.error} />
    ${data && !spans.length && html`<p class="empty">No times were kept of these steps.</p>`}
    ${spans.length > 0 && html`<section class="panel lanes" tabindex="0" role="group" aria-label="lanes; arrow keys move through the spans, Enter opens the step" onKeyDown=${move}>
      ${lanes.map((name) => html`<div class="lane"><span class="quiet">${LANES[name]} <b>${short(spans.filter((span) => span[0] === name).reduce((sum, [, , from, to]) => sum + to - from, 0))} s</b></span>
        <svg viewBox="0 0 1000 20" preserveAspectRatio="none" aria-hidden="true">${spans.map((span, number) => span[0] === name && html`<rect x=${(1000 * (span[2] - begin)) / all} width=${Math.max(0.8, (1000 * (span[3] - span[2])) / all)} y="2" height="16"
          class=${`k${Object.keys(LANES).indexOf(name)} ${span[1] % 2 ? "odd" : ""} ${number === at ? "at" : ""}`} onMouseOver=${() => setAt(number)} onClick=${() => go(writePlace("step", [span[1]]))} />`)}</svg></div>`)}
      <div class="lane"><span class="quiet">seconds</span><span class="ticks" aria-hidden="true">${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<i>${short(share * all)}</i>`)}</span></div>
      <p class="quiet" aria-live="polite">${spans[at] ? said(spans[at]) : `${short(all)} s in all; a shade for every other step`}</p></section>`}
    ${data && Object.keys(data.tokens).length > 0 && html`<${Versions} tokens=${data.tokens} />`}`;
}

/** Tokens of each step by the age of the version that sampled them: 0 = the newest of that step. */
function Versions({ tokens }) {
  const steps = Object.entries(tokens).map(([step, counts]) => {
    const versions = Object.keys(counts).map(Number), newest = Math.max(...versions), ages = {};
    for (const version of versions) ages[newest - version] = (ages[newest - version] ?? 0) + counts[version];
    return { step, newest, ages, all: Object.values(ages).reduce((sum, count) => sum + count, 0) };
  });
  return html`<section class="panel lanes" aria-label="staleness"><h2>Tokens by the version that sampled them</h2>
    ${steps.map(({ step, newest, ages, all }) => html`<div class="lane"><span class="quiet">step ${step}</span><span class="bar-of" role="img" aria-label=${Object.entries(ages).map(([age, count]) => `${count} tokens ${age} versions old`).join(", ")}>
      ${Object.entries(ages).map(([age, count]) => html`<i class=${`age${Math.min(3, age)}`} style=${{ width: `${(100 * count) / all}%` }} title=${`version ${newest - age}: ${count} tokens`}>${count / all > 0.12 ? `v${newest - age} ${Math.round((100 * count) / all)} %` : ""}</i>`)}</span></div>`)}</section>`;
}
