// src/openapi/*.ts of openapi/*.json; with --check: says when a file is stale.
import { spawnSync } from 'node:child_process'
import { readdirSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
const options = ['--root-types', '--root-types-no-schema-prefix', '--default-non-nullable=false', ...process.argv.slice(2)]
for (const file of readdirSync('openapi')) {
  const target = `src/openapi/${file.replace('.json', '.ts')}`
  const words = ['node_modules/openapi-typescript/bin/cli.js', `openapi/${file}`, '-o', target, ...options]
  if (spawnSync(process.execPath, words, { stdio: 'inherit' }).status !== 0) {
    console.error(`generate: ${target} is not what openapi/${file} makes: npm run generate`)
    process.exitCode = 1
  }
}
