// What a call does on a bad day, against an HTTP server that answers what the test tells it to.
import assert from 'node:assert/strict'
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http'
import type { AddressInfo } from 'node:net'
import { createRequire } from 'node:module'
import { after, before, beforeEach, test } from 'node:test'
import {
  APIError,
  BadRequestError,
  ConflictError,
  ConnectionError,
  EventParser,
  MlxParallm,
  ParallmError,
  RateLimitError,
  RLTrainer,
  TimeoutError,
  UnavailableError,
  UnexpectedAnswerError,
} from 'mlx-parallm'

type Handler = (request: IncomingMessage, response: ServerResponse, body: string) => void
let script: Handler[] = []
let seen: { method: string | undefined; url: string | undefined; key: string | undefined; body: string }[] = []
const server = createServer((request, response) => {
  let body = ''
  request.on('data', (part: Buffer) => (body += part.toString()))
  request.on('end', () => {
    seen.push({ method: request.method, url: request.url, key: request.headers.authorization, body })
    const handler = script.shift()
    if (handler === undefined) response.writeHead(500).end('no more script')
    else handler(request, response, body)
  })
})
let baseURL = ''
before(async () => {
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve))
  baseURL = `http://127.0.0.1:${(server.address() as AddressInfo).port}`
})
beforeEach(() => {
  script = []
  seen = []
})
after(() => server.close())

const answer =
  (status: number, value: unknown, headers: Record<string, string> = {}): Handler =>
  (_, response) =>
    response.writeHead(status, headers).end(typeof value === 'string' ? value : JSON.stringify(value))
const error = (status: number, code: string): Handler =>
  answer(
    status,
    { error: { message: `it is ${code}`, type: 'a_type', param: 'field', code } },
    { 'Retry-After': '0', 'X-Request-ID': 'r1' },
  )

test('an error has the status, and message, type, code and param of the body', async () => {
  script = [error(400, 'invalid_request')]
  await assert.rejects(new MlxParallm({ baseURL }).reward('a', [1]), (caught) => {
    assert(caught instanceof BadRequestError && caught instanceof APIError && caught instanceof ParallmError)
    const { name, message, status, type, code, param, requestId } = caught
    assert.deepEqual(
      { name, message, status, type, code, param, requestId },
      {
        name: 'BadRequestError',
        message: 'it is invalid_request',
        status: 400,
        type: 'a_type',
        code: 'invalid_request',
        param: 'field',
        requestId: 'r1',
      },
    )
    return true
  })
  script = [answer(409, '<html>a proxy</html>'), answer(200, '<html>a proxy</html>')]
  await assert.rejects(new MlxParallm({ baseURL }).runs(), ConflictError)
  await assert.rejects(new MlxParallm({ baseURL }).runs(), UnexpectedAnswerError)
})

test('429 and 503 are sent again where nothing was done, and no more often than maxRetries', async () => {
  const client = new MlxParallm({ baseURL, apiKey: 'sk-key' })
  script = [error(503, 'model_not_ready'), error(429, 'rate_limit_exceeded'), answer(200, { version: '1' })]
  assert.equal(await client.version(), '1')
  assert.deepEqual(
    seen.map(({ url, key }) => [url, key]),
    Array(3).fill(['/version', 'Bearer sk-key']),
  )
  script = [error(503, 'a'), answer(200, { object: 'rewards', environment: 'e', groups: [] })]
  await client.reward(['a', 'b'], [1, null], { environment: 'e' })
  assert.deepEqual(JSON.parse(seen.at(-1)?.body ?? ''), { ids: ['a', 'b'], rewards: [1, null], environment: 'e' })
  script = [error(503, 'a')]
  await assert.rejects(client.session('s').feedback({ score: 1 }), UnavailableError)
  assert.equal(script.length, 0, 'feedback is sent once: twice would be two labels')
  script = [error(429, 'a'), error(429, 'b'), error(429, 'c'), answer(200, {})]
  await assert.rejects(client.runs(), RateLimitError)
  assert.equal(script.length, 1)
  script = [error(429, 'a'), answer(200, {})]
  await assert.rejects(client.runs({ maxRetries: 0 }), RateLimitError)
  script = [answer(504, {}), answer(200, {})]
  await assert.rejects(client.runs(), APIError)
  assert.equal(script.length, 1, 'the same work again would take as long')
})

test('a lost connection: what changes nothing is sent again', async () => {
  const client = new MlxParallm({ baseURL })
  const drop: Handler = (request) => request.socket.destroy()
  script = [drop, answer(200, { version: '2' })]
  assert.equal(await client.version(), '2')
  script = [drop]
  await assert.rejects(client.reward('a', [1]), ConnectionError)
  await assert.rejects(new MlxParallm({ baseURL: 'http://127.0.0.1:1' }).version({ maxRetries: 0 }), (caught) => {
    assert(caught instanceof ConnectionError)
    assert.match(caught.message, /ECONNREFUSED|bad port/)
    return true
  })
})

