// Anthropic's Node client. packages: @anthropic-ai/sdk@1.10.0
import Anthropic from '@anthropic-ai/sdk'
import { MODEL, PARAMETERS, QUESTION, SCRIPTED_URL, TINY_URL, cell, check, checkLoop, getWeather } from './cells.mjs'

const tiny = new Anthropic({ baseURL: TINY_URL, apiKey: 'none', maxRetries: 0 })
const scripted = new Anthropic({ baseURL: SCRIPTED_URL, apiKey: 'none', maxRetries: 0 })
const asked = { model: MODEL, max_tokens: 200, messages: [{ role: 'user', content: QUESTION }] }
const tools = [{ name: 'get_weather', input_schema: PARAMETERS }]

await cell('chat', async () => {
  const answer = await tiny.messages.create({ ...asked, max_tokens: 8 })
  check(answer.usage.output_tokens > 0, answer)
})
await cell('stream', async () => {
  const stream = tiny.messages.stream({ ...asked, max_tokens: 8 })
  let events = 0
  for await (const _ of stream) events++
  check(events > 2, events)
})
await cell('tool loop', async () => {
  const first = await scripted.messages.create({ ...asked, tools })
  const use = first.content.find((block) => block.type === 'tool_use')
  const result = { type: 'tool_result', tool_use_id: use.id, content: getWeather(use.input) }
  const messages = [...asked.messages, { role: 'assistant', content: first.content }, { role: 'user', content: [result] }]
  checkLoop((await scripted.messages.create({ ...asked, messages, tools })).content)
})
