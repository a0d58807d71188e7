import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from mlx_parallm.errors import RolloutRejectedError
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.types import RolloutGroup
from tests.atropos.groups import as_sent, scored_data
from tests.rollout_store.groups import groups

PICTURE = {
    "role": "user",
    "content": [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
    ],
}


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


def test_a_group_without_logprobs_has_none() -> None:
    """What server_type openai sends: run-api adds the key as null."""
    group = parse(scored_data(inference_logprobs=None))
    assert [rollout.logprobs for rollout in group.rollouts] == [None, None]
    assert [rollout.mask for rollout in group.rollouts] == [(0, 0, 1, 1, 1)] * 2
    assert group.group_id == parse(scored_data(inference_logprobs=None)).group_id
    assert group.group_id != parse(scored_data(inference_logprobs=None, first_token=21)).group_id
    assert group.group_id != parse(scored_data()).group_id


def test_zeros_for_all_tokens_are_no_log_probabilities() -> None:
    """An environment without log-probabilities fills the field: its tokens would be trained on as
    certain ones."""
    row = list(range(5, 13))
    sent = {"tokens": [row, row], "masks": [[-100, *row[1:]]] * 2, "scores": [1.0, 0.0]}
    group = parse(sent | {"inference_logprobs": [[1.0] + [0.0] * 7] * 2})
    assert [rollout.logprobs for rollout in group.rollouts] == [None, None]
    assert group.metadata["ignored_fields"] == ["inference_logprobs"]
    with pytest.raises(RolloutRejectedError, match="zeros alone"):
        check_group(group, vocab_size=99, max_token_length=99)
    certain = parse(sent | {"inference_logprobs": [[1.0] + [0.0] * 7, [1.0] + [-1.0] * 7]})
    assert certain.rollouts[0].logprobs == (0.0, *[0.0] * 7), "one sequence may be certain"


def test_what_collect_trajectories_of_a_base_env_sends() -> None:
    """Its default implementation sends [] for what no item has, {} for the overrides and no
    inference_logprobs."""
    names = ("advantages", "ref_logprobs", "messages", "overrides", "images")
    sent = scored_data(inference_logprobs=None, group_overrides={}) | {name: [] for name in names}
    del sent["inference_logprobs"]
    assert parse(sent) == parse(scored_data(inference_logprobs=None))


def test_turns_of_one_sequence_are_trained_on_where_the_labels_say_so() -> None:
    """As ManagedServer makes it: the EOS (2) of turn one comes twice, the tool's answer 30 31 is
    given; in the second row, which extended a plain completion, turn one is given again."""
    group = parse(
        {
            "tokens": [[5, 20, 2, 2, 30, 31, 21, 2], [5, 20, 2, 30, 31, 22, 2]],
            "masks": [
                [-100, 20, 2, -100, -100, -100, 21, 2],
                [-100, -100, -100, -100, -100, 22, 2],
            ],
            "scores": [1.0, 0.0],
            "inference_logprobs": [
                [1.0, -0.5, -0.1, 1.0, 1.0, 1.0, -0.7, -0.2],
                [1.0, 1.0, 1.0, 1.0, 1.0, -0.9, -0.3],
            ],
        }
    )
    first, second = group.rollouts
    assert first.mask == (0, 1, 1, 0, 0, 0, 1, 1)
    assert first.logprobs == (0.0, -0.5, -0.1, 0.0, 0.0, 0.0, -0.7, -0.2)
    assert second.mask == (0, 0, 0, 0, 0, 1, 1)
    assert second.logprobs == (0.0, 0.0, 0.0, 0.0, 0.0, -0.9, -0.3)
    check_group(group, vocab_size=40, max_token_length=8)


