"""kind = "task_folders": tasks in Harbor's or Terminal-Bench's folders, in the sandbox.

    instruction → policy → a block of bash → its output → policy → … → an answer without a block, or
    max_steps → the task's own tests → reward

The metadata of an episode holds `task`, `commands`, `reward`, `tests_output` and the task's own
metadata as `of_task`.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlx_parallm.environments.base import Split
from mlx_parallm.environments.state import BaseEnvironment, Inference, State
from mlx_parallm.environments.task_folders.folder import (
    NeedsContainerError,
    TaskFolder,
    read_folder,
    task_paths,
)
from mlx_parallm.environments.task_folders.workspace import CommandRun, Workspace
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.rewards.code import fenced
from mlx_parallm.system.log import get_logger
from mlx_parallm.types import Trajectory

INSTRUCTIONS = (
    "You work in a shell, in the directory {workdir}. Answer with one block ```bash of commands at"
    " a time; you will see what it prints. There is no network. When the task is done, answer"
    " without a block."
)
SHELLS = ("bash", "sh", "shell")
SHOWN_REASONS = 5

log = get_logger("environments")


@dataclass
class FolderState(State):
    """A State with the files of the working directory."""

    files: dict[str, bytes] = field(default_factory=dict)


class TaskFoldersEnvironment(BaseEnvironment):
    several_turns = True
    default_rewards = ("python:mlx_parallm.environments.task_folders.environment:tests_reward",)
    blocking = True

    def __init__(
        self,
        inference: Inference | None = None,
        path: str = "",
        *,
        heldout: float = 0.1,
        skip: bool = False,
        instructions: str = INSTRUCTIONS,
        max_steps: int = 10,
        command_s: float = 10.0,
        tests_s: float = 60.0,
        memory_mb: int = 512,
        output: int = 4000,
    ) -> None:
        """
        Args:
            path: a task folder, or a directory of them, at any depth.
            heldout: share of the tasks that are held out, by a hash of their names. If that is
                none, an evaluation asks the tasks that are trained on, and the log says so.
            skip: leave tasks out that need a container, with a line in the log that counts them by
                reason; else the first one ends the start.
            instructions: come before the task's own; {workdir} is its directory.
            max_steps: turns of the policy.
            command_s: longest time of one block.
            tests_s: longest time of the tests; the task's own is taken if it is shorter.
            memory_mb: of a block, or of the tests.
            output: characters of a block's output that are shown, its last ones.

        Raises ConfigError: no task, or one that needs a container; a sandbox without a protection.
        """
        super().__init__(inference)
        if not path:
            raise ConfigError('task_folders: path is missing: options = { path = "tasks" }')
        if max_steps < 1:
            raise ConfigError(f"task_folders: max_steps has to be at least 1, not {max_steps}")
        if not 0 <= heldout <= 1:
            raise ConfigError(f"task_folders: heldout is a share from 0 to 1, not {heldout:g}")
        self.refused = Counter[str]()
        self.max_steps, self._instructions = max_steps, instructions
        tasks = [
            replace(task, verifier_s=min(task.verifier_s, tests_s))
            for task in self._read(Path(path), skip=skip)
        ]
        self._tasks: Mapping[Split, list[TaskFolder]] = {
            "train": [task for task in tasks if not _is_held_out(task.name, heldout)],
            "heldout": [task for task in tasks if _is_held_out(task.name, heldout)],
        }
        if not self._tasks["train"] and heldout < 1:
            self._tasks = {"train": tasks, "heldout": []}
        if not self._tasks["heldout"]:
            log.info("no task is held out: an evaluation asks those that are trained on")
            self._tasks = {"train": tasks, "heldout": tasks}
        self._workspace = Workspace(timeout_s=command_s, memory_mb=memory_mb, output=output)

    def _read(self, root: Path, *, skip: bool) -> list[TaskFolder]:
        tasks = []
        for path in task_paths(root):
            try:
                task = read_folder(path)
                # below a directory two may have one name
                name = path.relative_to(root).as_posix() if path != root else task.name
                tasks.append(replace(task, name=name))
            except NeedsContainerError as error:
                if not skip:
                    raise ConfigError(
                        f"task_folders: {path}: {error}; skip = true leaves such tasks out"
                    ) from error
                self.refused[str(error)] += 1
        if self.refused:
            log.warning(
                "tasks are left out",
                tasks=self.refused.total(),
                of=self.refused.total() + len(tasks),
                reasons=dict(self.refused.most_common(SHOWN_REASONS)),
            )
        if not tasks:
            raise ConfigError(
                f"task_folders: each of {self.refused.total()} tasks below {root} needs a"
                f" container: {self.refused.most_common(1)[0][0]}"
            )
        return tasks

    def reset(self, *, index: int | None = None, split: Split = "train") -> State:
        """Begin task `index` of a split, over and over; without an index the next one. Raises
        ConfigError: all are held out."""
        tasks = self._tasks[split]
        if not tasks:
            raise ConfigError(
                "task_folders: heldout = 1 leaves no task to train on: it is for"
                " [[evaluation.environments]]"
            )
        task = tasks[self._index_or_next(index) % len(tasks)]
        rules = self._instructions.replace("{workdir}", task.workdir)
        prompt = [{"role": "user", "content": f"{rules}\n\n{task.instruction}".strip()}]
        metadata = {"task": task.name, "commands": 0, "of_task": dict(task.metadata)}
        return FolderState(prompt, metadata=metadata, files=dict(task.files))

    def update_state(self, state: State, response: str) -> State:
        """Run the block of the answer; at the end, the task's tests."""
        if not isinstance(state, FolderState):
            raise RolloutRejectedError(
                "a TaskFoldersEnvironment continues from the State that its reset has made"
            )
        super().update_state(state, response)
        task = self._task(state)
        blocks = [code for name, code in fenced(response) if name in SHELLS]
        shown = ""
        if blocks:
            state.metadata["commands"] += 1
            run = self._workspace.command(task, state.files, blocks[0])
            shown = _shown(run, len(blocks))
            if isinstance(run, CommandRun):
                state.files = run.files
        state.done = not blocks or state.step_count >= self.max_steps
        if state.done:
            reward, printed = self._workspace.verify(task, state.files)
            state.metadata |= {"reward": reward, "tests_output": printed[-2000:]}
        turns = [{"role": "assistant", "content": response}, {"role": "user", "content": shown}]
        assert isinstance(state.prompt, list)
        state.prompt = [*state.prompt, *turns[: 1 if state.done else 2]]
        return state

    def _task(self, state: State) -> TaskFolder:
        name = state.metadata["task"]
        return next(task for tasks in self._tasks.values() for task in tasks if task.name == name)


def tests_reward(trajectories: Sequence[Trajectory]) -> list[float | None]:
    """Return the score of the task's tests: the default reward. None: they were not run."""
    return [trajectory.metadata.get("reward") for trajectory in trajectories]


def _shown(run: CommandRun | str, blocks: int) -> str:
    if isinstance(run, str):
        return run
    ending = "(it ran out of time)" if run.code is None else f"(exit code {run.code})"
    more = f" (only the first of {blocks} blocks was run)" if blocks > 1 else ""
    return f"{run.output.rstrip()}\n{ending}{more}".strip()


def _is_held_out(name: str, share: float) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32
