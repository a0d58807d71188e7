/** The errors of this package. Every one of them is a `ParallmError`; an abort by the caller's own signal is not, and is thrown as it is. */

export class ParallmError extends Error {
  constructor(message: string, options?: ErrorOptions) {
    super(message, options)
    this.name = new.target.name
  }
}

/** No connection, or one that broke off. `cause` has the reason. */
export class ConnectionError extends ParallmError {}

/** No whole answer within `timeoutMs`. */
export class TimeoutError extends ParallmError {}

/** The server's answer is not what its OpenAPI document says, such as a page of a proxy. */
export class UnexpectedAnswerError extends ParallmError {}

/** The server refused: `status`, and `type`, `code` and `param` of OpenAI's error body (null where it has none). */
export class APIError extends ParallmError {
  readonly type: string | null
  readonly code: string | null
  readonly param: string | null

  constructor(
    readonly status: number,
    message: string,
    body: { type?: unknown; code?: unknown; param?: unknown } = {},
    /** `X-Request-ID`, which the server's log has too. */
    readonly requestId: string | null = null,
  ) {
    super(message)
    this.type = textOrNull(body.type)
    this.code = textOrNull(body.code)
    this.param = textOrNull(body.param)
  }
}

/** 400: the request is wrong; `param` names the field. */
export class BadRequestError extends APIError {}
/** 401: the API key is missing or wrong. */
export class AuthenticationError extends APIError {}
/** 403: a foreign page, or something that this server does not allow. */
export class PermissionDeniedError extends APIError {}
/** 404: no such object. */
export class NotFoundError extends APIError {}
/** 409: not now, or not twice. */
export class ConflictError extends APIError {}
/** 410: too late: it is kept no longer. */
export class GoneError extends APIError {}
/** 429: the queue is full. */
export class RateLimitError extends APIError {}
/** 500 and 504. */
export class ServerError extends APIError {}
/** 503: loading, draining, or a full disk. */
export class UnavailableError extends ServerError {}

const CLASSES: Record<number, typeof APIError> = {
  400: BadRequestError,
  401: AuthenticationError,
  403: PermissionDeniedError,
  404: NotFoundError,
  409: ConflictError,
  410: GoneError,
  429: RateLimitError,
  503: UnavailableError,
}

/** The error for an answer that is not 2xx. `text`: its body. */
export function apiError(status: number, text: string, requestId: string | null): APIError {
  let body: Record<string, unknown> = {}
  try {
    const parsed: unknown = JSON.parse(text)
    const error: unknown = isRecord(parsed) ? (parsed['error'] ?? parsed['detail']) : undefined
    body = isRecord(error) ? error : typeof error === 'string' ? { message: error } : {}
  } catch {
    // not JSON: a proxy's page
  }
  const message = textOrNull(body['message']) ?? (text.slice(0, 200) || `status ${status}`)
  const kind = CLASSES[status] ?? (status >= 500 ? ServerError : APIError)
  return new kind(status, message, body, requestId)
}

export function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === 'object' && value !== null && !Array.isArray(value)
}

function textOrNull(value: unknown): string | null {
  return typeof value === 'string' ? value : null
}
