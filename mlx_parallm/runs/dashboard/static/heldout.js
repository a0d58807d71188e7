// View 6: the same held-out prompts in two evaluations: which became right, and what changed in the answers.
import { html, useData, Fragment, Problem } from "./ui.js";
import { short, visible, writePlace } from "./lib.js";

const RIGHT = 1 - 1e-9;
const KINDS = { fixed: "became right", broken: "became wrong", right: "right both times", wrong: "wrong both times" };
const kindOf = (before, after) => (after >= RIGHT ? (before >= RIGHT ? "right" : "fixed") : before >= RIGHT ? "broken" : "wrong");

export function HeldOutPrompts({ run, query, words, go }) {
  const answer = useData("heldout", { run, before: query.before ?? 0, after: query.after ?? -1 }, words?.evaluations), data = answer.data;
  if (!data) return html`<${Problem} error=${answer.error} />`;
  const count = data.evaluations.length;
  if (!count) return html`<p class="empty">No evaluation on held-out problems yet.</p>`;
  if (count === 1) {
    return html`<div class="heading"><h2>Held-out prompts</h2></div><p class="empty">One evaluation so far, of step ${data.evaluations[0].step}: the same prompts are compared once there is another.</p>
      <${Problem} error=${answer.error} />
      ${Object.entries(data.environments).map(([name, part]) => html`<section aria-label=${name}><div class="heading"><h3>${name}</h3></div>
        <div class="answers">${part.examples.map((example) => html`<${Example} key=${example.key} ...${example} before=${null} />`)}</div></section>`)}`;
  }
  const at = { before: Number(query.before ?? 0), after: Number(query.after ?? count - 1) };
  const choose = (side) => html`<label class="quiet">${side} <select aria-label=${side} value=${at[side]} onChange=${(event) => go(writePlace("heldout", [], { ...query, [side]: event.target.value }), true)}>
    ${data.evaluations.map(({ step, version }, place) => html`<option value=${place} selected=${place === at[side]}>step ${step} · version ${version}</option>`)}</select></label>`;
  return html`<div class="heading"><h2>The same held-out prompts</h2><div class="filters">${choose("before")} ${choose("after")}</div></div>
    <${Problem} error=${answer.error} />
    ${Object.entries(data.environments).map(([name, part]) => html`<${Environment} key=${name} name=${name} part=${part} />`)}`;
}

function Environment({ name, part }) {
  const counts = { fixed: 0, broken: 0, right: 0, wrong: 0 };
  for (const [, before, after] of part.problems) counts[kindOf(before, after)]++;
  return html`<section aria-label=${name}><div class="heading"><h3>${name}</h3>
      ${Object.entries(KINDS).map(([kind, text]) => html`<span class="quiet"><i class=${`cell ${kind}`}></i> ${text} <b>${counts[kind]}</b></span>`)}</div>
    <p class="cells" role="img" aria-label=${`${part.problems.length} problems: ${Object.entries(KINDS).map(([kind, text]) => `${counts[kind]} ${text}`).join(", ")}`}>${part.problems.map(([key, before, after]) =>
      html`<i class=${`cell ${kindOf(before, after)}`} title=${`${visible(key)}: ${short(before)} → ${short(after)}`}></i>`)}</p>
    <div class="answers">${part.examples.map((example) => html`<${Example} key=${example.key} ...${example} />`)}</div></section>`;
}

function Example({ prompt, expected, before, after, diff, rewards }) {
  const kind = before === null ? "" : kindOf(before, after);
  return html`<article class="answer" tabindex="0"><pre class="text" dir="ltr">${visible(prompt)}</pre>
    ${expected !== null && html`<p class="quiet">expected <code>${visible(expected)}</code></p>`}
    ${diff ? html`<pre class="text diff" dir="ltr">${diff.map(([what, text]) => (what === "gone" ? html`<del>${visible(text)}</del>` : what === "new" ? html`<ins>${visible(text)}</ins>` : html`<${Fragment}>${visible(text)}</${Fragment}>`))}</pre>`
      : html`<p class="quiet">not answered in both</p>`}
    <footer class="quiet">${before === null ? "–" : short(before)} → <b>${short(after)}</b> ${kind && html`<span class="kind ${kind}">${KINDS[kind]}</span>`}
      <span class="strip" role="img" aria-label=${`rewards over all evaluations: ${rewards.map(short).join(", ")}`} title="rewards over all evaluations">${rewards.map((reward) => html`<i class=${reward === null ? "" : reward >= RIGHT ? "high" : reward > 0 ? "middle" : "low"} style=${{ height: reward === null ? "0" : `${Math.round(12 + 88 * Math.max(0, Math.min(1, reward)))}%` }}></i>`)}</span></footer></article>`;
}
