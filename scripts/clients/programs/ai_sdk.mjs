// Vercel's AI SDK, with @ai-sdk/openai (Responses) and with the provider for compatible servers (chat).
// packages: ai@7.0.173 @ai-sdk/openai@4.0.118 @ai-sdk/openai-compatible@3.0.92 zod@4.6.7
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'
import { MODEL, QUESTION, SCRIPTED, V1, cell, check, checkIdle, checkLoop, getWeather } from './cells.mjs'

const openai = (baseURL) => createOpenAI({ baseURL, apiKey: 'none' })
const compatible = (baseURL) =>
  createOpenAICompatible({ name: 'local', baseURL, apiKey: 'none', supportsStructuredOutputs: true })
const get_weather = tool({
  description: 'The weather of a city.',
  inputSchema: z.object({ city: z.enum(['Paris']) }),
  execute: async (input) => getWeather(input),
})
const Weather = z.object({ city: z.enum(['Paris']), sunny: z.literal(true) })
const base = { prompt: QUESTION, maxRetries: 0 }
const looped = { ...base, tools: { get_weather }, stopWhen: stepCountIs(4) }

for (const [api, model] of [
  ['responses', (url) => openai(url)(MODEL)],
  ['chat', (url) => compatible(url)(MODEL)],
]) {
  await cell(api, async () => {
    const answer = await generateText({ ...base, model: model(V1), maxOutputTokens: 8 })
    check(answer.usage.outputTokens > 0, answer.usage)
  })
  await cell(`${api}: stream`, async () => {
    let parts = 0
    for await (const _ of streamText({ ...base, model: model(V1), maxOutputTokens: 8 }).textStream) parts++
    check(parts > 0, parts)
  })
  await cell(`${api}: tool loop`, async () => {
    checkLoop((await generateText({ ...looped, model: model(SCRIPTED) })).text)
  })
  await cell(`${api}: schema`, async () => {
    const output = Output.object({ schema: z.object({ sunny: z.boolean() }) })
    const answer = await generateText({ ...base, model: model(V1), maxOutputTokens: 64, output })
    check(typeof answer.output.sunny === 'boolean', answer.output)
  })
  await cell(`${api}: tools + schema`, async () => {
    const output = Output.object({ schema: Weather })
    const answer = await generateText({ ...looped, model: model(SCRIPTED), output })
    checkLoop(answer.output)
  })
  await cell(`${api}: cancel`, async () => {
    const control = new AbortController()
    const stream = streamText({ ...base, model: model(V1), maxOutputTokens: 1500, abortSignal: control.signal })
    for await (const _ of stream.textStream) break
    control.abort()
    await checkIdle()
  })
}
await cell('embeddings', async () => {
  const found = await embedMany({ model: compatible(V1).textEmbeddingModel(MODEL), values: ['a', 'b'] })
  check(found.embeddings.length === 2, found)
})
