// Preact, its hooks and htm under one name, and what every view uses.
import { h, options, render, Fragment } from "./vendor/preact.mjs";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
import htm from "./vendor/htm.mjs";
import { get } from "./api.js";

options.requestAnimationFrame = queueMicrotask; // effects in the frame of what they belong to, and not in one more

export const html = htm.bind(h);
export { render, Fragment, useEffect, useMemo, useRef, useState };

/** Data of the server, asked for again when the query or `word` changes; the old data stays until the new is there. */
export function useData(name, query, word) {
  const [state, setState] = useState({ data: null, error: null, asked: null });
  const asked = JSON.stringify([name, query]);
  useEffect(() => {
    if (!name) return undefined;
    const abort = new AbortController();
    get(name, query, abort.signal).then(
      (data) => setState({ data, error: null, asked }),
      (error) => error.name !== "AbortError" && setState((before) => ({ ...before, error, asked })),
    );
    return () => abort.abort();
  }, [asked, word]);
  return state.asked === asked ? state : { ...state, error: null, old: true };
}

const CALM_MS = 4000;
const COMPANY_MS = 2000; // that much longer a value waits to be drawn with what comes next: a frame of its own is dear

/** `value`, but for the same `of` a new one only every CALM_MS. */
export function useCalm(value, of) {
  const kept = useRef({ due: 0, value, of }), [, wake] = useState(0);
  const early = kept.current.of === of && kept.current.value !== null ? kept.current.due - Date.now() : 0;
  if (early <= 0 && kept.current.value !== value) kept.current = { due: Date.now() + CALM_MS, value, of };
  const waits = kept.current.value !== value;
  useEffect(() => {
    if (!waits) return undefined;
    const timer = setTimeout(() => wake((count) => count + 1), early + COMPANY_MS);
    return () => clearTimeout(timer);
  }, [waits]);
  return kept.current.value;
}

/** `act(event)` for each key that is pressed outside of a field. It knows what is drawn from the moment it is drawn: a
 * plain effect would come a frame later, and lose a key. */
export function useKeys(act) {
  useLayoutEffect(() => {
    const pressed = (event) => {
      if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
      act(event);
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}

export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message}</p>` : null;
}

/** The images of prompts: name → data URL. */
export function Thumbnails({ of }) {
  const shown = Object.entries(of ?? {});
  return shown.length > 0 && html`<p class="thumbnails">${shown.map(([name, url], i) => html`<img src=${url} alt=${`image ${i + 1} of the prompt`} title=${name} />`)}</p>`;
}
