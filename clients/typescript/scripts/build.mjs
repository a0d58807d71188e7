// dist/esm by the compiler; dist/cjs: the same sources file by file, and the same declarations. A package.json names each kind.
import { spawnSync } from 'node:child_process'
import { cpSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs'
import { dirname } from 'node:path'
import { fileURLToPath } from 'node:url'
import ts from 'typescript'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
rmSync('dist', { recursive: true, force: true })
const { status } = spawnSync(process.execPath, ['node_modules/typescript/bin/tsc'], { stdio: 'inherit' })
if (status !== 0) process.exit(status ?? 1)

const compilerOptions = { target: ts.ScriptTarget.ES2022, module: ts.ModuleKind.CommonJS, isolatedModules: true, sourceMap: true, inlineSources: true }
for (const name of readdirSync('src', { recursive: true }).filter((name) => name.endsWith('.ts'))) {
  const source = readFileSync(`src/${name}`, 'utf8')
  const { outputText, sourceMapText } = ts.transpileModule(source, { fileName: name, compilerOptions })
  const target = `dist/cjs/${name.slice(0, -'.ts'.length)}`
  mkdirSync(dirname(target), { recursive: true })
  writeFileSync(`${target}.js`, outputText)
  writeFileSync(`${target}.js.map`, sourceMapText)
  cpSync(`dist/esm/${name.slice(0, -'.ts'.length)}.d.ts`, `${target}.d.ts`)
}
writeFileSync('dist/esm/package.json', `${JSON.stringify({ type: 'module' })}\n`)
writeFileSync('dist/cjs/package.json', `${JSON.stringify({ type: 'commonjs' })}\n`)
