"""The configuration of `mlx_parallm train --model M --data D --reward R` (or `--algorithm A`).

Every value has its reason beside it in the templates. The learning rate and the sizes of batches
and answers depend on the model; for a toy they are the quickstart's.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mlx_parallm.config.algorithm import AlgorithmName
from mlx_parallm.config.data import DATA_ALGORITHMS
from mlx_parallm.config.environment import HUB_PREFIX
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import PREFIX, absolute, did_you_mean
from mlx_parallm.models.checkpoint_files import billions_in, directory_of, is_gguf
from mlx_parallm.system.files import is_directory, local_path
from mlx_parallm.system.hardware import Hardware, detect
from mlx_parallm.system.terminal import duration

SMALL = 512
"""A model with a smaller hidden size is a toy: it is trained like the quickstart's."""
GROUP, PASSES, FEWEST_STEPS = 8, 10, 20
OPERATIONS, CORE_OPERATIONS_S = 8.0, 25e9
"""For a parameter and a token that is sampled and trained on; in a second, of one CPU core."""
CPU_SIZES = ((64, 512), (64, 256), (64, 128), (32, 128), (32, 64))
"""(sequences of a step, tokens of an answer), the most first."""
STEP_S, RUN_S = 60.0, 3600.0
USUAL_HIDDEN_SIZE = 2560  # a 4B model's, assumed if the size cannot be found

HEAD = """\
# The configuration of: {command}
# Change what you like; then: mlx_parallm train --config THIS_FILE. All keys: docs/config.md

[model]
base_path = {model}

[server]
port = 0                      # any free one; it is printed
"""
REWARD_BODY = """\
batch_size = {rows:<17}# sequences decoded together; more is faster and takes more memory

[rl_training]
total_steps = {steps:<16}# {why_steps}
learning_rate = {learning_rate:<14}# 2e-4 * (1024 / hidden size)^1.5: smaller steps for larger models
lr_schedule = "linear"        # down to zero after the last step
warmup_steps = 5
batch_size = 32               # sequences of one optimizer update: {updates} updates a step
clip_ratio_high = 0.28        # unlikely right answers may grow faster (DAPO)
kl_beta = 0.0                 # no pull to the base model: a checkable reward needs none, and it costs a pass
temperature = 1.0             # train on the model's own distribution
checkpoint_interval = 50

[rl_training.lora]
rank = 16
alpha = 32.0

[rl_training.atropos]
rollout_batch_size = {rollouts:<9}# sequences of one step: {groups} prompts, 8 answers each{why_rollouts}
max_token_length = {longest:<11}# prompt and answer together

[evaluation]
problems = 40                 # held-out prompts answered before and after training

[[environments]]
kind = "dataset"
data = {data}
rewards = [{rewards}]
heldout_fraction = 0.1        # never trained on
group_size = 8                # answers to one prompt; they are compared with each other
max_tokens = {max_tokens:<17}# per answer; a cut answer is rarely right{why_tokens}
chat_template_kwargs = {{ enable_thinking = false }}  # thinking needs thousands of tokens; other templates ignore it
"""

RATES = {"sft": 2.0, "dpo": 0.04, "kto": 0.01}
"""Share of GRPO's learning rate, for DPO and KTO on a model's own answers:
docs/benchmarks/systems.md#traces."""
ROWS_BODY = """
[rl_training]
algorithm = "{algorithm}"
learning_rate = {learning_rate:<14}# smaller for larger models; of GRPO's rate sft takes 2, dpo 0.04, kto 0.01
lr_schedule = "linear"        # down to zero after the last step, which ends one pass over the rows
warmup_steps = 5
batch_size = {rows:<17}# rows of one optimizer update
checkpoint_interval = 50

[rl_training.lora]
rank = 16
alpha = 32.0

[data]
path = {data}
eval_fraction = 0.1           # never trained on
"""