@settings(max_examples=40)
@given(groups())
def test_what_the_wire_can_carry_survives_it(group: RolloutGroup) -> None:
    group = replace(
        group,
        index=None,
        metadata={},
        rollouts=tuple(
            replace(
                rollout,
                scores={"reward": rollout.reward},
                stop_reason=None,
                processed_logprobs=None,
                forced=None,
                error=None,
                extra={},
            )
            for rollout in group.rollouts
        ),
    )
    wire = json.loads(json.dumps(as_sent(group)))
    back = parse(wire)
    if group.advantages is not None and not isinstance(group.advantages[0], tuple):
        rows = tuple(
            (a,) * len(r.tokens) for a, r in zip(group.advantages, group.rollouts, strict=True)
        )
        group = replace(group, advantages=rows)
    assert back == group


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"inference_logprobs": [[1.0, 1.0, -0.1, -0.1, 1.0], [1.0] * 5]},
            "sampled token 4 has no log-probability",
        ),
        (
            {"inference_logprobs": [[1.0] * 4, [1.0] * 5]},
            "sequence 0: 4 inference_logprobs for 5 tokens",
        ),
        (
            {"masks": [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]},
            "masks[0] is 0, neither -100 (given) nor the token's id 20",
        ),
        ({"masks": [[-100] * 5]}, "1 masks for 2 sequences"),
        ({"scores": [1.0]}, "1 scores for 2 sequences"),
        ({"scores": None}, "scores: "),
        ({"tokens": [["a"], [1]]}, "tokens.0.0: "),
        ({"advantages": [1]}, "advantages.0: "),
        ({"advantages": [[0.5] * 4, [0.5] * 5]}, "sequence 0: 4 advantages for 5 tokens"),
        ({"policy_versions": [[1] * 5]}, "1 policy_versions for 2 sequences"),
        ({"episodes": [0]}, "1 episodes for 2 sequences"),
        ({"episodes": [0, 0]}, "the sequences of episode 0 have different scores"),
        ({"episodes": [0, 1], "advantages": [[0.5] * 5, [0.5] * 5]}, "advantages and episodes"),
        ({"overrides": [{}, {}, {}]}, "3 overrides for 2 sequences"),
        ({"overrides": [{"temperature": "hot"}]}, "temperature 'hot' is not a number"),
        ({"overrides": [{"sft": True}]}, "sft"),
        ({"group_overrides": {"sft": True}}, "sft"),
        ({"images": ["cat.png", None]}, "the group carries images; the policy reads text only"),
        ({"images": ["cat.png"]}, "1 images for 2 sequences"),
        (
            {"messages": [[PICTURE], []]},
            "sequence 0: its messages have images, and the field images has none",
        ),
        (
            {"messages": [[{"role": "user", "content": [{"type": "input_audio"}]}], []]},
            "the group carries input_audio; the policy reads text and images only",
        ),
    ],
)
def test_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RolloutRejectedError) as caught:
        parse(scored_data(**changes))
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "greedy"),
    [
        ({"generation_params": {"temperature": 0}}, True),
        ({"overrides": [{"temperature": 0.0}, {"temperature": 0}]}, True),
        ({"overrides": [{"temperature": 0.0}]}, False),  # the second one says nothing
        ({"generation_params": {"temperature": 0.7}}, False),
        ({}, False),
    ],
)
def test_a_greedy_group_that_says_so_may_have_zeros(changes: dict[str, Any], greedy: bool) -> None:
    """The sampler's own numbers are 0 at temperature 0. They are left out, and the trainer's stand
    in for them."""
    tokens = [[20, 21, *range(30, 50)]] * 2
    group = parse(
        scored_data(
            tokens=tokens,
            masks=[[-100, -100, *range(30, 50)]] * 2,
            inference_logprobs=[[0.0] * 22] * 2,
            **changes,
        )
    )
    assert [rollout.logprobs for rollout in group.rollouts] == [None, None]
    limits = {"max_token_length": 64, "vocab_size": 320}
    if greedy:
        check_group(group, **limits)
        return
    with pytest.raises(RolloutRejectedError, match="zeros alone"):
        check_group(group, **limits)


def test_atroposlibs_placeholder_data_is_refused() -> None:
    dummy = scored_data(
        tokens=[list(range(128))] * 2,
        masks=[[-100, *range(1, 128)]] * 2,
        inference_logprobs=[[-0.5] * 128] * 2,
    )
    with pytest.raises(RolloutRejectedError, match="server_type"):
        parse(dummy)
    real = dummy | {"inference_logprobs": [[-0.5] * 127 + [-0.4]] * 2}
    assert parse(real).rollouts[0].sampled_tokens == 127


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.9, 0.9]),
        ({"group_overrides": {"temperature": 0.8}}, [0.8, 0.8]),
        (
            {"group_overrides": {"temperature": 0.8}, "generation_params": {"temperature": 0.7}},
            [0.7, 0.7],
        ),
        (
            {"generation_params": {"temperature": 0.7}, "overrides": [{"temperature": 0.6}]},
            [0.6, 0.7],
        ),
        (
            {"generation_params": {"temperature": 0.7}, "overrides": [{}, {"temperature": None}]},
            [0.7, 0.7],
        ),
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


def test_sequences_of_one_episode_are_its_segments_and_score_once() -> None:
    data = scored_data()
    for name in ("tokens", "masks", "inference_logprobs"):
        data[name] = [data[name][0], data[name][1], data[name][0]]
    data |= {"scores": [1.0, 0.0, 1.0], "episodes": [7, 8, 7]}
    [first, second] = parse(data).rollouts
    assert (first.reward, second.reward) == (1.0, 0.0)
    [earlier] = first.earlier
    assert (earlier.tokens, earlier.scores, second.earlier) == (first.tokens, {}, ())


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


