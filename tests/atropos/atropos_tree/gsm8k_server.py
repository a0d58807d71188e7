"""Stands in for environments/gsm8k_server.py of Atropos' git tree, which is not in the wheel.

Alike in what the wrapper meets: the class and its name, `config_init` with one APIServerConfig that
is not in a list and points elsewhere, rows of `question` and `answer` with the number behind
`####`, collection through ManagedServer, None for a group of equal scores. Unlike: the rows are
sums that the tiny model half-knows, compared as text.
"""

import random

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup


class GSM8kEnv(BaseEnv):
    name = "gsm8k"

    @classmethod
    def config_init(cls):
        config = BaseEnvConfig(
            tokenizer_name="nobody/no-such-tokenizer",
            group_size=8,
            use_wandb=True,
            rollout_server_url="http://localhost:8000",
            total_steps=1000,
            batch_size=12,
            steps_per_eval=100,
            max_token_length=16,
            wandb_name="gsm8k",
        )
        return config, APIServerConfig(
            model_name="nobody/no-such-tokenizer", base_url="http://localhost:9001/v1", api_key="x"
        )

    async def setup(self):
        rng = random.Random(0)
        sums = [(rng.randrange(100), rng.randrange(100)) for _ in range(500)]
        self.train = [
            {
                "question": f"Sum: {a}+{b}",
                "answer": f"{a} and {b} are <<{a}+{b}={a + b}>>{a + b}.\n#### {a + b:,}",
            }
            for a, b in sums
        ]
        self.iter = 0

    async def evaluate(self, *args, **kwargs):
        pass

    async def get_next_item(self):
        self.iter += 1
        return self.train[(self.iter - 1) % len(self.train)]

    async def collect_trajectories(self, item):
        gold = item["answer"].split("#")[-1].strip().replace(",", "")
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            answer = await managed.chat_completion(
                messages=[{"role": "user", "content": item["question"]}],
                n=self.config.group_size,
                max_tokens=self.config.max_token_length,
                temperature=1.0,
            )
            nodes = managed.get_state()["nodes"]
        scores = [
            1.0 if choice.message.content.strip() == gold else -1.0 for choice in answer.choices
        ]
        if len(set(scores)) == 1:
            return None, []
        group = ScoredDataGroup(
            tokens=[node.tokens for node in nodes],
            masks=[node.masked_tokens for node in nodes],
            inference_logprobs=[node.logprobs for node in nodes],
            scores=scores,
        )
        return group, []


if __name__ == "__main__":
    GSM8kEnv.cli()
