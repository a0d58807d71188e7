// The TypeScript blocks of docs/clients.md, as files that the tests' compiler reads.
import { mkdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'

const target = new URL('../test/from_docs/', import.meta.url)
rmSync(target, { recursive: true, force: true })
mkdirSync(target)
for (const page of ['clients']) {
  const text = readFileSync(new URL(`../../../docs/${page}.md`, import.meta.url), 'utf8')
  const blocks = [...text.matchAll(/^```typescript\n(.*?)^```$/gms)]
  if (blocks.length === 0) throw new Error(`docs/${page}.md has no block of typescript`)
  blocks.forEach(([, code], place) => writeFileSync(new URL(`${page}_${place}.ts`, target), code))
}
