/** `RLTrainer`: episodes until the policy has learned. */

import {
  RLInterface,
  type Environment,
  type EpisodeResult,
  type RLConfig,
  type RewardModel,
  type UpdateResult,
} from './interface.js'

export interface TrainingStats {
  episodes: number
  steps: number
  updates: number
  /** Steps that were rewarded. */
  rewarded: number
  totalReward: number
  /** Mean of all rewards; null without one. */
  avgReward: number | null
  /** Best mean of an episode. */
  maxReward: number | null
  /** The mean of each episode that was rewarded. */
  episodeRewards: number[]
  lastUpdate: UpdateResult | null
}

export type OnProgress = (stats: TrainingStats, episode: EpisodeResult) => void

export class RLTrainer {
  readonly #rl: RLInterface

  constructor(config: RLConfig | RLInterface = {}) {
    this.#rl = config instanceof RLInterface ? config : new RLInterface(config)
  }

  getInterface(): RLInterface {
    return this.#rl
  }

  setRewardModel(model: RewardModel): void {
    this.#rl.setRewardModel(model)
  }

  start(options: { signal?: AbortSignal } = {}): Promise<void> {
    return this.#rl.startServer(options)
  }

  /** An update after every `updateInterval` episodes and one at the end, where there are enough experiences. */
  async train(
    source: readonly string[] | Environment,
    numEpisodes = 100,
    episodeLength = 5,
    updateInterval = 10,
    onProgress?: OnProgress,
  ): Promise<TrainingStats> {
    const stats: TrainingStats = emptyStats()
    for (let number = 1; number <= numEpisodes; number++) {
      const from = (number - 1) * episodeLength
      const episode = await this.#rl.trainEpisode('reset' in source ? source : turned(source, from), episodeLength)
      count(stats, episode)
      if (number % updateInterval === 0 || number === numEpisodes) {
        const result = await this.#rl.update()
        if (result !== null) {
          stats.updates += 1
          stats.lastUpdate = result
        }
      }
      onProgress?.(stats, episode)
    }
    return stats
  }

  stop(): Promise<void> {
    return this.#rl.stopServer()
  }
}

/** The prompts from this one on, and then those before it. */
function turned(prompts: readonly string[], from: number): string[] {
  const first = from % Math.max(1, prompts.length)
  return [...prompts.slice(first), ...prompts.slice(0, first)]
}

export function emptyStats(): TrainingStats {
  const none = { avgReward: null, maxReward: null, episodeRewards: [], lastUpdate: null }
  return { episodes: 0, steps: 0, updates: 0, rewarded: 0, totalReward: 0, ...none }
}

export function count(stats: TrainingStats, episode: EpisodeResult): void {
  stats.episodes += 1
  stats.steps += episode.steps
  if (episode.avgReward === null) return
  stats.episodeRewards.push(episode.avgReward)
  stats.rewarded += episode.rewarded
  stats.totalReward += episode.totalReward
  stats.avgReward = stats.totalReward / stats.rewarded
  stats.maxReward = Math.max(stats.maxReward ?? -Infinity, episode.avgReward)
}
