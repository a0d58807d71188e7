/** One HTTP call: the key, a time limit, the caller's signal, retries, errors. No package is needed for it. */

import { apiError, ConnectionError, ParallmError, TimeoutError, UnexpectedAnswerError } from './errors.js'
import { events, type ServerSentEvent } from './sse.js'

export interface HttpOptions {
  /** The server, without /v1. */
  baseURL: string
  /** Sent as a Bearer token. */
  apiKey?: string | undefined
  /** For each attempt, to the end of its body; of a stream, to its beginning and between two events. Infinity: no limit. */
  timeoutMs?: number
  /** How often a call is sent again. */
  maxRetries?: number
  /** Instead of the platform's own. */
  fetch?: typeof fetch
}

export interface CallOptions {
  signal?: AbortSignal | undefined
  timeoutMs?: number
  maxRetries?: number
}

/**
 * When a call may be sent again. "always": sending it twice is sending it once; after 429, 503 and lost connections.
 * "refused": only after 429 and 503, which say that nothing was done. "never": neither.
 */
export type Retry = 'always' | 'refused' | 'never'

export type Query = Readonly<Record<string, string | number | boolean | null | undefined>>

export interface Call {
  method: 'GET' | 'POST'
  path: string
  query?: Query
  body?: unknown
  retry: Retry
  /** Statuses beside 2xx that are answers and not errors. */
  also?: readonly number[]
}

const RETRIED: readonly number[] = [429, 503]
const FIRST_DELAY_MS = 250
const LONGEST_DELAY_MS = 8_000
/** What a timer can wait; it would not wait at all for more. */
const LONGEST_TIMER_MS = 2 ** 31 - 1

export class Http {
  readonly baseURL: string
  readonly apiKey: string | undefined
  readonly timeoutMs: number
  readonly maxRetries: number
  readonly #fetch: typeof fetch

  /** Throws `ParallmError`: an address or a key that no call could use. */
  constructor(options: HttpOptions) {
    this.baseURL = checkedURL(options.baseURL)
    this.apiKey = checkedKey(options.apiKey)
    this.timeoutMs = options.timeoutMs ?? 60_000
    this.maxRetries = options.maxRetries ?? 2
    this.#fetch = options.fetch ?? ((input, init) => globalThis.fetch(input, init))
  }

  /** The JSON of the answer. Throws what `errors.ts` lists, or the signal's reason. */
  async json(call: Call, options: CallOptions = {}): Promise<unknown> {
    const init = this.#init(call)
    return this.#retried(call, options, async (limit) => {
      const answer = await this.#answer(call, { ...init, signal: limit.signal })
      const text = await answer.text()
      try {
        return JSON.parse(text) as unknown
      } catch (cause) {
        const path = `${call.method} ${call.path}`
        throw new UnexpectedAnswerError(`${path} answered ${answer.status} and no JSON: ${text.slice(0, 200)}`, { cause })
      }
    })
  }

  /** The events of a stream, which is opened by the first `next()`. */
  async *stream(call: Call, options: CallOptions = {}): AsyncGenerator<ServerSentEvent, void, undefined> {
    const limit = new Limit(options.timeoutMs ?? this.timeoutMs, options.signal)
    const init = { ...this.#init(call), signal: limit.signal }
    try {
      const answer = await this.#retried(call, options, () => this.#answer(call, init), limit)
      if (answer.body === null) throw new UnexpectedAnswerError(`${call.path} answered without a body`)
      for await (const event of events(answer.body)) {
        limit.stop()
        yield event
        limit.start()
      }
    } catch (error) {
      throw limit.explain(error)
    } finally {
      limit.close()
    }
  }

  #init({ method, body }: Call): RequestInit {
    const headers: Record<string, string> = {}
    if (this.apiKey !== undefined) headers['Authorization'] = `Bearer ${this.apiKey}`
    if (method !== 'GET') headers['Content-Type'] = 'application/json' // without a body too: or a page's POST is refused
    if (body === undefined) return { method, headers }
    return { method, headers, body: JSON.stringify(body) }
  }

  async #answer(call: Call, init: RequestInit): Promise<Response> {
    const answer = await this.#fetch(this.baseURL + call.path + queryText(call.query), init)
    if (answer.ok || call.also?.includes(answer.status)) return answer
    const error = apiError(answer.status, await answer.text(), answer.headers.get('x-request-id'))
    throw withDelay(error, answer.headers.get('retry-after'))
  }

  async #retried<T>(
    call: Call,
    options: CallOptions,
    attempt: (limit: Limit) => Promise<T>,
    shared?: Limit,
  ): Promise<T> {
    const most = options.maxRetries ?? this.maxRetries
    for (let done = 0; ; done++) {
      options.signal?.throwIfAborted()
      const limit = shared ?? new Limit(options.timeoutMs ?? this.timeoutMs, options.signal)
      try {
        return await attempt(limit)
      } catch (error) {
        const explained = limit.explain(error)
        if (done >= most || !mayRetry(call.retry, explained)) throw explained
        await sleep(delayMs(done, explained), options.signal)
      } finally {
        if (shared === undefined) limit.close()
      }
    }
  }
}

