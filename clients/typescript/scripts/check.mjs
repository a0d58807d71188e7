// What must hold before the package is given to anybody: types of today's documents, a package that every resolver reads.
import { spawnSync } from 'node:child_process'
import { mkdtempSync, readdirSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { fileURLToPath } from 'node:url'

process.chdir(fileURLToPath(new URL('..', import.meta.url)))
const directory = mkdtempSync(join(tmpdir(), 'mlx-parallm-'))
const run = (command, ...words) => {
  const { status } = spawnSync(command, words, { stdio: 'inherit' })
  if (status !== 0) {
    console.error(`check: ${[command, ...words].join(' ')} failed`)
    process.exitCode = 1
  }
}
try {
  run(process.execPath, 'scripts/generate.mjs', '--check')
  run('npm', 'pack', '--silent', '--ignore-scripts', '--pack-destination', directory)
  const [tarball] = readdirSync(directory).map((name) => join(directory, name))
  run('node_modules/.bin/publint', tarball, '--strict')
  run('node_modules/.bin/attw', tarball, '--no-color', '--format', 'ascii')
} finally {
  rmSync(directory, { recursive: true })
}
