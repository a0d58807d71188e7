/** The service of the prompt policy as a process of this one: Node.js only. No module is imported, so that bundlers for browsers find none. */

import { ParallmError } from '../errors.js'

const KEPT_CHARACTERS = 4000

export interface ServiceProcess {
  /** What it has written last. */
  readonly output: string
  /** Its exit code, once it has ended; null where a signal has ended it. */
  readonly ended: Promise<number | null>
  stop(): void
}

/**
 * Its standard input is a pipe that ends with this process, however that ends. `apiKey`: the one that it asks for, in its
 * environment, where no list of processes shows it. Throws `ParallmError` in a page, and where Python cannot be started.
 */
export async function startProcess(program: string, words: readonly string[], apiKey?: string): Promise<ServiceProcess> {
  if (typeof process === 'undefined' || typeof process.getBuiltinModule !== 'function') {
    throw new ParallmError('a page cannot start the service: start `mlx_parallm prompt-policy --server 8765` yourself')
  }
  const { spawn } = process.getBuiltinModule('node:child_process')
  const env = apiKey === undefined ? process.env : { ...process.env, MLX_PARALLM_API_KEY: apiKey }
  const child = spawn(program, words, { stdio: ['pipe', 'pipe', 'pipe'], env })
  let output = ''
  const keep = (part: Buffer): void => {
    output = (output + part.toString()).slice(-KEPT_CHARACTERS)
  }
  child.stdout.on('data', keep)
  child.stderr.on('data', keep)
  const ended = new Promise<number | null>((resolve) => child.once('close', resolve))
  await new Promise<void>((resolve, reject) => {
    child.once('spawn', resolve)
    child.once('error', (cause) => reject(new ParallmError(`${program} cannot be started: ${cause.message}`, { cause })))
  })
  return {
    get output() {
      return output
    },
    ended,
    stop: () => void child.kill('SIGTERM'),
  }
}