/** The caller's signal and a time limit as one signal. */
class Limit {
  readonly #controller = new AbortController()
  readonly #onAbort = (): void => this.#controller.abort(this.outer?.reason)
  #timer: ReturnType<typeof setTimeout> | undefined

  constructor(
    readonly timeoutMs: number,
    readonly outer: AbortSignal | undefined,
  ) {
    if (outer?.aborted) this.#onAbort()
    outer?.addEventListener('abort', this.#onAbort, { once: true })
    this.start()
  }

  get signal(): AbortSignal {
    return this.#controller.signal
  }

  start(): void {
    this.stop()
    if (this.timeoutMs > LONGEST_TIMER_MS) return
    const message = `no whole answer within ${this.timeoutMs} ms`
    this.#timer = setTimeout(() => this.#controller.abort(new TimeoutError(message)), this.timeoutMs)
  }

  stop(): void {
    clearTimeout(this.#timer)
  }

  close(): void {
    this.stop()
    this.outer?.removeEventListener('abort', this.#onAbort)
  }

  /** What to throw for what `fetch` or a body's reader threw. */
  explain(error: unknown): unknown {
    if (this.signal.aborted) return this.signal.reason
    if (error instanceof TypeError) {
      const cause = error.cause instanceof Error ? `: ${error.cause.message}` : ''
      return new ConnectionError(`the connection failed${cause || `: ${error.message}`}`, { cause: error })
    }
    return error
  }
}

const delays = new WeakMap<object, number>()

/** Remember the seconds of Retry-After, or its date. */
function withDelay(error: Error & { status: number }, header: string | null): Error {
  if (header !== null && RETRIED.includes(error.status)) {
    const ms = /^\d+$/.test(header.trim()) ? Number(header) * 1000 : Date.parse(header) - Date.now()
    if (Number.isFinite(ms)) delays.set(error, ms)
  }
  return error
}

function mayRetry(retry: Retry, error: unknown): boolean {
  if (retry === 'never') return false
  if (error instanceof ConnectionError) return retry === 'always'
  return typeof error === 'object' && error !== null && 'status' in error && RETRIED.includes(error.status as number)
}

/** Retry-After where the server named it, else twice as long each time, half of it by chance so that clients spread. */
function delayMs(done: number, error: unknown): number {
  const named = typeof error === 'object' && error !== null ? delays.get(error) : undefined
  const backoff = FIRST_DELAY_MS * 2 ** done * (0.5 + Math.random() / 2)
  return Math.min(Math.max(named ?? backoff, 0), LONGEST_DELAY_MS)
}

/** Throws the signal's reason when it is aborted meanwhile. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = (): void => {
      clearTimeout(timer)
      reject(signal?.reason)
    }
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', stop)
      resolve()
    }, ms)
    if (signal?.aborted) stop()
    else signal?.addEventListener('abort', stop, { once: true })
  })
}

/** In a page, an address may be relative to it. */
function checkedURL(text: string): string {
  let url: URL | undefined
  try {
    url = new URL(text, (globalThis as { location?: { href: string } }).location?.href)
  } catch {
    // said below
  }
  if (url === undefined || !/^https?:$/.test(url.protocol) || url.username || url.password || url.search || url.hash) {
    throw new ParallmError(`baseURL ${JSON.stringify(text)} is no address of a server, such as http://127.0.0.1:8000`)
  }
  return url.href.replace(/\/+$/, '')
}

function checkedKey(key: string | undefined): string | undefined {
  try {
    if (key !== undefined) new Headers({ Authorization: `Bearer ${key}` })
  } catch (cause) {
    throw new ParallmError('apiKey has a character that no header may have, such as the end of a line', { cause })
  }
  return key
}

function queryText(query: Query = {}): string {
  const values = Object.entries(query).flatMap(([key, value]) =>
    value === undefined || value === null ? [] : [[key, String(value)]],
  )
  return values.length > 0 ? `?${new URLSearchParams(values).toString()}` : ''
}
