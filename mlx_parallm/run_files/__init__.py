"""The files of a run directory: training writes them, `runs/` reads them. No MLX.

    directory.py        names, the lock, which run and which checkpoint a command line means
    trainer_state.py    trainer_state.json of a checkpoint; versions.py: its table of versions
    checksums.py        SHA256SUMS of a checkpoint
    resume.py           what a resume goes on from, and what may differ
    metrics.py          metrics.jsonl, and every file of JSON lines with a step
    evaluations.py      evaluations.jsonl; best_checkpoint.py: scores that checkpoints are compared by
    spans.py            spans.jsonl
    samples.py          samples.jsonl, samples.html
    tokens.py           tokens.sqlite

Weights and optimizer of a checkpoint are `rl_training/checkpoint.py`'s, groups `rollout_store`'s.
"""
