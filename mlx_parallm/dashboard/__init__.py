"""The dashboard: what the policy writes and how its numbers move, in a browser, during a run and after it. A leaf.

    run_view.py  one run directory as JSON values: metrics by columns, groups, answers, tokens, health, evaluations
    routes.py    the routes below /dashboard, in the daemon and in a server of their own
    command.py   `mlx_parallm_dashboard RUN_DIR…`: finished runs, and several of them
    static/      the page: no build step; vendor/VENDORED.json says what is not ours

Everything is read from the disk, by the readers of `mlx_parallm rollouts`, `compare` and `explain`.
"""
