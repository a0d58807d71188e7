/** Server-sent events, by the WHATWG specification (html.spec.whatwg.org/multipage/server-sent-events.html). */

export interface ServerSentEvent {
  /** "message" where the stream names none. */
  event: string
  data: string
  /** The last id that the stream has sent; "" before that. */
  id: string
}

/** Takes a stream's text in pieces of any size and returns the events that are whole. */
export class EventParser {
  #rest = ''
  #begun = false
  #data: string[] = []
  #event = ''
  #id = ''

  push(text: string): ServerSentEvent[] {
    this.#rest += text
    if (!this.#begun && this.#rest !== '') {
      this.#begun = true
      if (this.#rest.startsWith('\uFEFF')) this.#rest = this.#rest.slice(1)
    }
    const events: ServerSentEvent[] = []
    let from = 0
    for (;;) {
      const end = lineEnd(this.#rest, from)
      if (end === null) break
      const event = this.#line(this.#rest.slice(from, end.at))
      if (event !== null) events.push(event)
      from = end.next
    }
    this.#rest = this.#rest.slice(from)
    return events
  }

  #line(line: string): ServerSentEvent | null {
    if (line === '') {
      const event = { event: this.#event || 'message', data: this.#data.join('\n'), id: this.#id }
      const whole = this.#data.length > 0
      this.#data = []
      this.#event = ''
      return whole ? event : null
    }
    const colon = line.indexOf(':')
    const field = colon < 0 ? line : line.slice(0, colon)
    const value = colon < 0 ? '' : line.slice(line[colon + 1] === ' ' ? colon + 2 : colon + 1)
    if (field === 'data') this.#data.push(value)
    else if (field === 'event') this.#event = value
    else if (field === 'id' && !value.includes('\0')) this.#id = value
    return null
  }
}

/** Where the line from `from` on ends (\n, \r or \r\n) and the next begins; null: it is not whole. A \r at the very end may be half of \r\n. */
function lineEnd(text: string, from: number): { at: number; next: number } | null {
  for (let at = from; at < text.length; at++) {
    if (text[at] === '\n') return { at, next: at + 1 }
    if (text[at] === '\r') return at + 1 === text.length ? null : { at, next: text[at + 1] === '\n' ? at + 2 : at + 1 }
  }
  return null
}

/** The events of a body. Leaving the loop closes the connection. An event that the end cuts off is dropped. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerSentEvent, void, undefined> {
  const reader = body.getReader()
  const decoder = new TextDecoder('utf-8', { ignoreBOM: true })
  const parser = new EventParser()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      yield* parser.push(done ? decoder.decode() : decoder.decode(value, { stream: true }))
      if (done) return
    }
  } finally {
    await reader.cancel().catch(() => undefined)
  }
}
