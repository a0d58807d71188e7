"""Plays a verifiers environment against the training daemon and posts the scored groups to its
/atropos queue.

    build/verifiers/bin/python examples/verifiers/train.py --taskset letters

verifiers' own TrainClient renders the prompts and calls /inference/v1/generate: token ids and
log-probabilities are the server's. It drops the answers' `weight_versions`, so a group counts as
sampled under the policy that was served when it
began: its staleness is never understated.
"""

import argparse
import asyncio
import json
import os
import sys
import uuid
from pathlib import Path

import httpx
import verifiers.v1 as vf
from renderers.configs import CustomRendererConfig
from verifiers.v1.utils.loaders import load_environment

HERE = Path(__file__).resolve().parent
TINY = HERE.parents[1] / "mlx_parallm" / "models" / "tiny"
GIVEN, NO_LOGPROB = -100, 1.0  # on the wire, where the policy did not sample
KEY = "MLX_PARALLM_API_KEY"


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the daemon")
    parser.add_argument("--taskset", default="letters", help="id of a verifiers taskset")
    parser.add_argument(
        "--tools", action="store_true", help="of the taskset `letters`: several turns over a tool"
    )
    parser.add_argument("--max-turns", type=int, default=3, help="model calls of one episode")
    parser.add_argument(
        "--tokenizer", default=str(TINY), help="directory or hub id, of the served model"
    )
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--groups", type=int, help="stop after so many; default: until the daemon ends"
    )
    parser.add_argument("--in-flight", type=int, default=8, help="groups that are played at once")
    parser.add_argument("--max-tokens", type=int, default=8, help="of one turn")
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a whole episode")
    parser.add_argument("--temperature", type=float, default=1.0)
    return parser.parse_args()


def environment(args):
    taskset = {"id": args.taskset} | ({"tools": args.tools} if args.taskset == "letters" else {})
    agent = {"runtime": {"type": "subprocess"}, "max_turns": args.max_turns}
    return load_environment(
        vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent})
    )


def rounds(taskset):
    """Its tasks, again and again. Raises Failed: it has none."""
    while True:
        task = None
        for task in taskset:
            yield task
        if task is None:
            raise Failed("the taskset has no tasks")


def context(args):
    renderer = None  # verifiers' choice by the tokenizer's name
    if args.taskset == "letters" and args.tools:
        renderer = CustomRendererConfig(import_path=f"{HERE / 'letters.py'}:QuizRenderer")
    client = vf.TrainClientConfig(
        base_url=f"{args.url}/v1",
        api_key_var=KEY,
        renderer=renderer,
        renderer_model_name=args.tokenizer,
    )
    sampling = vf.SamplingConfig(temperature=args.temperature, max_tokens=args.max_tokens)
    return vf.ModelContext(model="default", client=client, sampling=sampling)


def scored_group(episodes, *, env_id, version, temperature):
    """Episodes of one task → the wire's group. A trace of several branches (its history was
    rewritten) is several sequences; `episodes` says which belong together, so that its score
    counts once."""
    traces = [trace for episode in episodes for trace in episode.traces if trace.agent.trainable]
    sequences = [
        (number, branch, trace.reward)
        for number, trace in enumerate(traces)
        for branch in trace.branches
        if branch.trainable
    ]
    group = {
        "group_id": f"verifiers-{uuid.uuid4().hex}",
        "env_id": env_id,
        "generation_params": {"temperature": temperature},
        **{
            name: []
            for name in (
                "tokens",
                "masks",
                "inference_logprobs",
                "policy_versions",
                "scores",
                "episodes",
            )
        },
    }
    for episode, branch, reward in sequences:
        tokens, mask = branch.token_ids, branch.sampled_mask
        group["tokens"].append(tokens)
        group["masks"].append(
            [token if sampled else GIVEN for token, sampled in zip(tokens, mask, strict=True)]
        )
        logprobs = zip(branch.logprobs, mask, strict=True)
        group["inference_logprobs"].append(
            [value if sampled else NO_LOGPROB for value, sampled in logprobs]
        )
        group["policy_versions"].append([version if sampled else -1 for sampled in mask])
        group["scores"].append(reward)
        group["episodes"].append(episode)
    return group


class Failed(Exception):
    """The program ends with this text."""


class Daemon:
    """The requests to the training daemon."""

    def __init__(self, url):
        key = os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=60)

    async def _json(self, method, path, **options):
        answer = await self._http.request(method, path, **options)
        if answer.is_error:
            raise Failed(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer.json()

    async def register(self, args):
        """Make this process an environment of the run."""
        body = {
            "max_token_length": args.max_length,
            "desired_name": f"{args.taskset}{'_tools' if args.tools else ''}",
            "weight": 1.0,
            "group_size": args.group_size,
        }
        self._env_id = (await self._json("POST", "/atropos/register-env", json=body))["env_id"]
        self._batch_size = (await self._json("GET", "/atropos/info"))["batch_size"]
        return self._env_id

    async def wait_for_room(self, group_size):
        """Until less than a batch waits to be trained on: more would only grow old."""
        while True:
            status = await self._json("GET", "/atropos/status-env", json={"env_id": self._env_id})
            if status["queue_size"] * group_size < self._batch_size:
                return
            await asyncio.sleep(0.05)

    async def version(self):
        """Return the version of the policy that is served now."""
        return (await self._json("GET", "/v1/models"))["data"][0]["policy_version"]

    async def post(self, group):
        """Send a group. It is on the daemon's disk when this returns. Failed: it was refused."""
        await self._json("POST", "/atropos/scored_data", json=group)


async def play(env, task, context, daemon, args, env_id):
    """One group, from the version that is asked first to the post. Returns its mean reward.
    Raises Failed."""
    await daemon.wait_for_room(args.group_size)
    version = await daemon.version()
    episodes = await asyncio.gather(
        *(env.run_slot(slot, context) for slot in env.slots(task, args.group_size))
    )
    faults = [error.message for episode in episodes for error in episode.errors]
    faults += [
        error.message for episode in episodes for trace in episode.traces for error in trace.errors
    ]
    if faults or not all(episode.ok for episode in episodes):
        raise Failed(f"an episode failed: {faults[0] if faults else 'without a reason'}")
    group = scored_group(episodes, env_id=env_id, version=version, temperature=args.temperature)
    await daemon.post(group)
    return sum(group["scores"]) / len(group["scores"])


async def main(args):
    daemon = Daemon(args.url)
    env_id = await daemon.register(args)
    env = environment(args)
    made = context(args)
    tasks = rounds(env.taskset)
    started = 0
    async with env.serving(), asyncio.TaskGroup() as players:

        async def player():
            nonlocal started
            while args.groups is None or started < args.groups:
                started += 1
                number = started
                reward = await play(env, next(tasks), made, daemon, args, env_id)
                sys.stdout.write(json.dumps({"group": number, "reward": round(reward, 4)}) + "\n")
                sys.stdout.flush()

        for _ in range(args.in_flight):
            players.create_task(player())


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    # for the tools
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(HERE), os.environ.get("PYTHONPATH")])
    )
    try:
        asyncio.run(main(parse()))
    except* (Failed, httpx.TransportError) as failures:
        sys.exit(str(failures.exceptions[0]))
