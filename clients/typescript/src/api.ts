/** Calls with the types of the OpenAPI document: a path decides what may be sent and what comes back. */

import type { Call, CallOptions, Http, Query, Retry } from './http.js'
import type { paths } from './openapi/server.js'

type Method = 'get' | 'post'
/** The paths of `Api` that have this method. */
export type PathOf<M extends Method, Api = paths> = {
  [P in keyof Api]: Api[P] extends { [K in M]: object } ? P : never
}[keyof Api] &
  string

type Operation<P extends keyof Api, M extends Method, Api> = Api[P] extends { [K in M]: infer O } ? O : never
type JSONOf<T> = T extends { content: { 'application/json': infer A } } ? A : never
type Parameters<P extends keyof Api, M extends Method, Api> =
  Operation<P, M, Api> extends { parameters: infer Q } ? Q : never

/** What an answer holds; of /health a 503 too. */
export type Answer<P extends keyof Api, M extends Method, Api = paths> =
  Operation<P, M, Api> extends { responses: infer R } ? JSONOf<R[keyof R]> : never
export type Body<P extends keyof Api, Api = paths> =
  Operation<P, 'post', Api> extends { requestBody?: infer B } ? JSONOf<NonNullable<B>> : never
export type QueryOf<P extends keyof Api, M extends Method, Api = paths> =
  Parameters<P, M, Api> extends { query?: infer Q } ? NonNullable<Q> : never
type PathParams<P extends keyof Api, M extends Method, Api> =
  Parameters<P, M, Api> extends { path: infer V } ? { params: V } : { params?: never }

type Sent<P extends keyof Api, M extends Method, Api> = { query?: QueryOf<P, M, Api>; also?: readonly number[] } & PathParams<P, M, Api>

export function get<P extends PathOf<'get', Api>, Api = paths>(
  http: Http,
  path: P,
  sent: Sent<P, 'get', Api>,
  options?: CallOptions,
): Promise<Answer<P, 'get', Api>> {
  return http.json(call('GET', path, sent, 'always'), options) as Promise<Answer<P, 'get', Api>>
}

export function post<P extends PathOf<'post', Api>, Api = paths>(
  http: Http,
  path: P,
  sent: Sent<P, 'post', Api> & { body?: Body<P, Api>; retry: Retry },
  options?: CallOptions,
): Promise<Answer<P, 'post', Api>> {
  return http.json(call('POST', path, sent, sent.retry), options) as Promise<Answer<P, 'post', Api>>
}

function call(method: Call['method'], path: string, sent: object, retry: Retry): Call {
  const { params, ...rest } = sent as { params?: Record<string, string>; query?: Query; body?: unknown }
  const filled = path.replace(/\{(\w+)\}/g, (_, name: string) => encodeURIComponent(params?.[name] ?? ''))
  return { ...rest, method, path: filled, retry }
}
