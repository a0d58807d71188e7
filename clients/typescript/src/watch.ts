/** Live metrics: the server's stream says that something has changed, and the new lines are asked for. */

import type { Training } from './client.js'
import { ConnectionError, TimeoutError, UnavailableError, UnexpectedAnswerError } from './errors.js'
import { sleep, type Http } from './http.js'
import type { Changes, Mark, RunVersions } from './openapi/server.js'

export interface WatchOptions {
  /** The run's place in `client.runs()`; default 0, the one that the server trains. */
  run?: number
  /** Which columns; * stands for anything. Default: reward_mean. */
  keys?: readonly string[]
  /** The cursor of an earlier update: only what came after it. */
  after?: string
  signal?: AbortSignal
}

export interface LiveMetrics {
  /** Forget what came before: the run was rolled back or resumed. True for the first update. */
  reset: boolean
  /** New steps, with a number for each key; null where a step has none. */
  steps: { step: number; values: Record<string, number | null> }[]
  /** What people did to the run, by step. */
  marks: Mark[]
  state: RunVersions['state']
  cursor: string
}

const DONE = '[DONE]'
/** The server sends something every 8 s. */
const SILENCE_MS = 30_000
const RETRIES = 5
const RETRY_MS = 500

export async function* watchMetrics(
  http: Http,
  training: Training,
  { run = 0, keys = ['reward_mean'], after = '', signal }: WatchOptions,
): AsyncGenerator<LiveMetrics, void, undefined> {
  const call = signal === undefined ? {} : { signal }
  let cursor = after
  let known = ''
  for (let failed = 0; ; ) {
    try {
      const stream = http.stream(
        { method: 'GET', path: '/dashboard/api/events', retry: 'always' },
        { ...call, timeoutMs: SILENCE_MS },
      )
      for await (const { data } of stream) {
        failed = 0
        if (data === DONE) return // the server ends
        const now = versions(data, run)
        const words = `${now.metrics} ${now.marks} ${now.state}`
        if (words === known) continue
        const answer = await training.metrics({ run, keys, after: cursor }, call)
        const first = known === ''
        known = words
        cursor = answer.cursor
        const steps = answer.steps.map((step, row) => ({ step, values: row_of(answer.columns, row) }))
        yield { reset: answer.reset || (first && after === ''), steps, marks: answer.marks, state: now.state, cursor }
        if (now.state !== 'running') return
      }
      throw new ConnectionError('the stream of events broke off')
    } catch (error) {
      const lost = error instanceof ConnectionError || error instanceof TimeoutError
      if (error instanceof UnavailableError && known !== '') return // it drains: the run has ended
      if (!lost || ++failed > RETRIES) throw error
      await sleep(RETRY_MS * failed, signal)
    }
  }
}

function versions(data: string, run: number): RunVersions {
  let found: RunVersions | undefined
  try {
    found = (JSON.parse(data) as Partial<Changes> | null)?.runs?.[run]
  } catch {
    // said below
  }
  if (found === undefined) throw new UnexpectedAnswerError(`the stream says nothing of run ${run}: ${data.slice(0, 200)}`)
  return found
}

function row_of(columns: Record<string, (number | null)[]>, row: number): Record<string, number | null> {
  return Object.fromEntries(Object.entries(columns).map(([key, values]) => [key, values[row] ?? null]))
}
