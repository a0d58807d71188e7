export { MlxParallm, Engine, Rollouts, Session, Training } from './client.js'
export type { GroupsQuery, OpenAIOptions, ParallmOptions, RollbackTarget } from './client.js'
export * from './errors.js'
export { Http } from './http.js'
export type { Call, CallOptions, HttpOptions, Query, Retry } from './http.js'
export { EventParser, events } from './sse.js'
export type { ServerSentEvent } from './sse.js'
export type { LiveMetrics, WatchOptions } from './watch.js'
export type * as api from './openapi/server.js'
export { RLInterface } from './prompt-policy/interface.js'
export type {
  ActionDistribution,
  ActionOptions,
  Collected,
  Environment,
  EnvironmentStep,
  EpisodeResult,
  Feedback,
  Mutated,
  RewardModel,
  RLAction,
  RLConfig,
  RLStats,
  RolledOut,
  Stored,
  TrainingExperience,
  UpdateResult,
} from './prompt-policy/interface.js'
export { RLTrainer } from './prompt-policy/trainer.js'
export type { OnProgress, TrainingStats } from './prompt-policy/trainer.js'
export { MUTATION_TYPES, SAMPLE_PROMPTS, sampleReward, SimulatedRLTrainer } from './prompt-policy/simulation.js'
export type { MutationType } from './prompt-policy/simulation.js'
export type * as policyAPI from './openapi/prompt_policy.js'
