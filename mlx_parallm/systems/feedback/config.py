"""[feedback]: a training run that learns from the chats of people who agreed to it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from mlx_parallm.config.data import DATA_ALGORITHMS, ONLINE_DPO, ONLINE_KTO
from mlx_parallm.config.environment import Section
from mlx_parallm.execution.user_code import is_reference

if TYPE_CHECKING:
    from mlx_parallm.config.load import CoreConfig

MODEL = "base"


class SignalRewards(Section):
    thumb: float = Field(1.0, ge=0, le=1)
    """A rating of -1 to 1 by the completion's id counts so much. 0 switches a signal off, here and
    below."""
    edit: float = Field(1.0, ge=0, le=1)
    """The user sends the answer back changed: minus this, times the share that was changed."""
    message: float = Field(1.0, ge=0, le=1)
    """The user's next message, -1 to 1 by the judge."""
    regenerate: float = Field(0.5, ge=0, le=1)
    """The user asks the same again: minus this."""
    tool: float = Field(0.5, ge=0, le=1)
    """The client carries a tool call out and sends its result: plus this."""


def check_run(config: "CoreConfig") -> None:
    """Raises ValueError: a run of this kind cannot learn from chats."""
    training = config.rl_training
    section = config.section(FeedbackConfig)
    if not section.enabled:
        return
    if section.judge == MODEL and not training.lora.enabled:
        raise ValueError(
            'feedback.judge = "base" asks the model without its adapter, and with'
            " rl_training.lora.enabled = false the base itself is"
            " trained: use LoRA, or another judge"
        )
    if training.deterministic:
        raise ValueError(
            "feedback.enabled = true and rl_training.deterministic = true: what people say, and"
            " when, does not repeat"
        )
    if training.algorithm == "kto":
        raise ValueError(
            "feedback.enabled = true: kto learns from rows of a file alone: its loss on answers of"
            f" chats is rl_training.algorithm = {ONLINE_KTO!r}"
        )
    if training.algorithm == ONLINE_KTO and "baseline_decay" in section.changed():
        raise ValueError(
            f"feedback.baseline_decay is set, but {ONLINE_KTO} compares an answer with no mean"
        )
    if training.algorithm in DATA_ALGORITHMS:
        raise ValueError(
            f"feedback.enabled = true: {training.algorithm} learns from rows of a file alone:"
            " choose an rl_training.algorithm that learns from rollouts"
        )
    if training.algorithm == ONLINE_DPO:
        raise ValueError(
            f"feedback.enabled = true: a chat has one answer to its prompt, and {ONLINE_DPO}"
            " compares two: choose another rl_training.algorithm"
        )


class FeedbackConfig(Section):
    enabled: bool = False
    """Learn from chats over /v1 of those who agree to it (docs/traces.md#learning-from-use)."""
    opt_in: tuple[Literal["header", "key"], ...] = ("header", "key")
    """How people agree: by the header X-Feedback: learn, or by a key of `keys_file`."""
    keys_file: Path | None = None
    """Lines "NAME KEY": keys of people who agree. They open the chat routes and POST /v1/feedback,
    nothing else."""
    redact: bool = True
    """Replace secrets and user names before anything is written. An answer to a chat in which
    something was replaced is not learned: its tokens would show it."""
    redact_personal: bool = False
    """With redact: e-mail addresses, payment cards, IBANs and phone numbers too."""
    baseline_decay: float = Field(0.95, ge=0, lt=1)
    """The advantage of an answer is its reward less a running mean of its task's rewards; so much
    of an older one's weight is left one reward later."""
    rewards: SignalRewards = SignalRewards()
    judge: str | None = None
    """Who reads the user's next message: "base" (this model without its adapter), a server's URL
    ("http://127.0.0.1:8001/v1"), or "python:file.py:function" of (question, answer, reply) that
    returns -1 to 1, or None if it cannot tell. Default: replies are not judged."""
    judge_model: str | None = None
    """The model's name at that server."""
    judge_api_key_file: Path | None = None
    """File with that server's key."""
    judge_concurrency: int = Field(4, ge=1)
    """Replies that are judged at once; a function is called by so many threads."""
    ambiguous_below: float = Field(0.4, ge=0, le=1)
    """A judgement closer to 0 than this is not a signal, and is counted."""
    settle_s: float = Field(30.0, ge=0)
    """Time after the first signal in which a stronger one may replace it: a thumb counts before an
    edit, a message, a regenerate, a tool result."""
    keep_s: float = Field(7 * 24 * 3600.0, gt=0)
    """How long an answer waits for its first signal."""
    max_answers: int = Field(100_000, ge=1)
    """Answers that are remembered. Beyond it those go that were decided on longest ago, and then
    the oldest that were not, which are counted."""
    max_answers_per_hour: int = Field(2000, ge=1)
    """Answers that are learned of one key of `keys_file` in an hour (of the server's own key: of
    all whose chats have the header). Those beyond are not learned, and are counted."""
    regenerate_within_s: float = Field(600.0, gt=0)
    """The same question later than this is a new question."""
    review: bool = False
    """Learn only what a person has approved on the dashboard or at /v1/feedback/review."""
    max_updates_per_hour: float | None = Field(None, gt=0)
    """Batches of this source that are handed to the trainer in an hour, at most. Default: no
    bound."""

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, data: Any) -> Any:
        """Take a single way to agree as a list of one."""
        if isinstance(data, dict) and isinstance(data.get("opt_in"), str):
            return {**data, "opt_in": (data["opt_in"],)}
        return data

    @model_validator(mode="after")
    def _consistent(self) -> "FeedbackConfig":
        if not self.enabled:
            if others := [key for key in self.changed() if key != "enabled"]:
                raise ValueError(f"{others[0]} is set, but enabled is false: set enabled = true")
            return self
        if not self.opt_in:
            raise ValueError("opt_in is empty: then no chat can agree, and nothing is learned")
        if "key" in self.opt_in and "header" not in self.opt_in and self.keys_file is None:
            raise ValueError('opt_in = ["key"] needs keys_file: lines "NAME KEY"')
        if self.keys_file is not None and "key" not in self.opt_in:
            raise ValueError('keys_file is set, but opt_in has no "key"')
        of_a_server = self.judge is not None and self.judge.startswith(("http://", "https://"))
        if of_a_server != (self.judge_model is not None):
            raise ValueError(
                "judge and judge_model: a server's URL needs the name of its"
                " model, and nothing else has one"
            )
        if self.judge_api_key_file is not None and not of_a_server:
            raise ValueError("judge_api_key_file belongs to a judge that is a server")
        named = self.judge in (None, MODEL) or of_a_server or is_reference(str(self.judge))
        if not named:
            raise ValueError(
                f'judge = {self.judge!r}: "base", a URL that begins with http, or'
                ' "python:file.py:function"'
            )
        return self
