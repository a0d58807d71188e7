"""MLX's own fast operations are taken where a trial shows that they are one, and right."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from structlog.testing import capture_logs

from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.recurrent import chunks, fast_paths
from mlx_parallm.models.recurrent.fast_paths import cross_entropy, gated_delta, prove
from mlx_parallm.models.recurrent.layers import use_chunks
from tests.rl_training.step.test_blockwise import batch, whole_graph, with_lora
from tests.rl_training.tiny_models import make_model

HEADS = (1, 2, 8, 8)
DELTA = mx.fast.gated_delta_update


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    """What these tests prove, and refuse, holds for them alone."""
    fast_paths.forget()
    yield
    fast_paths.forget()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where MLX has a kernel: its operations are one node of the graph."""
    monkeypatch.setattr(fast_paths, "graph_nodes", lambda *arrays: 1)


def hybrid() -> Any:
    return make_model("qwen3_next")


def counted(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any]) -> list[int]:
    calls: list[int] = []

    def call(*arrays: Any) -> Any:
        calls.append(1)
        return function(*arrays)

    monkeypatch.setattr(mx.fast, name, call)
    return calls


def test_a_loop_over_tokens_is_not_taken() -> None:
    """MLX without a kernel, as on a CPU; nothing is wrong, so nothing is said."""
    with capture_logs() as logs:
        prove(hybrid())
    slow = mx.default_device().type == mx.DeviceType.cpu
    assert slow == (fast_paths._proved == {"cross_entropy": False, HEADS: False})
    assert not [line for line in logs if line["log_level"] == "warning"]


@pytest.mark.usefixtures("fused")
def test_what_agrees_is_taken_and_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "gated_delta_update", DELTA)
    model = hybrid()
    use_chunks(model)
    prove(model)
    assert fast_paths._proved[HEADS]
    tried = len(calls)
    prove(model)
    assert len(calls) == tried > 0, "each is tried once"
    trained = with_lora(model)
    value, gradients = whole_graph(trained, batch())
    assert len(calls) > tried
    fast_paths.forget()
    wanted, expected = whole_graph(trained, batch())
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for name, gradient in gradients.items():
        scale = mx.abs(expected[name]).max().item()
        np.testing.assert_allclose(gradient, expected[name], atol=1e-5 * scale + 1e-7)


def late(*arrays: Any) -> Any:
    raise RuntimeError("no kernel of these sizes")


def wrong_value(*arrays: Any) -> Any:
    y, state = DELTA(*arrays)
    return y * 1.001, state


def wrong_gradient(*arrays: Any) -> Any:
    y, state = DELTA(*arrays)
    return y + 0.01 * (y - mx.stop_gradient(y)), state


def not_finite(*arrays: Any) -> Any:
    y, state = DELTA(*arrays)
    return y * mx.nan, state


@pytest.mark.usefixtures("fused", "informative_logs")
@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (wrong_value, "off by"),
        (wrong_gradient, "off by"),
        (not_finite, "off by nan"),
    ],
)
def test_what_is_wrong_is_refused_and_named_once(
    wrong: Callable[..., Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch, "gated_delta_update", wrong)
    with capture_logs() as logs:
        prove(hybrid())
        prove(hybrid())
    named = [line for line in logs if line.get("name") == "mx.fast.gated_delta_update"]
    assert len(named) == 1 and reason in named[0]["reason"]
    _, _, inputs = fast_paths._gated_delta_trial(HEADS)
    tried = len(calls)
    found, wanted = gated_delta(*inputs), chunks.gated_delta(*inputs)
    assert len(calls) == tried
    assert all(mx.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("fused", "informative_logs")
def test_what_fails_while_it_computes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_paths, "_with_slopes", late)
    with capture_logs() as logs:
        prove(hybrid())
    assert [line["reason"] for line in logs] == ["no kernel of these sizes"] * 2
    assert not any(fast_paths._proved.values())


@pytest.mark.usefixtures("fused")
def test_padding_and_a_gate_a_channel_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    prove(hybrid())
    _, _, (q, k, v, decay, beta, state) = fast_paths._gated_delta_trial(HEADS)
    calls = counted(monkeypatch, "gated_delta_update", DELTA)
    mask = mx.ones(q.shape[:2], mx.bool_)
    by_channel = mx.broadcast_to(decay[..., None], (*decay.shape, 8))
    wanted = chunks.gated_delta(q, k, v, decay, beta, state)
    for others in ((decay, beta, state, mask), (by_channel, beta, state)):
        found = gated_delta(q, k, v, *others)
        np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)
    assert not calls
    gated_delta(q, k, v, decay, beta, state)
    assert calls


@pytest.mark.usefixtures("fused")
def test_log_probabilities_by_cross_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = mx.random.normal((3, 900), key=mx.random.key(0))
    tokens = mx.array([0, 5, 899])
    assert cross_entropy(logits, tokens) is None
    wanted = token_logprobs(logits, tokens, 0.7)
    monkeypatch.setitem(fast_paths._proved, "cross_entropy", True)
    calls = counted(monkeypatch, "cross_entropy", mx.fast.cross_entropy)
    np.testing.assert_allclose(token_logprobs(logits, tokens, 0.7), wanted, atol=1e-5)
    assert calls