test('what no call could use is refused at once, and no lost connection', async () => {
  for (const wrong of ['localhost:8000', '127.0.0.1:8000', '', 'ftp://x', 'http://', 'http://user:key@x', 'http://x/?a=1']) {
    assert.throws(() => new MlxParallm({ baseURL: wrong }), { name: 'ParallmError', message: /^baseURL .*http:\/\/127/ }, wrong)
  }
  assert.throws(() => new MlxParallm({ apiKey: 'sk\nkey' }), { name: 'ParallmError', message: /^apiKey / })
  assert.equal(new MlxParallm({ baseURL: 'https://example.org/below//' }).http.baseURL, 'https://example.org/below')
  for (const name of ['', '.', '..']) assert.throws(() => new MlxParallm().session(name), ParallmError)
  await assert.rejects(new MlxParallm({ baseURL }).reward('a', [1n as unknown as number]), TypeError)
  assert.equal(seen.length, 0)
})

test('ready waits for a server that is not there yet, and not for ever', async () => {
  let asked = 0
  const nobody: typeof fetch = () => {
    asked++
    return Promise.reject(new TypeError('fetch failed'))
  }
  await assert.rejects(new MlxParallm({ fetch: nobody }).ready({ absentMs: 50 }), ConnectionError)
  assert.equal(asked, 2)
  const [loading, ok] = [
    { status: 'loading', reason: 'the model' },
    { status: 'ok', queue: 0 },
  ]
  script = [(request) => request.socket.destroy(), answer(503, loading), answer(200, ok)]
  assert.deepEqual(await new MlxParallm({ baseURL }).ready(), ok)
})

test('a trainer’s mean is that of all rewards', async () => {
  const mutated = (id: string | null) => answer(200, { id, prompt: 'p', mutation_type: 'expansion', score: 0 })
  const stored = answer(200, { stored: true, buffer_size: 1 })
  script = [mutated('a'), stored, mutated('b'), stored, mutated('c'), stored, mutated(null)]
  script.push(answer(200, { message: 'Not enough data' }))
  const rewards = [1, 0.5, 0]
  const trainer = new RLTrainer({ baseURL })
  trainer.setRewardModel(() => rewards.shift() ?? 9)
  const { avgReward, maxReward, episodeRewards, rewarded, totalReward, steps } = await trainer.train(['one', 'two'], 2, 2)
  assert.deepEqual(
    { avgReward, maxReward, episodeRewards, rewarded, totalReward, steps },
    { avgReward: 0.5, maxReward: 0.75, episodeRewards: [0.75, 0], rewarded: 3, totalReward: 1.5, steps: 4 },
  )
})

test('a time limit and the caller’s own signal end a call', async () => {
  let sent = 0
  const silent: typeof fetch = (_, init) => {
    sent++
    return new Promise((_, reject) => init?.signal?.addEventListener('abort', () => reject(init.signal?.reason)))
  }
  await assert.rejects(new MlxParallm({ baseURL, timeoutMs: 30, fetch: silent }).runs(), TimeoutError)
  assert.equal(sent, 1, 'the caller has waited long enough')
  const unfinished: typeof fetch = async (_, init) => {
    const start = (body: ReadableStreamDefaultController): void => {
      body.enqueue(new TextEncoder().encode('{"a": '))
      init?.signal?.addEventListener('abort', () => body.error(init.signal?.reason))
    }
    return new Response(new ReadableStream({ start }))
  }
  await assert.rejects(new MlxParallm({ baseURL, timeoutMs: 30, fetch: unfinished }).runs(), TimeoutError)
  script = [(_, response) => setTimeout(() => response.end('{"runs": []}'), 20)]
  assert.deepEqual(await new MlxParallm({ baseURL, timeoutMs: Infinity, maxRetries: 0 }).runs(), [])
  seen = []
  const control = new AbortController()
  script = [() => control.abort(new Error('enough'))]
  await assert.rejects(new MlxParallm({ baseURL }).runs({ signal: control.signal }), { message: 'enough' })
  await assert.rejects(new MlxParallm({ baseURL }).runs({ signal: control.signal }), { message: 'enough' })
  assert.equal(seen.length, 1, 'an aborted call is not sent')
  const later = new AbortController()
  script = [
    (_, response) => {
      response.once('finish', () => setTimeout(() => later.abort(new Error('no more waiting')), 20))
      response.writeHead(503, { 'Retry-After': '60' }).end('{}')
    },
  ]
  const waiting = new MlxParallm({ baseURL }).runs({ signal: later.signal })
  await assert.rejects(waiting, { message: 'no more waiting' })
})

