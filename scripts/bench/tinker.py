"""Eight models at once against one, 2,000 samples in flight, and an RL loop against the trainer, on
`builtin:tiny`.

    .venv/bin/python -m scripts.bench.tinker models     tokens/s of 8 models together / of one; each equals itself alone
    .venv/bin/python -m scripts.bench.tinker samples    none lost; how long GET /api/v1/healthz takes meanwhile
    .venv/bin/python -m scripts.bench.tinker loop       scripts/tinker/rl_loop.py / mlx_parallm_train: reward, seconds

The server is a process of its own. Both sides of a ratio are measured in turns. `loop` needs
scripts/setup_tinker.
"""

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np

from mlx_parallm.config.load import load_config
from mlx_parallm.environments.registry import build_sources
from mlx_parallm.models.loading import load_tokenizer
from scripts.bench.rl_step import our_times
from scripts.server_process import command
from scripts.tinker.recipes import SDK_PYTHON, TINY, tinker_process
from tests.tinker.serving import API, WireClient

MODELS, STEPS, ROUNDS = 8, 3, 3
SAMPLES = 2000
LONGEST = 1.2  # of the RL loop's wall time, in units of the trainer's
LOOP_CONFIG = """
[model]
base_path = "builtin:tiny"
[server]
batch_size = 128
max_concurrent_requests = 1024
[rl_training]
algorithm = "importance_sampling"
total_steps = {steps}
learning_rate = 1e-3
batch_size = {samples}
token_budget = 8192
blocks_per_eval = 0
max_staleness = {staleness}
dynamic_sampling = false
checkpoint_interval = 1000
checkpoint_dir = "{folder}"
run_name = "run"
seed = {seed}
[rl_training.lora]
rank = 16
alpha = 32.0
[rl_training.atropos]
rollout_batch_size = {samples}
max_token_length = 64
[evaluation]
problems = 0
[[environments]]
kind = "tasks"
name = "sum"
group_size = {group_size}
max_tokens = 8
"""
GROUPS = 16  # of a step


def data(seed):
    rng = np.random.default_rng(seed)
    made = []
    for count in rng.integers(40, 120, 16):
        tokens, targets = rng.integers(3, 300, (2, count))
        made.append({"tokens": tokens, "target_tokens": targets, "weights": np.full(count, 0.01)})
    return made


def train(client, jobs):
    """Steps of (model, first seq_id, seed), all sent before any result is asked for. Returns
    tokens/s."""
    started, promises, tokens = time.perf_counter(), [], 0
    for step in range(STEPS):
        for model, first, seed in jobs:
            batch = data(seed + step)
            tokens += sum(len(each["tokens"]) for each in batch)
            promises.append(client.send(model, first + 2 * step, batch, "cross_entropy"))
            promises.append(client.optim_step(model, first + 2 * step + 1, learning_rate=1e-3))
    for promise in promises:
        client.result(promise)
    return tokens / (time.perf_counter() - started)


def final_loss(client, model, seq_id):
    return client.output(
        client.send(model, seq_id, data(0), "cross_entropy", forward_only=True)
    ).metrics["loss:sum"]


def models(url):
    with httpx.Client(base_url=url, timeout=120) as http:
        client = WireClient(http)
        ranks = [4, 8, 16, 4, 8, 16, 4, 8]
        together = [client.create_model(i, rank=ranks[i], seed=i) for i in range(MODELS)]
        alone = client.create_model(99, rank=8, seed=99)
        warm = client.create_model(98, rank=8, seed=98)
        train(client, [(warm, 1, 0)])
        one, many, width = [], [], 2 * STEPS
        for number in range(ROUNDS):
            one += [train(client, [(alone, 1 + width * number, 0)])]
            many += [
                train(client, [(m, 1 + width * number, 100 * i) for i, m in enumerate(together)])
            ]
        ratio = statistics.median(many) / statistics.median(one)
        print(
            f"tokens/s: one model {statistics.median(one):.0f}, eight"
            f" {statistics.median(many):.0f}: {ratio:.2f}"
        )
        worst = 0.0
        for i, model in enumerate(together):
            twin = client.create_model(200 + i, rank=ranks[i], seed=i)
            for number in range(ROUNDS):
                train(client, [(twin, 1 + width * number, 100 * i)])
            seq_id = 1 + width * ROUNDS
            a, b = final_loss(client, model, seq_id), final_loss(client, twin, seq_id)
            worst = max(worst, abs(a - b) / abs(b))
            client.post("unload_model", model_id=twin)
        print(f"each against itself trained alone: losses apart by {worst:.1e} (relative)")
        return int(worst > 1e-5)


