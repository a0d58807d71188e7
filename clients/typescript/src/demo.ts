#!/usr/bin/env node
/**
 *     npm run demo                        a simulation: no service, no model, no real rewards
 *     npm run demo -- --action PROMPT     what the simulated policy does with a sample prompt, or one of yours
 *     npm run demo -- --full              the service, its networks and its mutations; only the rewards are made up
 *
 * `--full` uses the service that answers at --port (8765), or starts it with --python (python3).
 */

import { ParallmError } from './errors.js'
import { RLTrainer } from './prompt-policy/trainer.js'
import { MUTATION_TYPES, SAMPLE_PROMPTS, sampleReward, SimulatedRLTrainer } from './prompt-policy/simulation.js'

const NOISE = 0.1
const USAGE = 'usage: mlx-parallm-demo [--action PROMPT | --full [--port N] [--python PROGRAM] [--directory DIR]]'

interface Options {
  full: boolean
  action?: string
  port?: string
  python?: string
  directory?: string
}

function parse(words: readonly string[]): Options {
  const options: Options = { full: false }
  for (let place = 0; place < words.length; place++) {
    const word = words[place] as string
    const name = word.slice(2) as 'action' | 'port' | 'python' | 'directory'
    if (word === '--full') options.full = true
    else if (['--action', '--port', '--python', '--directory'].includes(word) && words[place + 1] !== undefined) {
      options[name] = words[++place] as string
    } else throw new ParallmError(`${word}: ${USAGE}`)
  }
  if (options.port !== undefined && !/^\d{1,5}$/.test(options.port)) throw new ParallmError(`--port ${options.port} is no port`)
  return options
}

function simulated(action: string | undefined): void {
  console.log('SIMULATION: a table learns from made-up rewards. No service, no language model.')
  const trainer = new SimulatedRLTrainer()
  const { episodeRewards } = trainer.train(SAMPLE_PROMPTS, 50, 3, (stats, episode) => {
    if (stats.episodes % 10 === 0) console.log(`episode ${stats.episodes}: reward ${shown(episode.avgReward)}`)
  })
  console.log(`first ten episodes ${shown(mean(episodeRewards.slice(0, 10)))}, last ten ${shown(mean(episodeRewards.slice(-10)))}`)
  for (const prompt of action === undefined ? SAMPLE_PROMPTS.slice(0, MUTATION_TYPES.length) : [action]) {
    const known = SAMPLE_PROMPTS.includes(prompt) ? '' : ' (a table knows nothing of other prompts: the first one)'
    console.log(`${trainer.selectMutation(prompt)}: ${prompt}${known}`)
  }
}

async function full({ port, python, directory }: Options): Promise<void> {
  const trainer = new RLTrainer({
    ...(port === undefined ? {} : { serverPort: Number(port) }),
    ...(python === undefined ? {} : { pythonPath: python }),
    ...(directory === undefined ? {} : { checkpointDir: directory }),
    serverArguments: ['--set', 'prompt_policy.ppo.learning_rate=1e-3'],
  })
  const rl = trainer.getInterface()
  trainer.setRewardModel((prompt, { mutationType }) => sampleReward(prompt, mutationType ?? null) + NOISE * (Math.random() * 2 - 1))
  await trainer.start()
  console.log(`the service answers at ${rl.http.baseURL}; the rewards are made up, all else is real`)
  try {
    await report(trainer)
    const { episodeRewards } = await trainer.train(SAMPLE_PROMPTS, 256, 5, 64, (stats, episode) => {
      if (stats.episodes % 32 === 0) console.log(`episode ${stats.episodes}: reward ${shown(episode.avgReward)}, ${stats.updates} updates`)
    })
    const tenth = Math.ceil(episodeRewards.length / 10)
    console.log(`first ${tenth} episodes ${shown(mean(episodeRewards.slice(0, tenth)))}, last ${shown(mean(episodeRewards.slice(-tenth)))}`)
    await report(trainer)
    console.log(`saved as ${await rl.saveCheckpoint('demo')}`)
  } finally {
    await trainer.stop()
  }
}

/** The reward of the likeliest mutations, without noise. */
async function report(trainer: RLTrainer): Promise<void> {
  const rewards = []
  for (const prompt of SAMPLE_PROMPTS) {
    const { mutationType } = await trainer.getInterface().mutate(prompt, { deterministic: true })
    rewards.push(sampleReward(prompt, mutationType ?? null))
  }
  console.log(`the likeliest mutations get ${shown(mean(rewards))} (best 0.900, by chance 0.400)`)
}

function mean(values: readonly number[]): number | null {
  return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length
}

function shown(value: number | null): string {
  return value === null ? 'none' : value.toFixed(3)
}

async function main(words: readonly string[]): Promise<void> {
  const options = parse(words)
  if (options.full) await full(options)
  else simulated(options.action)
}

main(process.argv.slice(2)).catch((error: unknown) => {
  console.error(error instanceof ParallmError ? `error: ${error.message}` : error)
  process.exitCode = 2
})
