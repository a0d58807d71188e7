// View 5: one prompt, asked of two models at once; what they answer, token by token; and rewards for it.
import { html, useData, useEffect, useRef, useState, Problem } from "./ui.js";
import { ask, post, streamed } from "./api.js";
import { short, visible, writePlace } from "./lib.js";
import { Scale, SCALES, shade } from "./tokens.js";

const LIVE = "default", SIDES = ["left", "right"];
const NUMBERS = {
  seed: ["seed", 1, { min: 0, step: 1 }], temperature: ["temperature", 1, { min: 0, max: 2, step: 0.1 }],
  tokens: ["most tokens", 256, { min: 1, step: 1 }], answers: ["answers each", 1, { min: 1, max: 8, step: 1 }],
};

/** One choice while it streams. The tokens' bytes are joined here: a character may be made of several tokens. */
function newAnswer() {
  const decoder = new TextDecoder();
  const answer = { text: "", tokens: [], end: null, reward: null };
  return Object.assign(answer, {
    take({ delta, logprobs, finish_reason }) {
      answer.text += delta.content ?? "";
      for (const { token, bytes, logprob } of logprobs?.content ?? []) {
        const text = bytes ? decoder.decode(new Uint8Array(bytes), { stream: true }) : token;
        answer.tokens.push({ text, logprob });
      }
      answer.end = finish_reason ?? answer.end;
    },
  });
}

/** Names that can be asked: the live policy, the base, versions that may be kept, every adapter. */
function useNames(word) {
  const [models, setModels] = useState([]);
  useEffect(() => { ask("/v1/models").then((answer) => setModels(answer.data), () => {}); }, [word]);
  const version = models[0]?.policy_version ?? 0, policy = models.some(({ id }) => id === "policy");
  const before = policy ? [0, version - 2, version - 1, version].filter((one, place, all) => one >= 0 && all.indexOf(one) === place) : [];
  return [...new Set([LIVE, ...models.slice(1).map(({ id }) => id).filter((id) => id !== "policy"), ...before.map((one) => `policy@${one}`)])];
}

export function Chat({ run, info, query, words, go }) {
  const names = useNames(words?.metrics), base = names.find((name) => name.endsWith(":base"));
  const [turns, setTurns] = useState([]);
  const [typed, setTyped] = useState(query.prompt ?? "");
  const [, draw] = useState(0);
  const abort = useRef(null), due = useRef(false);
  const model = { left: query.left || base || LIVE, right: query.right || LIVE };
  const value = (name) => query[name] ?? NUMBERS[name][1];
  const set = (changes) => go(writePlace("chat", [], { ...query, ...changes }), true);
  const redraw = () => {
    if (due.current) return;
    due.current = true;
    requestAnimationFrame(() => { due.current = false; draw((count) => count + 1); });
  };
  useEffect(() => () => abort.current?.abort(), []);
  if (info && !info.live) return html`<p class="empty">There is nobody to talk to: this process does not train the run.</p>`;

  const running = turns.some(({ sides }) => SIDES.some((side) => sides[side].running));
  const column = async (turn, side) => {
    const part = turn.sides[side];
    const messages = [];
    for (const { prompt, sides } of turn.before) messages.push({ role: "user", content: prompt }, { role: "assistant", content: sides[side].answers[0].text });
    const body = { model: part.model, messages: [...messages, { role: "user", content: turn.prompt }], stream: true, logprobs: true,
      seed: Number(value("seed")), temperature: Number(value("temperature")), max_tokens: Number(value("tokens")), n: Number(value("answers")) };
    try {
      for await (const chunk of streamed("/v1/chat/completions", body, abort.current.signal)) {
        part.id = chunk.id;
        part.version = chunk.policy_version ?? part.version;
        for (const choice of chunk.choices) (part.answers[choice.index] ??= newAnswer()).take(choice);
        redraw();
      }
    } catch (error) {
      part.error = error.name === "AbortError" ? { message: "stopped" } : error;
    }
    part.running = false;
    redraw();
  };
  const send = (event) => {
    event?.preventDefault();
    if (!typed.trim() || running) return;
    abort.current = new AbortController();
    const sides = Object.fromEntries(SIDES.map((side) => [side, { model: model[side], answers: [], running: true, error: null, id: null, version: null }]));
    const whole = turns.every((turn) => SIDES.every((side) => turn.sides[side].answers[0]));
    const turn = { prompt: typed, sides, before: whole ? turns : [], sent: null, problem: null };
    setTurns([...(whole ? turns : []), turn]);
    setTyped("");
    SIDES.forEach((side) => column(turn, side));
  };
  const typing = (event) => (event.key === "Enter" && !event.shiftKey ? send(event) : undefined);
  return html`
    <form class="panel chat" onSubmit=${send}>
      <div class="models">${SIDES.map((side) => html`<label><span>${side} model</span><input list="models" name=${side} value=${model[side]} autocomplete="off" onChange=${(event) => set({ [side]: event.target.value })} /></label>`)}
        <datalist id="models">${names.map((name) => html`<option value=${name}>${name === LIVE ? "the live policy" : name === base ? "without what was learned" : ""}</option>`)}</datalist></div>
      <div class="models numbers">${Object.entries(NUMBERS).map(([name, [label, , limits]]) => html`<label><span>${label}</span><input type="number" name=${name} ...${limits} value=${value(name)} onChange=${(event) => set({ [name]: event.target.value })} /></label>`)}</div>
      <textarea name="prompt" rows="3" aria-label="prompt" placeholder="Ask both (Enter sends, Shift+Enter makes a line)" value=${typed} onInput=${(event) => setTyped(event.target.value)} onKeyDown=${typing}></textarea>
      <p class="filters"><button class="primary" type="submit" disabled=${running}>Send</button>
        ${running && html`<button type="button" onClick=${() => abort.current.abort()}>Stop</button>`}
        ${turns.length > 0 && !running && html`<button type="button" onClick=${() => setTurns([])}>New conversation</button>`}
        <${Scale} scale=${SCALES.logprobs} /></p>
    </form>
    ${turns.map((turn) => html`<section class="turn-of" aria-label="turn"><pre class="text large" dir="ltr">${visible(turn.prompt)}</pre>
      <div class="columns">${SIDES.map((side) => html`<${Side} part=${turn.sides[side]} rewards=${info?.rewards && isLive(turn.sides[side].model, names)} redraw=${redraw} sent=${turn.sent} />`)}</div>
      ${info?.rewards && html`<${Rewards} turn=${turn} redraw=${redraw} names=${names} />`}</section>`)}
    ${!turns.length && html`<p class="empty">One prompt, one seed, two models. Left is the base, right the policy as it is now; <code>policy@N</code> is an earlier version, and every adapter can be named.</p>`}`;
}

