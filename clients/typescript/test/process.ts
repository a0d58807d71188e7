// Real servers of this repository as processes of their own, on the shipped tiny model.
import { type ChildProcess, spawn } from 'node:child_process'
import { existsSync, mkdtempSync, openSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { createServer } from 'node:net'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

const BIN = process.env['MLX_PARALLM_BIN'] ?? fileURLToPath(new URL('../../../../.venv/bin', import.meta.url))
const PROGRAM = join(BIN, 'mlx_parallm')
export const PYTHON = join(BIN, 'python')

/** Why there is no server to test against; false where there is one. */
export const NO_SERVER = existsSync(PROGRAM) ? false : `no ${PROGRAM}: make test sets it up`

export function freePort(): Promise<number> {
  return new Promise((resolve, reject) => {
    const probe = createServer()
    probe.once('error', reject)
    probe.listen(0, '127.0.0.1', () => {
      const address = probe.address()
      probe.close(() => resolve(typeof address === 'object' && address !== null ? address.port : 0))
    })
  })
}

/** A process that ends with its test. `log`: what it has written so far. */
export class Server {
  readonly directory = mkdtempSync(join(tmpdir(), 'mlx-parallm-'))
  readonly ended: Promise<number | null>
  readonly #child: ChildProcess

  /** DIRECTORY in `words` and `config` is the process's own; `config` is the file of that name there. */
  constructor(words: readonly string[], config = '') {
    writeFileSync(join(this.directory, 'config.toml'), config.replaceAll('DIRECTORY', this.directory))
    const out = openSync(join(this.directory, 'log'), 'w')
    const env = { ...process.env, XDG_CACHE_HOME: this.directory }
    this.#child = spawn(PROGRAM, words.map((word) => word.replaceAll('DIRECTORY', this.directory)), {
      stdio: ['ignore', out, out],
      env,
    })
    this.ended = new Promise((resolve) => this.#child.once('exit', resolve))
  }

  get log(): string {
    return readFileSync(join(this.directory, 'log'), 'utf8')
  }

  /** What `work` returns. Throws with the log when the process ends before it, and aborts its signal. */
  async while<T>(work: (signal: AbortSignal) => Promise<T>): Promise<T> {
    const control = new AbortController()
    const early = this.ended.then((code) => {
      throw new Error(`the server has ended with ${code}:\n${this.log}`)
    })
    try {
      return await Promise.race([work(control.signal), early])
    } finally {
      control.abort()
    }
  }

  async stop(): Promise<number | null> {
    this.#child.kill('SIGTERM')
    const code = await this.ended
    rmSync(this.directory, { recursive: true, force: true })
    return code
  }
}
