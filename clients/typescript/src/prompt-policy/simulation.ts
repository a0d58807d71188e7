/**
 * A SIMULATION: no service, no network, no language model, no real rewards. It shows what learning which mutation helps
 * which kind of prompt looks like, with a table in the place of the policy. The real policy is `RLInterface`.
 */

import { count, emptyStats, type OnProgress, type TrainingStats } from './trainer.js'

/** In the service's order. */
export const MUTATION_TYPES = [
  'try-catch-style',
  'context-reduction',
  'expansion',
  'constraint-addition',
  'task-decomposition',
] as const
export type MutationType = (typeof MUTATION_TYPES)[number]

/** Two made-up prompts of each of five kinds; for kind k mutation k helps. */
export const SAMPLE_PROMPTS: readonly string[] = [
  'Help me with the parser and the unit tests today.',
  'Please could you, if you do not mind, tell me the capital of Peru, thank you so much.',
  'Write a poem about the dragon.',
  'Write a slogan for the landing page.',
  'Read the sales table and then draw a churn chart and finally write a report.',
  'I need a sorting loop before Monday.',
  'Hello! I hope you are well. I was just wondering how vaccines work, please.',
  'A short story about a sonnet.',
  'A headline for the discount banner.',
  'Load the survey data, test for outliers, and after that plot the quarterly revenue.',
]
const KINDS = MUTATION_TYPES.length
const HELPS = 0.9
const ELSE = 0.275
const NOISE = 0.1

/** The made-up mean reward of a mutation of a sample prompt: 0.9 for the one that helps, else 0.275. */
export function sampleReward(prompt: string, mutationType: string | null): number {
  const kind = SAMPLE_PROMPTS.indexOf(prompt) % KINDS
  return MUTATION_TYPES[kind] === mutationType ? HELPS : ELSE
}

export class SimulatedRLTrainer {
  readonly #random: () => number
  readonly #sums = new Map<string, { total: number; count: number }[]>()

  /** `epsilon`: how often a mutation is tried by chance. The same seed gives the same run. */
  constructor(
    readonly epsilon = 0.2,
    seed = 0,
  ) {
    this.#random = mulberry32(seed)
  }

  /** The mutation with the best mean reward so far; one that was never tried comes first. */
  selectMutation(prompt: string, explore = false): MutationType {
    const tried = this.#tried(prompt)
    if (explore && this.#random() < this.epsilon) return MUTATION_TYPES[Math.floor(this.#random() * KINDS)] as MutationType
    const means = tried.map(({ total, count }) => (count === 0 ? Infinity : total / count))
    return MUTATION_TYPES[means.indexOf(Math.max(...means))] as MutationType
  }

  train(
    prompts: readonly string[] = SAMPLE_PROMPTS,
    numEpisodes = 50,
    episodeLength = 3,
    onProgress?: OnProgress,
  ): TrainingStats {
    const stats = emptyStats()
    for (let number = 0; number < numEpisodes; number++) {
      let totalReward = 0
      for (let step = 0; step < episodeLength; step++) {
        const prompt = prompts[(number * episodeLength + step) % prompts.length] as string
        const mutation = this.selectMutation(prompt, true)
        const reward = sampleReward(prompt, mutation) + NOISE * (this.#random() * 2 - 1)
        const entry = this.#tried(prompt)[MUTATION_TYPES.indexOf(mutation)] as { total: number; count: number }
        entry.total += reward
        entry.count += 1
        totalReward += reward
      }
      const episode = { steps: episodeLength, rewarded: episodeLength, totalReward, avgReward: totalReward / episodeLength }
      count(stats, episode)
      onProgress?.(stats, episode)
    }
    return stats
  }

  #tried(prompt: string): { total: number; count: number }[] {
    const known = this.#sums.get(prompt) ?? MUTATION_TYPES.map(() => ({ total: 0, count: 0 }))
    this.#sums.set(prompt, known)
    return known
  }
}

/** Random numbers in [0, 1) from a seed (github.com/cprosche/mulberry32). */
function mulberry32(seed: number): () => number {
  let state = seed >>> 0
  return () => {
    state = (state + 0x6d2b79f5) >>> 0
    let mixed = Math.imul(state ^ (state >>> 15), state | 1)
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61)
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296
  }
}
