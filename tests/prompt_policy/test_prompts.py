"""Embeddings, classifier, mutations, reward model, judge loop."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import Ridge

from mlx_parallm.errors import ConfigError, EndpointError
from mlx_parallm.systems.prompt_policy.app import make_deps
from mlx_parallm.systems.prompt_policy.classifier import classify_prompt
from mlx_parallm.systems.prompt_policy.embeddings import HashedEmbedder, checked
from mlx_parallm.systems.prompt_policy.mutations import RULES, mutate
from mlx_parallm.systems.prompt_policy.phrases import CONSTRAINTS, CRITERIA, FALLBACKS, STEPS
from mlx_parallm.systems.prompt_policy.prompt_ratings import (
    RewardModel,
    default_reward_model,
    features,
    rated_prompts,
    rated_texts,
)
from mlx_parallm.systems.prompt_policy.protocol import LONGEST_PROMPT
from mlx_parallm.systems.prompt_policy.rlaif import RLAIFOptions, learn_from_judge
from tests.prompt_policy.helpers import small_config


def test_prompts_with_common_words_lie_near_each_other() -> None:
    rows = HashedEmbedder(1536).embed(
        ["sort a list in Python", "sort this list with Python", "a poem about the autumn moon", ""]
    )
    near, far = rows[0] @ rows[1], rows[0] @ rows[2]
    assert near > 0.3 > 0.15 > far
    assert np.linalg.norm(rows[:3], axis=1) == pytest.approx(1) and not rows[3].any()
    assert np.array_equal(
        rows,
        HashedEmbedder(1536).embed(
            [
                "sort a list in Python",
                *["sort this list with Python", "a poem about the autumn moon", ""],
            ]
        ),
    )


def test_embeddings_that_are_no_numbers_are_refused_and_large_ones_get_length_1() -> None:
    for bad in (np.nan, np.inf):
        with pytest.raises(EndpointError, match="not finite"):
            checked(np.full((1, 4), bad, np.float32), 1, 4, "m")
    assert checked(np.full((1, 4), 1e30, np.float32), 1, 4, "m").tolist() == [[0.5] * 4]


def test_an_embedding_of_another_size_says_what_to_set() -> None:
    with pytest.raises(EndpointError, match=r"prompt_policy.ppo.input_dim"):
        checked(np.ones((1, 3)), 1, 16, "m")


@pytest.mark.parametrize(
    ("prompt", "category"),
    [
        ("Write a Python function that merges two sorted lists.", "CODE_GENERATION"),
        ("Fix the bug: why does this crash with a memory leak?", "CODE_REVIEW"),
        ("Draft a blog post with an introduction and a conclusion.", "CONTENT_WRITING"),
        ("A slogan and a landing page for our product launch", "MARKETING_COPY"),
        ("Analyze the sales dataset and plot the quarterly revenue.", "DATA_ANALYSIS"),
        ("What is the capital of France?", "GENERAL_QA"),
        ("Write a poem about a dragon that rhymes.", "CREATIVE_WRITING"),
    ],
)
def test_categories(prompt: str, category: str) -> None:
    found = classify_prompt(prompt)
    assert found.category == category and 0.55 <= found.confidence <= 0.95


def test_without_a_sign_it_is_a_question_and_not_sure() -> None:
    assert (classify_prompt("hm").category, classify_prompt("hm").confidence) == (
        "GENERAL_QA",
        0.25,
    )


def texts(prompt: str, name: str) -> str:
    mutation = mutate(prompt, name)
    assert mutation is not None
    return mutation.text


def test_each_mutation_does_what_it_is_called() -> None:
    wordy = (
        'Hi! I hope you are well. Could you please list "please" and `just` in French, if you'
        " don't mind? Thanks!"
    )
    assert texts(wordy, "context-reduction") == 'List "please" and `just` in French.'
    several = "Read the log, then count the errors and plot the counts of Monday and Tuesday."
    assert texts(several, "task-decomposition").startswith(
        "Do the following, one after the other:\n1. Read the log\n2. Count the errors\n3. Plot the"
        " counts of Monday and Tuesday\n\n"
    )
    one = texts("Write a poem about rain.", "task-decomposition")
    assert one.startswith("Write a poem about rain.\n\nWork in these steps:\n1. Decide")
    crash = "Fix the crash at start."
    added = {
        "try-catch-style": [
            "If this cannot be done as it stands:",
            *(f"- {line}" for line in FALLBACKS["mend"]),
        ],
        "expansion": [
            "Go about it like this:",
            *(f"- {step}" for step in STEPS["GENERAL_QA"]),
            "",
            "A good answer: " + "; ".join(CRITERIA["GENERAL_QA"]) + ".",
        ],
    }
    for name, lines in added.items():
        assert texts(crash, name) == "\n".join([crash, "", *lines])
    assert '"robust": gives a clear error' in texts("Make it robust.", "expansion")
    constrained = texts("What is a heat pump?", "constraint-addition")
    assert {line.removeprefix("- ") for line in constrained.splitlines()[3:]} < set(
        CONSTRAINTS["GENERAL_QA"]
    )
    assert constrained.count("\n- ") == 2 and constrained == texts(
        "What is a heat pump?", "constraint-addition"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "Explain the weather in Paris. Then compare it.",
        "How can you tell whether a melon is ripe?",
        "This is important: never delete user data. Write the migration.",
        "Explain just-in-time compilation.",
        "def f(x):\n    return   x\n\nFix this please.",
        "Translate this text: Could you please pass the salt? Thanks.",
        'Translate "Hello. Thanks. Could you please list them?" into French.',
        "My boss wants a summary of the sales report. Keep it short.",
        "I'm not sure whether a list or a dict is right. Compare them.",
        "Let me know which of the two is faster.",
        "Write a story in which the hero says thank you.",
        "Write a program that prints hello, world.",
        "What kind of dog is not very loud? Return just the number.",
    ],
)
def test_a_reduction_never_drops_a_part_of_the_task(prompt: str) -> None:
    assert mutate(prompt, "context-reduction") is None


@pytest.mark.parametrize(
    "unit", ["a" + " " * 19_998, "“", "if it ", "\n", "fix and ", "i hope you ", " ,", "please "]
)
def test_a_prompt_of_the_longest_length_is_not_gone_through_again_from_each_place_in_it(
    unit: str,
) -> None:
    """Each takes milliseconds; n³ steps, at 20,000 characters, would take hours, and n² many
    seconds."""
    prompt = (unit * LONGEST_PROMPT)[: LONGEST_PROMPT - 1] + "b"
    for name in RULES:
        mutate(prompt, name)
    assert len(features(prompt)) == len(features(""))


def test_a_mutation_that_would_change_nothing_is_none_and_none_is_done_twice() -> None:
    prompt = "Fix the crash at start and write a test."
    assert mutate(prompt, "context-reduction") is None
    for name in RULES:
        if name != "context-reduction":
            assert mutate(texts(prompt, name), name) is None, name
    assert mutate("please", "context-reduction") is None  # something is always left


def test_the_reward_model_ranks_held_out_ratings_and_does_not_saturate() -> None:
    rows = rated_prompts()
    fitted = RewardModel.fit(*rated_texts([row for n, row in enumerate(rows) if n % 4]))
    held_out = fitted.evaluate(*rated_texts(rows[::4]))
    assert held_out["correlation"] > 0.7 and held_out["mae"] < 0.15
    scores = [default_reward_model().score(row["prompt"]).score for row in rows]
    assert np.std(scores) > 0.05 and max(scores) < 0.98


def test_the_reward_model_is_scikit_learns_ridge() -> None:
    texts_N, ratings_N = rated_texts(rated_prompts())
    model = RewardModel.fit(texts_N, ratings_N, ridge=3.0)
    rows = np.array([list(features(text).values()) for text in texts_N])
    share = np.clip((np.array(ratings_N) - 1) / 4, 0.03, 0.97)
    fitted = Ridge(alpha=3.0).fit((rows - model.mean) / model.scale, np.log(share / (1 - share)))
    assert model.weights == pytest.approx(fitted.coef_.tolist(), abs=1e-9)
    assert model.bias == pytest.approx(fitted.intercept_, abs=1e-9)


def test_a_reward_model_is_saved_and_its_errors_say_what_is_wrong(tmp_path: Path) -> None:
    model = default_reward_model()
    model.save(tmp_path / "model.json")
    prompt = "Hello! Please write a poem."
    assert (
        RewardModel.load(tmp_path / "model.json").score(prompt).score == model.score(prompt).score
    )
    scored = model.score(prompt)
    assert scored.explanation.startswith("filler -") and scored.breakdown["filler"] < 0
    with pytest.raises(ConfigError, match="it takes 10 of each"):
        RewardModel.fit(["a"], [3.0])
    with pytest.raises(ConfigError, match="ratings go from 1 to 5"):
        RewardModel.fit(["a"] * 10, [7.0] * 10)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"names: .*; mean: "):
        RewardModel.load(tmp_path / "other.json")
    values = json.loads((tmp_path / "model.json").read_text())
    for change in ({"weights": [0.0]}, {"names": ["a", *values["names"][1:]]}):
        (tmp_path / "other.json").write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match="features"):
            RewardModel.load(tmp_path / "other.json")


def test_a_person_corrects_the_judge(tmp_path: Path) -> None:
    """The judge says 0.9 always; a person, asked in rounds 2 and 4 of 4 for half of two, says
    0.3: corrected there, and 0.9 - 0.6 = 0.3 afterwards."""
    deps = make_deps(small_config(tmp_path).prompt_policy)
    asked = []

    async def says(prompt: str, rewriting: str) -> float:
        return 0.9

    async def person(prompt: str, rewriting: str) -> float:
        asked.append(prompt)
        return 0.3

    try:
        options = RLAIFOptions(rounds=4, prompts_per_round=2, human_every=2, human_share=0.5)
        rounds = asyncio.run(
            learn_from_judge(deps, ["What is rain?", "Explain snow."], says, person, options)
        )
        assert [r.rewards for r in rounds] == [
            pytest.approx([0.9, 0.9]),
            pytest.approx([0.3, 0.3]),
            pytest.approx([0.3, 0.3]),
            pytest.approx([0.3, 0.3]),
        ]
        assert [(r.validated, r.corrected) for r in rounds] == [
            (0, 0),
            (1, 1),
            (0, 0),
            (1, 1),
        ] and len(asked) == 2
        assert [r.updated for r in rounds] == [False, False, False, True]  # 8 experiences
        assert deps.service.history().experiences == 8
    finally:
        deps.service.close()
