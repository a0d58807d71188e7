"""rl_training.advantage and rl_training.loss of the user's own."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.errors import ConfigError
from mlx_parallm.losses.types import LossInputs
from mlx_parallm.rl_training.options import make_algorithm
from mlx_parallm.rl_training.step.algorithms import Algorithm

INPUTS = LossInputs(
    logprobs=mx.array([[-1.0, -2.0]]),
    rollout_logprobs=mx.array([[-1.0, -2.0]]),
    advantages=mx.array([[1.0, 3.0]]),
    mask=mx.array([[True, True]]),
    token_normalizer=2.0,
    sequence_normalizer=1.0,
)
HEAD = "from mlx_parallm.losses.types import LossOutputs, aggregate\n"


def algorithm(tmp_path: Path, text: str, key: str) -> Algorithm:
    (tmp_path / "mine.py").write_text(text)
    config = parse_config({"rl_training": {key: f"python:{tmp_path / 'mine.py'}:f"}})
    return make_algorithm(config.rl_training)


def test_an_advantage_of_ones_own(tmp_path: Path) -> None:
    made = algorithm(
        tmp_path, "def f(rewards):\n    return [r - max(rewards) for r in rewards]", "advantage"
    )
    assert made.advantages([1.0, 3.0]) == (-2.0, 0.0)


def test_an_advantage_may_say_that_there_is_nothing_to_learn(tmp_path: Path) -> None:
    assert (
        algorithm(tmp_path, "def f(rewards): return None", "advantage").advantages([1.0, 3.0])
        is None
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1.0]", r"returned \[1.0\] for 2 rewards"),
        ("return [1.0, float('inf')]", "inf"),
        ("return [1.0, 'x']", r"line 2: ValueError|ValueError: could not convert"),
        ("return 3", "TypeError"),
        ("raise KeyError('k')", r"mine\.py, line 2: KeyError: 'k'"),
    ],
)
def test_advantages_that_cannot_be_used_are_named(tmp_path: Path, body: str, message: str) -> None:
    made = algorithm(tmp_path, f"def f(rewards):\n    {body}", "advantage")
    with pytest.raises(ConfigError, match=f"^rl_training.advantage: python:.*{message}"):
        made.advantages([1.0, 3.0])


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    text = HEAD + (
        "def f(inputs):\n    loss = aggregate(-inputs.logprobs * inputs.advantages, inputs)\n"
    )
    outputs = algorithm(
        tmp_path, text + "    return LossOutputs(loss, {'mine': 2 * loss, 'n': 3})", "loss"
    ).loss(INPUTS)
    assert (outputs.loss.item(), outputs.metrics["mine"].item()) == (3.5, 7.0)
    other = tmp_path / "other"
    other.mkdir()
    bare = algorithm(other, text + "    return loss", "loss").loss(INPUTS)
    assert (bare.loss.item(), bare.metrics["policy_loss"].item()) == (3.5, 3.5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return inputs.logprobs",
            r"returned \[1, 2\]: expected LossOutputs with a loss of one number",
        ),
        ("return 3.0", "returned float: expected LossOutputs"),
        ("return LossOutputs(3.0)", "returned float: expected LossOutputs"),
        ("return LossOutputs(inputs.logprobs.sum(), {'m': 'x'})", "ValueError"),
        (
            "return LossOutputs(inputs.logprobs.sum(), {'step': inputs.logprobs.sum()})",
            "the metric 'step'",
        ),
        (
            "return LossOutputs(inputs.logprobs.sum(), {'m': inputs.logprobs})",
            r"the metric 'm' has the shape \[1, 2\]",
        ),
        ("return inputs.nothing", r"mine\.py, line 3: AttributeError"),
    ],
)
def test_losses_that_cannot_be_used_are_named(tmp_path: Path, body: str, message: str) -> None:
    made = algorithm(tmp_path, f"{HEAD}def f(inputs):\n    {body}", "loss")
    with pytest.raises(ConfigError, match=f"^rl_training.loss: python:.*{message}"):
        made.loss(INPUTS)


@pytest.mark.parametrize("key", ["advantage", "loss"])
def test_a_signature_is_checked_before_anything_is_built(tmp_path: Path, key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"rl_training.{key}: .*takes \(a, b\), but it is called with"
    ):
        algorithm(tmp_path, "def f(a, b): ...", key)
