"""A whole run of a mixture of experts: recorded by the engine, kept by the store, repeated by the
trainer."""

import contextlib
import random
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import httpx
import mlx.core as mx
import pytest

from mlx_parallm.models.loading import resolve_model_path
from mlx_parallm.rollout_store.store import RolloutStore
from scripts.bench.studies.upcycling import EACH, EXPERTS, upcycle
from tests.integration.http_environment import HttpEnvironment, needs_atropos
from tests.integration.in_process import train_here
from tests.integration.processes import free_port, metrics
from tests.soak.resume_bits import Run, differences, kill_once
from tests.waiting import until

HTTP = """
[model]
base_path = "{model}"

[server]
port = {port}
batch_size = 16

[rl_training]
total_steps = 2
learning_rate = 5e-3
batch_size = 16
max_staleness = 1
dynamic_sampling = false
run_name = "run"

[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 128
"""
CONFIG = """
[model]
base_path = "{model}"

[server]
port = 0
batch_size = 32

[rl_training]
total_steps = 3
learning_rate = 5e-3
batch_size = 16
max_staleness = 1
dynamic_sampling = false
kl_beta = 0.01
run_name = "run"

[rl_training.atropos]
rollout_batch_size = 16
max_token_length = 128

[[environments]]
kind = "tasks"
name = "sort"
group_size = 8
max_tokens = 6
"""
LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("upcycled") / "model"
    upcycle(resolve_model_path("builtin:tiny"), directory)
    return directory


@pytest.mark.parametrize(("replay", "adapted"), [("auto", True), ("off", False)])
def test_the_experts_that_sampled_are_the_experts_that_learn(
    model: Path, tmp_path: Path, replay: str, adapted: bool
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(model=model))
    train_here(
        config,
        f"rl_training.checkpoint_dir={tmp_path}",
        f"rl_training.router_replay={replay}",
        f"rl_training.lora.routed_experts={str(adapted).lower()}",
        f"rl_training.router_replay_prompts={str(replay != 'off').lower()}",
    )
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    with closing(RolloutStore(tmp_path / "run" / "rollouts.sqlite")) as store:
        groups = store.groups(store.known_ids())
    # whatever the router is led by: what training saw
    assert all(1.0 < line["expert_load_max"] < EXPERTS / EACH for line in lines)
    assert all(0.5 < line["expert_load_entropy"] < 1.0 for line in lines)
    assert all(0.0 <= line["experts_unused"] < 0.5 for line in lines)
    recorded = [
        (rollout.routed_experts, sum(rollout.mask))
        for group in groups
        for rollout in group.rollouts
    ]
    assert len(recorded) >= 48
    names = mx.load(str(tmp_path / "run" / "final" / "adapters.safetensors"))
    assert any("switch_mlp" in name for name in names) is adapted
    # the engine's adapters of experts are the trainer's
    assert lines[0]["logprob_diff_max"] < 1e-4
    assert not adapted or all(line["grad_norm"] > 0 for line in lines)
    if replay == "off":
        assert all(experts is None for experts, _ in recorded)
        assert not any("experts_differing" in line for line in lines)
        assert not any(rollout.prompt_experts for group in groups for rollout in group.rollouts)
        return
    for group in groups:
        stretches = [rollout.prompt_experts for rollout in group.rollouts]
        assert all(
            part.start == 0 and part.stop == rollout.mask.index(1) - 1
            for [part], rollout in zip(stretches, group.rollouts, strict=True)
        )
    assert all(line["prompt_experts_missing"] == 0.0 for line in lines)
    assert lines[0]["prompt_experts_differing"] == 0.0
    assert lines[-1]["prompt_experts_differing"] > 0.0
    for experts, sampled in recorded:
        assert (experts.layers, experts.each, len(experts)) == (LAYERS, EACH, sampled)
        assert experts.array().max() < EXPERTS
    assert lines[0]["experts_differing"] == 0.0
    assert lines[-1]["experts_differing"] > 0.0, "the weights have moved since"


@pytest.mark.slow
def test_kill_9_in_a_step_that_repeats_experts_changes_no_bit(model: Path, tmp_path: Path) -> None:
    training = 'router_replay = "on"\nrouter_replay_prompts = true'

    def make(name: str) -> Run:
        return Run(tmp_path / name, steps=3, training=training, model=model)

    whole, killed = make("whole"), make("killed")
    whole.finish()
    _, step = kill_once(killed, "in a step", random.Random(3), steps=3)
    assert step < 3
    killed.finish()
    assert differences(killed.lines(), whole.lines()) == []
    assert all(line["prompt_experts_missing"] == 0.0 for line in killed.lines())
    assert any(line["expert_load_max"] > 1.0 for line in killed.lines())


class Replaying(HttpEnvironment):
    """Asks for the experts of its answers, and sends them back; every second group without."""

    extra: ClassVar[dict[str, Any]] = {"return_routed_experts": True}

    def run(self) -> None:
        until(self._is_ready)
        super().run()

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self._generate.get("/health").status_code == 200
        return False

    def _scored(self, problem: Any, ids: list[int], answer: dict[str, Any]) -> dict[str, Any]:
        data = super()._scored(problem, ids, answer)
        experts = answer["routed_experts"]
        return data | {"routed_experts": None if len(self.replies) % 2 else experts}


@needs_atropos
def test_an_environment_over_http_uses_replay(model: Path, tmp_path: Path) -> None:
    config, port = tmp_path / "config.toml", free_port()
    config.write_text(HTTP.format(model=model, port=port))
    environment = Replaying(f"http://127.0.0.1:{port}")
    environment.start()
    try:
        train_here(config, f"rl_training.checkpoint_dir={tmp_path}")
    finally:
        environment.ended.set()
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2]
    with closing(RolloutStore(tmp_path / "run" / "rollouts.sqlite")) as store:
        groups = store.groups(store.known_ids())
    carried = [[r.routed_experts is not None for r in group.rollouts] for group in groups]
    assert [True] * 8 in carried and [False] * 8 in carried
    # of the first step's answers, which the weights sampled that it starts from
    assert lines[0]["experts_differing"] == 0.0
