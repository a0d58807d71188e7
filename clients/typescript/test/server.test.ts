// The client against a real training daemon: rewards, sessions, numbers, control; from Node and from a page in Chromium.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { AuthenticationError, ConflictError, type LiveMetrics, MlxParallm, NotFoundError, RLInterface } from 'mlx-parallm'
import OpenAI from 'openai'
import { chromium, Pages } from './browser.js'
import { freePort, NO_SERVER, Server } from './process.js'

const KEY = 'sk-of-the-tests'
const config = (port: number, origin: string): string => `
[server]
port = ${port}
batch_size = 32
cors_origins = ["${origin}"]
[model]
base_path = "builtin:tiny"
[rl_training]
total_steps = 100
batch_size = 16
blocks_per_eval = 0
max_staleness = 50
run_name = "typescript"
checkpoint_dir = "DIRECTORY/runs"
[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 64
[traces]
directory = "DIRECTORY/traces"
group_size = 2
[prompt_policy]
mount = true
checkpoint_dir = "DIRECTORY/policy"
rewards = ["builtin:answer_match"]
rollouts = 2
max_tokens = 4
[logging]
level = "warning"
`
let server: Server
let client: MlxParallm
let openai: OpenAI
let pages: Pages

before(async () => {
  if (NO_SERVER) return
  pages = await Pages.listen()
  const port = await freePort()
  process.env['MLX_PARALLM_API_KEY'] = KEY
  server = new Server(['train', '--config', 'DIRECTORY/config.toml'], config(port, pages.origin))
  client = new MlxParallm({ baseURL: `http://127.0.0.1:${port}`, apiKey: KEY })
  openai = new OpenAI(client.openai)
  await server.while((signal) => client.ready({ signal }))
})
after(async () => {
  await pages?.close()
  await server?.stop()
})

async function rewardOneGroup(): Promise<string> {
  const messages = [{ role: 'user' as const, content: 'Reverse: abcd' }]
  const answer = await openai.chat.completions.create({ model: 'default', messages, n: 8, max_tokens: 8 })
  const rewarded = await client.reward(
    answer.id,
    answer.choices.map((_, place) => place % 2),
  )
  assert.deepEqual(rewarded, { object: 'rewards', environment: 'rewards', groups: [{ id: `${answer.id}-0`, rollouts: 8 }] })
  return answer.id
}

