// The built package in a page of Chromium. Its address is another origin than the server's.
import { accessSync, constants, readFileSync } from 'node:fs'
import { createServer, type Server } from 'node:http'
import type { AddressInfo } from 'node:net'
import { delimiter, join, normalize } from 'node:path'
import { fileURLToPath } from 'node:url'
import type * as Package from 'mlx-parallm'
import { type Browser, chromium as launcher } from 'playwright-core'

const DIST = fileURLToPath(new URL('../../dist/esm/', import.meta.url))
const NAMES = ['chromium', 'chromium-browser', 'google-chrome']

export function chromiumPath(): string | undefined {
  const places = (process.env['PATH'] ?? '').split(delimiter).flatMap((place) => NAMES.map((name) => join(place, name)))
  return places.find((path) => {
    try {
      accessSync(path, constants.X_OK)
      return true
    } catch {
      return false
    }
  })
}

/** Why there is no browser; false where there is one. */
export function chromium(): string | false {
  return chromiumPath() === undefined ? 'no chromium: scripts/setup_browser gets it' : false
}

export class Pages {
  #browser: Browser | undefined

  private constructor(readonly server: Server) {}

  static async listen(): Promise<Pages> {
    const server = createServer((request, response) => {
      const path = normalize(new URL(request.url ?? '/', 'http://x').pathname)
      if (path === '/') response.writeHead(200, { 'Content-Type': 'text/html' }).end('<!doctype html><title>test</title>')
      else if (path.endsWith('.js')) {
        response.writeHead(200, { 'Content-Type': 'text/javascript' }).end(readFileSync(join(DIST, path)))
      } else response.writeHead(404).end()
    })
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
    return new Pages(server)
  }

  get #port(): number {
    return (this.server.address() as AddressInfo).port
  }

  get origin(): string {
    return `http://127.0.0.1:${this.#port}`
  }

  /** What `program` returns in a page. It gets the package and `words`, and sees nothing else of its file. */
  async run<T>(
    program: (module: typeof Package, words: [string, string]) => Promise<T>,
    words: [string, string],
    host = '127.0.0.1',
  ): Promise<T> {
    this.#browser ??= await launcher.launch({
      executablePath: chromiumPath() ?? '',
      args: ['--no-sandbox', '--disable-gpu', '--disable-background-networking'],
    })
    const page = await this.#browser.newPage()
    await page.goto(`http://${host}:${this.#port}/`)
    const source = `import('/index.js').then((module) => (${program.toString()})(module, ${JSON.stringify(words)}))`
    const result = (await page.evaluate(source)) as T
    await page.close()
    return result
  }

  async close(): Promise<void> {
    this.server.close()
    await this.#browser?.close()
  }
}
