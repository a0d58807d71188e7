// View 11: chats that people agreed to have learned: what waits for a person, and what became of the others.
import { html, useEffect, useState, Problem } from "./ui.js";
import { ask, post } from "./api.js";
import { short, visible } from "./lib.js";

const LOOK_MS = 3000;
const WORDS = { thumb: "a rating", edit: "an edit", message: "the next message", regenerate: "asked again", tool: "a tool's result" };

/** The queue and the counts, again every LOOK_MS and when `turn` changes. */
function useReview(turn) {
  const [state, setState] = useState({ data: null, error: null });
  useEffect(() => {
    const abort = new AbortController();
    const look = async () => {
      try {
        const [status, queue] = await Promise.all(["status", "review"].map((name) => ask(`/v1/feedback/${name}`, abort.signal)));
        setState({ data: { status, queue }, error: null });
      } catch (error) {
        if (error.name !== "AbortError") setState((before) => ({ ...before, error }));
      }
    };
    look();
    const timer = setInterval(look, LOOK_MS);
    return () => { abort.abort(); clearInterval(timer); };
  }, [turn]);
  return state;
}

function Counts({ name, counts }) {
  const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  return html`<section class="panel" aria-label=${name}><h3>${name}</h3>
    ${rows.length ? html`<table><tbody>${rows.map(([what, number]) => html`<tr><th scope="row">${visible(what)}</th><td>${number}</td></tr>`)}</tbody></table>` : html`<p class="quiet">none yet</p>`}</section>`;
}

export function Feedback() {
  const [turn, setTurn] = useState(0), [error, setError] = useState(null), [working, setWorking] = useState(false);
  const state = useReview(turn);
  if (!state.data) return html`<${Problem} error=${state.error} />`;
  const { status, queue } = state.data;
  const decide = async (ids, action) => {
    setWorking(true);
    setError(null);
    try {
      await post("/v1/feedback/review", { ids, action });
    } catch (failure) { setError(failure); }
    setWorking(false);
    setTurn(turn + 1);
  };
  const all = queue.answers.map(({ id }) => id);
  const signals = Object.fromEntries(Object.entries(status.signals).flatMap(([kind, counts]) => Object.entries(counts).map(([outcome, number]) => [`${WORDS[kind] ?? kind}: ${outcome}`, number])));
  return html`<div class="heading"><h2>Chats to learn from</h2><span class="quiet">${queue.review ? `${queue.waiting} wait for you` : "nothing waits for a person: feedback.review is false"}</span>
      ${all.length > 1 && html`<span class="filters"><button type="button" disabled=${working} onClick=${() => decide(all, "approve")}>Approve these ${all.length}</button>
        <button type="button" class="careful" disabled=${working} onClick=${() => decide(all, "reject")}>Reject these ${all.length}</button></span>`}</div>
    <${Problem} error=${error ?? state.error} />
    <div class="answers">${queue.answers.map((one) => html`<article class="answer" tabindex="0" key=${one.id} aria-label=${`answer ${one.id}, reward ${short(one.reward)}`}>
      <p class="quiet">${visible(one.task)} · ${WORDS[one.kind] ?? one.kind} · reward <b>${short(one.reward)}</b></p>
      <pre class="text" dir="ltr">${visible(one.question)}</pre><pre class="text" dir="ltr">${visible(one.answer)}</pre>
      ${one.reply && html`<p class="quiet">the user: <q>${visible(one.reply)}</q></p>`}
      <footer class="filters"><button type="button" class="primary" disabled=${working} onClick=${() => decide([one.id], "approve")}>Learn it</button>
        <button type="button" class="careful" disabled=${working} onClick=${() => decide([one.id], "reject")}>Reject</button></footer></article>`)}</div>
    <div class="controls"><${Counts} name="Answers now" counts=${status.answers} /><${Counts} name="What became of answers" counts=${status.outcomes} />
      <${Counts} name="What became of signals" counts=${signals} /></div>`;
}
