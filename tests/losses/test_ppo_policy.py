"""Another policy than a language model learns by the same PPO: a recurrent one of four weights,
and a token model."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.optimizers import Adam

from mlx_parallm.losses.policy_gradient import policy_loss
from mlx_parallm.losses.ppo import Policy, Steps, gae, loss_inputs, with_value_loss
from mlx_parallm.models.layer_stack import LayerStack
from mlx_parallm.models.logprobs import token_logprobs_and_entropy
from tests.losses import fixtures
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.rollouts import make_rollout


class Recurrent(nn.Module):
    """A GRU over observations [B, T, D]; which of two actions, and what reward is to be
    expected."""

    def __init__(self, inputs: int = 1, hidden: int = 4) -> None:
        super().__init__()
        self.memory = nn.GRU(inputs, hidden)
        self.choice, self.value = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def act(self, observations: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        hidden = self.memory(observations[:, None], hidden=state)[:, -1]
        return mx.random.categorical(self.choice(hidden)), hidden

    def scores(
        self, observations: mx.array, actions: mx.array, state: mx.array | None
    ) -> tuple[mx.array, mx.array, mx.array]:
        hidden = self.memory(observations, hidden=state)
        logprobs = nn.log_softmax(self.choice(hidden), axis=-1)
        entropy = -(mx.exp(logprobs) * logprobs).sum(axis=-1)
        return (
            mx.take_along_axis(logprobs, actions[..., None], axis=-1)[..., 0],
            entropy,
            self.value(hidden)[..., 0],
        )


class Tokens:
    """A language model as a `Policy`: an observation is a token, an action the next one, the
    memory those before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def act(self, observations: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
        seen = (
            observations[:, None]
            if state is None
            else mx.concatenate([state, observations[:, None]], axis=1)
        )
        return self.model(seen)[:, -1].argmax(axis=-1), seen

    def scores(
        self, observations: mx.array, actions: mx.array, state: None
    ) -> tuple[mx.array, mx.array, mx.array]:
        logits, hidden = LayerStack(self.model).forward(observations)
        logprobs, entropy = token_logprobs_and_entropy(logits, actions, 1.0)
        return logprobs, entropy, self.model.value_head(hidden)


def ppo_loss(policy: Policy, steps: Steps) -> mx.array:
    policy_term = lambda inputs: policy_loss(inputs, fixtures.options())  # noqa: E731
    return with_value_loss(policy_term, clip=0.2, coefficient=0.5)(loss_inputs(policy, steps)).loss


def test_the_loss_of_a_policy_whose_numbers_are_known() -> None:
    """All weights 0: either action has the probability ½, the value is 0.

    Rewards 0 and 1, V 0.4 and 0.6, γ = 1, λ = 0.5 → A = [0.4, 0.4], R = [0.8, 1]. The actor's
    probabilities were 0.4 and 0.25 → ratios 1.25 and 2, both cut at 1.2: -0.48. The value 0 is held
    at V_old - 0.2 = [0.2, 0.4], which is nearer to R, so the plain error counts: ½ (0.64 + 1) / 2 =
    0.41. Together -0.48 + 0.5 · 0.41 = -0.275.
    """
    policy = Recurrent()
    policy.update({"choice": {k: mx.zeros_like(v) for k, v in policy.choice.parameters().items()}})
    policy.update({"value": {k: mx.zeros_like(v) for k, v in policy.value.parameters().items()}})
    values = np.array([0.4, 0.6])
    advantages = gae(np.array([0.0, 1.0]), values, np.array([1]), gamma=1.0, gae_lambda=0.5)
    row = lambda *numbers: mx.array([[*numbers, 7.0]])  # noqa: E731 - the third step is padding
    steps = Steps(
        observations=mx.zeros((1, 3, 1)),
        actions=mx.array([[0, 1, 0]]),
        mask=mx.array([[True, True, False]]),
        logprobs=mx.log(row(0.4, 0.25)),
        values=row(*values),
        advantages=row(*advantages),
        returns=row(*(advantages + values)),
    )
    assert ppo_loss(policy, steps).item() == pytest.approx(-0.275, abs=1e-6)


def test_a_recurrent_policy_learns_what_it_has_to_remember() -> None:
    """The first observation says which action the second step, which sees nothing, is rewarded
    for."""
    mx.random.seed(0)
    policy, rng = Recurrent(hidden=8), np.random.default_rng(0)
    adam, chances = Adam(learning_rate=0.03), []
    for _ in range(40):
        seen = rng.integers(0, 2, 64)
        observations = mx.array(
            np.stack([2.0 * seen - 1, np.zeros(64)], axis=1)[..., None].astype(np.float32)
        )
        actions, state = [], None
        for step in range(2):
            action, state = policy.act(observations[:, step], state)
            actions.append(action)
        chosen = mx.stack(actions, axis=1)
        logprobs, _, values = policy.scores(observations, chosen, None)
        rewards = np.stack([np.zeros(64), np.array(chosen[:, 1]) == seen], axis=1)
        chances.append(rewards[:, 1].mean())
        flat = np.array(values, np.float64).reshape(-1)
        advantages = gae(
            rewards.reshape(-1), flat, np.arange(1, 128, 2), gamma=0.99, gae_lambda=0.95
        )
        steps = Steps(
            *(
                observations,
                chosen,
                mx.ones((64, 2), mx.bool_),
                mx.stop_gradient(logprobs),
                mx.stop_gradient(values),
            ),
            advantages=mx.array(advantages.reshape(64, 2), mx.float32),
            returns=mx.array((advantages + flat).reshape(64, 2), mx.float32),
        )
        for _ in range(4):
            _, gradients = nn.value_and_grad(policy, lambda: ppo_loss(policy, steps))()  # noqa: B023
            adam.update(policy, gradients)
            mx.eval(policy.parameters(), adam.state)
    assert chances[0] < 0.7
    assert np.mean(chances[-3:]) > 0.95


def test_a_language_model_is_such_a_policy() -> None:
    """It says of tokens what the trainer says, and repeats what greedy decoding gives."""
    trainer = make_trainer(make_config(algorithm="ppo"))
    trainer.policy.model.value_head.weight = mx.random.normal((1, 32))
    policy: Policy = Tokens(trainer.policy.model)
    action, state, tokens = mx.array([3]), None, [3]
    for _ in range(4):
        action, state = policy.act(action, state)
        tokens.append(action.item())
    row = mx.array([tokens])
    assert tokens[1:] == trainer.policy.model(row)[0, :-1].argmax(axis=-1).tolist()
    expected = trainer.token_scores([make_rollout(tokens[1:], prompt=(3,))])
    for own, others in zip(policy.scores(row[:, :-1], row[:, 1:], None), expected[0], strict=True):
        np.testing.assert_allclose(np.array(own)[0], others, atol=1e-5)
