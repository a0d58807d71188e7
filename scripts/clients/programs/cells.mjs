// What the Node programs here have in common (cells.py is Python's). A program is copied beside its node_modules.
export const { MODEL, TINY_URL, SCRIPTED_URL } = process.env
export const V1 = `${TINY_URL}/v1`
export const SCRIPTED = `${SCRIPTED_URL}/v1`
export const QUESTION = 'What is the weather in Paris?'
export const SCHEMA = {
  type: 'object',
  properties: { city: { type: 'string', enum: ['Paris'] }, sunny: { type: 'boolean', enum: [true] } },
  required: ['city', 'sunny'],
  additionalProperties: false,
}
export const PARAMETERS = { type: 'object', properties: { city: { type: 'string', enum: ['Paris'] } }, required: ['city'] }
export const calls = []

export function getWeather({ city }) {
  calls.push(city)
  return 'sunny'
}

export function check(condition, found) {
  if (!condition) throw new Error(`unexpected: ${JSON.stringify(found)}`)
}

export function checkLoop(answer) {
  check(calls.length === 1 && calls[0] === 'Paris', { calls })
  check(JSON.stringify(answer).includes('Paris'), answer)
}

export async function checkIdle() {
  for (let round = 0; round < 100; round++) {
    const page = await (await fetch(`${TINY_URL}/metrics`)).text()
    if (Number(page.match(/^\S*requests_running\S* (\S+)$/m)[1]) === 0) return
    await new Promise((resolve) => setTimeout(resolve, 100))
  }
  throw new Error('the server still generates 10 s after the client has gone')
}

export async function cell(name, run) {
  calls.length = 0
  let why = null
  let timer
  const expired = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error('not done in 60 s')), 60_000)
  })
  try {
    await Promise.race([run(), expired])
  } catch (error) {
    why = `${error.name}: ${error.message}`.replace(/\s+/g, ' ').slice(0, 400)
  }
  clearTimeout(timer)
  console.log(JSON.stringify({ cell: name, why }))
}
