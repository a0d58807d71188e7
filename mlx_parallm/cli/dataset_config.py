"""`mlx_parallm_train --model M --data D --reward R` (or `--algorithm A`): the configuration that these amount to.

Every default has its reason beside it in `TEMPLATE`. What depends on the model is the learning rate, and the sizes of
batches and answers, which are those of the quickstart for a model that is as small as its.
"""

import importlib.resources
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.config.environment import HUB_PREFIX
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.user_code import PREFIX, absolute

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config

SMALL = 512
"""A model with a smaller hidden size is a toy: it is trained like the quickstart's."""
USUAL_HIDDEN_SIZE = 2560  # of a 4B model: what is assumed of one that nothing is known about

TEMPLATE = """\
# {command}
# amounts to this. Change what you like; then: mlx_parallm_train --config THIS_FILE. All keys: docs/config.md

[model]
base_path = {model}

[server]
port = 0                      # any free one; it is printed
batch_size = {rows:<17}# sequences decoded together; more is faster and takes more memory

[rl_training]
total_steps = {steps}
learning_rate = {learning_rate:<14}# 4e-5 * (1024 / hidden size)^1.5: smaller steps for larger models
lr_schedule = "linear"        # down to zero after the last step
warmup_steps = 5
batch_size = 32               # sequences of one optimizer update: {updates} updates a step
blocks_per_eval = {blocks:<12}# 1: least memory; 0: fastest, for a small model
clip_ratio = 0.2
clip_ratio_high = 0.28        # unlikely right answers may grow faster (DAPO)
kl_beta = 0.0                 # no pull to the base model: a reward that can be checked needs none, and it costs a pass
temperature = 1.0             # train on the model's own distribution
checkpoint_interval = 50

[rl_training.lora]
rank = 16
alpha = 32.0

[rl_training.atropos]
rollout_batch_size = {rollouts:<9}# sequences of one step: {groups} prompts, 8 answers each
max_token_length = {longest:<11}# prompt and answer together

[evaluation]
problems = 40                 # held-out prompts answered before and after training

[[environments]]
kind = "dataset"
data = {data}
rewards = [{rewards}]
heldout_fraction = 0.1        # never trained on
group_size = 8                # answers to one prompt; they are compared with each other
max_tokens = {max_tokens:<17}# of one answer; one that is cut off can hardly be right
chat_template_kwargs = {{ enable_thinking = false }}  # thinking needs thousands of tokens; other templates ignore it
"""

ROWS_TEMPLATE = """\
# {command}
# amounts to this. Change what you like; then: mlx_parallm_train --config THIS_FILE. All keys: docs/config.md

[model]
base_path = {model}

[server]
port = 0                      # any free one; it is printed

[rl_training]
algorithm = "{algorithm}"
learning_rate = {learning_rate:<14}# smaller steps for larger models; sft takes ten times those of a preference
lr_schedule = "linear"        # down to zero after the last step, which ends one pass over the rows
warmup_steps = 5
batch_size = {rows:<17}# rows of one optimizer update
blocks_per_eval = {blocks:<12}# 1: least memory; 0: fastest, for a small model
checkpoint_interval = 50

[rl_training.lora]
rank = 16
alpha = 32.0

[data]
path = {data}
eval_fraction = 0.1           # never trained on
"""


def toml_for_rows(model: str, data: str, algorithm: str, rewards: Sequence[str]) -> str:
    """The configuration of an algorithm that learns from rows. Raises ConfigError: a reward function."""
    if rewards:
        raise ConfigError(f"--algorithm {algorithm} learns from the rows alone: leave out --reward")
    hidden_size = find_hidden_size(model)
    rate = learning_rate_for(hidden_size) * (10 if algorithm == "sft" else 1)
    return ROWS_TEMPLATE.format(
        command=shlex.join(["mlx_parallm_train", "--model", model, "--data", data, "--algorithm", algorithm]),
        model=_quoted(_base(model)),
        algorithm=algorithm,
        learning_rate=f"{min(2e-3, rate):.1e}",
        rows=16 if algorithm == "sft" else 32,
        blocks=0 if hidden_size < SMALL else 1,
        data=_quoted(data if data.startswith(HUB_PREFIX) else absolute(data, [Path.cwd()])),
    )


