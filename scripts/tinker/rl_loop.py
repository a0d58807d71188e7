"""An RL loop in Tinker's four calls: sample, forward_backward, optim_step, and weights for the next
sampling client.

    build/tinker/bin/python scripts/tinker/rl_loop.py URL MODEL JOB.json

Runs in the SDK's own environment (scripts/setup_tinker); `scripts.bench.tinker loop` writes
JOB.json and compares with `mlx_parallm_train`. A step is GROUPS problems with GROUP_SIZE answers
each, advantages are rewards less their group's mean, the loss is importance_sampling averaged over
the step's tokens, and one optimizer step follows. `staleness` 1: the next step's answers are
sampled while this one is trained, as the trainer does; 0: they wait for its weights. Prints a JSON
line a step: time, reward, tokens.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"
import numpy as np
import tinker
from tinker import types


class Loop:
    def __init__(self, job, training, tokenizer):
        self.job, self.training, self.tokenizer = job, training, tokenizer
        self.sampling = types.SamplingParams(max_tokens=job["max_tokens"], temperature=1.0)
        self.adam = types.AdamParams(**job["adam"])

    async def groups(self, sampler, problems):
        """The answers to each problem, as sequences with tokens and log-probabilities."""
        prompts = [types.ModelInput.from_ints(problem["prompt"]) for problem in problems]
        sent = [sampler.sample(each, self.job["group_size"], self.sampling) for each in prompts]
        return [(await each).sequences for each in sent]

    def reward(self, problem, sequence):
        return float(
            self.tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            == problem["answer"]
        )

    def datums(self, problems, groups):
        """The step's training data, its mean reward, and how many tokens were sampled."""
        tokens = sum(len(sequence.tokens) for group in groups for sequence in group)
        data, means = [], []
        for problem, group in zip(problems, groups, strict=True):
            rewards = [self.reward(problem, sequence) for sequence in group]
            means.append(sum(rewards) / len(rewards))
            for sequence, reward in zip(group, rewards, strict=True):
                data.append(datum(problem["prompt"], sequence, (reward - means[-1]) / tokens))
        return data, sum(means) / len(means), tokens

    async def train(self, data):
        """Submit the pass, the update and the save together; return a sampling client of the new
        weights."""
        sent = [
            self.training.forward_backward(data, "importance_sampling"),
            self.training.optim_step(self.adam),
        ]
        sampler = await self.training.save_weights_and_get_sampling_client()
        for each in sent:
            await each
        return sampler

    async def run(self):
        steps, ahead = self.job["problems"], self.job["staleness"]
        sampler = await self.training.save_weights_and_get_sampling_client()
        coming = asyncio.create_task(self.groups(sampler, steps[0]))
        for number, problems in enumerate(steps):
            groups = await coming
            following = steps[number + 1] if number + 1 < len(steps) else None
            if following and ahead:
                coming = asyncio.create_task(self.groups(sampler, following))
                await asyncio.sleep(0)  # so that its requests go out first
            data, reward, tokens = self.datums(problems, groups)
            sampler = await self.train(data)
            if following and not ahead:
                coming = asyncio.create_task(self.groups(sampler, following))
            print(json.dumps({"time": time.time(), "reward": reward, "tokens": tokens}), flush=True)


def datum(prompt, sequence, advantage):
    """Position i of the input predicts target i: the prompt's targets have no advantage."""
    tokens = [*prompt, *sequence.tokens]
    masked = len(prompt) - 1
    inputs = {
        "target_tokens": np.array(tokens[1:], np.int64),
        "logprobs": np.array([0.0] * masked + list(sequence.logprobs), np.float32),
        "advantages": np.array([0.0] * masked + [advantage] * len(sequence.tokens), np.float32),
    }
    tensors = {name: types.TensorData.from_numpy(array) for name, array in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=tensors)


async def main(url, model, job):
    service = tinker.ServiceClient(base_url=url)
    training = await service.create_lora_training_client(
        base_model=model, rank=job["rank"], seed=job["seed"]
    )
    await Loop(job, training, training.get_tokenizer()).run()
    service.close("success")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3], json.loads(Path(sys.argv[3]).read_text())))
