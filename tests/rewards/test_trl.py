"""The same reward functions on the same completions: TRL's own call against ours. Skipped
without TRL."""

import asyncio
import importlib.util
import threading
from types import SimpleNamespace

import pytest

from mlx_parallm.rewards.base import score_group
from mlx_parallm.rewards.functions import RewardFunctions, TrainingProgress
from mlx_parallm.types import Rollout, Trajectory

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl"
    ),
    pytest.mark.filterwarnings("ignore"),
]
WEIGHTS = (1.0, 0.25, -2.0, 1.0, 0.5, 1.0, 0.125)
OWN = """
import asyncio
import math
from trl.rewards import think_format_reward, get_soft_overlong_punishment
from trl.rewards import get_repetition_penalty_reward

def text_of(completion):
    return completion if isinstance(completion, str) else completion[0]["content"]

def correct(prompts, completions, answer, **kwargs):
    return [1.0 if text_of(c).strip().endswith(a) else 0.0 for c, a in zip(completions, answer)]

async def judged(prompts, completions, level, **kwargs):
    await asyncio.sleep(0)
    return [None if "?" in text_of(c) else len(text_of(c)) / (n + 1) for c, n in zip(completions, level)]

def early(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / 100 + math.sin(len(text_of(c))) for c in completions]

def logged(completions, log_metric, log_extra, **kwargs):
    log_metric("letters", sum(len(text_of(c)) for c in completions))
    log_extra("texts", [text_of(c) for c in completions])
    return [float(i) for i, _ in enumerate(completions)]

short = get_soft_overlong_punishment(4, 3)
fresh = get_repetition_penalty_reward(2, -0.5)
"""
TEXTS = ("4", "it is 4", "<think>2 and 2</think>4", "why?", "5 5 5 5 5", "")
TOKENS = ((5, 1), (5, 6, 7, 1), (5, 6, 7, 8, 9, 1), (3,), (4, 4, 4, 4, 4, 1), (1,))


def trl_scores(functions, prompt, columns):
    """Per function and weighted, from GRPOTrainer._calculate_rewards and the sum that follows it
    there."""
    import torch
    from transformers import TrainerState
    from trl.trainer.grpo_trainer import GRPOTrainer
    from trl.trainer.utils import get_callable_name

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    plain = isinstance(prompt, str)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device=torch.device("cpu"), is_main_process=True),
        args=SimpleNamespace(report_to=[]),
        reward_funcs=functions,
        reward_processing_classes=[None] * len(functions),
        reward_func_names=[get_callable_name(function) for function in functions],
        state=TrainerState(global_step=30),
        environments=None,
        async_loop=loop,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    completions = [text if plain else [{"role": "assistant", "content": text}] for text in TEXTS]
    inputs = [{"prompt": prompt, **columns} for _ in TEXTS]
    ids = [list(tokens) for tokens in TOKENS]
    table = GRPOTrainer._calculate_rewards(trainer, inputs, [prompt] * len(TEXTS), completions, ids)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    weighted = (table * torch.tensor(WEIGHTS[: len(functions)])).nansum(dim=1)
    return table.tolist(), weighted.tolist()


async def our_scores(made, prompt, columns):
    row = {"prompt": prompt, **columns}
    rollouts = [
        Rollout(
            (2, *ids),
            (0, *(1,) * len(ids)),
            (0.0,) * (len(ids) + 1),
            (0,) * (len(ids) + 1),
            1.0,
            {},
        )
        for ids in TOKENS
    ]
    responses = [Trajectory(text, rollout) for text, rollout in zip(TEXTS, rollouts, strict=True)]
    reward = made.for_row(prompt, row, lambda: TrainingProgress(30, 200))
    return [rollout.scores for rollout in await score_group(reward, responses)]


@pytest.mark.parametrize(
    "prompt", ["What is 2+2?", [{"role": "user", "content": "What is 2+2?"}]], ids=["text", "chat"]
)
async def test_scores_are_those_of_trl(tmp_path, prompt):
    names = ["correct", "judged", "early", "logged", "short", "fresh"]
    names += [] if isinstance(prompt, str) else ["think_format_reward"]
    columns = {"answer": "4", "level": 2, "solution": "$4$"}
    (tmp_path / "score.py").write_text(OWN)
    made = RewardFunctions(
        [f"python:{tmp_path / 'score.py'}:{name}" for name in names],
        WEIGHTS[: len(names)],
        columns=["prompt", *columns],
        key="rewards",
    )
    functions = [function.call for function in made._functions]
    table, weighted = trl_scores(functions, prompt, columns)
    ours = await our_scores(made, prompt, columns)
    for row, total, scores in zip(table, weighted, ours, strict=True):
        mine = [scores.get(f"rewards/{function.name}") for function in made._functions]
        for theirs, own in zip(row, mine, strict=True):
            assert (own is None) == (theirs != theirs)
            assert own is None or own == pytest.approx(theirs, abs=1e-6)
        assert scores["reward"] == pytest.approx(total, abs=1e-5)
    assert len({round(total, 4) for total in weighted}) >= 4
    assert {scores["metrics/letters"] for scores in ours} == {sum(map(len, TEXTS))}
