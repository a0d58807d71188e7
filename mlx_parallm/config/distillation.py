"""[rl_training.distillation]: teachers, and what the policy learns from their log-probabilities
(docs/distillation.md)."""

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mlx_parallm.config.data import ONLINE_DPO, PREFER_SAMPLED
from mlx_parallm.config.environment import Section
from mlx_parallm.execution.user_code import is_reference

HTTP_KEYS = ("url", "api", "served_name", "api_key_file", "requests_at_once", "timeout_s", "tries")
OWN_KINDS = ("base", "policy", "checkpoint", "ema")
KEYS_OF: dict[str, tuple[str, ...]] = {
    "model": ("path", "revision", "quantize", "tokenizer"),
    "base": (),
    "policy": (),
    "checkpoint": ("path", "policy_version"),
    "ema": (),
    "group": (),
    "http": (*HTTP_KEYS, "path", "revision", "tokenizer"),
}
"""Kinds of teachers, and the keys that each reads besides those of all."""
OF_ALL = ("name", "kind", "environments", "prompt", "solved_from")
AT_ONE = ("group", "http")  # kinds whose log-probabilities come from a server, at temperature 1
PATH_NEEDED = ("model", "checkpoint")


class TeacherConfig(Section):
    name: str
    """In metrics, in messages, and in the rows' column."""
    kind: Literal["model", "base", "policy", "checkpoint", "ema", "group", "http"]
    """"model" (another one in this process), the policy itself: "base" (without the adapter, or
    as the run started), "policy" (as it is now: needs `prompt`), "checkpoint" (policy@VERSION of a
    run), "ema" (the moving average of rl_training.reference = "ema"); "group" (the
    log-probabilities came with the group: Atropos' distill fields), "http" (a server)."""
    environments: tuple[str, ...] = ()
    """Names of the environments that it teaches; none named: all."""
    prompt: str | tuple[dict[str, str], ...] = ""
    """Prompt in the place of the last message's text, e.g. "{prompt}\\nThe answer is
    {answer}.", or messages; {prompt}, {solved} (a sibling's right answer) and the row's columns
    are filled in. Or "python:file.py:function": (row, group) → messages, or None. Default: the
    student's own prompt."""
    solved_from: float = 1.0
    """Reward from which on an answer of the group is a {solved} one."""
    path: str = ""
    """model: directory, hub id or GGUF file. checkpoint: a step's directory, or a run's. http:
    directory of its tokenizer; default: the policy's own."""
    revision: str | None = None
    """Hub revision of `path`."""
    policy_version: int | None = Field(None, ge=0)
    """checkpoint: policy version in the run that `path` is; default: its newest."""
    tokenizer: Literal["policy", "own"] = "policy"
    """model, http: "policy" (it has the policy's, which is compared), "own" (a teacher of another
    family: the answer's text is aligned, and prompts are rendered by its own chat template; http:
    `path` is its tokenizer)."""
    quantize: bool = False
    """model: 4 bits, as rl_training.lora.quantize_base."""
    url: str = ""
    """http: address of the server, with or without /v1."""
    api: Literal["vllm", "sglang", "completions"] = "vllm"
    """http: "vllm" (`prompt_logprobs`, also our own server's), "sglang" (/generate with
    `return_logprob`), "completions" (/v1/completions with `echo`)."""
    served_name: str = ""
    """http: the model's name there; default: the first of /v1/models."""
    api_key_file: str = ""
    """http: file that holds its key."""
    requests_at_once: int = Field(16, ge=1)
    """http: requests at a time."""
    timeout_s: float = Field(120.0, gt=0)
    """http: longest time of a request."""
    tries: int = Field(4, ge=1)
    """http: tries of a request, with growing pauses, before the server counts as lost."""

    @model_validator(mode="after")
    def _consistent(self) -> "TeacherConfig":
        read = (*OF_ALL, *KEYS_OF[self.kind])
        if unread := [key for key in self.changed() if key not in read]:
            readers = ", ".join(kind for kind, keys in KEYS_OF.items() if unread[0] in keys)
            raise ValueError(f"{unread[0]} is a key of {readers}: {self.kind!r} does not read it")
        if self.kind in PATH_NEEDED and not self.path:
            raise ValueError(f'kind = "{self.kind}" needs path')
        if self.kind == "http" and self.tokenizer == "own" and not self.path:
            raise ValueError(
                'tokenizer = "own" needs path: the directory or hub id of the tokenizer that the'
                " server has, with its chat template"
            )
        if self.kind == "http" and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url {self.url!r} does not begin with http:// or https://")
        if self.kind == "policy" and not self.prompt:
            raise ValueError(
                'kind = "policy" is the student itself: without a `prompt` that says more than its'
                " own there is nothing to learn from it"
            )
        if self.kind == "group" and self.prompt:
            raise ValueError('kind = "group" is scored already: it cannot have a `prompt`')
        return self