def healthz(url, done, longest):
    """In a process of its own: a client that is busy would measure itself."""
    seconds = []
    with httpx.Client(base_url=url, timeout=120) as http:
        while not done.is_set():
            started = time.perf_counter()
            http.get(f"{API}/healthz")
            seconds.append(time.perf_counter() - started)
            time.sleep(0.02)  # the pace at which it looks
    ordered = sorted(1e3 * each for each in seconds)
    longest.put((ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1]))


async def collect(http, sampler):
    """Begin all samples, then fetch each when `retrieve_futures` says that it is there. Returns
    how many came."""

    # as many requests as connections: httpx's queue costs the square of its length
    places = asyncio.Semaphore(100)

    async def begin(number):
        body = {
            "sampling_session_id": sampler,
            "seq_id": number,
            "sampling_params": {"max_tokens": 24, "stop": []},
        }
        body["prompt"] = {
            "chunks": [{"type": "encoded_text", "tokens": [1, *range(40, 60), 40 + number % 200]}]
        }
        async with places:
            return (await http.post(f"{API}/asample", json=body)).json()["request_id"]

    async def fetch(request_id):
        async with places:
            answer = await http.post(f"{API}/retrieve_future", json={"request_id": request_id})
        return answer.headers["content-type"] == "application/x-protobuf"

    waiting = set(await asyncio.gather(*(begin(number) for number in range(SAMPLES))))
    begun, cursor, came = len(waiting), 0, 0
    while waiting:
        body = {"target": {"sampling_session_id": sampler}, "prev_cursor": cursor}
        answer = (await http.post(f"{API}/retrieve_futures", json=body)).json()
        cursor = answer["cursor"]
        ready = [each["request_id"] for each in answer["completions"]]
        came += sum(await asyncio.gather(*map(fetch, ready)))
        waiting -= set(ready)
    return begun, came


async def samples(url):
    with httpx.Client(base_url=url, timeout=120) as plain:
        client = WireClient(plain)
        sampler = client.live_sampler(client.create_model(), 1, 0)
    context = multiprocessing.get_context("spawn")
    done, longest = context.Event(), context.Queue()
    watch = context.Process(target=healthz, args=(url, done, longest))
    watch.start()
    limits = httpx.Limits(max_connections=101)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        started = time.perf_counter()
        begun, came = await collect(http, sampler)
        wall = time.perf_counter() - started
    done.set()
    middle, high, most = longest.get()
    watch.join()
    print(
        f"{came} of {begun} samples in {wall:.1f} s; healthz median {middle:.0f} ms, 99 %"
        f" {high:.0f} ms, {most:.0f} ms"
    )
    return int(came != SAMPLES)


# ---------------------------------------------------------------------- the RL loop by calls, and
# by the trainer


def loop_config(folder, options, seed):
    """The configuration file of `mlx_parallm_train`: the same work as JOB.json below describes
    for the loop."""
    values = {"samples": GROUPS * options.group_size, "group_size": options.group_size}
    text = LOOP_CONFIG.format(
        folder=folder, seed=seed, steps=options.steps, staleness=options.staleness, **values
    )
    (folder / "train.toml").write_text(text)
    return folder / "train.toml"


def job(config, steps):
    """Return the job of scripts/tinker/rl_loop.py: the problems that the trainer's environment
    asks, in its order."""
    training, (environment,) = config.rl_training, config.environments
    (source,) = build_sources(config.environments, seed=training.seed)
    tokenizer = load_tokenizer(TINY, config.model)
    tasks = [[source.task(GROUPS * step + i) for i in range(GROUPS)] for step in range(steps)]
    problems = [
        [{"prompt": tokenizer.render_chat(t.messages), "answer": t.answer} for t in each]
        for each in tasks
    ]
    adam = {"beta1": training.adam_beta1, "beta2": training.adam_beta2, "eps": training.adam_eps}
    adam |= {"learning_rate": training.learning_rate, "grad_clip_norm": training.max_grad_norm}
    return {
        "problems": problems,
        "group_size": environment.group_size,
        "max_tokens": environment.max_tokens,
        "adam": adam,
        "rank": training.lora.rank,
        "seed": training.seed,
        "staleness": training.max_staleness,
    }


