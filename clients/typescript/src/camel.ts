/** Names of the OpenAPI document, in TypeScript's way: `mutation_type` is `mutationType`. */

type CamelKey<K extends string> = K extends `${infer Head}_${infer Tail}` ? `${Head}${Capitalize<CamelKey<Tail>>}` : K

/** A type whose fields have TypeScript's names, at every depth. */
export type Camel<T> = T extends readonly (infer Item)[]
  ? Camel<Item>[]
  : T extends object
    ? { [K in keyof T as K extends string ? CamelKey<K> : K]: Camel<T[K]> }
    : T

export function camel<T>(value: T): Camel<T> {
  return renamed(value) as Camel<T>
}

function renamed(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(renamed)
  if (typeof value !== 'object' || value === null) return value
  return Object.fromEntries(Object.entries(value).map(([key, field]) => [inCamelCase(key), renamed(field)]))
}

function inCamelCase(key: string): string {
  return key.replace(/_([a-z0-9])/g, (_, letter: string) => letter.toUpperCase())
}
