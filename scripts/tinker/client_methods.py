"""Every method of the tinker SDK's clients that docs/library.md#tinkers-api lists, once, against a server that
runs.

    build/tinker/bin/python scripts/tinker/client_methods.py URL MODEL

Runs in the SDK's own environment (scripts/setup_tinker). Prints a line a method; exit code 1 when
one fails. MODEL: the base's name or path, as the server was started with.
"""

import math
import os
import sys
import tarfile
import tempfile
import urllib.request
import warnings
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"
import numpy as np
import tinker
from tinker import types

TOKENS = [1, 40, 41, 42, 43, 44]


def datum(tokens, **inputs):
    targets = [*tokens[1:], 2]
    arrays = {"target_tokens": np.array(targets, np.int64)} | {
        k: np.array(v, np.float32) for k, v in inputs.items()
    }
    tensors = {name: types.TensorData.from_numpy(array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=tensors)


def ready(client):
    """SDKs since 0.36 return a future of a client."""
    return client.result() if hasattr(client, "result") else client


class Checked:
    """The methods that were called, and whether each did what it should."""

    def __init__(self):
        self.done = []

    def __call__(self, name, condition=True):
        self.done.append((name, bool(condition)))
        print(f"{'ok  ' if condition else 'FAIL'} {name}", flush=True)


def rl_losses():
    rl = {"logprobs": [-3.0] * 6, "advantages": [0, 0, 1, 1, -1, 1]}
    losses = {
        "cross_entropy": ({"weights": [0, 0, 1, 1, 0.5, -0.5]}, None),
        "importance_sampling": (rl, None),
        "ppo": (rl, {"clip_low_threshold": 0.9}),
        "cispo": (rl, None),
        "dro": (rl, {"beta": 0.1}),
    }
    if tinker.__version__ >= "0.34":
        bounds = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
        losses["gspo"] = (rl | {"sequence_ratio_mask": [0, 0, 1, 1, 1, 1]}, bounds)
    return losses


def forward(training):
    return training.forward([datum(TOKENS, weights=[1] * 6)], "cross_entropy").result()


def training_methods(check, training):
    info = training.get_info()
    check("TrainingClient.get_info", info.lora_rank == 8 and info.is_lora)
    try:
        check("TrainingClient.get_tokenizer", len(training.get_tokenizer().encode("hello")) > 0)
    except ImportError:
        print("skip TrainingClient.get_tokenizer: transformers is not installed")
    check(
        "TrainingClient.forward",
        list(forward(training).loss_fn_outputs[0]["logprobs"].shape) == [6],
    )
    for loss, (inputs, config) in rl_losses().items():
        out = training.forward_backward(
            [datum(TOKENS, **inputs)] * 3, loss, loss_fn_config=config
        ).result()
        check(f"TrainingClient.forward_backward {loss}", math.isfinite(out.metrics["loss:sum"]))
    step = training.optim_step(types.AdamParams(learning_rate=1e-3, grad_clip_norm=1.0)).result()
    check("TrainingClient.optim_step", step.metrics is None or "grad_norm:mean" in step.metrics)
    try:
        import torch

        def loss_fn(data, logprobs):
            return -torch.stack([lp.sum() for lp in logprobs]).sum(), {"custom": 1.0}

        out = training.forward_backward_custom(
            [datum(TOKENS, weights=[1] * 6)] * 2, loss_fn
        ).result()
        check(
            "TrainingClient.forward_backward_custom",
            {"custom", "surrogate_loss:sum"} <= out.metrics.keys(),
        )
    except ImportError:
        print("skip TrainingClient.forward_backward_custom: torch is not installed")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    try:
        training.forward_backward([datum(TOKENS, weights=[1] * 6)], "no_such_loss").result()
        check("an unknown loss fails", False)
    except tinker.TinkerError as error:
        check(f"an unknown loss fails: {type(error).__name__}", "cross_entropy" in str(error))


def sampling_methods(check, service, training, model, sampler_path):
    live = ready(training.save_weights_and_get_sampling_client())
    check("TrainingClient.save_weights_and_get_sampling_client")
    prompt = types.ModelInput.from_ints(TOKENS)
    params = types.SamplingParams(max_tokens=8, temperature=1.0, seed=1)
    a = live.sample(prompt, num_samples=4, sampling_params=params).result().sequences
    check("SamplingClient.sample", len(a) == 4 and len({tuple(s.tokens) for s in a}) > 1)
    named = ready(service.create_sampling_client(model_path=sampler_path))
    b = named.sample(prompt, num_samples=4, sampling_params=params).result().sequences
    check(
        "ServiceClient.create_sampling_client model_path",
        [s.tokens for s in a] == [s.tokens for s in b],
    )
    base = ready(service.create_sampling_client(base_model=model))
    check("ServiceClient.create_sampling_client base_model")
    check("SamplingClient.get_base_model", base.get_base_model() == model)
    lp = live.compute_logprobs(prompt).result()
    check("SamplingClient.compute_logprobs", len(lp) == 6 and lp[0] is None)
    learner = forward(training).loss_fn_outputs[0]["logprobs"].tolist()
    gap = max(abs(lp[i + 1] - learner[i]) for i in range(5))
    check(f"sampler against learner: {gap:.1e} <= 1e-4", gap <= 1e-4)
    top = live.sample(
        prompt,
        num_samples=1,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    check("SamplingClient.sample topk_prompt_logprobs", len(top.topk_prompt_logprobs) == 6)


def resumed(check, service, training, saved):
    clients = {
        "ServiceClient.create_training_client_from_state_with_optimizer": (
            service.create_training_client_from_state_with_optimizer
        ),
        "ServiceClient.create_training_client_from_state": service.create_training_client_from_state,
    }
    wanted = forward(training).metrics["loss:sum"]
    for name, create in clients.items():
        check(name, abs(forward(ready(create(saved))).metrics["loss:sum"] - wanted) < 1e-4)


def rest_methods(check, service, training, saved, sampler_path):
    rest, run = service.create_rest_client(), training.get_info().model_id
    check(
        "RestClient.get_training_run",
        rest.get_training_run(run).result().user_metadata["renderer_name"] == "x",
    )
    by_path = rest.get_training_run_by_tinker_path(saved).result()
    check("RestClient.get_training_run_by_tinker_path", by_path.lora_rank == 8)
    runs = rest.list_training_runs().result().training_runs
    check("RestClient.list_training_runs", run in [r.training_run_id for r in runs])
    check("RestClient.list_checkpoints", len(rest.list_checkpoints(run).result().checkpoints) == 2)
    check(
        "RestClient.list_user_checkpoints",
        len(rest.list_user_checkpoints().result().checkpoints) >= 2,
    )
    info = rest.get_weights_info_by_tinker_path(saved).result()
    check("RestClient.get_weights_info_by_tinker_path", info.lora_rank == 8)
    if hasattr(training, "save_weights_external"):
        external = training.save_weights_external("download-1").result().path
        urls = rest.get_external_weights_urls(external).result().urls
        sizes = {name: len(urllib.request.urlopen(url).read()) for name, url in urls.items()}
        check(
            "RestClient.get_external_weights_urls", sizes.get("adapter_model.safetensors", 0) > 1000
        )
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        url = rest.get_checkpoint_archive_url_from_tinker_path(sampler_path).result().url
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "a.tar"
            file.write_bytes(urllib.request.urlopen(url).read())
            with tarfile.open(file) as tar:
                check(
                    "RestClient.get_checkpoint_archive_url",
                    "adapters.safetensors" in tar.getnames(),
                )
    rest.set_checkpoint_ttl_from_tinker_path(sampler_path, 7200).result()
    check("RestClient.set_checkpoint_ttl_from_tinker_path")
    rest.delete_checkpoint_from_tinker_path(sampler_path).result()
    left = [each.checkpoint_id for each in rest.list_checkpoints(run).result().checkpoints]
    check("RestClient.delete_checkpoint", not any("sampler" in each for each in left))
    check(
        "RestClient.get_session",
        run in rest.get_session(run.split(":")[0]).result().training_run_ids,
    )
    check("RestClient.list_sessions", run.split(":")[0] in rest.list_sessions().result().sessions)


def main(url, model):
    warnings.simplefilter("ignore", FutureWarning)
    check = Checked()
    service = tinker.ServiceClient(base_url=url)
    served_names = [each.model_name for each in service.get_server_capabilities().supported_models]
    check("ServiceClient.get_server_capabilities", model in served_names)
    metadata = {"renderer_name": "x"}
    client = service.create_lora_training_client(
        base_model=model, rank=8, seed=3, user_metadata=metadata
    )
    training = ready(client)
    check("ServiceClient.create_lora_training_client")
    training_methods(check, training)
    saved = training.save_state("state-1").result().path
    check("TrainingClient.save_state", saved.endswith("/weights/state-1"))
    sampler_path = training.save_weights_for_sampler("sampler-1").result().path
    check("TrainingClient.save_weights_for_sampler", "/sampler_weights/" in sampler_path)
    sampling_methods(check, service, training, model, sampler_path)
    resumed(check, service, training, saved)
    rest_methods(check, service, training, saved, sampler_path)
    service.close("success")
    check("ServiceClient.close")
    failed = [name for name, good in check.done if not good]
    print(f"{len(check.done) - len(failed)} of {len(check.done)} (tinker {tinker.__version__})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
