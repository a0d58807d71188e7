"""A run in words: `run_info` at its beginning, `print_run_report` at its end."""

from typing import Any

from mlx_parallm.config.data import REWARD_MODEL
from mlx_parallm.environments.base import EnvironmentSource
from mlx_parallm.environments.row_images import example_content
from mlx_parallm.rl_training.data.heldout_rows import in_words
from mlx_parallm.rl_training.evaluation.comparison import BEFORE, compare
from mlx_parallm.rl_training.events import Outcome, RunInfo
from mlx_parallm.rl_training.monitor import report
from mlx_parallm.rl_training.run.start import StartedRun
from mlx_parallm.run_files.metrics import MetricsFile
from mlx_parallm.run_files.samples import SAMPLES_PAGE
from mlx_parallm.system.log import FILE_ONLY, get_logger

log = get_logger("train")


def run_info(started: StartedRun) -> RunInfo:
    """Describe the run for those who watch it from the start."""
    config, serving = started.config, started.prepared.serving
    evaluation, training = config.evaluation, config.rl_training
    rows = started.heldout is not None and started.heldout.measures
    return RunInfo(
        run_name=started.opened.path.name,
        model=config.model.base_path,
        base_url=serving.url,
        total_steps=training.total_steps,
        example_prompt=""
        if training.algorithm == REWARD_MODEL
        else started.data.example_prompt
        if started.data is not None
        else _example_prompt(started.prepared.environments),
        start_step=started.first_step,
        needs_key=serving.needs_key,
        checkpoint_every=training.checkpoint_interval,
        evaluate_every=evaluation.every
        if evaluation.problems
        else config.data.eval_every
        if rows
        else 0,
        evaluates_at_end=(evaluation.problems > 0 and evaluation.at_end) or rows,
    )


def _example_prompt(sources: tuple[EnvironmentSource, ...]) -> Any:
    if not sources:
        return "Hello!"
    [task] = sources[0].heldout(1) or [sources[0].task(0)]
    return example_content(task.messages)


def print_run_report(started: StartedRun, metrics: MetricsFile, outcome: Outcome) -> None:
    """Write the reward curve, and print the result and the next steps."""
    run, console = started.opened.path, started.prepared.console
    lines, evaluations = list(metrics.read()), started.evaluation_log.done()
    finished = outcome == "finished"
    curve = None
    if any(line["reward_mean"] is not None for line in lines):
        try:
            curve = report.write_reward_curve(lines, run / "reward.png", title=run.name)
        except OSError as error:
            log.warning("the reward curve cannot be written", error=str(error))
    if finished and not report.has_trained(lines):
        commands = []  # the result is the base model: there is nothing new to serve
    elif finished:
        training, base = started.config.rl_training, started.config.model.base_path
        lora, scores = training.lora.enabled, training.algorithm == REWARD_MODEL
        commands = report.next_commands(run, base, lora=lora, scores=scores)
    else:
        commands = [f"{report.our_command()} train --resume {run}"]
    comparisons = (
        compare(evaluations[0], evaluations[-1]) if finished and len(evaluations) > 1 else []
    )
    samples = run / SAMPLES_PAGE
    started.memory.tell(console)
    problems = report.problems_of(lines, run)
    for problem in problems:
        log.warning(problem, **{FILE_ONLY: True})  # the report shows them
    first = (
        f"after step {evaluations[0]['step']}" if comparisons and evaluations[0]["step"] else BEFORE
    )
    shown = samples if samples.is_file() else None
    successes = report.successes_of(lines)
    heldout = started.heldout
    results = None if heldout is None else in_words(lines, heldout.rows)
    report.print_report(
        console,
        comparisons,
        commands,
        curve,
        shown,
        problems,
        successes,
        first=first,
        results=results,
    )
