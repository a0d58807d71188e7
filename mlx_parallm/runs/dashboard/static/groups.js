// Views 2 and 4: the groups of a step, search over all of them, and one group with its answers side by side.
import { html, useData, useEffect, useKeys, useRef, useState, Problem, Fragment, Thumbnails } from "./ui.js";
import { get } from "./api.js";
import { parts, searched, short, visible, writePlace } from "./lib.js";

const KINDS = { mixed: "mixed", right: "all right", wrong: "all wrong", same: "all equal", unknown: "no reward known", lost: "tokens pruned" };
const ORDERS = { best: "best first", worst: "worst first", newest: "newest first" };

export function Text({ text, found, className = "text" }) {
  if (text === null || text === undefined) return html`<p class="quiet">no text: the tokenizer of the run's model is not on this machine</p>`;
  if (text === "") return html`<p class="quiet">the answer is empty</p>`;
  return html`<pre class=${className} dir="ltr">${parts(visible(text), found).map(([part, hit]) => (hit ? html`<mark>${part}</mark>` : part))}</pre>`;
}

/** A square for each answer: its height is the reward, between the lowest and the highest of what is shown. */
export function Strip({ answers, low, high }) {
  const words = answers.map(({ reward }) => short(reward)).join(", ");
  return html`<span class="strip" role="img" aria-label=${`rewards ${words}`} title=${`rewards ${words}`}>${answers.map(({ reward }) => {
    const height = high > low ? (reward - low) / (high - low) : reward > 0 ? 1 : 0;
    return html`<i style=${{ height: `${Math.round(12 + 88 * height)}%` }} class=${height > 0.66 ? "high" : height > 0.33 ? "middle" : "low"}></i>`;
  })}</span>`;
}

const rangeOf = (groups) => {
  const rewards = groups.flatMap(({ answers }) => answers.map(({ reward }) => reward));
  return [Math.min(0, ...rewards), Math.max(...rewards, 0)];
};

export function Kind({ group }) {
  return html`<span class=${`kind ${group.kind}`}>${KINDS[group.kind]}</span>
    ${group.state !== "taken" && html`<span class="kind state">${group.state}</span>`}`;
}

function GroupList({ groups, found, open, selected }) {
  const [low, high] = rangeOf(groups);
  return html`<ol class="groups">${groups.map((group, number) => html`<li key=${group.group_id}>
    <a class=${`group ${number === selected ? "selected" : ""}`} href=${open(group)} data-group=${group.group_id}>
      <span class="prompt">${parts(visible(group.prompt ?? group.group_id), found).map(([part, hit]) => (hit ? html`<mark>${part}</mark>` : part))}</span>
      <span class="facts"><${Strip} answers=${group.answers} low=${low} high=${high} /> <b>${short(group.reward_mean)}</b>
        <${Kind} group=${group} /> <span class="quiet">${group.environment}${group.step === null ? "" : ` · step ${group.step}`}</span></span>
      ${found && group.answers.slice(0, 3).map(({ completion }) => html`<span class="hit">${parts(visible(completion ?? ""), found).map(([part, hit]) => (hit ? html`<mark>${part}</mark>` : part))}</span>`)}
    </a></li>`)}</ol>`;
}

/** Moves a selection with u and i; Enter opens. */
function useSelection(count, openNumber) {
  const [selected, setSelected] = useState(-1);
  useKeys((event) => {
    const move = { i: 1, u: -1 }[event.key];
    if (move && count) {
      const next = Math.max(0, Math.min(count - 1, selected + move));
      setSelected(next);
      document.querySelectorAll(".groups a")[next]?.focus();
    } else if (event.key === "o" && selected >= 0) openNumber(selected);
  });
  return selected;
}

