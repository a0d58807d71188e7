// dist/esm and dist/cjs, by the compiler alone. A package.json in each names its kind.
import { spawnSync } from 'node:child_process'
import { mkdirSync, rmSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
rmSync('dist', { recursive: true, force: true })
for (const [kind, type, project] of [
  ['esm', 'module', 'tsconfig.json'],
  ['cjs', 'commonjs', 'tsconfig.cjs.json'],
]) {
  mkdirSync(`dist/${kind}`, { recursive: true })
  writeFileSync(`dist/${kind}/package.json`, `${JSON.stringify({ type })}\n`)
  const { status } = spawnSync(process.execPath, ['node_modules/typescript/bin/tsc', '-p', project], { stdio: 'inherit' })
  if (status !== 0) process.exit(status ?? 1)
}
