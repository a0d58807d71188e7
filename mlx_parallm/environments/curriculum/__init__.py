"""`curriculum = "adaptive"`: rows are drawn by what a group of them is expected to teach now.

pass_rates.py  the estimate of each row's pass rate, from the rewards of its groups
draws.py       RowDraws: the row of each group, drawn by the estimates
run.py         what an environment and a run make of them
log.py         the file of a run that keeps draws and rewards, from which both are made again
"""
