"""Train on groups that were answered and scored before: the rows of `GRPODatasetBuilder`.

    {"prompt": [messages], "completions": [[messages], …], "rewards": [numbers], "logprobs"?:
    [[numbers], …]}

A group's rewards become GRPO's advantages; nothing is sampled. If a row has the
log-probabilities of the tokens that were sampled (of each completion, its end token too), the
ratio to the policy is corrected as PPO does, else the answers count as the policy's own.
"""

import math
import numbers
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_parallm.config.data import DataConfig
from mlx_parallm.config.library import BackpropConfig
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.execution.chat_messages import read_tools
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.faces.trl.model import save
from mlx_parallm.faces.trl.trainers import TrainOutput
from mlx_parallm.losses.advantages import group_advantages, token_advantages
from mlx_parallm.models.loading import load_tokenizer
from mlx_parallm.models.threads import in_mlx_thread
from mlx_parallm.rl_training.data.examples import Example, read_answers
from mlx_parallm.rl_training.data.learned_tokens import encode_all
from mlx_parallm.systems.pipeline.verdict import read_lines
from mlx_parallm.types import UNSCORED, Rollout, RolloutGroup, has_score

Json = dict[str, Any]
ARGUMENTS = {"learning_rate": 1e-5, "num_train_epochs": 1, "groups_per_step": 8, "max_length": 2048}


class OfflineGroupTrainer:
    """Train on scored groups by GRPO's advantages: `train(rows)`, `save_model(directory)`.

    Args:
        base_model: directory, hub id or "builtin:tiny".
        lora: `r` and `lora_alpha` of the adapter; None trains all weights.
        arguments: learning_rate, num_train_epochs, groups_per_step, max_length.

    Raises ConfigError: another argument.
    """

    def __init__(
        self, base_model: str, lora: Mapping[str, Any] | None, arguments: Mapping[str, Any]
    ) -> None:
        if unknown := sorted(set(arguments) - set(ARGUMENTS)):
            raise ConfigError(
                f"RLTrainer: {unknown[0]!r} is not an argument for training on scored groups, which"
                f" takes {', '.join(ARGUMENTS)}; with rewards=[…] the answers are sampled anew"
            )
        self._base, self._arguments = base_model, ARGUMENTS | dict(arguments)
        keys = {"r": "rank", "lora_alpha": "alpha"}
        if wrong := sorted(set(lora or {}) - set(keys)):
            raise ConfigError(f"RLTrainer: lora has {wrong[0]!r}: expected r and lora_alpha")
        values = {keys[name]: value for name, value in (lora or {}).items()}
        self._lora = LoraConfig(enabled=lora is not None, **values)
        self._module: BackpropModule | None = None

    def train(self, rows: Any) -> TrainOutput:
        """Make one update for each `groups_per_step` groups, in a new order each epoch; return the
        number of updates and the last loss. Groups whose rewards are equal, or with an answer
        beyond max_length, are left out and counted.

        Raises ConfigError: a row that is not a group, or none has different rewards.
        """
        return in_mlx_thread(lambda: self._train(_listed(rows)))

    def _train(self, rows: Sequence[Json]) -> TrainOutput:
        arguments = self._arguments
        config = BackpropConfig(
            learning_rate=arguments["learning_rate"], lora=self._lora, kl_coef=0.0
        )
        self._module = module = BackpropModule(self._base, config=config, value_head=False)
        groups = [group for n, row in enumerate(rows) for group in self._group(n, row)]
        learned = [
            (group, rows_of_tokens)
            for group in groups
            if (rows_of_tokens := token_advantages(group, group_advantages)) is not None
        ]
        if not learned:
            raise ConfigError(f"none of {len(rows)} groups has answers of different rewards")
        order, size, steps = random.Random(0), int(arguments["groups_per_step"]), 0
        metrics: Mapping[str, float | None] = {}
        for _ in range(math.ceil(arguments["num_train_epochs"])):
            order.shuffle(learned)
            for start in range(0, len(learned), size):
                pairs = [
                    (rollout, row[-1])
                    for group, table in learned[start : start + size]
                    for rollout, row in zip(group.rollouts, table, strict=True)
                    if rollout.is_scored
                ]
                rollouts, advantages = zip(*pairs, strict=True)
                metrics = module.update(module.compute_ppo_loss(rollouts, advantages))
                steps += 1
        left_out = float(len(groups) - len(learned))
        counts = {"groups": float(len(learned)), "groups_without_variance": left_out}
        counts["groups_too_long"] = float(len(rows) - len(groups))
        return TrainOutput(steps, float(metrics["loss"] or 0.0), counts)

    def _group(self, number: int, row: Json) -> Iterable[RolloutGroup]:
        where = f"row {number + 1}"
        if not {"prompt", "completions", "rewards"} <= set(row):
            raise ConfigError(f"{where}: a scored group has prompt, completions and rewards")
        prompt, answers = read_answers(row["prompt"], row["completions"], where)
        rewards = row["rewards"]
        of_sampler = row.get("logprobs") or [None] * len(answers)
        if not len(answers) == len(rewards) == len(of_sampler):
            raise ConfigError(
                f"{where}: {len(answers)} completions, {len(rewards)} rewards and"
                f" {len(of_sampler)} logprobs: one for each"
            )
        assert self._module is not None
        tokenizer = load_tokenizer(self._module.loaded.path, ModelConfig(base_path=self._base))
        tools = tuple(read_tools(row.get("tools")) or ())
        example = Example(where, prompt, answers, where, tools=tools)
        data = DataConfig(path="rows", max_length=self._arguments["max_length"], too_long="skip")
        for unit in encode_all([example], tokenizer, data, {}, form="whole"):
            parts = zip(unit.sequences, rewards, of_sampler, strict=True)
            rollouts = [
                _scored(encoded.rollout(), reward, logprobs, where)
                for encoded, reward, logprobs in parts
            ]
            yield RolloutGroup(where, "rows", tuple(rollouts))

    def save_model(self, directory: str | Path) -> None:
        """Write the adapter in PEFT's files, or all weights."""
        if self._module is None:
            raise RuntimeError("train(rows) comes first")
        policy = self._module.policy
        target = Path(directory).expanduser()
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as checkpoint:

            def write() -> None:
                policy.save(Path(checkpoint))
                save(Path(checkpoint), target, lora=self._lora, base=self._base)

            in_mlx_thread(write)


def _scored(
    rollout: Rollout, reward: float | None, logprobs: Sequence[float] | None, where: str
) -> Rollout:
    if reward is not None and not isinstance(reward, numbers.Real):
        raise ConfigError(f"{where}: rewards has {reward!r}: expected numbers, or null")
    scores = {"reward": float(reward)} if has_score(reward) else {"reward": 0.0, UNSCORED: 1.0}
    if logprobs is None:
        return replace(rollout, scores=scores, logprobs=None)
    sampled = sum(rollout.mask)
    if len(logprobs) != sampled:
        raise ConfigError(f"{where}: {len(logprobs)} logprobs for {sampled} sampled tokens")
    if not all(map(math.isfinite, logprobs)):
        raise ConfigError(f"{where}: its logprobs are not all finite numbers")
    values = iter(map(float, logprobs))
    column = tuple(next(values) if on else 0.0 for on in rollout.mask)
    return replace(rollout, scores=scores, logprobs=column)


def _listed(rows: Any) -> list[Json]:
    if isinstance(rows, str | Path):
        return read_lines(Path(rows))
    return [dict(row) for row in (getattr(rows, "train", None) or rows)]