def dataset_toml(
    model: str, data: str, rewards: Sequence[str], algorithm: str | None = None
) -> str:
    """Return the configuration as TOML, with absolute paths. `algorithm`: one that learns from the
    rows.

    Raises ConfigError: no reward function; or one beside an algorithm that needs none.
    """
    if algorithm == "grpo" and rewards:
        algorithm = None  # what rewards are learned by unless something else is set
    if algorithm is None and not rewards:
        raise ConfigError("--data needs a reward function: --reward score.py:function")
    if algorithm is not None and algorithm not in DATA_ALGORITHMS:
        names = get_args(AlgorithmName)
        if algorithm not in names:
            raise ConfigError(
                f"--algorithm {algorithm}: unknown name"
                f"{did_you_mean(algorithm, names)}; from the rows alone learn"
                f" {', '.join(DATA_ALGORITHMS)}"
            )
        raise ConfigError(
            f"--algorithm {algorithm} learns from rollouts: leave it out (a reward function trains"
            f" by grpo), or --set rl_training.algorithm={algorithm}"
        )
    if algorithm is not None and rewards:
        raise ConfigError(f"--algorithm {algorithm} learns from the rows alone: leave out --reward")
    directories = [Path.cwd()]
    hidden_size = find_hidden_size(model)
    rate, small = learning_rate_for(hidden_size), hidden_size < SMALL
    flags = [word for name in rewards for word in ("--reward", name)] + (
        ["--algorithm", algorithm] if algorithm else []
    )
    values: dict[str, Any] = {
        "command": shlex.join(["mlx_parallm", "train", "--model", model, "--data", data, *flags]),
        "model": _quoted(
            str(local_path(model).resolve()) if is_directory(model) or is_gguf(model) else model
        ),
        "data": _quoted(data if data.startswith(HUB_PREFIX) else absolute(data, directories)),
    }
    if algorithm is not None:
        rate = min(2e-3, rate * RATES.get(algorithm, 1.0))
        rows, count = 16 if algorithm == "sft" else 32, count_rows(data)
        least = 2 if algorithm == "kto" else 1  # its KL is estimated over a mini-batch
        while count is not None and rows > max(least, 0.75 * count):  # about a tenth is held out
            rows //= 2
        values |= {"algorithm": algorithm, "learning_rate": f"{rate:.1e}", "rows": rows}
        return (HEAD + ROWS_BODY).format(**values)
    references = [
        name if name.startswith((PREFIX, "builtin:")) else PREFIX + name for name in rewards
    ]
    sizes = sizes_for(hidden_size, parameters_of(model, hidden_size), count_rows(data), detect())
    values |= {
        "steps": sizes.steps,
        "why_steps": sizes.why_steps,
        "rows": 128 if small else 32,
        "learning_rate": f"{rate:.1e}",
        "updates": sizes.rollouts // 32,
        "rollouts": sizes.rollouts,
        "why_rollouts": f"; {sizes.why}" if sizes.why else "",
        "groups": sizes.rollouts // GROUP,
        "longest": 1024 if small else 2048,
        "rewards": ", ".join(_quoted(absolute(reference, directories)) for reference in references),
        "max_tokens": sizes.max_tokens,
        "why_tokens": f"; {sizes.why}" if sizes.why else "",
    }
    return (HEAD + REWARD_BODY).format(**values)


@dataclass(frozen=True)
class Sizes:
    """The size of a run, and the reasons. `rollouts`: sequences of one step; `why`: "" if the
    machine asks for no less."""

    rollouts: int
    max_tokens: int
    steps: int
    why_steps: str
    why: str = ""


