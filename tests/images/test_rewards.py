"""Answers to images cannot be rewarded by id: nobody keeps the images."""

from contextlib import closing
from pathlib import Path

import pytest

from mlx_parallm.errors import RefusedError
from mlx_parallm.rollout_store.completions import KeptCompletions
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.types import Completion, PromptImage, Request, SamplingParams


def test_they_are_refused_by_name(tmp_path: Path) -> None:
    with closing(RolloutStore(tmp_path / "rollouts.sqlite")) as store:
        kept = KeptCompletions(
            store,
            policy_adapter=None,
            max_bytes=1 << 20,
            max_age_s=60.0,
            batch_size=8,
            max_token_length=64,
            vocab_size=100,
        )
        choices = [
            (
                Completion(
                    index=index,
                    text="a",
                    token_ids=(7,),
                    logprobs=(-0.5,),
                    processed_logprobs=None,
                    top_logprobs=None,
                    policy_versions=(0,),
                    finish_reason="stop",
                ),
            )
            for index in range(2)
        ]
        image = PromptImage("digest", "<image>", 1, arrays={})
        for name, images in (("seeing", (image,)), ("blind", ())):
            request = Request(name, (1, 2), SamplingParams(n=2), images=images)
            kept.keep(name, [request], [choices])
        with pytest.raises(RefusedError, match="'seeing'"):
            kept.reward(["seeing"], [0.0, 1.0], "clients")
        assert len(kept.reward(["blind"], [0.0, 1.0], "clients")) == 1