export function Step({ run, info, metrics, words, step, query, go }) {
  const set = (changes) => go(writePlace("step", [step], { ...query, ...changes }), true);
  const order = query.order ?? "best";
  const [more, setMore] = useState({ of: "", groups: [], older: null });
  const asked = { run, first_step: step, last_step: step, environment: query.environment, order };
  const last = metrics?.steps.at(-1) ?? step, newest = Boolean(metrics) && step >= last; // before the metrics are there nobody knows
  const answer = useData("groups", asked, newest ? words?.rollouts : "");
  const waiting = useData(newest ? "groups" : "", { run, state: "waiting", limit: 64 }, words?.rollouts).data?.groups ?? [];
  const of = JSON.stringify(asked), extra = more.of === of ? more : { groups: [], older: answer.data?.older ?? null };
  const all = [...(answer.data?.groups ?? []), ...extra.groups];
  const groups = all.filter((group) => !query.kind || (query.kind === "dropped" ? group.state !== "taken" : group.kind === query.kind));
  const open = (group) => writePlace("group", [group.group_id], { from: order === "best" ? "" : order });
  const selected = useSelection(groups.length, (number) => go(open(groups[number])));
  const goto = (to) => to >= 1 && to <= Math.max(last, 1) && go(writePlace("step", [to], query));
  const count = (test) => all.filter(test).length;
  const row = metrics?.steps.indexOf(step) ?? -1, reward = row < 0 ? null : metrics.columns.headline?.[row];
  const further = () => get("groups", { ...asked, older_than: extra.older }).then((got) => setMore({ of, groups: [...extra.groups, ...got.groups], older: got.older }));
  return html`
    <div class="heading steps"><h2>Step</h2>
      <button onClick=${() => goto(step - 1)} disabled=${step <= 1} aria-label="step before (key [)">‹</button>
      <input type="number" min="1" max=${last} value=${step} aria-label="step" onChange=${(event) => goto(Number(event.target.value))} />
      <button onClick=${() => goto(step + 1)} disabled=${step >= last} aria-label="next step (key ])">›</button>
      <span class="quiet">of ${last}${reward === null || reward === undefined ? "" : ` · ${info?.judged_by ?? "reward"} ${short(reward)}`}${answer.data ? ` · ${all.length} groups` : ""}</span></div>
    <div class="filters" role="group" aria-label="which groups">
      ${[["", "all", all.length], ["mixed", "mixed", count(({ kind }) => kind === "mixed")], ["right", "all right", count(({ kind }) => kind === "right")],
        ["wrong", "all wrong", count(({ kind }) => kind === "wrong")], ["dropped", "not trained on", count(({ state }) => state !== "taken")]].map(([kind, name, number]) =>
        html`<button class="chip" aria-pressed=${(query.kind ?? "") === kind} onClick=${() => set({ kind })}>${name} <b>${number}</b></button>`)}
      <${Choice} label="environment" value=${query.environment ?? ""} values=${Object.fromEntries([["", "every environment"], ...(info?.environments ?? []).map((name) => [name, name])])} set=${(environment) => set({ environment })} />
      <${Choice} label="order" value=${order} values=${ORDERS} set=${(order) => set({ order })} />
    </div>
    <${Problem} error=${answer.error} />
    <${GroupList} groups=${groups} open=${open} selected=${selected} />
    ${extra.older && html`<button onClick=${further}>more groups of this step</button>`}
    ${answer.data && !groups.length && html`<p class="empty">${all.length ? "No group of this step is of that kind." : "The store has no groups of this step."}</p>`}
    ${answer.data?.notes.map((note) => html`<p class="quiet">${note}</p>`)}
    ${newest && answer.data && waiting.length > 0 && html`<section aria-label="waiting"><div class="heading"><h2>Sampled, and not trained on yet</h2></div><${GroupList} groups=${waiting} open=${open} selected=${-1} /></section>`}`;
}

function Choice({ label, value, values, set }) {
  return html`<select aria-label=${label} value=${value} onChange=${(event) => set(event.target.value)}>
    ${Object.entries(values).map(([key, name]) => html`<option value=${key} selected=${key === value}>${name}</option>`)}</select>`;
}

