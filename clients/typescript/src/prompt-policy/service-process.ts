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

/** Throws `ParallmError` in a page, and where Python cannot be started. */
export async function startProcess(program: string, words: readonly string[]): Promise<ServiceProcess> {
  if (typeof process === 'undefined' || typeof process.getBuiltinModule !== 'function') {
    throw new ParallmError('a page cannot start the service: start `mlx_parallm prompt-policy --server 8765` yourself')
  }
  const { spawn } = process.getBuiltinModule('node:child_process')
  const child = spawn(program, words, { stdio: ['ignore', 'pipe', 'pipe'] })
  let output = ''
  const keep = (part: Buffer): void => {
    output = (output + part.toString()).slice(-KEPT_CHARACTERS)
  }
  child.stdout.on('data', keep)
  child.stderr.on('data', keep)
  const stop = (): void => void child.kill('SIGTERM')
  process.once('exit', stop)
  const ended = new Promise<number | null>((resolve) => {
    child.once('close', (code) => {
      process.removeListener('exit', stop)
      resolve(code)
    })
  })
  await new Promise<void>((resolve, reject) => {
    child.once('spawn', resolve)
    child.once('error', (cause) => reject(new ParallmError(`${program} cannot be started: ${cause.message}`, { cause })))
  })
  return {
    get output() {
      return output
    },
    ended,
    stop,
  }
}
