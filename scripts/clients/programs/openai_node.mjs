// OpenAI's Node client. packages: openai@7.55.0
import OpenAI from 'openai'
import {
  MODEL, PARAMETERS, QUESTION, SCHEMA, SCRIPTED, V1, cell, check, checkIdle, checkLoop, getWeather,
} from './cells.mjs'

const tiny = new OpenAI({ baseURL: V1, apiKey: 'none', maxRetries: 0 })
const scripted = new OpenAI({ baseURL: SCRIPTED, apiKey: 'none', maxRetries: 0 })
const asked = { model: MODEL, messages: [{ role: 'user', content: QUESTION }] }
const tools = [{ type: 'function', function: { name: 'get_weather', parameters: PARAMETERS } }]
const format = { type: 'json_schema', json_schema: { name: 'weather', schema: SCHEMA, strict: true } }

async function loop(fields) {
  const messages = [...asked.messages]
  for (;;) {
    const answer = await scripted.chat.completions.create({ ...asked, ...fields, messages, tools })
    const message = answer.choices[0].message
    if (!message.tool_calls?.length) return message.content
    messages.push(message)
    for (const call of message.tool_calls) {
      const content = getWeather(JSON.parse(call.function.arguments))
      messages.push({ role: 'tool', tool_call_id: call.id, content })
    }
  }
}

await cell('chat', async () => {
  const answer = await tiny.chat.completions.create({ ...asked, max_tokens: 8 })
  check(answer.usage.completion_tokens > 0, answer)
})
await cell('stream', async () => {
  let chunks = 0
  for await (const _ of await tiny.chat.completions.create({ ...asked, max_tokens: 8, stream: true })) chunks++
  check(chunks > 2, chunks)
})
await cell('tool loop', async () => checkLoop(await loop({})))
await cell('schema', async () => {
  const answer = await tiny.chat.completions.parse({ ...asked, max_tokens: 64, response_format: format })
  check('sunny' in JSON.parse(answer.choices[0].message.content), answer)
})
await cell('tools + schema', async () => {
  const answer = await loop({ response_format: format })
  check(JSON.parse(answer).sunny === true, answer)
  checkLoop(answer)
})
await cell('responses', async () => {
  const stream = tiny.responses.stream({ model: MODEL, input: QUESTION, max_output_tokens: 8 })
  const types = new Set()
  for await (const event of stream) types.add(event.type)
  check(types.has('response.output_text.delta'), [...types])
})
await cell('embeddings', async () => {
  const found = await tiny.embeddings.create({ model: MODEL, input: ['a', 'b'] })
  check(found.data[1].embedding.length > 8, found)
})
await cell('cancel', async () => {
  const control = new AbortController()
  const fields = { ...asked, max_tokens: 1500, ignore_eos: true, stream: true }
  const stream = await tiny.chat.completions.create(fields, { signal: control.signal })
  await stream[Symbol.asyncIterator]().next()
  control.abort()
  await checkIdle()
})
