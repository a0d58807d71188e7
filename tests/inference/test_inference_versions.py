"""InferenceModule while weights are published: what it scores, and episodes that are under way."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.engine.client import EngineClient
from mlx_parallm.engine.scoring import Scorer
from mlx_parallm.environments.manager import RolloutConfig, RolloutManager
from mlx_parallm.environments.state import BaseEnvironment, State
from mlx_parallm.faces.library.backprop import BackpropModule
from mlx_parallm.inference.module import InferenceModule
from tests.inference.test_inference import CONFIG, adapter


@pytest.mark.parametrize("what", ["adapter", "base"])
def test_scores_of_one_text_are_of_one_version(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Whatever is published between its chunks: an adapter stays what it was, a new base begins
    anew."""
    with InferenceModule("builtin:tiny", config=CONFIG) as own:
        client, weights, model = own.client, own.weights, own.loaded and own.loaded.model
        assert isinstance(client, EngineClient) and weights is not None and model is not None
        text: tuple[Any, Any] = ([[5, 6, 7] * 5], [[8, 9] * 20])
        weights.publish_adapter(adapter(model))
        own.adapter = "policy" if what == "adapter" else None
        before = own.get_logits(*text)[0], own.get_logprobs(*text)[0]
        norms = [
            (name, array) for name, array in tree_flatten(model.parameters()) if "norm" in name
        ]
        parameters = {
            times: {name: array * 1.5 / times for name, array in norms} for times in (1, 3)
        }
        mx.eval(parameters)  # in the thread that has made them
        call, collect, calls = client.call, Scorer.collect, []

        def publish(times: int) -> None:
            calls.append(times)
            if len(calls) == times and what == "adapter":
                weights.publish_adapter(adapter(model, seed=times))
            elif len(calls) == times:
                weights.publish_parameters(parameters[times])

        def called(function: Any) -> Any:
            publish(3)  # after the beginning and the first chunk
            return call(function)

        def collected(*given: Any) -> None:
            collect(*given)
            publish(1)  # after the first chunk

        monkeypatch.setattr(client, "call", called)
        logits = own.get_logits(*text)[0]
        monkeypatch.setattr(client, "call", call)
        after = own.get_logits(*text)[0]
        assert not np.array_equal(before[0], after)
        assert np.array_equal(logits, before[0] if what == "adapter" else after)
        calls.clear()
        later = own.get_logprobs(*text)[0]
        monkeypatch.setattr(Scorer, "collect", collected)
        scores = own.get_logprobs(*text)[0]
        latest = own.get_logprobs(*text)[0]
        assert not np.array_equal(later, latest) and np.array_equal(
            scores, later if what == "adapter" else latest
        )


def test_an_episode_keeps_its_transcript_when_training_begins_during_its_step() -> None:
    """Training gives the module an adapter (`BackpropModule.publish`): the episode continues as it
    began."""
    stepping, release = threading.Event(), threading.Event()

    class Twice(BaseEnvironment):
        def reset(self, index: int = 0) -> State:
            return State(prompt="ab")

        def step(self, state: State) -> State:
            for _ in range(2):
                state.add_turn("ab", own.generate(["ab"], 4)[0])
                stepping.set()
                assert release.wait(30)
            state.done = True
            return state

    with InferenceModule("builtin:tiny", config=CONFIG) as own, ThreadPoolExecutor(1) as pool:
        assert own.loaded is not None and own.weights is not None
        with RolloutManager(Twice(own), RolloutConfig(group_size=2)) as manager:
            collecting = pool.submit(manager.collect_rollouts, 2)
            assert stepping.wait(30)
            BackpropModule(own, value_head=False).publish()
            assert own.adapter == "policy"
            release.set()
            found = collecting.result(30)
            found += manager.collect_rollouts(2)  # what begins now is the adapter's
            assert [(each.error, len(each.history)) for each in found] == [(None, 2)] * 4


@pytest.mark.parametrize("way", ["opponent", "base", "base plays the trained"])
def test_only_the_policys_own_answers_are_turns_of_its_episode(way: str) -> None:
    """Self-play, and asking the base inside a step: what a module has been before does not make
    it the policy."""

    class TwoSpeak(BaseEnvironment):
        def reset(self, index: int = 0) -> State:
            return State(prompt="ab")

        def step(self, state: State) -> State:
            state.add_turn("ab", learner.generate(["ab"], 4)[0])
            if way == "opponent":
                other.adapter = "policy@1"
            elif way == "base":
                own.adapter = None
            other.generate(["cd"], 4)
            state.done = True
            return state

    with InferenceModule("builtin:tiny", config=CONFIG) as own:
        assert own.weights is not None and own.tokenizer is not None and own.client is not None
        backprop = BackpropModule(own, value_head=False)
        backprop.publish()
        backprop.publish()
        learner = other = own
        with InferenceModule.over(
            own.client, own.tokenizer, "policy" if way == "opponent" else None
        ) as second:
            if way == "opponent":
                other = second
            elif way != "base":
                learner = second
            with RolloutManager(TwoSpeak(learner), RolloutConfig(group_size=1)) as manager:
                [found] = manager.collect_rollouts(1)
    assert (found.error, len(found.history)) == (None, 1)
