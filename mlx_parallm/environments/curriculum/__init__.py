"""`curriculum = "adaptive"`: rows are drawn by what a group of them is expected to teach now.

pass_rates.py  the estimate of each row's pass rate, from the rewards of its groups
draws.py       RowDraws: the row of each group, drawn by the estimates
log.py         the file of a run that keeps draws and rewards, from which both are made again
"""
