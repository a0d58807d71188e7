// The page: where it is (the address), what the server has (one stream), and the view of it.
import { html, render, useEffect, useKeys, useRef, useState } from "./ui.js";
import { follow, get, setKey, takeKey, together } from "./api.js";
import { merged, readPlace, writePlace } from "./lib.js";
import { Overview, KEYS } from "./overview.js";
import { Group, Search, Step } from "./groups.js";
import { HeldOutPrompts } from "./heldout.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Controls } from "./controls.js";
import { Feedback } from "./feedback.js";

const HELP = [
  ["1 … 9", "the tabs, from left to right"], ["[ ]", "step before, next step"], ["u i", "group before, next group; o opens it"],
  ["j k", "next answer, answer before"], ["← →", "move on a chart or through tokens"], ["Enter", "on a chart: the groups of that step"],
  ["t", "on a chart: its table"], ["/", "search"], ["?", "this help"],
];

/** A long name without its middle. */
const inShort = (name) => (name.length > 32 ? `${name.slice(0, 12)}…${name.slice(-12)}` : name);

const TITLE_MS = 10000; // between two titles: for each the browser draws its own window too

function usePlace() {
  const [place, setPlace] = useState(readPlace(location.hash));
  useEffect(() => {
    const moved = () => setPlace(readPlace(location.hash));
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  const go = (to, replace = false) => {
    if (replace) { history.replaceState(null, "", to); setPlace(readPlace(to)); }
    else location.hash = to;
  };
  return [place, go];
}

/** Numbers of a run; only new steps are asked for. */
function useMetrics(run, word, state) {
  const kept = useRef({});
  const [, draw] = useState(0);
  useEffect(() => {
    if (word === undefined) return;
    const entry = (kept.current[run] ??= { asking: false, again: false, data: null });
    entry.word = word;
    if (entry.asking) { entry.again = true; return; }
    const ask = async () => {
      entry.asking = true;
      do {
        entry.again = false;
        try {
          const query = { run, keys: KEYS.join(","), after: entry.data?.cursor };
          entry.data = merged(entry.data, await (entry.data ? together("metrics", query, entry.word) : get("metrics", query)));
          draw((count) => count + 1);
        } catch { /* the stream says what is wrong; the next change asks again */ }
      } while (entry.again);
      entry.asking = false;
    };
    ask();
  }, [run, word, state]);
  return kept.current[run]?.data ?? null;
}

function useTheme() {
  const [theme, setTheme] = useState(localStorage.getItem("mlx_parallm.theme") ?? "auto");
  const [dark, setDark] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
  useEffect(() => {
    const query = matchMedia("(prefers-color-scheme: dark)"), changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  const shown = theme === "auto" ? (dark ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = shown;
  const next = () => {
    const to = shown === "dark" ? "light" : "dark";
    localStorage.setItem("mlx_parallm.theme", to);
    setTheme(to);
  };
  return [shown, next];
}

/** The newest title, at most every TITLE_MS; at once that of another `run`. */
function useTitle(title, run) {
  const set = useRef({ due: 0, run });
  useEffect(() => {
    const act = () => { document.title = title; set.current = { due: Date.now() + TITLE_MS, run }; };
    const early = set.current.run === run ? set.current.due - Date.now() : 0;
    const timer = setTimeout(act, Math.max(0, early));
    return () => clearTimeout(timer);
  }, [title, run]);
}

function App() {
  const [place, go] = usePlace();
  const [theme, turn] = useTheme();
  const [runs, setRuns] = useState(null);
  const [heard, setWords] = useState(null), words = heard ?? [];
  const [lost, setLost] = useState(null);
  const [help, setHelp] = useState(false);
  const [smooth, setSmooth] = useState(Number(localStorage.getItem("mlx_parallm.smooth") ?? 0.8));
  const first = useRef(null), wanted = place.query.run ?? sessionStorage.getItem("mlx_parallm.run");
  if (runs?.length) first.current ??= runs[0].id; // runs that begin later do not take the page over
  const chosen = (list) => list?.find(({ id }) => id === Number(wanted ?? -1)) ?? list?.find(({ id }) => id === first.current) ?? list?.[0];
  const info = chosen(runs), run = (info ?? chosen(words))?.id ?? 0, word = words.find(({ id }) => id === run);
  const metrics = useMetrics(run, word && `${word.metrics} ${word.marks}`, word?.state);
  const last = metrics?.steps.at(-1) ?? 0;

  useEffect(() => follow(
    (changed) => setWords((before) => (JSON.stringify(changed) === JSON.stringify(before) ? before : changed)),
    (failure) => setLost((before) => (failure ? { failure, since: before?.since ?? new Date() } : null)),
  ), []);
  useEffect(() => {
    if (heard === null) return;
    get("runs").then((answer) => setRuns(answer.runs), () => {});
  }, [heard && words.map((one) => `${one.id} ${one.state}`).join(), last > 0]);
  useTitle(info ? `${info.name} · ${last}${info.total_steps ? `/${info.total_steps}` : ""}` : "mlx_parallm", info?.name);
  useEffect(() => { window.scrollTo(0, 0); }, [place.view, place.rest.join()]);

  const step = place.view === "step" ? Number(place.rest[0] ?? (last || 1)) : last || 1;
  const tabs = [["Overview", "overview"], ["Groups", "step", [step], ["group", "tokens"]], ["Search", "search"], ["Held-out", "heldout"], ["Timeline", "timeline"],
    ...(info?.live ? [["Chat", "chat"], ["Controls", "controls"]] : []), ...(info?.feedback ? [["Feedback", "feedback"]] : []), ...(runs?.length > 1 ? [["Compare", "compare"]] : [])];
  useKeys((event) => {
    const numbered = tabs[Number(event.key) - 1];
    const to = event.key === "/" ? writePlace("search") : numbered && writePlace(numbered[1], numbered[2] ?? []);
    if (to) {
      event.preventDefault();
      go(to);
      if (event.key === "/") setTimeout(() => document.getElementById("search-text")?.focus(), 50);
    } else if (event.key === "[" && step > 1) go(writePlace("step", [step - 1], place.view === "step" ? place.query : {}));
    else if (event.key === "]" && step < last) go(writePlace("step", [step + 1], place.view === "step" ? place.query : {}));
    else if (event.key === "?") setHelp(!help);
    else if (event.key === "Escape") setHelp(false);
  });

  if (lost?.failure.status === 401) return html`<${AskKey} />`;
  const choose = (number) => { sessionStorage.setItem("mlx_parallm.run", number); go(writePlace("overview", [], { run: number })); };
  const shared = { run, info, metrics, words: word, query: place.query, go, theme };
  const views = {
    overview: () => html`<${Overview} ...${shared} smooth=${smooth} setSmooth=${(value) => { localStorage.setItem("mlx_parallm.smooth", value); setSmooth(value); }} />`,
    step: () => html`<${Step} key=${step} ...${shared} step=${step} />`,
    group: () => html`<${Group} key=${place.rest[0]} ...${shared} id=${place.rest[0]} />`,
    tokens: () => html`<${Tokens} key=${place.rest.join()} ...${shared} id=${place.rest[0]} number=${Number(place.rest[1] ?? 0)} />`,
    search: () => html`<${Search} ...${shared} />`,
    chat: () => html`<${Chat} key=${run} ...${shared} />`,
    controls: () => html`<${Controls} key=${run} ...${shared} />`,
    feedback: () => html`<${Feedback} key=${run} ...${shared} />`,
    heldout: () => html`<${HeldOutPrompts} key=${run} ...${shared} />`,
    timeline: () => html`<${Timeline} key=${run} ...${shared} />`,
    compare: () => runs?.length > 1 && html`<${Compare} ...${shared} runs=${runs} words=${words} smooth=${smooth} />`,
  };
  const tab = ([name, view, rest = [], also = []], number) => html`<a href=${writePlace(view, rest)} title=${`key ${number + 1}`} aria-current=${place.view === view || also.includes(place.view) ? "page" : null}>${name}</a>`;
  return html`
    <header class="bar">
      <div class="who">
        ${runs && runs.length > 1 ? html`<h1><select aria-label="run" value=${run} onChange=${(event) => choose(Number(event.target.value))}>${runs.map(({ id, name }) => html`<option value=${id} selected=${id === run}>${inShort(name)}</option>`)}</select></h1>`
          : html`<h1 title=${info?.name}>${inShort(info?.name ?? "mlx_parallm")}</h1>`}
        ${info && html`<span class="quiet model">${info.model ?? ""}${info.algorithm ? ` · ${info.algorithm}` : ""}</span>`}
      </div>
      <nav aria-label="views">${tabs.map(tab)}</nav>
      <div class="now">
        ${info && html`<span class=${`badge ${word?.state ?? info.state}`}>${word?.state ?? info.state}</span> <span class="count">${last}${info.total_steps ? ` / ${info.total_steps}` : ""}</span>${info.ended && html` <span class="count">${info.ended}</span>`}`}
        <button class="plain" onClick=${turn} aria-label=${theme === "dark" ? "light colours" : "dark colours"} title="light or dark">${theme === "dark" ? "☀" : "☾"}</button>
        <button class="plain" onClick=${() => setHelp(!help)} aria-label="keys" title="keys (?)">?</button>
      </div>
      ${info?.total_steps ? html`<progress max=${info.total_steps} value=${last} aria-label="steps"></progress>` : null}
    </header>
    ${lost && html`<p class="lost" role="alert">${lost.failure.status === 503 ? `${lost.failure.message}.` : `Not reachable since ${lost.since.toLocaleTimeString()}. What is shown is from before; the page goes on by itself.`}</p>`}
    ${help && html`<aside class="help" aria-label="keys"><h2>Keys</h2><dl>${HELP.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}</dl></aside>`}
    <main>${info || word ? (views[place.view] ?? views.overview)()
      : runs && html`<p class="empty">No model is trained here yet: a run is shown as soon as a client creates one.</p>`}</main>`;
}

function AskKey() {
  const save = (event) => { event.preventDefault(); setKey(event.target.elements.key.value); location.reload(); };
  return html`<main class="ask"><h1>mlx_parallm</h1><p>This server has an API key. The link that the run printed has it in it; or type it here. It stays in this tab.</p>
    <form onSubmit=${save}><input name="key" type="password" autocomplete="off" aria-label="API key" /> <button class="primary">Open</button></form></main>`;
}

takeKey();
render(html`<${App} />`, document.getElementById("app"));