class DistillationSettings(Section):
    mode: Literal["advantage", "loss"] = "advantage"
    """"advantage": -weight · (log π - log π_teacher) of each sampled token is added to its
    advantage. "loss": weight · a divergence of the two distributions at each token is added to
    the loss."""
    weight: float = Field(1.0, gt=0)
    """Weight of the teacher's signal."""
    reward: bool = True
    """Learn from the reward's advantage too; false: from the teacher alone."""
    beta: float = Field(1.0, ge=0, le=1)
    """loss: β of the generalised Jensen-Shannon divergence, as in TRL: 0 forward KL, 1 reverse
    KL."""
    top_k: int = Field(64, ge=0)
    """loss: the teacher's best tokens that are compared, with the rest as one; 0 = the whole
    vocabulary."""
    temperature: float | None = Field(None, gt=0)
    """loss: the temperature at which the two distributions are compared; default: that of the
    rollout. TRL's GKD samples at its own and compares at 1."""
    lmbda: float = Field(1.0, ge=0, le=1)
    """loss: share of the groups that are trained on as they were sampled; in the place of the
    others comes the answer in `completion_column` (GKD)."""
    vocabularies: Literal["spelled", "hybrid", "uld"] = "spelled"
    """loss, of teachers with tokenizer = "own": how tokens of two vocabularies are compared.
    "spelled": the teacher's token counts as the policy's token that its text begins with. "hybrid":
    tokens that both have by the divergence, the others by their sorted probabilities (GOLD).
    "uld": all by their sorted probabilities."""
    completion_column: str = "completion"
    """Column of the rows that holds the given answer, a text."""
    column: str | None = None
    """Column of the rows that names the teacher; a row without it goes by its environment."""
    on_teacher_lost: Literal["wait", "skip"] = "wait"
    """When a server does not answer: steps wait for it, or continue without its signal."""
    teachers: tuple[TeacherConfig, ...] = ()

    @property
    def active(self) -> bool:
        """Whether there is a teacher."""
        return bool(self.teachers)

    @property
    def reads_rows(self) -> bool:
        """Whether teachers need the row of a group, and not its tokens alone."""
        has_prompt = any(bool(each.prompt) or each.tokenizer == "own" for each in self.teachers)
        return has_prompt or self.column is not None or self.lmbda < 1

    @field_validator("teachers")
    @classmethod
    def _names_differ(cls, teachers: tuple[TeacherConfig, ...]) -> tuple[TeacherConfig, ...]:
        names = [teacher.name for teacher in teachers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two teachers are named {twice[0]!r}")
        return teachers

    @model_validator(mode="after")
    def _read(self) -> "DistillationSettings":
        changed = self.changed()
        if changed and not self.teachers:
            raise ValueError(
                f"{changed[0]} is set, but there is no [[rl_training.distillation.teachers]]"
            )
        if self.mode == "advantage" and (
            unread := [key for key in ("beta", "top_k", "temperature", "lmbda") if key in changed]
        ):
            raise ValueError(f'{unread[0]} is only read with mode = "loss"')
        served = [teacher.kind for teacher in self.teachers if teacher.kind in AT_ONE]
        if served and self.temperature not in (None, 1.0):
            raise ValueError(
                f"temperature = {self.temperature:g} cannot be reached: the log-probabilities of"
                f' kind = "{served[0]}" are at temperature 1: leave it out'
            )
        others = [teacher.tokenizer == "own" for teacher in self.teachers]
        if "vocabularies" in changed and not (any(others) and self.mode == "loss"):
            raise ValueError(
                'vocabularies is only read with mode = "loss" and a teacher with tokenizer = "own"'
            )
        if self.vocabularies != "spelled" and (len(others) > 1 or not self.top_k):
            raise ValueError(
                f'vocabularies = "{self.vocabularies}" compares with one teacher, by its top_k best'
                " tokens: set top_k, for all of them to the size of its vocabulary"
            )
        if self.lmbda == 1 and "completion_column" in changed:
            raise ValueError("completion_column is only read with lmbda < 1")
        return self

    def check(
        self, *, learns_from_rows: bool, algorithm: str, reference: str, run: Path | None
    ) -> None:
        """Raises ValueError: contradicts the rest of [rl_training]. `run`: the run's directory,
        if it is known."""
        if not self.teachers:
            return
        for teacher in self.teachers if run is not None else ():
            lies_in_it = teacher.kind == "checkpoint" and Path(teacher.path).resolve()
            if run is not None and lies_in_it and lies_in_it.is_relative_to(run.resolve()):
                raise ValueError(
                    f"distillation: teacher {teacher.name!r}: {teacher.path} is this run's own"
                    f" checkpoint ({run}), so it would learn from itself: name another run's"
                    ' directory (a moving average of the policy is kind = "ema")'
                )
        if algorithm in PREFER_SAMPLED:
            what = (
                "two answers of a group and which is better"
                if algorithm == ONLINE_DPO
                else "single answers and whether they are good"
            )
            raise ValueError(
                f"distillation: {algorithm} learns from {what}; it reads no teacher: choose another"
                " algorithm of rollouts"
            )
        if learns_from_rows:
            raise ValueError(
                f"distillation: {algorithm} learns from rows of a file, and teachers score what the"
                " policy samples: choose an algorithm of rollouts"
            )
        if reference != "ema" and any(teacher.kind == "ema" for teacher in self.teachers):
            raise ValueError(
                'distillation: kind = "ema" is the moving average of the policy: set'
                ' rl_training.reference = "ema" (with reference_decay)'
            )

    def functions(self) -> list[str]:
        """Return the references to functions of the user's."""
        prompts = (teacher.prompt for teacher in self.teachers)
        return [prompt for prompt in prompts if isinstance(prompt, str) and is_reference(prompt)]
