/** The routes of mlx_parallm itself. For chat, give `client.openai` to the package `openai`. */

import { get, post, type Answer, type Body, type QueryOf } from './api.js'
import { ConnectionError, ParallmError, UnavailableError } from './errors.js'
import { Http, sleep, type CallOptions, type HttpOptions, type Retry } from './http.js'
import type { Healthy, ListedGroup, ModelEntry, RunSummary, Settings, Unavailable } from './openapi/server.js'
import { watchMetrics, type LiveMetrics, type WatchOptions } from './watch.js'

export interface ParallmOptions extends Omit<HttpOptions, 'baseURL'> {
  /** The server, without /v1; default http://127.0.0.1:8000. */
  baseURL?: string
}

/** What `new OpenAI(…)` of the package `openai` takes. */
export interface OpenAIOptions {
  baseURL: string
  apiKey: string
}

export type GroupsQuery = QueryOf<'/dashboard/api/groups', 'get'>
type ControlAnswer = Answer<'/dashboard/api/control', 'post'>

/** A training run that serves (`mlx_parallm train`) or a server (`mlx_parallm serve`), where what needs a run is a `ConflictError` or a `NotFoundError`. */
export class MlxParallm {
  readonly http: Http
  readonly training: Training
  readonly rollouts: Rollouts
  readonly engine: Engine

  constructor(options: ParallmOptions = {}) {
    this.http = new Http({ ...options, baseURL: options.baseURL ?? 'http://127.0.0.1:8000' })
    this.training = new Training(this.http)
    this.rollouts = new Rollouts(this.http)
    this.engine = new Engine(this.http)
  }

  /** `new OpenAI(client.openai)` talks to this server. */
  get openai(): OpenAIOptions {
    return openaiOptions(this.http, '/v1')
  }

  /** Whether a request sent now would be worked on; `status` is "ok" when it is. */
  health(options?: CallOptions): Promise<Healthy | Unavailable> {
    return get(this.http, '/health', { also: [503] }, options)
  }

  /**
   * Waits until the model is loaded. Throws `ConnectionError` when nothing answers for `absentMs` (60,000), as where the
   * address is wrong; `UnavailableError` when loading failed; and the signal's reason.
   */
  async ready({ absentMs = 60_000, signal }: { absentMs?: number; signal?: AbortSignal } = {}): Promise<Healthy> {
    let answered = Date.now()
    for (;;) {
      try {
        const health = await this.health({ signal, maxRetries: 0 })
        answered = Date.now()
        if (isHealthy(health)) return health
        if (health.status === 'failed') throw new UnavailableError(503, health.reason)
      } catch (error) {
        if (!(error instanceof ConnectionError) || Date.now() - answered > absentMs) throw error
      }
      await sleep(100, signal)
    }
  }

  async models(options?: CallOptions): Promise<ModelEntry[]> {
    return (await get(this.http, '/v1/models', {}, options)).data
  }

  async version(options?: CallOptions): Promise<string> {
    return (await get(this.http, '/version', {}, options)).version
  }

  /**
   * Rewards for an answer of the policy that is trained, by the `id` of the answer: one for each choice, null to leave
   * one out. Several ids: answers to the same prompt. The groups are on the disk when this returns.
   */
  reward(
    id: string | readonly string[],
    rewards: readonly (number | null)[],
    options: CallOptions & { environment?: string } = {},
  ): Promise<Answer<'/v1/rewards', 'post'>> {
    const named = typeof id === 'string' ? { id } : { ids: [...id] }
    const { environment, ...rest } = options
    const body = { ...named, rewards: [...rewards], ...(environment === undefined ? {} : { environment }) }
    return post(this.http, '/v1/rewards', { body, retry: 'refused' }, rest)
  }

  /** A recorded session; it begins with its first call. */
  session(name: string): Session {
    return new Session(this.http, name)
  }

  /** The runs that this server shows; `live`: it trains the run. */
  async runs(options?: CallOptions): Promise<RunSummary[]> {
    return (await get(this.http, '/dashboard/api/runs', {}, options)).runs
  }
}

/** What is recorded below /sessions/NAME. Throws `ParallmError` for the names that are no part of an address: "", "." and "..". */
export class Session {
  constructor(
    private readonly http: Http,
    readonly name: string,
  ) {
    if (/^\.{0,2}$/.test(name)) throw new ParallmError(`${JSON.stringify(name)} cannot be the name of a session`)
  }

  /** `new OpenAI(session.openai)` talks to the server and is recorded. */
  get openai(): OpenAIOptions {
    return openaiOptions(this.http, `/sessions/${encodeURIComponent(this.name)}/v1`)
  }

  /** A score, label or comment for the session, or with `response_id` for one of its answers. Where the server trains, `training` says what became of a score. */
  feedback(
    body: Body<'/sessions/{name}/feedback'>,
    options?: CallOptions,
  ): Promise<Answer<'/sessions/{name}/feedback', 'post'>> {
    const params = { name: this.name }
    return post(this.http, '/sessions/{name}/feedback', { params, body, retry: 'never' }, options)
  }
}

/** The run that this server trains: numbers, control, rollback. */
export class Training {
  constructor(private readonly http: Http) {}

  /** Columns of metrics.jsonl. `keys`: names, * stands for anything; `after`: the cursor of an earlier answer. */
  metrics(
    query: Omit<QueryOf<'/dashboard/api/metrics', 'get'>, 'keys'> & { keys?: readonly string[] } = {},
    options?: CallOptions,
  ): Promise<Answer<'/dashboard/api/metrics', 'get'>> {
    const { keys = ['reward_mean'], ...rest } = query
    return get(this.http, '/dashboard/api/metrics', { query: { ...rest, keys: keys.join(',') } }, options)
  }

