// An agent that trains the model it talks to, with the Vercel AI SDK. In two terminals:
//   mlx_parallm train --config examples/rewards_by_id/letters.toml
//   cd examples/typescript && npm ci && npm run agent [http://127.0.0.1:8000]
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText } from 'ai'
import { MlxParallm } from 'mlx-parallm'

const client = new MlxParallm({ baseURL: process.argv[2] ?? 'http://127.0.0.1:8000' })
const model = createOpenAICompatible({ name: 'mlx_parallm', ...client.openai })('default')
const letter = () => String.fromCharCode(97 + Math.floor(Math.random() * 26))
let running = true

/** One task: eight attempts, judged, and rewarded by the ids of their answers. */
async function task(): Promise<void> {
  const word = [letter(), letter(), letter(), letter()]
  const attempt = () => generateText({ model, prompt: `Reverse: ${word.join('')}`, maxOutputTokens: 8 })
  const answers = await Promise.all(Array.from({ length: 8 }, attempt))
  const rewards = answers.map(({ text }) => Number(text === word.toReversed().join('')))
  const ids = answers.map(({ response }) => response.id)
  await client.reward(ids, rewards)
}

async function work(): Promise<void> {
  while (running) {
    await task().catch((error: unknown) => {
      if (running) throw error // the run has ended, and the server with it
    })
  }
}

async function watch(): Promise<void> {
  for await (const { steps, state } of client.training.watch()) {
    for (const { step, values } of steps) console.log(`step ${step}: reward ${values['reward_mean']?.toFixed(3)}`)
    running = state === 'running'
  }
  running = false
}

await client.ready()
await Promise.all([watch(), ...Array.from({ length: 6 }, work)])
