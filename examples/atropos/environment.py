"""An Atropos environment that needs no download: letters to reverse or to sort, graded by the exact
answer.

Runs in the environment that scripts/setup_atropos makes; README.md beside this file has the
commands. It collects through atroposlib's ManagedServer, so token ids and log-probabilities are the
server's own.
"""

import random
import zlib
from pathlib import Path
from typing import Literal

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup
from pydantic import Field

# of `builtin:tiny`
TINY = str(Path(__file__).resolve().parents[2] / "mlx_parallm" / "models" / "tiny")
ANSWERS = {
    "reverse": lambda letters: letters[::-1],
    "sort": lambda letters: "".join(sorted(letters)),
}


class LettersConfig(BaseEnvConfig):
    task: Literal["reverse", "sort"] = Field(
        default="reverse", description="What is to be done with the letters"
    )
    max_tokens: int = Field(default=8, description="Tokens of one answer")
    seed: int = Field(default=0, description="Of the problems")


class LettersEnv(BaseEnv):
    name = "letters"
    env_config_cls = LettersConfig

    @classmethod
    def config_init(cls):
        """The defaults of the flags. A list, also of one server: a single one makes atroposlib
        ignore base_url."""
        config = LettersConfig(
            rollout_server_url="http://127.0.0.1:8001",
            tokenizer_name=TINY,
            group_size=8,
            max_num_workers=16,  # groups in flight
            max_batches_offpolicy=1,
            max_token_length=64,
            total_steps=-1,  # the trainer's
            steps_per_eval=0,
            # the trainer drops such groups itself, and counts their rewards
            ensure_scores_are_not_same=False,
            use_wandb=False,
            wandb_name=cls.name,
        )
        server = APIServerConfig(
            server_type="vllm",  # token ids and log-probabilities
            base_url="http://127.0.0.1:8000/v1",
            api_key="none",
            tokenizer_name=TINY,
        )
        return config, [server]

    async def setup(self):
        self.rng = random.Random(self.config.seed)

    async def get_next_item(self):
        return self.problem(self.rng, heldout=False)

    def problem(self, rng, heldout):
        """The letters of one problem; a tenth of all, chosen by a hash, is held out."""
        while True:
            letters = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 6)))
            if (zlib.crc32(letters.encode()) % 10 == 0) == heldout:
                return letters

    def messages(self, letters):
        return [{"role": "user", "content": f"{self.config.task.capitalize()}: {letters}"}]

    def score(self, letters, text):
        return float(text.strip() == ANSWERS[self.config.task](letters))

    async def collect_trajectories(self, item):
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=self.messages(item),
                n=self.config.group_size,
                max_tokens=self.config.max_tokens,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=[self.score(item, choice.message.content) for choice in answer.choices],
        )
        return group, []  # nothing to play again

    async def evaluate(self, *args, **kwargs):
        """Greedy accuracy on 64 held-out problems, into the directory
        `--env.data_dir_to_save_evals`."""
        rng = random.Random(0)
        right = []
        for letters in [self.problem(rng, heldout=True) for _ in range(64)]:
            answer = await self.server.chat_completion(
                messages=self.messages(letters),
                max_tokens=self.config.max_tokens,
                temperature=0.0,
                split="eval",
            )
            right.append(self.score(letters, answer.choices[0].message.content))
        await self.evaluate_log({"accuracy": sum(right) / len(right)})


if __name__ == "__main__":
    LettersEnv.cli()
