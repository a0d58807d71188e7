"""The front door: `mlx_parallm COMMAND …`. One table holds every command: those of the core, and
those of the leaves.

A command is a class, an `Arguments`. Its module is imported only when the command is called, so
`mlx_parallm` alone and every `--help` answer at once and load no MLX.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Literal

from mlx_parallm import __version__
from mlx_parallm.cli.command import EXIT_ERROR, exit_code
from mlx_parallm.config.arguments import Arguments, place
from mlx_parallm.config.leaves import Command, leaves
from mlx_parallm.system.command_start import IS_COMMAND, end_at_once
from mlx_parallm.system.signals import (
    EndLimit,
    block_shutdown_signals,
    unblock_shutdown_signals,
)

INTERRUPTED = 130  # the exit code of Ctrl-C

TASKS = {
    "start": "Start",
    "look": "Look at a run",
    "evaluate": "Evaluate and compare",
    "data": "Collect data",
    "deploy": "Deploy",
    "repair": "Repair",
}


CORE = (
    Command(
        "train",
        "start",
        "Serve a model over an OpenAI-compatible API and train it meanwhile.",
        "mlx_parallm.cli.start:Train",
        "mlx_parallm_train",
        ends_in_order=True,
    ),
    Command(
        "serve",
        "start",
        "Serve a model over an OpenAI-compatible API.",
        "mlx_parallm.cli.start:Serve",
        "mlx_parallm_serve",
        ends_in_order=True,
    ),
    Command(
        "explain",
        "look",
        "Say what a run did and why it does not learn.",
        "mlx_parallm.cli.existing:Explain",
        "mlx_parallm_explain",
        "The answer has the numbers and the setting to change. Works while the run continues, too."
        " Exit code 0: nothing is wrong; 1: a finding is named.",
    ),
    Command(
        "rollouts",
        "look",
        "Show the answers of a run, their rewards, and what became of them.",
        "mlx_parallm.cli.existing:Rollouts",
        "mlx_parallm_rollouts",
        "The newest first, or the worst or the best; one group as a whole; counts; or the refused"
        " groups. Reads only, also while the run continues.",
    ),
    Command(
        "checkpoint",
        "look",
        "Show what a checkpoint holds, and whether it is complete.",
        "mlx_parallm.cli.existing:ShowCheckpoint",
        "mlx_parallm_show_checkpoint",
        "Step, version, metrics, adapter, optimizer and sizes. Exit code 0: complete; 1: damaged.",
    ),
    Command(
        "eval",
        "evaluate",
        "Answer held-out problems, and print accuracy and pass@k with 95% intervals.",
        "mlx_parallm.cli.existing:Evaluate",
        "mlx_parallm_eval",
        "The problems are those of a configuration's environments; a model on this machine"
        " answers them, or any"
        " OpenAI-compatible endpoint. Or compare two such results.",
        ends_in_order=True,
    ),
    Command(
        "compare",
        "evaluate",
        "Show training runs side by side: settings that differ, curves, evaluations.",
        "mlx_parallm.cli.existing:Compare",
        details=(
            "Says which differences on held-out problems are more than chance. Works while the"
            " runs continue, too."
        ),
    ),
    Command(
        "replay",
        "evaluate",
        "Train again on the rollouts of a run, with other settings.",
        "mlx_parallm.cli.existing:ReplayRun",
        "mlx_parallm_replay",
        "Nothing is generated. Shows the metrics side by side.",
        ends_in_order=True,
    ),
    Command(
        "distill-data",
        "data",
        "Let a teacher answer prompts, filter by a reward, and write rows for SFT or DPO.",
        "mlx_parallm.cli.distill:DistillData",
        details=(
            "The teacher is a model on this machine, or any OpenAI-compatible endpoint. A call that"
            " was ended continues where it was."
        ),
        ends_in_order=True,
    ),
    Command(
        "merge",
        "deploy",
        "Add an adapter to its base model and save the result as a model.",
        "mlx_parallm.cli.existing:Merge",
        "mlx_parallm_merge_lora",
        writes_models=True,
    ),
    Command(
        "convert",
        "deploy",
        (
            "Write an adapter in another format (npz, mlx-lm, PEFT), or a GGUF"
            " file as a Hugging Face folder."
        ),
        "mlx_parallm.cli.existing:Convert",
        "mlx_parallm_convert_adapter",
        "Every format is read: LoRA, rsLoRA, DoRA.",
        writes_models=True,
    ),
    Command(
        "doctor",
        "repair",
        "Show device, BLAS and its speed, memory, versions, and what to fix.",
        "mlx_parallm.cli.existing:Doctor",
        "mlx_parallm_doctor",
        "Exit code 0: nothing to fix; 1: see the advice; 2: MLX cannot be loaded.",
    ),
    Command(
        "completion",
        "repair",
        "Print the completion script of a shell.",
        "mlx_parallm.cli.table:CompletionScript",
    ),
)
"""The commands of the core."""
COMMANDS = (*CORE, *(command for leaf in leaves() for command in leaf.commands))


def main(argv: Sequence[str] | None = None) -> int:
    """`mlx_parallm COMMAND …`; alone it shows the commands by task."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(overview())
        return 0
    if arguments[0] == "--version":
        sys.stdout.write(f"mlx-parallm {__version__}\n")
        return 0
    command = next((command for command in COMMANDS if command.name == arguments[0]), None)
    if command is None:
        near = get_close_matches(arguments[0], [command.name for command in COMMANDS], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        sys.stderr.write(
            f"error: there is no command {arguments[0]!r}{hint}; `mlx_parallm` lists them\n"
        )
        return EXIT_ERROR
    return call(command, arguments[1:], f"mlx_parallm {command.name}")


def call(command: Command, argv: Sequence[str], prog: str) -> int:
    """Carry out a command with these arguments and return its exit code."""
    usual = os.umask(0o077)
    os.umask(usual if command.writes_models else usual | 0o077)
    try:
        if not command.ends_in_order:  # a parent that has blocked them may send them
            unblock_shutdown_signals()
        elif IS_COMMAND:
            end_at_once(INTERRUPTED if "--dry-run" in argv else EndLimit.exit_code)
        parser, run = command.parser(prog)
        args = parser.parse_args(argv)
        args.argv = list(argv)
        return exit_code(run, args)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        os.umask(usual)
        if IS_COMMAND:  # what is left of Python ends without a traceback, too
            block_shutdown_signals()


def overview() -> str:
    width = max(len(command.name) for command in COMMANDS)
    parts = [
        f"mlx_parallm {__version__}: serve a language model and train it by RL, in one process."
    ]
    for task, title in TASKS.items():
        rows = [f"  {c.name:{width}}  {c.summary}" for c in COMMANDS if c.task == task]
        parts.append("\n".join([title, *rows]))
    parts.append(
        "Begin with\n  mlx_parallm train --config quickstart\n\n`mlx_parallm COMMAND --help`"
        " shows the options of one."
    )
    return "\n\n".join(parts) + "\n"


def script(name: str) -> Callable[..., int]:
    """Return the function behind an underscored command, which runs the same code as
    `mlx_parallm NAME`."""
    command = next(command for command in COMMANDS if command.script == name)

    def run(argv: Sequence[str] | None = None) -> int:
        return call(command, sys.argv[1:] if argv is None else argv, name)

    return run


class CompletionScript(Arguments):
    """Print the completion script of bash, zsh or tcsh."""

    shell: Literal["bash", "zsh", "tcsh"] = place()
    """the shell that will read the script"""

    @classmethod
    def added_to(cls, parser: ArgumentParser) -> Callable[[Namespace], int]:
        parser.formatter_class = RawDescriptionHelpFormatter
        parser.epilog = (
            'bash: eval "$(mlx_parallm completion bash)" in ~/.bashrc\n'
            'zsh:  mlx_parallm completion zsh > "${fpath[1]}/_mlx_parallm"'
        )
        return super().added_to(parser)

    def run(self) -> int:
        import shtab

        root = ArgumentParser("mlx_parallm")
        commands = root.add_subparsers()
        for command in COMMANDS:
            command_parser, _ = command.parser(f"mlx_parallm {command.name}")
            commands.add_parser(
                command.name, parents=[command_parser], add_help=False, help=command.summary
            )
        sys.stdout.write(shtab.complete(root, shell=self.shell) + "\n")
        return 0