def sizes_for(hidden_size: int, parameters: float, rows: int | None, hardware: Hardware) -> Sizes:
    """Return the sizes of a run, smaller on a CPU and with few rows.

    A token that is sampled and trained on costs about 8 operations for each parameter. Worked:
    134.5 M parameters on two cores, 64 answers of 48 tokens: 64 · 48 · 8 · 134.5e6 / (2 · 25e9) =
    66 s a step; 52 s were measured.
    """
    small = hidden_size < SMALL
    steps, rollouts, max_tokens = (80, 128, 64) if small else (200, 64, 512)
    why, why_steps = "", "as many as usually teach something; more where the curve still rises"
    if hardware.backend == "cpu" and not small:
        token_s = OPERATIONS * parameters / (hardware.cores * CORE_OPERATIONS_S)
        full_step_s = rollouts * max_tokens * token_s
        for rollouts, max_tokens in CPU_SIZES:
            step_s = rollouts * max_tokens * token_s
            if step_s <= STEP_S:
                break
        if step_s < full_step_s:
            largest, longest = CPU_SIZES[0]
            why = (
                f"on {hardware.cores} CPU cores {largest} of {longest} would take"
                f" {duration(full_step_s)} a step"
            )
        if (fit := max(FEWEST_STEPS, int(RUN_S / step_s))) < steps:
            steps, why_steps = fit, f"about {duration(fit * step_s)} on {hardware.cores} CPU cores"
    if rows and (few := max(FEWEST_STEPS, PASSES * rows * GROUP // rollouts)) < steps:
        steps, why_steps = (
            few,
            f"about {PASSES} passes over {rows} rows, and at least {FEWEST_STEPS} steps",
        )
    return Sizes(rollouts, max_tokens, steps, why_steps, why)


def count_rows(data: str) -> int | None:
    """Return how many rows a file has; None: it cannot be read here, or lies on the hub. The
    reader reports faults."""
    try:
        with Path(data).expanduser().open("rb") as file:
            return sum(1 for line in file if line.strip())
    except (OSError, ValueError):
        return None


def parameters_of(model: str, hidden_size: int) -> float:
    """Return about how many parameters a model has, from its configuration or its name, without
    network."""
    config = _config_of(model)
    try:
        text = config.get("text_config") or config
        layers, vocabulary = (
            int(text.get("num_hidden_layers") or 0),
            int(text.get("vocab_size") or 0),
        )
    except (ValueError, AttributeError, TypeError):
        layers = vocabulary = 0  # the loader reports what is wrong with the file
    if layers:
        return hidden_size * (12.0 * layers * hidden_size + vocabulary)
    billions = billions_in(model)
    return billions * 1e9 if billions else (hidden_size / 1320) ** 2 * 1e9


def learning_rate_for(hidden_size: int) -> float:
    """Return AdamW's peak rate on a LoRA adapter of alpha / rank = 2: 2e-4 · (1024 / hidden
    size)^1.5, at most 1e-3.

    Measured at 576 (SmolLM2 135M, docs/benchmarks/real_model.md): 4.7e-4 learns instructions in 80
    steps, 9.5e-5 hardly moves. A 0.6B model (1024) gets 2e-4, a 4B model (2560) 5e-5, ten times
    what full weights usually take there (https://thinkingmachines.ai/blog/lora). The shipped tiny
    model (128) gets 1e-3; a search found 9e-4 (docs/benchmarks/learning.md#quickstart-tasks).
    """
    return min(1e-3, 2e-4 * float(1024 / hidden_size) ** 1.5)


def find_hidden_size(model: str) -> int:
    """Read it from config.json if the model is on this machine, else from a size in the name
    ("Qwen3-0.6B"), else assume a 4B model. It uses no network: a wrong name is reported when the
    model is loaded."""
    if (size := _hidden_size_in(_config_of(model))) is not None:
        return size
    if (billions := billions_in(model)) is not None:
        return max(SMALL, round(1320 * billions**0.5))  # 1024 at 0.6B, 2640 at 4B, 3730 at 8B
    return USUAL_HIDDEN_SIZE


def _config_of(model: str) -> Any:
    """Return config.json of a model on this machine, or what a GGUF file says in its place; {}:
    there is none, or it is damaged, which the loader reports."""
    if is_gguf(model):
        return _sizes_in_gguf(local_path(model))
    directory = directory_of(model)
    file = directory / "config.json" if directory is not None else _cached(model)
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file is not None else {}
    except (OSError, ValueError):
        return {}


def _sizes_in_gguf(file: Path) -> dict[str, int]:
    try:
        from gguf import GGUFReader

        fields = GGUFReader(file).fields
        name = fields["general.architecture"].contents()
        return {
            "hidden_size": int(fields[f"{name}.embedding_length"].contents()),
            "num_hidden_layers": int(fields[f"{name}.block_count"].contents()),
            "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        }
    except (ImportError, OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError):
        return {}  # the loader says what is missing or damaged


def _hidden_size_in(config: Any) -> int | None:
    for section in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if (
            isinstance(section, dict)
            and isinstance(section.get("hidden_size"), int)
            and section["hidden_size"] > 0
        ):
            return int(section["hidden_size"])
    return None


def _cached(model: str) -> Path | None:
    """Return config.json in the hub's cache on this machine."""
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        file = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a hub id
        return None
    return Path(file) if isinstance(file, str) else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML one
