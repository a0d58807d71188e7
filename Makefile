# make install · quickstart · test · check — each sets up what it needs, once (`scripts/setup`, stamp files in .venv).

# Started without a PATH (a bare container, `env -i make`): programs still need one.
export PATH := $(or $(PATH),/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin)

.PHONY: help install quickstart test check real-model
help:
	@echo "make install      make .venv and install what fits this machine"
	@echo "make quickstart   install, then watch a tiny model learn (about two minutes)"
	@echo "make test         install with the test tools, then run the tests (make check has the gates)"
	@echo "make check        linter, formatter, types, architecture, documentation rows (under a minute)"
	@echo "make real-model   download a small real model (93 MB), then run the tests that need it"

install: .venv/.ready
	@echo "ready: the commands are in .venv/bin (. .venv/bin/activate)"

quickstart: .venv/.ready
	@.venv/bin/mlx_parallm_train --config train_configs/quickstart.toml

test: .venv/.ready-dev
	@scripts/test

check:
	@scripts/check

real-model: .venv/.ready-dev
	@scripts/get_smollm2
	@scripts/test -m real_model tests/real_model

.venv/.ready: pyproject.toml scripts/setup
	@scripts/setup

.venv/.ready-dev: pyproject.toml scripts/setup
	@scripts/setup dev
