import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.rollout_store.wire import from_scored_data, to_scored_data
from mlx_parallm.types import RolloutGroup
from tests.rollout_store.groups import groups, make_group, make_rollout, scored_data


def parse(data: Any, **options: Any) -> RolloutGroup:
    return from_scored_data(data, **({"policy_version": 7, "environment": "external"} | options))


def test_labels_and_placeholders_become_mask_and_logprobs() -> None:
    group = parse(
        {
            "tokens": [[5, 6, 7, 8, 9], [5, 6, 3]],
            "masks": [[-100, -100, 7, -100, 9], [-100, 6, 3]],  # two spans; ragged
            "scores": [1.0, -0.5],
            "inference_logprobs": [[1.0, 1.0, -0.25, 1.0, -1.5], [1.0, -0.125, -2.0]],
        }
    )
    first, second = group.rollouts
    assert first.tokens == (5, 6, 7, 8, 9)
    assert first.mask == (0, 0, 1, 0, 1)
    assert first.logprobs == (0.0, 0.0, -0.25, 0.0, -1.5)
    assert first.policy_versions == (-1, -1, 7, -1, 7)
    assert (first.reward, second.reward) == (1.0, -0.5)
    assert second.mask == (0, 1, 1)
    assert group.environment == "external"
    assert group.advantages is None


@given(groups())
def test_what_the_wire_can_carry_survives_it(group: RolloutGroup) -> None:
    group = replace(
        group,
        index=None,
        metadata={},
        rollouts=tuple(
            replace(rollout, scores={"reward": rollout.reward}, stop_reason=None, processed_logprobs=None, error=None)
            for rollout in group.rollouts
        ),
    )
    wire = json.loads(json.dumps(to_scored_data(group)))
    back = parse(wire)
    if group.advantages is not None and not isinstance(group.advantages[0], tuple):
        rows = tuple((a,) * len(r.tokens) for a, r in zip(group.advantages, group.rollouts, strict=True))
        group = replace(group, advantages=rows)
    assert back == group


def test_what_goes_out_is_atropos_wire() -> None:
    wire = to_scored_data(make_group(rollouts=(make_rollout(prompt=2, sampled=1, zero_advantage=True),)))
    assert wire["masks"] == [[-100, -100, 12]]
    assert wire["inference_logprobs"][0][:2] == [1.0, 1.0]
    assert wire["overrides"] == [{"temperature": 1.0, "set_advantage_to_zero": True}]
    assert wire["ref_logprobs"] is None and wire["images"] is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"inference_logprobs": None}, "no inference_logprobs"),
        ({"inference_logprobs": [[1.0, 1.0, -0.1, -0.1, 1.0], [1.0] * 5]}, "sampled token 4 has no log-probability"),
        ({"inference_logprobs": [[1.0] * 4, [1.0] * 5]}, "sequence 0: 4 inference_logprobs for 5 tokens"),
        ({"masks": [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]}, "masks[0] is 0, neither -100 (given) nor the token's id 20"),
        ({"masks": [[-100] * 5]}, "1 masks for 2 sequences"),
        ({"scores": [1.0]}, "1 scores for 2 sequences"),
        ({"scores": None}, "scores: "),
        ({"tokens": [["a"], [1]]}, "tokens.0.0: "),
        ({"advantages": [1]}, "advantages.0: "),
        ({"advantages": [[0.5] * 4, [0.5] * 5]}, "sequence 0: 4 advantages for 5 tokens"),
        ({"policy_versions": [[1] * 5]}, "1 policy_versions for 2 sequences"),
        ({"overrides": [{}, {}, {}]}, "3 overrides for 2 sequences"),
        ({"overrides": [{"temperature": "hot"}]}, "temperature 'hot' is not a number"),
        ({"overrides": [{"sft": True}]}, "sft"),
        ({"group_overrides": {"sft": True}}, "sft"),
        ({"images": ["cat.png"]}, "images"),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutRejectedError) as caught:
        parse(scored_data(**changes))
    assert reason in str(caught.value)


def test_atroposlibs_placeholder_data_is_refused() -> None:
    dummy = scored_data(
        tokens=[list(range(128))] * 2,
        masks=[[-100, *range(1, 128)]] * 2,
        inference_logprobs=[[-0.5] * 128] * 2,
    )
    with pytest.raises(RolloutRejectedError, match=r"placeholder.*server_type vllm"):
        parse(dummy)
    real = dummy | {"inference_logprobs": [[-0.5] * 127 + [-0.4]] * 2}
    assert parse(real).rollouts[0].sampled_tokens == 127


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.9, 0.9]),
        ({"group_overrides": {"temperature": 0.8}}, [0.8, 0.8]),
        ({"group_overrides": {"temperature": 0.8}, "generation_params": {"temperature": 0.7}}, [0.7, 0.7]),
        ({"generation_params": {"temperature": 0.7}, "overrides": [{"temperature": 0.6}]}, [0.6, 0.7]),
        ({"generation_params": {"temperature": 0.7}, "overrides": [None, {"temperature": None}]}, [0.7, 0.7]),
        ({"generation_params": {"temperature": 0}}, [1.0, 1.0]),
        ({"generation_params": {"top_p": 0.9}, "overrides": []}, [0.9, 0.9]),
    ],
)
def test_temperature_precedence(changes: dict[str, Any], expected: list[float]) -> None:
    group = parse(scored_data(**changes), temperature=0.9)
    assert [rollout.temperature for rollout in group.rollouts] == expected


def test_advantages_and_zeroed_sequences_are_kept() -> None:
    rows = [[0.0, 0.0, 1.0, 2.0, 3.0], [0.0, 0.0, -1.0, -1.0, -1.0]]
    group = parse(scored_data(advantages=rows, overrides=[{}, {"set_advantage_to_zero": True}]))
    assert group.advantages == tuple(map(tuple, rows))
    assert [rollout.zero_advantage for rollout in group.rollouts] == [False, True]


def test_our_optional_fields_win_over_the_callers_words() -> None:
    versions = [[3, 3, 3, 4, 4], [5] * 5]
    group = parse(scored_data(policy_versions=versions, group_id="mine", environment="sorting"))
    assert [rollout.policy_versions for rollout in group.rollouts] == [(3, 3, 3, 4, 4), (5,) * 5]
    assert (group.group_id, group.environment) == ("mine", "sorting")


def test_the_same_group_gets_the_same_id_and_another_one_another() -> None:
    data = scored_data(env_id=0)
    again = parse(data, policy_version=8)  # sent again after a publish
    assert again.group_id == parse(data).group_id
    others = [
        scored_data(env_id=1),
        scored_data(env_id=0, scores=[0.0, 0.5]),
        scored_data(env_id=0, first_token=21),
        scored_data(env_id=0, inference_logprobs=[[1.0, 1.0, -0.3, -0.3, -0.3]] * 2),
    ]
    assert len({again.group_id, *(parse(other).group_id for other in others)}) == 5


def test_fields_without_use_are_listed_and_messages_kept() -> None:
    messages = [[{"role": "user", "content": "hi"}]] * 2
    group = parse(scored_data(messages=messages, ref_logprobs=[[0.0] * 5] * 2, env_id=3))
    assert group.metadata == {"messages": messages, "env_id": 3, "ignored_fields": ["ref_logprobs"]}
