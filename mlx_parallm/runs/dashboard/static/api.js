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
const POLL_MS = 2000;
const OVERHEAR_MS = 300;
const POLLS_PER_TRY = 30; // before a stream is tried again

/** Tabs with the same key hear each other; a name for it that is not the key (FNV-1a). */
function nameOf(key) {
  let hash = 2166136261;
  for (const byte of new TextEncoder().encode(key)) hash = Math.imul(hash ^ byte, 16777619) >>> 0;
  return `mlx_parallm.changes.${hash}`;
}

const tabs = { leads: false, channel: null, hear: (message) => { tabs.heard = message; }, heard: null };

/**
 * `get`, once for all tabs that follow the same run: the one that leads tells its answer, and the others wait
 * OVERHEAR_MS for it. `word`: of the change that it is asked for; with `query` it says whether two ask the same.
 */
export async function together(name, query, word) {
  const asked = JSON.stringify([name, query, word]);
  if (!tabs.leads) {
    const answer = await overheard(asked);
    if (answer) return answer;
  }
  const answer = await get(name, query);
  if (tabs.leads) tabs.channel.postMessage({ asked, answer });
  return answer;
}

/** What the tab that leads was answered; null: it asked something else, or is late. */
function overheard(asked) {
  const keep = tabs.hear;
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      tabs.hear = keep;
      resolve(tabs.heard?.asked === asked ? tabs.heard.answer : null);
    };
    const timer = setTimeout(end, OVERHEAR_MS);
    tabs.hear = (message) => { keep(message); end(); };
    if (tabs.heard?.asked === asked) end();
  });
}

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Resolves when the tab is seen, with a signal that is aborted when it is hidden. */
const seen = () => new Promise((resolve) => {
  const look = () => {
    if (document.hidden) return;
    document.removeEventListener("visibilitychange", look);
    const hidden = new AbortController();
    document.addEventListener("visibilitychange", () => hidden.abort(), { once: true });
    resolve(hidden.signal);
  };
  document.addEventListener("visibilitychange", look);
  look();
});

/**
 * Follow the changes while the tab is seen. `onChange(words)`: a word for each kind of data of each run.
 * `onState(failure)`: null when connected.
 *
 * Six streams use up a browser's connections to a server. So of all tabs that are seen one holds the stream (the one
 * with the lock) and tells the others. Where there are no locks (plain HTTP to another machine), or where a stream does
 * not begin within 3 s, a tab asks every 2 s instead.
 */
export function follow(onChange, onState) {
  const name = nameOf(sessionStorage.getItem(KEY) ?? "");
  const channel = tabs.channel = new BroadcastChannel(name);
  let last = null;
  const take = ({ runs, failure }) => {
    onState(failure ? new Failure(failure.message, failure.status) : null);
    if (runs) onChange(runs);
  };
  const tell = (message) => { last = message; take(message); channel.postMessage(message); };
  channel.onmessage = ({ data }) => {
    if (data.asked) tabs.hear(data);
    else if (data.ask) tabs.leads && last && channel.postMessage(last);
    else if (!document.hidden) take(data); // a hidden tab asks when it is seen again
  };
  const failed = (error) => tell({ failure: error instanceof Failure ? { message: error.message, status: error.status } : { message: "the connection was lost", status: 0 } });

  /** Ends when the connection does. Returns whether the stream began within STALLED_MS. */
  async function stream(hidden) {
    const own = new AbortController(), stop = () => own.abort();
    hidden.addEventListener("abort", stop);
    let stalled = false, timer = setTimeout(() => { stalled = true; stop(); }, STALLED_MS);
    const heard = () => { clearTimeout(timer); timer = setTimeout(stop, QUIET_MS); };
    try {
      const response = await checked(fetch("/dashboard/api/events", { headers: headers(), signal: own.signal }));
      for await (const event of events(response, heard)) if (event.runs) tell({ runs: event.runs });
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    } finally {
      clearTimeout(timer);
      hidden.removeEventListener("abort", stop);
    }
    return !stalled;
  }

  async function poll(hidden) {
    try {
      const signal = AbortSignal.any([hidden, AbortSignal.timeout(QUIET_MS)]);
      tell({ runs: (await get("events", { once: true }, signal)).runs });
    } catch (error) {
      if (error.name !== "AbortError") failed(error);
    }
  }

  /** Until the tab is hidden, or has the wrong key: then another tab may try. */
  async function lead(hidden) {
    let streams = !!navigator.locks;
    let polls = 0;
    tabs.leads = true;
    while (!hidden.aborted && last?.failure?.status !== 401) {
      if (streams) streams = await stream(hidden);
      else await poll(hidden);
      if (!streams && ++polls % POLLS_PER_TRY === 0) streams = !!navigator.locks;
      if (!hidden.aborted) await wait(streams ? RETRY_MS : POLL_MS);
    }
    tabs.leads = false;
    last = null;
  }

  (async () => {
    for (;;) {
      const hidden = await seen();
      channel.postMessage({ ask: true });
      if (navigator.locks) await navigator.locks.request(name, { signal: hidden }, () => lead(hidden)).catch(() => {});
      else await lead(hidden);
      await wait(RETRY_MS);
    }
  })();
}
