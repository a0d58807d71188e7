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

const queryOf = (query) => {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `?${new URLSearchParams(kept)}` : "";
};

/** Any route of the server, e.g. "/v1/models". */
export const ask = async (path, signal) => (await checked(fetch(path, { headers: headers(), signal }))).json();

export const get = (name, query = {}, signal) => ask(`/dashboard/api/${name}${queryOf(query)}`, signal);

const posted = (path, body, signal) => checked(fetch(path, {
  method: "POST", headers: { ...headers(), "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
}));

export const post = async (path, body = {}) => (await posted(path, body)).json();

/** The answer to a POST with `stream: true`, one event after the other. Throws Failure: what the server says in it. */
export async function* streamed(path, body, signal) {
  for await (const event of events(await posted(path, body, signal))) {
    if (event.error) throw new Failure(event.error.message, 0);
    yield event;
  }
}

/** Server-sent events as objects; `onBytes`: called whenever something has come. */
async function* events(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    onBytes();
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
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
      const heard = () => { clearTimeout(timer); timer = setTimeout(() => abort.abort(), QUIET_MS); };
      for await (const event of events(response, heard)) onChange(event.runs ?? null);
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