const isLive = (model, names) => model === LIVE || model === "policy" || `${model}:base` === names.find((name) => name.endsWith(":base"));

function Side({ part, rewards, redraw, sent }) {
  const [at, setAt] = useState([0, -1]);
  const over = (number) => (event) => { const i = event.target.dataset?.i; if (i !== undefined) setAt([number, Number(i)]); };
  const move = (number, count) => (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt([number, Math.max(0, Math.min(count - 1, (at[0] === number ? at[1] : -1) + step))]);
  };
  const shown = part.answers[at[0]]?.tokens[at[1]];
  return html`<div class="side"><p class="quiet" aria-live="polite"><b>${visible(part.model)}</b>${part.version === null || part.model.endsWith(":base") ? "" : ` · version ${part.version}`}${shown ? html` · <code>${visible(JSON.stringify(shown.text))}</code> log-probability <b>${short(shown.logprob)}</b>` : ""}</p>
    ${part.answers.map((answer, number) => answer && html`<article class="answer" key=${number} aria-label=${`answer ${number + 1} of ${part.model}`}>
      <div class="text" dir="ltr" tabindex="0" role="group" aria-label="tokens; arrow keys move" onMouseOver=${over(number)} onKeyDown=${move(number, answer.tokens.length)}>${answer.tokens.map(({ text, logprob }, i) => html`<span class=${`token ${shade(SCALES.logprobs, logprob)} ${at[0] === number && at[1] === i ? "at" : ""}`} data-i=${i}>${visible(text)}</span>`)}</div>
      <footer class="quiet">${answer.tokens.length} tokens${answer.end ? ` · ended by ${answer.end}` : " …"} · mean log-probability <b>${short(mean(answer.tokens.map(({ logprob }) => logprob)))}</b>
        ${rewards && answer.end && !sent && html`<span class="rate" role="group" aria-label="reward">${[["right", 1], ["wrong", 0]].map(([name, reward]) =>
          html`<button type="button" class="chip" aria-pressed=${answer.reward === reward} onClick=${() => { answer.reward = answer.reward === reward ? null : reward; redraw(); }}>${name}</button>`)}</span>`}</footer></article>`)}
    <${Problem} error=${part.error} /></div>`;
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** Rated answers of one turn become a group: the policy learns from it as from every other one. */
function Rewards({ turn, redraw, names }) {
  const parts = SIDES.map((side) => turn.sides[side]).filter(({ model, answers }) => isLive(model, names) && answers.some((answer) => answer?.reward !== null && answer?.reward !== undefined));
  const rated = parts.flatMap(({ answers }) => answers.filter((answer) => answer.reward !== null));
  if (turn.sent) return html`<p class="quiet" role="status">Rewards sent: ${turn.sent.map(({ id }) => html`<a href=${writePlace("group", [id])}>${id}</a> `)} is trained on with its batch.</p>`;
  if (!rated.length) return null;
  const send = async () => {
    try {
      turn.sent = (await post("/v1/rewards", { ids: parts.map(({ id }) => id), rewards: parts.flatMap(({ answers }) => answers.map(({ reward }) => reward)), environment: "chat" })).groups;
      turn.problem = null;
    } catch (error) {
      turn.problem = error;
    }
    redraw();
  };
  return html`<p class="filters"><button class="primary" type="button" disabled=${rated.length < 2} onClick=${send}>Send rewards</button>
    <span class="quiet">${rated.length < 2 ? "rate two answers or more: rewards are compared with each other" : "the policy will be trained on these answers"}</span></p>
    <${Problem} error=${turn.problem} />`;
}
