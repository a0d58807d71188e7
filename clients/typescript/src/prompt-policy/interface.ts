/** `RLInterface`: the prompt policy's service, by the names of its specification. */

import { get, post, type Answer, type Body } from '../api.js'
import { camel, type Camel } from '../camel.js'
import {
  APIError,
  AuthenticationError,
  ConnectionError,
  NotFoundError,
  ParallmError,
  PermissionDeniedError,
  TimeoutError,
} from '../errors.js'
import { Http, sleep, type CallOptions, type HttpOptions } from '../http.js'
import type { paths } from '../openapi/prompt_policy.js'
import { startProcess, type ServiceProcess } from './service-process.js'

const START_MS = 60_000

/** `apiKey`: a service that is started from here asks for it. */
export interface RLConfig extends Omit<HttpOptions, 'baseURL'> {
  /** A service that somebody else runs, such as the one within a server: http://127.0.0.1:8000/prompt_policy. It is never started from here. */
  baseURL?: string
  /** Default 127.0.0.1. */
  serverHost?: string
  /** Default 8765. */
  serverPort?: number
  /** Runs the service: default python3, which needs mlx_parallm. */
  pythonPath?: string
  /** Further words of `mlx_parallm prompt-policy`. */
  serverArguments?: readonly string[]
  /** Where the service keeps checkpoints and experiences; its own default is checkpoints/prompt_policy. */
  checkpointDir?: string
  /** Numbers of an embedding, for a service that is started from here; its own default is 1536. */
  embeddingDim?: number
  /** Whether `startServer` starts the service where none answers; default true. */
  autoStartServer?: boolean
}

export interface RLAction {
  actionIndex: number
  mutationType: string
  probability: number
  logProb: number
  value: number
  /** 1 where there is no experience of such prompts; it falls towards 0. */
  uncertainty: number
}

export interface ActionOptions extends CallOptions {
  /** Take the likeliest. */
  deterministic?: boolean
  /** Mutations that may be chosen. */
  allowed?: readonly string[]
}

export interface TrainingExperience {
  state: readonly number[]
  action: number
  reward: number
  nextState: readonly number[]
  done: boolean
  logProb: number
  value: number
  /** Steps of one episode have the same; without it a step is an episode. */
  episodeId?: string
  /** As it was when the action was chosen. */
  allowed?: readonly string[]
}

export type UpdateResult = Exclude<Camel<Answer<'/update', 'post', paths>>, { message: string }>
export type ActionDistribution = Camel<Answer<'/get_distribution', 'post', paths>>

export interface Stored {
  stored: boolean
  bufferSize: number
}

/** A rewritten prompt. `id` is what its reward is sent with; null where the prompt was left as it is. */
export type Mutated = Camel<Answer<'/mutate', 'post', paths>>
/** A rewritten prompt, what a model answered it, and the rewards. */
export type RolledOut = Camel<Answer<'/rollout', 'post', paths>>
export type RLStats = Camel<Answer<'/stats', 'get', paths>>

/** The reward of a rewriting: higher is better, best between 0 and 1. */
export type RewardModel = (original: string, mutated: Mutated) => number | Promise<number>

/** A reward, or the score of a person from 1 to 5. */
export type Feedback = ({ reward: number } | { score: number }) & {
  /** Steps that depend on each other have the same; without it a step is an episode. */
  episodeId?: string
  /** The prompt that the mutation led to; without it the episode has ended. Needs `episodeId`. */
  nextPrompt?: string
}

/** A task of several steps: which prompt comes next depends on the mutation that was chosen. */
export interface Environment {
  /** Begins an episode: its first prompt. */
  reset(): string | Promise<string>
  /** Uses the rewritten prompt: its reward, and the prompt of the next step; null where the episode ends. */
  step(mutated: Mutated): EnvironmentStep | Promise<EnvironmentStep>
}

export interface EnvironmentStep {
  reward: number
  nextPrompt: string | null
}

export interface Collected {
  mutated: Mutated
  /** Null where the prompt was left as it is: there is nothing to reward. */
  reward: number | null
}

