// RLInterface and RLTrainer against the real service, which they start; the simulation; the demonstration.
import assert from 'node:assert/strict'
import { spawn, spawnSync } from 'node:child_process'
import { once } from 'node:events'
import { existsSync, mkdtempSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { after, before, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import {
  AuthenticationError,
  BadRequestError,
  ConnectionError,
  type Environment,
  MUTATION_TYPES,
  type Mutated,
  ParallmError,
  RLInterface,
  RLTrainer,
  SAMPLE_PROMPTS,
  SimulatedRLTrainer,
  type TrainingExperience,
} from 'mlx-parallm'
import { chromium, Pages } from './browser.js'
import { freePort, NO_SERVER, PYTHON } from './process.js'

const DIM = 32
const KEY = 'sk-of-the-policy'
const directory = mkdtempSync(join(tmpdir(), 'mlx-parallm-'))
const embedding = (place: number): number[] => Array.from({ length: DIM }, (_, at) => Number(at === place % DIM))
let rl: RLInterface
let trainer: RLTrainer
let port = 0

before(async () => {
  if (NO_SERVER) return
  port = await freePort()
  trainer = new RLTrainer({
    serverPort: port,
    pythonPath: PYTHON,
    apiKey: KEY,
    checkpointDir: join(directory, 'policy'),
    embeddingDim: DIM,
    serverArguments: ['--set', 'prompt_policy.ppo.hidden_dim=16', '--set', 'prompt_policy.ppo.min_buffer_size=32'],
  })
  rl = trainer.getInterface()
  assert.equal(await rl.checkHealth(), false)
  await Promise.all([trainer.start(), trainer.start()])
})
after(async () => {
  await trainer?.stop()
  rmSync(directory, { recursive: true, force: true })
})

function experience(place: number, changes: Partial<TrainingExperience> = {}): TrainingExperience {
  const state = embedding(place)
  const known = { state, action: place % 5, reward: place % 2, nextState: state, done: true, logProb: Math.log(0.2), value: 0 }
  return { ...known, ...changes }
}

test('the service, chosen from and taught', { skip: NO_SERVER }, async (t) => {
  await t.test('it is started once, and left alone by those who did not start it', async () => {
    assert.equal(await rl.checkHealth(), true)
    const second = new RLInterface({ serverPort: port, pythonPath: '/no/python' })
    await second.startServer()
    await second.stopServer()
    assert.equal(await rl.checkHealth(), true)
    await assert.rejects(second.getStats(), AuthenticationError, 'it asks for the key of those who did')
  })

  await t.test('choosing', async () => {
    assert.deepEqual(await rl.getStats(), { message: 'No training data yet' })
    const { probabilities, mutationTypes } = await rl.getActionDistribution(embedding(1))
    assert(Math.abs(probabilities.reduce((sum, one) => sum + one, 0) - 1) < 1e-5)
    const action = await rl.selectAction(embedding(1), { deterministic: true })
    assert.equal(action.actionIndex, probabilities.indexOf(Math.max(...probabilities)))
    assert.equal(action.mutationType, mutationTypes[action.actionIndex])
    assert(Math.abs(Math.exp(action.logProb) - action.probability) < 1e-5)
    const only = await rl.selectMutation('Sort this list.', { allowed: ['expansion'] })
    assert.deepEqual([only.mutationType, only.actionIndex, only.probability], ['expansion', 2, 1])
    await assert.rejects(rl.selectAction([1, 2]), (error) => error instanceof BadRequestError && error.param === 'embedding')
    await assert.rejects(rl.selectMutation('x', { allowed: ['nothing'] }), BadRequestError)
  })

  await t.test('rewriting and its reward', async () => {
    const prompt = 'Could you please sort this list and then print it, thank you?'
    const mutated = await rl.mutate(prompt, { mutation: 'context-reduction' })
    assert.equal(mutated.mutationType, 'context-reduction')
    assert(mutated.prompt.length < prompt.length && mutated.id !== null)
    const { bufferSize } = await rl.feedback(mutated.id, { score: 5 })
    await assert.rejects(rl.feedback(mutated.id, 0.5), { name: /ConflictError|NotFoundError/ })
    const collected = await rl.collectExperience(prompt)
    assert.equal(collected.reward, collected.mutated.score, "the service's own reward model")
    assert(collected.reward !== null && collected.reward > 0 && collected.reward < 1)
    const seen: string[] = []
    rl.setRewardModel((original, { prompt: rewritten }) => {
      seen.push(original)
      return rewritten.length > original.length ? 1 : 0
    })
    const episode = await rl.trainEpisode([prompt, 'Write a poem.'], 3)
    assert.deepEqual([episode.steps, seen], [3, [prompt, 'Write a poem.', prompt]])
    const stats = await rl.getStats()
    assert('bufferSize' in stats && stats.bufferSize === bufferSize + 4)
  })

  await t.test('an episode whose steps depend on each other', async () => {
    const prompts: string[] = []
    const environment: Environment = {
      reset: () => 'Write a poem.',
      step({ prompt, mutationType }) {
        prompts.push(prompt)
        const last = prompts.length === 3
        return { reward: last ? 1 : 0, nextPrompt: last ? null : `${prompts.length}. after ${mutationType}: sort it, please` }
      },
    }
    const before = await rl.getStats()
    const whole = await rl.trainEpisode(environment, 9)
    assert.deepEqual(whole, { steps: 3, rewarded: 3, totalReward: 1, avgReward: 1 / 3 })
    assert.match(prompts[1] ?? '', /after (try-catch-style|expansion|constraint-addition|context-reduction|task-decomposition)/)
    const between = await rl.getStats()
    assert('totalEpisodes' in before && 'totalEpisodes' in between)
    assert.equal(between.totalEpisodes, before.totalEpisodes + 1, 'three steps are one episode')
    prompts.length = 0
    assert.equal((await rl.trainEpisode(environment, 2)).steps, 2)
    const after = await rl.getStats()
    assert('totalEpisodes' in after)
    assert.deepEqual([after.totalEpisodes, after.bufferSize], [between.totalEpisodes, between.bufferSize + 2], 'it was cut')
    const again = { reset: () => 'Write a poem.', step: ({ prompt }: Mutated) => ({ reward: 1, nextPrompt: prompt }) }
    const rewritten = await rl.trainEpisode(again, 99)
    assert(rewritten.steps > 1 && rewritten.steps < 9, 'until no mutation would change the prompt')
    const last = await rl.getStats()
    assert('totalEpisodes' in last)
    assert.equal(last.totalEpisodes, after.totalEpisodes + 1)
    const { id } = await rl.mutate('Write a poem.')
    assert(id !== null)
    await assert.rejects(rl.feedback(id, { reward: 1, nextPrompt: 'Write it again.' }), { param: 'episode_id' })
  })

  await t.test('experiences of fifty clients at once, an update, a checkpoint that comes back', async () => {
    assert.equal(await rl.update(), null, 'too few')
    const before = await rl.getStats()
    const stored = await Promise.all(
      Array.from({ length: 50 }, (_, place) =>
        new RLInterface({ serverPort: port, apiKey: KEY }).storeExperience(experience(place, { episodeId: `e${place % 7}` })),
      ),
    )
    assert('bufferSize' in before)
    assert.equal(Math.max(...stored.map(({ bufferSize }) => bufferSize)), before.bufferSize + 50)
    await assert.rejects(rl.storeExperience(experience(0, { action: 9 })), { param: 'action' })
    await assert.rejects(rl.storeExperience(experience(0, { nextState: [] })), { param: 'next_state' })
    const updated = await rl.update()
    assert(updated !== null && Math.abs(updated.firstRatio - 1) < 1e-5)
    assert.deepEqual([updated.updateCount, updated.bufferSize], [1, 0])

    assert.equal(await rl.saveCheckpoint('mine'), 'mine')
    const then = await rl.getActionDistribution(embedding(3))
    await Promise.all(Array.from({ length: 40 }, (_, place) => rl.storeExperience(experience(place))))
    await rl.update()
    assert.notDeepEqual((await rl.getActionDistribution(embedding(3))).probabilities, then.probabilities)
    await trainer.stop()
    assert.equal(await rl.checkHealth(), false)
    await trainer.start()
    assert.equal(await rl.loadCheckpoint('nobody'), false)
    await assert.rejects(rl.loadCheckpoint('../mine'), BadRequestError)
    assert.equal(await rl.loadCheckpoint('mine'), true)
    assert.deepEqual((await rl.getActionDistribution(embedding(3))).probabilities, then.probabilities)
  })

  await t.test('a trainer', async () => {
    trainer.setRewardModel((_, { mutationType }) => (mutationType === 'expansion' ? 1 : 0))
    const progress: number[] = []
    const stats = await trainer.train(['Write a poem.', 'Sort the list.'], 8, 5, 4, ({ episodes }) => progress.push(episodes))
    assert.deepEqual([stats.episodes, stats.steps, stats.updates], [8, 40, 1])
    assert(stats.avgReward !== null && stats.maxReward !== null && stats.avgReward <= stats.maxReward)
    assert.deepEqual(progress, [1, 2, 3, 4, 5, 6, 7, 8])
  })

  await t.test('a page of this machine', { skip: chromium() }, async () => {
    const pages = await Pages.listen()
    try {
      const [types, refusal] = await pages.run(
        async ({ RLInterface }, [port, apiKey]) => {
          const rl = new RLInterface({ serverPort: Number(port), apiKey })
          await rl.startServer() // it answers already
          const { mutationType } = await rl.selectMutation('Write a poem.')
          const nobody = new RLInterface({ serverPort: 9, maxRetries: 0 })
          return [mutationType, String(await nobody.startServer().catch((error: unknown) => error))]
        },
        [String(port), KEY],
      )
      assert(MUTATION_TYPES.some((name) => name === types))
      assert.match(String(refusal), /^ParallmError: a page cannot start the service/)
    } finally {
      await pages.close()
    }
  })
})

test('a service that cannot be started says why', { skip: NO_SERVER }, async () => {
  const serverPort = await freePort()
  await assert.rejects(new RLInterface({ serverPort, autoStartServer: false }).startServer(), ConnectionError)
  const elsewhere = new RLInterface({ baseURL: `http://127.0.0.1:${serverPort}/prompt_policy`, pythonPath: PYTHON })
  await assert.rejects(elsewhere.startServer(), ConnectionError)
  await assert.rejects(new RLInterface({ serverPort, pythonPath: '/no/python' }).startServer(), (error) => {
    assert(error instanceof ParallmError)
    assert.match(error.message, /\/no\/python cannot be started/)
    return true
  })
  const wrong = new RLInterface({ serverPort, pythonPath: process.execPath }) // Node.js knows no -m
  const [one, other] = await Promise.allSettled([wrong.startServer(), wrong.startServer()])
  assert(one.status === 'rejected' && other.status === 'rejected')
  assert.match(String(one.reason), /ended with 9: .*bad option/s)
  assert.equal(one.reason, other.reason, 'two starts at once are one')
})

test('a service ends with the process that has started it, however that ends', { skip: NO_SERVER }, async () => {
  const checkpointDir = join(directory, 'orphan')
  const config = { serverPort: await freePort(), pythonPath: PYTHON, embeddingDim: DIM, checkpointDir }
  const program = `
    import { RLInterface } from 'mlx-parallm'
    await new RLInterface(${JSON.stringify(config)}).startServer()
    console.log('started')`
  const cwd = fileURLToPath(new URL('../..', import.meta.url))
  const parent = spawn(process.execPath, ['--input-type=module', '-e', program], { cwd, stdio: ['ignore', 'pipe', 'inherit'] })
  try {
    const [words] = (await once(parent.stdout, 'data')) as [Buffer]
    assert.equal(words.toString(), 'started\n')
    const rl = new RLInterface(config)
    assert.equal(await rl.checkHealth(), true)
    parent.kill('SIGKILL')
    while ((await rl.checkHealth()) || !existsSync(join(checkpointDir, 'latest'))) await new Promise(setImmediate)
  } finally {
    parent.kill('SIGKILL')
  }
})

test('the simulation learns, and repeats itself', () => {
  const runs = [new SimulatedRLTrainer(), new SimulatedRLTrainer()].map((one) => one.train().episodeRewards)
  assert.deepEqual(runs[0], runs[1])
  const trained = new SimulatedRLTrainer(0.2, 1)
  const { episodeRewards, episodes, steps } = trained.train(SAMPLE_PROMPTS, 100)
  const mean = (values: number[]): number => values.reduce((sum, value) => sum + value, 0) / values.length
  assert.deepEqual([episodes, steps], [100, 300])
  assert(mean(episodeRewards.slice(-20)) > mean(episodeRewards.slice(0, 20)) + 0.2)
  assert.equal(trained.selectMutation(SAMPLE_PROMPTS[2] ?? ''), 'expansion')
})

test('the demonstration needs no Python, and says that it is a simulation', () => {
  const demo = fileURLToPath(new URL('../../dist/esm/demo.js', import.meta.url))
  const run = (...words: string[]) => spawnSync(process.execPath, [demo, ...words], { encoding: 'utf8', env: { PATH: '' } })
  const shown = run('--action', SAMPLE_PROMPTS[4] ?? '')
  assert.equal(shown.status, 0)
  assert.match(shown.stdout, /^SIMULATION: .*\n[^]*\ntask-decomposition: Read the sales table/)
  for (const words of [['--nothing'], ['--port', 'x'], ['--full', '--python', '/no/python', '--port', '9']]) {
    const refused = run(...words)
    assert.deepEqual([refused.status, refused.stderr.split('\n').length], [2, 2], refused.stderr)
    assert.match(refused.stderr, /^error: /)
  }
})