// ------------------------------------------------------------------ search

const FIELDS = {
  text: ["text in the prompt or an answer", "search"], regex: ["regular expression", "text"], lowest: ["reward from", "number"], highest: ["to", "number"],
  first_step: ["step from", "number"], last_step: ["to", "number"], version: ["policy version", "number"], reason: ["dropped because", "text"],
};
const STATES = { "": "every state", taken: "trained on", dropped: "dropped", waiting: "waiting", quarantined: "quarantined" };

export function Search({ run, info, query, go }) {
  const [typed, setTyped] = useState(query);
  const [more, setMore] = useState({ of: "", groups: [], older: null, asking: false });
  const of = JSON.stringify([run, query]), asked = { run, limit: 60, ...query };
  const answer = useData("groups", asked, "");
  useEffect(() => setTyped(query), [of]);
  const extra = more.of === of ? more : { groups: [], older: answer.data?.older ?? null };
  const groups = [...(answer.data?.groups ?? []), ...extra.groups], found = searched(query.text, query.regex);
  const open = (group) => writePlace("group", [group.group_id]);
  const selected = useSelection(groups.length, (number) => go(open(groups[number])));
  const submit = (event) => { event.preventDefault(); go(writePlace("search", [], typed)); };
  const type = (changes) => setTyped({ ...typed, ...changes });
  const choose = (changes) => { type(changes); go(writePlace("search", [], { ...typed, ...changes })); };
  const now = useRef(of);
  now.current = of;
  useEffect(() => () => { now.current = null; }, []);
  const further = async () => { // until something fits: of a long run an answer of the server covers some dozen steps
    let groups = [], older = extra.older;
    while (older && !groups.length && now.current === of) {
      setMore({ of, groups: extra.groups, older, asking: true });
      ({ groups, older } = await get("groups", { ...asked, older_than: older }));
    }
    if (now.current === of) setMore({ of, groups: [...extra.groups, ...groups], older });
  };
  const answers = groups.reduce((sum, group) => sum + group.answers.length, 0);
  return html`
    <form class="search" onSubmit=${submit}>
      ${Object.entries(FIELDS).map(([name, [label, type_]]) => html`<label class=${name}><span>${label}</span>
        <input type=${type_} step="any" id=${`search-${name}`} value=${typed[name] ?? ""} onInput=${(event) => type({ [name]: event.target.value })} /></label>`)}
      <label><span>environment</span><${Choice} label="environment" value=${typed.environment ?? ""} set=${(environment) => choose({ environment })}
        values=${Object.fromEntries([["", "every environment"], ...(info?.environments ?? []).map((name) => [name, name])])} /></label>
      <label><span>state</span><${Choice} label="state" value=${typed.state ?? ""} values=${STATES} set=${(state) => choose({ state })} /></label>
      <button class="primary" type="submit">Search</button>
    </form>
    <${Problem} error=${answer.error} />
    ${answer.data && html`<p class="quiet" role="status">${answers} answers in ${groups.length} groups, the newest first${extra.older ? `; ${extra.asking ? "searching" : "nothing was looked at"} before ${visible(extra.older)}` : ""}</p>`}
    <${GroupList} groups=${groups} found=${found} open=${open} selected=${selected} />
    ${extra.older && html`<button disabled=${extra.asking} onClick=${further}>search further back</button>`}
    ${answer.data && !groups.length && !extra.older && html`<p class="empty">No answer fits.</p>`}
    ${answer.data?.notes.map((note) => html`<p class="quiet">${note}</p>`)}`;
}

// ------------------------------------------------------------------ one group

const BY = { worst: (a, b) => a.reward - b.reward, best: (a, b) => b.reward - a.reward, number: (a, b) => a.number - b.number };