test('queries and names are escaped; undefined is left out', async () => {
  script = [answer(200, { groups: [], older: null, notes: [] }), answer(200, {})]
  for await (const _ of new MlxParallm({ baseURL }).rollouts.groups({ text: 'a&b ü', lowest: 0.5, limit: 3 })) _ satisfies object
  assert.equal(seen[0]?.url, `/dashboard/api/groups?${new URLSearchParams({ text: 'a&b ü', lowest: '0.5', limit: '3' })}`)
  await new MlxParallm({ baseURL: `${baseURL}//` }).session('a/b c').feedback({ label: 'good' })
  assert.equal(seen[1]?.url, '/sessions/a%2Fb%20c/feedback')
  assert.deepEqual(new MlxParallm({ baseURL, apiKey: 'k' }).session('a/b').openai, {
    baseURL: `${baseURL}/sessions/a%2Fb/v1`,
    apiKey: 'k',
  })
})

test('server-sent events, however the stream is cut', () => {
  const text =
    '\uFEFF: a comment\r\n\r\nevent: step\r\ndata: {"a":\r\ndata:  1}\r\nid: 7\r\n\r\ndata:x\rdata\r\rdata: ü€😀\n\nretry: 3\nevent: none\n\ndata: cut off'
  const expected = [
    { event: 'step', data: '{"a":\n 1}', id: '7' },
    { event: 'message', data: 'x\n', id: '7' },
    { event: 'message', data: 'ü€😀', id: '7' },
  ]
  assert.deepEqual(new EventParser().push(text), expected)
  for (let first = 0; first <= text.length; first++) {
    for (const second of [first, first + 1, first + 5]) {
      const parser = new EventParser()
      const parts = [text.slice(0, first), text.slice(first, second), text.slice(second)]
      assert.deepEqual(
        parts.flatMap((part) => parser.push(part)),
        expected,
      )
    }
  }
})

test('live metrics: bytes cut in the middle of a character, a broken stream, the end of the server', async () => {
  const word = (metrics: string, state = 'running') =>
    `data: ${JSON.stringify({ runs: [{ metrics, marks: 'ü', state }] })}\n\n`
  const columns = (step: number, reset: boolean) =>
    answer(200, { cursor: `c-${step}`, reset, steps: [step], columns: { kl: [step / 10] }, keys: ['kl'], marks: [] })
  let stream: ServerResponse | undefined
  const [head, tail] = [Buffer.from(word('1')).subarray(0, 38), Buffer.from(word('1')).subarray(38)]
  script = [
    (_, response) => {
      response.writeHead(200, { 'Content-Type': 'text/event-stream' }).write(head)
      setTimeout(() => response.write(tail), 5)
      stream = response
    },
    (request, response, body) => {
      response.once('finish', () => setTimeout(() => stream?.socket?.destroy(), 20))
      columns(1, true)(request, response, body)
    },
    (_, response) => {
      response.writeHead(200, { 'Content-Type': 'text/event-stream' })
      response.end(`${word('1')}${word('2')}data: [DONE]\n\n`)
    },
    columns(2, false),
  ]
  const updates = []
  for await (const update of new MlxParallm({ baseURL }).training.watch({ keys: ['kl', 'loss'] })) updates.push(update)
  assert.deepEqual(
    updates.map(({ steps, reset }) => [steps, reset]),
    [
      [[{ step: 1, values: { kl: 0.1 } }], true],
      [[{ step: 2, values: { kl: 0.2 } }], false],
    ],
  )
  const asked = seen.filter(({ url }) => url?.startsWith('/dashboard/api/metrics')).map(({ url }) => url?.split('?')[1])
  assert.deepEqual(asked, ['run=0&after=&keys=kl%2Closs', 'run=0&after=c-1&keys=kl%2Closs'])
})

test('an event that is no JSON is no answer', async () => {
  script = [(_, response) => response.writeHead(200, { 'Content-Type': 'text/event-stream' }).end('data: <html>\n\n')]
  await assert.rejects(new MlxParallm({ baseURL }).training.watch().next(), UnexpectedAnswerError)
})

test('CommonJS gets the same', () => {
  const required = createRequire(import.meta.url)('mlx-parallm') as typeof import('mlx-parallm')
  assert.equal(typeof required.MlxParallm, 'function')
  assert.notEqual(required.MlxParallm, MlxParallm)
})

test('the types are those of the document', async () => {
  const client = new MlxParallm({ baseURL })
  script = [answer(200, { object: 'rewards', environment: 'x', groups: [{ id: 'g', rollouts: 2 }] })]
  const rewarded = await client.reward('a', [1, 0])
  rewarded.groups satisfies { id: string; rollouts: number }[]
  // @ts-expect-error  an answer has no such field
  assert.equal(rewarded.nothing, undefined)
  const wrong = () => [
    // @ts-expect-error  a reward is a number or null
    client.reward('a', ['1']),
    // @ts-expect-error  not a setting
    client.training.change({ batch_size: 3 }),
    // @ts-expect-error  one of abort, wait and keep
    client.engine.pause({ mode: 'now' }),
    // @ts-expect-error  either a version or a checkpoint
    client.training.rollback({}),
  ]
  assert.equal(typeof wrong, 'function')
})
