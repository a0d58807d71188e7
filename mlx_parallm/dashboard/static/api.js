// The server: data with the key, and one stream for each tab.
const KEY = "mlx_parallm.key";

/** Take the key out of the address: a fragment is sent to nobody, and now it is not in the history either. */
export function takeKey() {
  const match = /^#key=(.*)$/.exec(location.hash);
  if (!match) return;
  sessionStorage.setItem(KEY, decodeURIComponent(match[1]));
  history.replaceState(null, "", location.pathname);
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** `status`: HTTP's, or 0 when nobody answered. */
export class Failure extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

async function checked(request) {
  let response;
  try {
    response = await request;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the server does not answer", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Failure(body?.error?.message ?? `HTTP ${response.status}`, response.status);
}

export async function get(name, query = {}, signal) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const url = `/dashboard/api/${name}${kept.length ? `?${new URLSearchParams(kept)}` : ""}`;
  return (await checked(fetch(url, { headers: headers(), signal }))).json();
}

const QUIET_MS = 25000; // the server sends something every 8 s
const STALLED_MS = 3000;
const RETRY_MS = 1000;

/**
 * Follow the stream of changes while the tab is seen. `onChange(words)`: a word for each kind of data of each run, or
 * null: ask for everything. `onState(failure)`: null when connected. Where no stream can be opened within 3 s (six
 * tabs use up a browser's connections), it asks every 3 s instead.
 */
export function follow(onChange, onState) {
  let abort = null;
  const seen = () => new Promise((resolve) => {
    if (!document.hidden) return resolve();
    document.addEventListener("visibilitychange", resolve, { once: true });
  });
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  document.addEventListener("visibilitychange", () => document.hidden && abort?.abort());

  async function stream() {
    abort = new AbortController();
    let stalled = false;
    let timer = setTimeout(() => { stalled = true; abort.abort(); }, STALLED_MS);
    try {
      const response = await checked(fetch("/dashboard/api/events", { headers: headers(), signal: abort.signal }));
      onState(null);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        clearTimeout(timer);
        timer = setTimeout(() => abort.abort(), QUIET_MS);
        const { value, done } = await reader.read();
        if (done) return;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
          const data = event.replace(/^data: /, "");
          if (data !== "[DONE]") onChange(JSON.parse(data).runs ?? null);
        }
      }
    } catch (error) {
      if (stalled) onChange(null);
      else if (error.name !== "AbortError") onState(error instanceof Failure ? error : new Failure("the connection was lost", 0));
    } finally {
      clearTimeout(timer);
    }
  }

  (async () => {
    for (;;) {
      await seen();
      await stream();
      await wait(RETRY_MS);
    }
  })();
}