test('a training from Node', { skip: NO_SERVER }, async (t) => {
  await t.test('what it serves', async () => {
    const health = await client.health()
    assert(health.status === 'ok' && 'steps' in health)
    const [model] = await client.models()
    assert.equal(model?.object, 'model')
    assert.equal((await client.engine.info()).version, await client.version())
    const [run] = await client.runs()
    assert.deepEqual([run?.name, run?.state, run?.live, run?.rewards], ['typescript', 'running', true, true])
  })

  await t.test('refusals', async () => {
    await assert.rejects(new MlxParallm({ ...client.openai, baseURL: client.http.baseURL, apiKey: 'wrong' }).runs(), (error) => {
      assert(error instanceof AuthenticationError)
      assert.equal(error.code, 'invalid_api_key')
      return true
    })
    await assert.rejects(client.reward('chatcmpl-none', [1]), NotFoundError)
    const id = await rewardOneGroup()
    await assert.rejects(client.reward(id, Array<number>(8).fill(1)), ConflictError)
    await assert.rejects(client.training.rollback({ checkpoint: 'step_009999' }), NotFoundError)
  })

  await t.test('a session that is scored becomes a rollout', async () => {
    const states = []
    for (const name of ['one', 'two']) {
      const session = client.session(name)
      const messages = [{ role: 'user' as const, content: 'Sort: dcba' }]
      await new OpenAI(session.openai).chat.completions.create({ model: 'default', messages, max_tokens: 8 })
      if (name !== 'one') {
        await assert.rejects(session.feedback({}), { param: 'score', status: 400 })
      }
      const feedback = await session.feedback({ score: name === 'one' ? 1 : 0, comment: 'judged' })
      assert.equal(feedback.label.explanation, 'judged')
      states.push(feedback.training?.state)
    }
    assert.deepEqual(states, ['waiting', 'queued'])
  })

  await t.test('the prompt policy within the server', async () => {
    const baseURL = `${client.http.baseURL}/prompt_policy`
    await assert.rejects(new RLInterface({ baseURL, apiKey: 'wrong' }).startServer(), AuthenticationError)
    const rl = new RLInterface({ baseURL, apiKey: KEY })
    await rl.startServer()
    const { answers, reward, rewards, mutation } = await rl.rollout('Could you please sort: dbca', { columns: { answer: 'abcd' } })
    assert.equal(answers.length, 2)
    assert.equal(reward, ((rewards[0] ?? 0) + (rewards[1] ?? 0)) / 2)
    assert(mutation.mutationType === null || mutation.prompt !== 'Could you please sort: dbca')
  })

  await t.test('live metrics, control, rollouts, the end', async (t) => {
    const updates: LiveMetrics[] = []
    const watching = (async () => {
      for await (const update of client.training.watch({ keys: ['reward_mean', 'loss'] })) updates.push(update)
    })()
    const steps = (): number => updates.at(-1)?.steps.at(-1)?.step ?? 0
    while (steps() < 2) await server.while(rewardOneGroup)
    const values = updates.flatMap((update) => update.steps)[0]?.values
    assert.deepEqual(Object.keys(values ?? {}).sort(), ['loss', 'reward_mean'])
    assert.equal(typeof values?.['reward_mean'], 'number')

    assert.deepEqual(await client.training.note('from TypeScript'), { status: 'done' })
    await client.training.pause()
    assert.equal(await client.engine.isPaused(), true)
    await client.training.resume()
    assert.equal((await client.training.state()).paused, false)
    const { learning_rate } = (await client.training.state()).settings
    let ordered = true // what is ordered is done when a step ends, so there have to be steps
    const feeding = (async () => {
      while (ordered) await rewardOneGroup()
    })()
    const saved = await client.training.checkpoint()
    const checkpoint = String(saved.result?.['checkpoint'])
    assert.match(checkpoint, /^step_/)
    const changed = await client.training.change({ learning_rate: learning_rate / 2 })
    assert.deepEqual(changed, { status: 'done', result: { learning_rate: [learning_rate, learning_rate / 2] } })
    const rolled = await client.training.rollback({ checkpoint })
    ordered = false
    await feeding
    assert.deepEqual([rolled.status, rolled.to], ['done', checkpoint])
    assert.deepEqual(await client.training.lastRollback(), rolled)
    assert((await client.training.state()).checkpoints.includes(checkpoint))
    assert.equal(typeof (await client.training.health()).gained, 'boolean')
    assert.deepEqual(await client.training.evaluations(), [])

    const groups = []
    for await (const group of client.rollouts.groups({ environment: 'rewards', limit: 16 })) groups.push(group)
    const taken = groups.find((group) => group.state === 'taken')
    assert(groups.length >= 5 && taken !== undefined)
    const group = await client.rollouts.group(taken.group_id)
    assert.equal(group.rollouts?.length, 8)
    assert.equal(group.rollouts?.[1]?.reward, 1)
    assert.match(group.rollouts?.[0]?.conversation[0]?.text ?? '', /Reverse: abcd/)
    const tokens = await client.rollouts.tokens(taken.group_id, 0)
    assert.equal(tokens.ids.length, tokens.total)
    assert((tokens.values['logprobs'] ?? []).some((value) => value !== null && value < 0))

    await t.test('a page of another origin', { skip: chromium() }, async () => {
      const seen = await pages.run(
        async ({ MlxParallm, ConnectionError, AuthenticationError }, [baseURL, apiKey]) => {
          const client = new MlxParallm({ baseURL, apiKey })
          const caught = (error: unknown) => error
          const updates = client.training.watch()
          const { value } = await updates.next()
          await updates.return()
          const controlled = await client.training.note('from a page')
          return {
            status: (await client.health()).status,
            version: await client.version(),
            marks: value?.marks.map((mark) => mark.text) ?? [],
            steps: value?.steps.length ?? 0,
            controlled: controlled.status,
            rewarded: ((await client.reward('chatcmpl-none', [1]).catch(caught)) as { code: string }).code,
            wrongKey: (await new MlxParallm({ baseURL, apiKey: 'no' }).runs().catch(caught)) instanceof AuthenticationError,
            nobody:
              (await new MlxParallm({ baseURL: 'http://127.0.0.1:9' }).runs({ maxRetries: 0 }).catch(caught)) instanceof
              ConnectionError,
          }
        },
        [client.http.baseURL, KEY],
      )
      assert.equal(seen.version, await client.version())
      assert(seen.steps >= 2 && seen.marks.includes('from TypeScript'))
      const { status, controlled, rewarded, wrongKey, nobody } = seen
      const expected = { status: 'ok', controlled: 'done', rewarded: 'not_found', wrongKey: true, nobody: true }
      assert.deepEqual({ status, controlled, rewarded, wrongKey, nobody }, expected)
      const foreign = await pages.run(
        async ({ MlxParallm }, [baseURL, apiKey]) =>
          String(await new MlxParallm({ baseURL, apiKey, maxRetries: 0 }).runs().catch((error: unknown) => error)),
        [client.http.baseURL, KEY],
        'localhost',
      )
      assert.match(foreign, /^ConnectionError/, 'an origin that server.cors_origins does not name')
    })

    await client.training.stop()
    await watching
    assert.equal(await server.ended, 0)
  })
})