def by_trainer(folder, path):
    """Time and reward of each step."""
    metrics = folder / "run" / "metrics.jsonl"
    times = our_times([command("mlx_parallm_train"), "--config", str(path)], metrics)
    rewards = [json.loads(line)["reward_mean"] for line in metrics.read_text().splitlines()]
    return list(zip(times, rewards, strict=True))


def by_calls(folder, path, steps):
    """The same of the loop, with a server of its own."""
    config = load_config(str(path))
    (folder / "job.json").write_text(json.dumps(job(config, steps)))
    settings = [f"server.batch_size={config.server.batch_size}"]
    settings += [
        f"rl_training.{key}={getattr(config.rl_training, key)}"
        for key in ("token_budget", "blocks_per_eval")
    ]
    with tinker_process(folder, *settings) as url:
        words = [
            str(SDK_PYTHON),
            "scripts/tinker/rl_loop.py",
            url,
            str(TINY),
            str(folder / "job.json"),
        ]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    # the exit code says less: the SDK's transport was seen to abort a process that was done
    if len(lines) != steps:
        raise SystemExit(
            f"the loop ended after {len(lines)} of {steps} steps, exit code {done.returncode}"
        )
    return [(line["time"], line["reward"]) for line in lines]


def loop(options):
    """Both sides once a seed, in turns; seconds are from the end of the first step to the end of
    the last."""
    rows = {"calls": [], "trainer": []}
    for number, seed in enumerate(range(options.seed, options.seed + options.seeds)):
        for side in sorted(rows, reverse=number % 2 == 1):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch)
                path = loop_config(folder, options, seed)
                trainer = side == "trainer"
                steps = (
                    by_trainer(folder, path) if trainer else by_calls(folder, path, options.steps)
                )
            rewards, part = [reward for _, reward in steps], max(len(steps) // 4, 1)
            seconds = steps[-1][0] - steps[0][0]
            first, last = sum(rewards[:part]) / part, sum(rewards[-part:]) / part
            rows[side].append((seconds, last))
            print(
                f"seed {seed} {side:8} {seconds:6.1f} s, reward {first:.3f} -> {last:.3f}",
                flush=True,
            )
    (calls, by_call), (trainer, by_train) = (
        zip(*rows[side], strict=True) for side in ("calls", "trainer")
    )
    ratio = statistics.median(a / b for a, b in zip(calls, trainer, strict=True))
    apart = statistics.mean(by_call) - statistics.mean(by_train)
    noise = statistics.stdev([*by_call, *by_train]) if options.seeds > 1 else math.nan
    print(
        f"wall time {ratio:.2f} x; last quarter's reward apart by {apart:+.3f},"
        f" deviation of the runs {noise:.3f}"
    )
    return int(ratio > LONGEST)


def main():
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("what", choices=("models", "samples", "loop"))
    parser.add_argument("--seeds", type=int, default=3, help="loop: runs of each side")
    parser.add_argument("--seed", type=int, default=0, help="loop: the first one's")
    parser.add_argument("--steps", type=int, default=40, help="loop")
    parser.add_argument(
        "--group-size",
        type=int,
        default=8,
        help=f"loop: samples of each of the {GROUPS} prompts of a step",
    )
    parser.add_argument(
        "--staleness",
        type=int,
        choices=(0, 1),
        default=0,
        help="loop: steps that sampling is ahead",
    )
    options = parser.parse_args()
    if options.what == "loop":
        return loop(options)
    with tempfile.TemporaryDirectory() as scratch, tinker_process(Path(scratch)) as url:
        return models(url) if options.what == "models" else asyncio.run(samples(url))


if __name__ == "__main__":
    sys.exit(main())