def toml_for(model: str, data: str, rewards: Sequence[str]) -> str:
    """The configuration. Files are named by their absolute paths. Raises ConfigError: no reward function."""
    if not rewards:
        raise ConfigError("--data needs a reward function: --reward score.py:function")
    here = [Path.cwd()]
    references = [absolute(name if name.startswith((PREFIX, "builtin:")) else PREFIX + name, here) for name in rewards]
    hidden_size = find_hidden_size(model)
    small = hidden_size < SMALL
    rollouts = 128 if small else 64
    flags = [word for name in rewards for word in ("--reward", name)]
    return TEMPLATE.format(
        command=shlex.join(["mlx_parallm_train", "--model", model, "--data", data, *flags]),
        model=_quoted(_base(model)),
        steps=80 if small else 200,
        rows=128 if small else 32,
        learning_rate=f"{learning_rate_for(hidden_size):.1e}",
        updates=rollouts // 32,
        blocks=0 if small else 1,
        rollouts=rollouts,
        groups=rollouts // 8,
        longest=1024 if small else 2048,
        data=_quoted(data if data.startswith(HUB_PREFIX) else absolute(data, here)),
        rewards=", ".join(map(_quoted, references)),
        max_tokens=64 if small else 512,
    )


def learning_rate_for(hidden_size: int) -> float:
    """Peak rate of AdamW on a LoRA adapter of alpha / rank = 2: 4e-5 · (1024 / hidden size)^1.5, at most 1e-3.

    Through two points: 1e-5 for a 4B model (hidden size 2560), where LoRA GRPO is usually run at 5e-6 to 2e-5, and
    9e-4 for the shipped tiny model (128), whose best rate was searched for (docs/benchmarks/quickstart.md). A 0.6B
    model (1024) gets 4e-5.
    """
    return min(1e-3, 4e-5 * float(1024 / hidden_size) ** 1.5)


def find_hidden_size(model: str) -> int:
    """From config.json where the model is on this machine, else from a size in its name ("Qwen3-0.6B"), else a 4B's.
    Looks nothing up over the network: what is wrong with a model's name is said when it is loaded."""
    path = Path(model).expanduser()
    if model == "builtin:tiny":
        path = Path(str(importlib.resources.files("mlx_parallm"))) / "assets" / "tiny"
    file: Path | None = path / "config.json" if path.is_dir() else _cached(model)
    if file is not None and file.is_file():
        try:
            found = _hidden_size_in(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            found = None  # the loader says what is wrong with it
        if found is not None:
            return found
    if named := re.search(r"(\d+(?:\.\d+)?)[bB](?![a-zA-Z])", Path(model).name):
        return max(SMALL, round(1320 * float(named[1]) ** 0.5))  # 1024 at 0.6B, 2640 at 4B, 3730 at 8B
    return USUAL_HIDDEN_SIZE


def _hidden_size_in(config: Any) -> int | None:
    for section in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(section, dict) and isinstance(section.get("hidden_size"), int) and section["hidden_size"] > 0:
            return int(section["hidden_size"])
    return None


def _cached(model: str) -> Path | None:
    """config.json in the hub's cache on this machine."""
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _base(model: str) -> str:
    return str(Path(model).expanduser().resolve()) if Path(model).expanduser().is_dir() else model


def what_flags_said(config: "Config") -> tuple[tuple[str, object], ...]:
    """What a configuration has of --model, --data, --reward and --algorithm."""
    own = ("--model", config.model.base_path), ("--algorithm", config.rl_training.algorithm)
    if not config.environments:
        return *own, ("--data", config.data.path)
    return *own, ("--data", config.environments[0].data), ("--reward", config.environments[0].rewards)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # a JSON string is a TOML one
