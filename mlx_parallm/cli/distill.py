"""`mlx_parallm distill-data`: rows for SFT or DPO from a teacher's answers. Imports no MLX."""

from typing import Annotated, Any, Literal

from mlx_parallm.cli.command import ended_in_order, load
from mlx_parallm.config.arguments import (
    Configured,
    Count,
    File,
    Function,
    KeyFile,
    Model,
    Name,
    setting,
    toml_value,
)
from mlx_parallm.errors import ConfigError
from mlx_parallm.system.packages import require_mlx

URLS = ("http://", "https://")


class DistillData(Configured):
    """`mlx_parallm distill-data`: a teacher answers, a reward filters, rows are written."""

    teacher: Model
    """directory, hub id, builtin:tiny or GGUF file; or an endpoint, http://…/v1"""
    teacher_model: Name | None = None
    """an endpoint's name of the model; default: the first one"""
    lora_path: Annotated[str, "A"] | None = setting("model.lora_path")
    """adapter of a teacher on this machine"""
    api_key_file: KeyFile | None = setting("server.api_key_file")
    """file that holds the endpoint's API key"""
    data: Annotated[str, "ROWS"]
    """a JSONL file with a column prompt, or hf:owner/name"""
    output: File
    """JSONL file to write"""
    form: Literal["sft", "dpo"] = "sft"
    """rows of messages, or pairs"""
    n: Annotated[int, "N"] = 4
    """answers to each prompt"""
    reward: list[Function]
    """reward function, or builtin:NAME; may be repeated, their sum counts"""
    reward_option: list[Annotated[str, "NAME.KEY=VALUE"]]
    """option of a reward, e.g. reward_model.path=checkpoints/judge; may be repeated"""
    threshold: Annotated[float, "R"] | None = None
    """keep only answers with at least this reward"""
    best: Annotated[int, "K"] | None = None
    """keep at most the best K answers of a prompt"""
    max_tokens: Annotated[int, "T"] = 512
    """longest answer"""
    temperature: Annotated[float, "T"] = 0.8
    """of the answers"""
    top_p: Annotated[float, "P"] = 1.0
    """of the answers"""
    seed: Annotated[int, "S"] = 0
    """of the answers"""
    system: Annotated[str, "TEXT"] | None = None
    """system message before each prompt; it is in the rows too"""
    prompt_column: Annotated[str, "C"] | None = None
    """column of the prompts; default: prompt, else messages"""
    prompt_format: Literal["chat", "text"] = "chat"
    """texts become messages of the user, or go to the teacher as they are"""
    limit: Annotated[int, "N"] | None = None
    """the first N prompts only"""
    concurrency: Count = 16
    """prompts under way at once"""

    @ended_in_order()
    def run(self) -> int:
        is_endpoint = self.teacher.startswith(URLS)
        if is_endpoint and self.lora_path:
            self.error("--lora-path is for a teacher on this machine")
        if not is_endpoint and (self.teacher_model or self.api_key_file):
            self.error("--teacher-model and --api-key-file are for an endpoint")
        require_mlx()
        from mlx_parallm.runs import distill_data as distilling
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.system.terminal import Console

        configure_logging(level="warning")
        settings = distilling.DistillSettings(
            data=self.data,
            teacher=self.teacher_model or self.teacher,
            form=self.form,
            n=self.n,
            rewards=tuple(map(_reference, self.reward)),
            reward_options=_options(self.reward_option),
            threshold=self.threshold,
            best=self.best,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            system_prompt=self.system,
            prompt_format=self.prompt_format,
            prompt_column=self.prompt_column,
            limit=self.limit,
        )
        settings.check()
        here = [] if is_endpoint else [f"model.base_path={toml_value(self.teacher)}"]
        config = load(None, [*self.overrides, *here])
        with (
            distilling.endpoint_teacher(self.teacher, self.teacher_model, config.resolve_api_key())
            if is_endpoint
            else distilling.InferenceModule(config=config)
        ) as teacher:
            outcome = distilling.distill(
                settings, self.output, teacher, concurrency=self.concurrency
            )
        distilling.show(outcome, self.output, Console())
        return 0


def _reference(text: str) -> str:
    """Return a reward as the configuration names it."""
    return text if text.startswith(("builtin:", "python:")) else f"python:{text}"


def _options(texts: list[str]) -> dict[str, dict[str, Any]]:
    """Return `NAME.KEY=VALUE` entries as reward_options. Raises ConfigError: another form."""
    import tomli

    options: dict[str, dict[str, Any]] = {}
    for text in texts:
        place, sign, value = text.partition("=")
        name, dot, key = place.strip().partition(".")
        if not (sign and dot and name and key):
            raise ConfigError(f"--reward-option {text}: expected NAME.KEY=VALUE")
        try:
            parsed = tomli.loads(f"value = {value}")["value"]
        except tomli.TOMLDecodeError:
            parsed = value  # a text without quotes
        options.setdefault(name, {})[key] = parsed
    return options