export function Group({ run, words, id, query, go }) {
  const answer = useData("group", { run, id }, words?.rollouts), group = answer.data;
  const order = query.order ?? "best";
  const [at, setAt] = useState(-1);
  const rollouts = [...(group?.rollouts ?? [])].sort(BY[order] ?? BY.best);
  useKeys((event) => {
    const move = { j: 1, k: -1 }[event.key];
    if (!move || !rollouts.length) return;
    const next = Math.max(0, Math.min(rollouts.length - 1, at + move));
    setAt(next);
    document.querySelectorAll(".answer")[next]?.focus();
  });
  if (!group) return html`<${Problem} error=${answer.error} />`;
  const rewards = rollouts.map(({ reward }) => reward), low = Math.min(0, ...rewards), high = Math.max(0, ...rewards);
  const several = rollouts.some(({ conversation }) => conversation.length > 2);
  return html`
    <nav class="crumbs" aria-label="place"><a href=${writePlace("step", [group.step ?? 1])}>${group.step === null ? "groups" : `step ${group.step}`}</a> › <span>${visible(group.group_id)}</span></nav>
    <${Problem} error=${answer.error} />
    <header class="prompt-of">
      <${Thumbnails} of=${group.thumbnails} />
      <${Text} text=${rollouts[0]?.prompt ?? ""} className="text large" />
      <p class="facts">${rollouts.length > 0 && html`<${Strip} answers=${rollouts} low=${low} high=${high} />`} <span>mean reward <b>${short(group.reward_mean)}</b></span>
        <${Kind} group=${group} /> <span class="quiet">${group.environment} · ${group.why}</span></p>
      ${Object.keys(group.metadata ?? {}).length > 0 && html`<details class="quiet"><summary>what the environment knows</summary><${Text} text=${JSON.stringify(group.metadata, null, 1)} /></details>`}
    </header>
    <div class="filters"><${Choice} label="order of the answers" value=${order} values=${{ best: "best first", worst: "worst first", number: "as they came" }}
      set=${(order) => go(writePlace("group", [id], { ...query, order }), true)} /></div>
    <div class="answers">${rollouts.map((rollout) => html`<article class="answer" tabindex="0" key=${rollout.number} aria-label=${`answer ${rollout.number}, reward ${short(rollout.reward)}`}>
      <header><b class=${`reward ${rollout.reward === high && high > low ? "high" : rollout.reward === low && high > low ? "low" : ""}`}>${short(rollout.reward)}</b>
        <span class="quiet">advantage <b>${advantage(rollout.advantage)}</b></span>
        <a class="tokens-link" href=${writePlace("tokens", [group.group_id, rollout.number])}>tokens</a></header>
      ${Object.keys(rollout.parts).length > 0 && html`<p class="quiet parts">${Object.entries(rollout.parts).map(([name, score]) => html`<span>${name} <b>${short(score)}</b></span> `)}</p>`}
      ${Object.keys(rollout.extra).length > 0 && html`<details class="quiet"><summary>${Object.keys(rollout.extra).map(visible).join(", ")}</summary>${Object.entries(rollout.extra).map(([column, value]) => html`<${Text} text=${`${column}: ${typeof value === "string" ? value : JSON.stringify(value)}`} />`)}</details>`}
      ${several ? rollout.conversation.slice(1).map(({ role, text }) => html`<div class=${`turn ${role}`}><span class="role">${role}</span><${Text} text=${text} /></div>`)
        : html`<${Text} text=${rollout.completion} />`}
      <footer class="quiet">${rollout.tokens} tokens · ended by ${rollout.stop_reason ?? "?"} · version ${rollout.version ?? "?"}${rollout.error ? html` · <b>${visible(rollout.error)}</b>` : ""}</footer>
    </article>`)}</div>
    ${!rollouts.length && html`<p class="empty">${group.lost}</p>`}`;
}

const advantage = (value) => (Array.isArray(value) ? `${short(value[0])} to ${short(value[1])}` : value === null ? "none" : `${value > 0 ? "+" : ""}${short(value)}`);