export interface EpisodeResult {
  steps: number
  /** Steps that were rewarded. */
  rewarded: number
  totalReward: number
  /** Null without a step that was rewarded. */
  avgReward: number | null
}

export class RLInterface {
  readonly http: Http
  readonly #config: RLConfig
  #process: ServiceProcess | undefined
  #starting: Promise<void> | undefined
  #rewardModel: RewardModel = (_, mutated) => mutated.score

  constructor(config: RLConfig = {}) {
    const host = config.serverHost ?? '127.0.0.1'
    const name = host.includes(':') && !host.startsWith('[') ? `[${host}]` : host
    this.http = new Http({ ...config, baseURL: config.baseURL ?? `http://${name}:${config.serverPort ?? 8765}` })
    this.#config = config
  }

  // ------------------------------------------------------------------ the service

  /**
   * Uses the service that answers already, else starts one and waits for it; called again meanwhile, it waits for the same
   * one. A service that is started from here ends with this process. Throws `ParallmError` with its last words.
   */
  startServer(options: { signal?: AbortSignal } = {}): Promise<void> {
    this.#starting ??= this.#start(options).finally(() => {
      this.#starting = undefined
    })
    return this.#starting
  }

  async #start(options: { signal?: AbortSignal }): Promise<void> {
    if (await this.checkHealth(options)) return
    if (this.#config.autoStartServer === false || this.#config.baseURL !== undefined) {
      throw new ConnectionError(`no service answers at ${this.http.baseURL}, and none may be started from here`)
    }
    const started = await startProcess(this.#config.pythonPath ?? 'python3', this.#words(), this.http.apiKey)
    this.#process = started
    const deadline = Date.now() + START_MS
    const ended = started.ended.then((code) => {
      throw new ParallmError(`the service has ended with ${code}: ${started.output.trim()}`)
    })
    const ready = async (): Promise<void> => {
      while (!(await this.checkHealth(options))) {
        if (Date.now() > deadline) throw new TimeoutError(`the service did not answer within ${START_MS} ms`)
        await Promise.race([sleep(100, options.signal), ended])
      }
    }
    try {
      await Promise.race([ready(), ended])
    } catch (error) {
      await this.stopServer()
      throw error
    }
  }

  /** Ends the service that `startServer` has started; it writes a checkpoint. Leaves any other alone. */
  async stopServer(): Promise<void> {
    const started = this.#process
    this.#process = undefined
    started?.stop()
    await started?.ended
  }

  /** Whether the service answers. Throws `AuthenticationError` and `PermissionDeniedError`. */
  async checkHealth(options: CallOptions = {}): Promise<boolean> {
    const path = this.#config.baseURL === undefined ? '/health' : '/stats' // within a server only the server has a health
    try {
      await get<typeof path, paths>(this.http, path, {}, { maxRetries: 0, timeoutMs: 2000, ...options })
      return true
    } catch (error) {
      if (error instanceof AuthenticationError || error instanceof PermissionDeniedError) throw error
      if (error instanceof ConnectionError || error instanceof TimeoutError || error instanceof APIError) return false
      throw error
    }
  }

  #words(): string[] {
    const { serverHost, serverPort = 8765, checkpointDir, embeddingDim, serverArguments = [] } = this.#config
    const words = ['-m', 'mlx_parallm', 'prompt-policy', '--until-stdin-ends', '--server', String(serverPort)]
    if (serverHost !== undefined) words.push('--set', `server.host=${serverHost}`)
    if (checkpointDir !== undefined) words.push('--checkpoint-dir', checkpointDir)
    if (embeddingDim !== undefined) words.push('--set', `prompt_policy.ppo.input_dim=${embeddingDim}`)
    return [...words, ...serverArguments]
  }

  // ------------------------------------------------------------------ choosing

  async selectAction(embedding: readonly number[], options: ActionOptions = {}): Promise<RLAction> {
    const { deterministic = false, allowed, ...rest } = options
    const body = { embedding: [...embedding], deterministic, ...copied('allowed', allowed) }
    return toAction(await this.#post('/select_action', body, 'always', rest))
  }

  /** What the policy would choose for a prompt. Nothing is applied or kept: see `mutate`. */
  async selectMutation(prompt: string, options: ActionOptions = {}): Promise<RLAction> {
    const { signal, timeoutMs, maxRetries } = options
    const calls = { signal, ...(timeoutMs === undefined ? {} : { timeoutMs }), ...(maxRetries === undefined ? {} : { maxRetries }) }
    return this.selectAction(await this.embed(prompt, calls), options)
  }

  /** Chooses a mutation and applies it. Send the reward of the new prompt with its `id`: `feedback`. */
  mutate(prompt: string, options: Omit<Body<'/mutate', paths>, 'prompt'> = {}, calls?: CallOptions): Promise<Mutated> {
    return this.#post('/mutate', { prompt, ...options }, 'refused', calls).then(camel)
  }

  /** The reward of a mutation. It is on the disk when this returns. */
  async feedback(id: string, reward: number | Feedback, calls?: CallOptions): Promise<Stored> {
    const { episodeId, nextPrompt, ...scored } = typeof reward === 'number' ? { reward } : reward
    const body = {
      ...{ id, ...scored },
      ...(episodeId === undefined ? {} : { episode_id: episodeId }),
      ...(nextPrompt === undefined ? {} : { next_prompt: nextPrompt }),
    }
    return toStored(await this.#post('/feedback', body, 'never', calls))
  }

  async getActionDistribution(
    embedding: readonly number[],
    { allowed, ...calls }: Omit<ActionOptions, 'deterministic'> = {},
  ): Promise<ActionDistribution> {
    const body = { embedding: [...embedding], ...copied('allowed', allowed) }
    return camel(await this.#post('/get_distribution', body, 'always', calls))
  }

  /** The numbers that the policy reads of a prompt, by the service's own embedding. */
  async embed(prompt: string, calls?: CallOptions): Promise<number[]> {
    const { embeddings } = await this.#post('/embed', { input: [prompt] }, 'always', calls)
    return embeddings[0] ?? []
  }

  // ------------------------------------------------------------------ learning

  /** On the disk when this returns. Never sent twice. */
  async storeExperience(experience: TrainingExperience, calls?: CallOptions): Promise<Stored> {
    const { state, action, reward, nextState, done, logProb, value, episodeId, allowed } = experience
    const body = {
      ...{ state: [...state], action, reward, next_state: [...nextState], done, log_prob: logProb, value },
      ...copied('allowed', allowed),
      ...(episodeId === undefined ? {} : { episode_id: episodeId }),
    }
    return toStored(await this.#post('/store_experience', body, 'never', calls))
  }

  /** Null where there are too few experiences. */
  async update(calls?: CallOptions): Promise<UpdateResult | null> {
    const answer = camel(await this.#post('/update', undefined, 'never', { timeoutMs: 600_000, ...calls }))
    return 'message' in answer ? null : answer
  }

  /** Who rewards a rewriting: your task, a model, a person. Without one it is the service's own reward model (`score`). */
  setRewardModel(model: RewardModel): void {
    this.#rewardModel = model
  }

  /** Rewrites a prompt, has it rewarded by the reward model, and stores that. */
  async collectExperience(prompt: string, calls?: CallOptions): Promise<Collected> {
    const mutated = await this.mutate(prompt, {}, calls)
    if (mutated.id === null) return { mutated, reward: null }
    const reward = await this.#rewardModel(prompt, mutated)
    await this.feedback(mutated.id, reward, calls)
    return { mutated, reward }
  }

  /** The whole round at the service: a rewriting, answers of the task's model, their rewards; `columns` is what reward functions compare with. */
  rollout(
    prompt: string,
    options: Omit<Body<'/rollout', paths>, 'prompt'> = {},
    calls?: CallOptions,
  ): Promise<RolledOut> {
    return this.#post('/rollout', { prompt, ...options }, 'never', { timeoutMs: 600_000, ...calls }).then(camel)
  }

  /**
   * At most `maxSteps` steps. Of prompts: one after another and from the first again, each rewarded on its own by the
   * reward model. Of an environment: each step's prompt follows from the step before, and the policy learns from the
   * rewards of later steps too; the episode also ends where no mutation would change the prompt.
   */
  async trainEpisode(
    source: readonly string[] | Environment,
    maxSteps: number,
    calls?: CallOptions,
  ): Promise<EpisodeResult> {
    if ('reset' in source) return this.#playEpisode(source, maxSteps, calls)
    if (source.length === 0) throw new ParallmError('an episode needs prompts')
    const rewards: number[] = []
    for (let step = 0; step < maxSteps; step++) {
      const { reward } = await this.collectExperience(source[step % source.length] as string, calls)
      if (reward !== null) rewards.push(reward)
    }
    return episodeResult(maxSteps, rewards)
  }

  async #playEpisode(environment: Environment, maxSteps: number, calls?: CallOptions): Promise<EpisodeResult> {
    const rewards: number[] = []
    let mutated: Mutated | null = await this.mutate(await environment.reset(), {}, calls)
    const episodeId = mutated.id ?? ''
    while (mutated !== null && mutated.id !== null && rewards.length < maxSteps) {
      const { reward, nextPrompt }: EnvironmentStep = await environment.step(mutated)
      const cut = rewards.length + 1 === maxSteps
      const next: Mutated | null = nextPrompt === null || cut ? null : await this.mutate(nextPrompt, {}, calls)
      const goesOn = nextPrompt !== null && (cut || next?.id !== null) // else nothing is chosen any more
      await this.feedback(mutated.id, { reward, episodeId, ...(goesOn ? { nextPrompt } : {}) }, calls)
      rewards.push(reward)
      mutated = next
    }
    return episodeResult(rewards.length, rewards)
  }

  /** Numbers so far, or a `message` before the first experience. */
  getStats(calls?: CallOptions): Promise<RLStats> {
    return get<'/stats', paths>(this.http, '/stats', {}, calls).then(camel)
  }

  // ------------------------------------------------------------------ checkpoints

  /** A checkpoint of this name below the service's directory; `latest` without one. Returns its name. */
  async saveCheckpoint(path?: string, calls?: CallOptions): Promise<string> {
    return (await this.#post('/save', path === undefined ? {} : { path }, 'always', calls)).path
  }

  /** False where there is no such checkpoint. */
  async loadCheckpoint(path: string, calls?: CallOptions): Promise<boolean> {
    try {
      return (await this.#post('/load', { path }, 'always', calls)).loaded === true
    } catch (error) {
      if (error instanceof NotFoundError) return false
      throw error
    }
  }

  #post<P extends PostPath>(
    path: P,
    body: Body<P, paths> | undefined,
    retry: 'always' | 'refused' | 'never',
    calls?: CallOptions,
  ): Promise<Answer<P, 'post', paths>> {
    const sent = body === undefined ? { retry } : { body, retry }
    return post<P, paths>(this.http, path, sent as Parameters<typeof post<P, paths>>[2], calls)
  }
}

type PostPath = Extract<
  keyof paths,
  '/select_action' | '/mutate' | '/feedback' | '/rollout' | '/get_distribution' | '/embed' | '/store_experience' | '/update' | '/save' | '/load'
>

function toAction(answer: Answer<'/select_action', 'post', paths>): RLAction {
  const { action, mutation_type, probability, log_prob, value, uncertainty } = answer
  return { actionIndex: action, mutationType: mutation_type, probability, logProb: log_prob, value, uncertainty }
}

function toStored({ stored, buffer_size }: Answer<'/feedback', 'post', paths>): Stored {
  return { stored: stored === true, bufferSize: buffer_size }
}

function episodeResult(steps: number, rewards: readonly number[]): EpisodeResult {
  const totalReward = rewards.reduce((sum, reward) => sum + reward, 0)
  const rewarded = rewards.length
  return { steps, rewarded, totalReward, avgReward: rewarded === 0 ? null : totalReward / rewarded }
}

function copied(key: 'allowed', values: readonly string[] | undefined): { allowed?: string[] } {
  return values === undefined ? {} : { [key]: [...values] }
}