  /** Metrics as they come: first those that there are, then each new step, until the run ends. */
  watch(options: WatchOptions = {}): AsyncGenerator<LiveMetrics, void, undefined> {
    return watchMetrics(this.http, this, options)
  }

  /** What `mlx_parallm explain` finds. */
  health(query: OfRun = {}, options?: CallOptions): Promise<Answer<'/dashboard/api/health', 'get'>> {
    return get(this.http, '/dashboard/api/health', { query }, options)
  }

  async evaluations(
    query: OfRun = {},
    options?: CallOptions,
  ): Promise<Answer<'/dashboard/api/evaluations', 'get'>['evaluations']> {
    return (await get(this.http, '/dashboard/api/evaluations', { query }, options)).evaluations
  }

  /** What can be ordered now. */
  state(options?: CallOptions): Promise<Answer<'/dashboard/api/control', 'get'>> {
    return get(this.http, '/dashboard/api/control', {}, options)
  }

  /** Every request stands still, those of the rollouts too. */
  pause(options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'pause' }, 'always', options)
  }

  resume(options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'resume' }, 'always', options)
  }

  /** A checkpoint when the step ends; `status` is "waiting" when that takes long. */
  checkpoint(options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'checkpoint' }, 'never', options)
  }

  /** Saves a checkpoint and ends the run. */
  stop(options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'stop' }, 'never', options)
  }

  /** A mark on the charts, at the present step. */
  note(text: string, options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'note', text }, 'never', options)
  }

  /** Other settings from the next step on. */
  change(settings: Partial<Settings>, options?: CallOptions): Promise<ControlAnswer> {
    return this.#order({ action: 'change', settings }, 'never', options)
  }

  /** The weights go back to an earlier version or checkpoint. `status` is "waiting" when the step takes long: see `lastRollback`. */
  rollback(to: RollbackTarget, options?: CallOptions): Promise<Answer<'/v1/training/rollback', 'post'>> {
    return post(this.http, '/v1/training/rollback', { body: to, retry: 'never' }, options)
  }

  lastRollback(options?: CallOptions): Promise<Answer<'/v1/training/rollback', 'get'>> {
    return get(this.http, '/v1/training/rollback', {}, options)
  }

  #order(body: Body<'/dashboard/api/control'>, retry: Retry, options?: CallOptions): Promise<ControlAnswer> {
    return post(this.http, '/dashboard/api/control', { body, retry }, options)
  }
}

export type RollbackTarget = { version: number } | { checkpoint: string }
type OfRun = { run?: number }

/** The scored answers of a run. */
export class Rollouts {
  constructor(private readonly http: Http) {}

  /** One page; `older` goes on where it ends. */
  page(query: GroupsQuery = {}, options?: CallOptions): Promise<Answer<'/dashboard/api/groups', 'get'>> {
    return get(this.http, '/dashboard/api/groups', { query }, options)
  }

  /** All groups that fit, page by page. */
  async *groups(query: GroupsQuery = {}, options?: CallOptions): AsyncGenerator<ListedGroup, void, undefined> {
    let older = query.older_than
    do {
      const page = await this.page(older === undefined ? query : { ...query, older_than: older }, options)
      yield* page.groups
      older = page.older ?? undefined
    } while (older !== undefined)
  }

  /** One group with its conversations. */
  group(id: string, query: OfRun = {}, options?: CallOptions): Promise<Answer<'/dashboard/api/group', 'get'>> {
    return get(this.http, '/dashboard/api/group', { query: { ...query, id } }, options)
  }

  /** The tokens of answer `number` of a group, 2,048 at most. */
  tokens(
    id: string,
    number: number,
    query: OfRun & { segment?: number; first?: number } = {},
    options?: CallOptions,
  ): Promise<Answer<'/dashboard/api/tokens', 'get'>> {
    return get(this.http, '/dashboard/api/tokens', { query: { ...query, id, number } }, options)
  }
}

/** The engine, by vLLM's names. */
export class Engine {
  constructor(private readonly http: Http) {}

  info(options?: CallOptions): Promise<Answer<'/server_info', 'get'>> {
    return get(this.http, '/server_info', {}, options)
  }

  /** New requests wait until `resume`. Running ones are aborted, end by themselves ("wait"), or stand still ("keep"). */
  pause(query: QueryOf<'/pause', 'post'> = {}, options?: CallOptions): Promise<Answer<'/pause', 'post'>> {
    return post(this.http, '/pause', { query, retry: 'always' }, options)
  }

  resume(options?: CallOptions): Promise<Answer<'/resume', 'post'>> {
    return post(this.http, '/resume', { retry: 'always' }, options)
  }

  async isPaused(options?: CallOptions): Promise<boolean> {
    return (await get(this.http, '/is_paused', {}, options)).is_paused
  }

  /** How many were ended; without ids all that came over HTTP. */
  async abort(requestIds?: readonly string[], options?: CallOptions): Promise<number> {
    const body = requestIds === undefined ? {} : { request_ids: [...requestIds] }
    return (await post(this.http, '/abort_requests', { body, retry: 'refused' }, options)).aborted
  }

  async resetPrefixCache(options?: CallOptions): Promise<boolean> {
    return (await post(this.http, '/reset_prefix_cache', { retry: 'always' }, options)).success
  }
}

function isHealthy(health: Healthy | Unavailable): health is Healthy {
  return health.status === 'ok'
}

function openaiOptions(http: Http, path: string): OpenAIOptions {
  return { baseURL: http.baseURL + path, apiKey: http.apiKey ?? 'none' }
}