def test_of_a_million_faults_each_list_tells_one() -> None:
    """All of them would be gigabytes."""
    wrong = {
        "tokens": [["a"] * 1_000_000],
        "masks": [["b"]] * 1_000_000,
        "scores": [{}] * 1_000_000,
    }
    optional = {"inference_logprobs": [["x"]] * 2, "messages": [[5, 5], [5]], "overrides": [1, 2]}
    with pytest.raises(RolloutRejectedError) as refused:
        parse(wrong | optional)
    places = [entry["loc"] for entry in refused.value.__cause__.errors()]
    assert sorted(places) == [
        *(("inference_logprobs", 0, 0), ("masks", 0, 0), ("messages", 0, 0)),
        *(("overrides", 0), ("scores", 0), ("tokens", 0, 0)),
    ]


def distill(data: dict[str, Any], width: int = 2) -> dict[str, Any]:
    """The same group with a teacher's numbers at each position."""
    ids = [[[token, 1][:width] for token in row] for row in data["tokens"]]
    logprobs = [[[-0.5, -2.0][:width] for _ in row] for row in data["tokens"]]
    return data | {"distill_token_ids": ids, "distill_logprobs": logprobs}


def test_a_teachers_numbers_come_along() -> None:
    data = distill(scored_data())
    group = parse(data)
    assert group.metadata["distill"] == {
        "token_ids": data["distill_token_ids"],
        "logprobs": data["distill_logprobs"],
    }
    assert "ignored_fields" not in group.metadata


def test_a_teachers_numbers_follow_the_segments_of_their_episodes() -> None:
    data = distill(scored_data(size=4, scores=[1.0, 0.0, 1.0, 0.0]))
    group = parse(data | {"episodes": [7, 5, 7, 5]})
    segments = [segment.tokens for rollout in group.rollouts for segment in rollout.segments]
    own = [tuple(ids for ids, _ in row) for row in group.metadata["distill"]["token_ids"]]
    assert own == segments


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"distill_logprobs": None}, "belong together"),
        ({"distill_token_ids": [[[1]]]}, "1 distill_token_ids for 2 sequences"),
        ({"distill_logprobs": [[[-1.0, -1.0]]] * 2}, "1 distill_logprobs for 5 tokens"),
        ({"distill_logprobs": [[[-1.0]] * 5] * 2}, r"distill_logprobs\[0\] is not"),
        ({"distill_logprobs": [[[0.5, -1.0]] * 5] * 2}, r"distill_logprobs\[0\] is not"),
    ],
)
def test_a_teachers_numbers_of_another_shape_are_refused(
    change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(RolloutRejectedError, match=reason):
        parse(distill(scored_data()) | change)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([20, 100], r"distill_token_ids\[0\] has id 100, outside the vocabulary of 100"),
        ([20, -1], r"distill_token_ids\[0\] has id -1, outside"),
        ([20, 20], r"distill_token_ids\[0\] names a token twice"),
    ],
)
def test_a_teachers_tokens_are_the_vocabularys(ids: list[int], reason: str) -> None:
    """A divergence would read logits that there are not."""
    group = parse(distill(scored_data()))
    check_group(group, vocab_size=100, max_token_length=32)
    group.metadata["distill"]["token_ids"][1][0] = ids
    with pytest.raises(RolloutRejectedError, match=f"sequence 1: {reason}"):
        check_group(group, vocab_size=100, max_token_length=32)


def test_rewards_of_turns_go_through_the_sequences_of_an_episode() -> None:
    """Episode 0 is the sequences 0 and 2; the first has two turns."""
    labels = [[-100, 21, -100, 23, 24], [-100, 22, 23, 24, 25], [-100, -100, -100, -100, 26]]
    data = scored_data(size=3, scores=[4.0, 1.0, 4.0], episodes=[0, 1, 0])
    data |= {"masks": labels, "inference_logprobs": [[-0.5] * 5] * 3}
    first, second = parse(data | {"turn_rewards": [[1.0, 0.5], [1.0], [2.0]]}).rollouts
    assert first.turn_rewards == (1.0, 0.5, 2.0) and second.turn_rewards == (1.0,)
    assert [segment.turn_rewards for segment in first.earlier] == [()]
    assert parse(data | {"turn_rewards": []}).rollouts[0].turn_rewards == ()
    for rows, reason in (
        ([[1.0], [1.0], [2.0]], "sequence 0: 1 turn_rewards for 2 turns"),
        ([[1.0, 0.5], [1.0]], "2 turn_rewards for 3 sequences"),
    ):
        with pytest.raises(RolloutRejectedError, match=reason):
            parse(data | {"turn_rewards": rows})
    with pytest.raises(RolloutRejectedError, match="turn 0 is nan"):
        check_group(
            parse(data | {"turn_rewards": [[float("nan"), 0.5], [1.0], [2.0]]}),
            vocab_size=512,
            max_token_length=32,
        )
