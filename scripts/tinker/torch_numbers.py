"""The same losses, data and optimizer in torch (float64) as through the tinker SDK, against a
server that runs.

    build/tinker/bin/python scripts/tinker/torch_numbers.py URL MODEL_DIRECTORY

Runs in the SDK's own environment (scripts/setup_tinker). MODEL_DIRECTORY: the base, as the server
was started with. Prints the largest differences of losses and log-probabilities (wanted: 1e-5), of
gradients by a custom loss (1e-5 of the largest), and of the weights after 20 optimizer steps
(1e-4). Exit code 1 when one is missed.

Gradients are read through the API: AdamW with betas 0, eps 1e9 and learning rate 1e9 moves each
weight by its gradient.
"""

import os
import sys
import tempfile
import urllib.request
import warnings
from pathlib import Path

os.environ.setdefault("TINKER_API_KEY", "tml-local")
os.environ["TINKER_TELEMETRY"] = "0"
import numpy as np
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 32.0
STEPS = 20
RNG = np.random.default_rng(11)
BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.15}
LOSSES = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": BOUNDS,
    "cispo": BOUNDS,
    "dro": {"beta": 0.1},
    "gspo": BOUNDS,
}


class Lora(torch.nn.Module):
    def __init__(self, linear, a, b):
        super().__init__()
        self.linear, self.a, self.b = linear, torch.nn.Parameter(a), torch.nn.Parameter(b)

    def forward(self, x):
        return self.linear(x) + ALPHA / RANK * (x @ self.a.T @ self.b.T)


def downloaded(service, training, name):
    """The adapter as float64 arrays by PEFT's names."""
    path = training.save_weights_external(name).result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adapter_model.safetensors"
        file.write_bytes(urllib.request.urlopen(urls[file.name]).read())
        return {
            key.removeprefix("base_model.model."): value.double()
            for key, value in load_file(file).items()
        }


def torch_model(directory, adapter):
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager"
    )
    model.requires_grad_(False)
    for key in [key for key in adapter if key.endswith(".lora_A.weight")]:
        path = key.removesuffix(".lora_A.weight")
        parent, _, leaf = path.rpartition(".")
        owner = model.get_submodule(parent)
        b = adapter[f"{path}.lora_B.weight"]
        setattr(owner, leaf, Lora(getattr(owner, leaf), adapter[key].clone(), b.clone()))
    return model.double()


def parameters(model):
    names = {}
    for path, module in model.named_modules():
        if isinstance(module, Lora):
            names[f"{path}.lora_A.weight"], names[f"{path}.lora_B.weight"] = module.a, module.b
    return names


def make_data(model):
    """Datums of other lengths, some with several targets a position for cross_entropy."""
    data = []
    for count in RNG.integers(5, 30, 6):
        tokens, targets = RNG.integers(3, 300, count), RNG.integers(3, 300, count)
        with torch.no_grad():
            lp = logprobs(model, tokens, targets).numpy()
        advantages = np.where(RNG.random(count) < 0.3, 0.0, RNG.normal(size=count))
        inputs = {"logprobs": lp + 0.2 * RNG.normal(size=count), "advantages": advantages}
        mask = (RNG.random(count) < 0.8).astype(float)
        mask[0] = 1.0
        data.append((tokens, targets, inputs, mask, RNG.normal(size=count)))
    return data


def logprobs(model, tokens, targets):
    logits = model(torch.tensor(tokens)[None]).logits[0]
    scores = torch.log_softmax(logits, -1)
    wanted = torch.tensor(targets).reshape(len(tokens), -1)
    return scores.gather(1, wanted).reshape(torch.tensor(targets).shape)


def torch_loss(name, config, lp, inputs, mask, weights):
    """Written from the formulas of docs/library.md#tinkers-api."""
    if name == "cross_entropy":
        return -(lp * torch.tensor(weights)).sum()
    q, a = torch.tensor(inputs["logprobs"]), torch.tensor(inputs["advantages"])
    ratio = torch.exp(lp - q)
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "dro":
        return -(lp * a - config["beta"] / 2 * (lp - q) ** 2).sum()
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "cispo":
        return -(ratio.clamp(low, high).detach() * lp * a).sum()
    if name == "gspo":
        m = torch.tensor(mask)
        ratio = torch.exp(((lp.detach() - q) * m).sum() / m.sum()) * torch.exp(lp - lp.detach())
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def f32(values):
    return types.TensorData.from_numpy(np.asarray(values, np.float32))


def datums(name, data):
    made = []
    for tokens, targets, inputs, mask, weights in data:
        columns = {"weights": weights} if name == "cross_entropy" else inputs
        columns = columns | ({"sequence_ratio_mask": mask} if name == "gspo" else {})
        tensors = {key: f32(value) for key, value in columns.items()}
        tensors["target_tokens"] = types.TensorData.from_numpy(targets.astype(np.int64))
        made.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(tokens.tolist()), loss_fn_inputs=tensors
            )
        )
    return made


def rounded(data):
    """Round to float32, as the wire does."""

    def near(values):
        return values.astype(np.float32).astype(np.float64)

    return [(t, y, {k: near(v) for k, v in i.items()}, m, near(w)) for t, y, i, m, w in data]


def compare_losses(training, model, data):
    """(loss, relative to Σ|terms|; log-probability) on the same weights; both sides keep the
    gradients."""
    worst_loss = worst_lp = 0.0
    for name, config in LOSSES.items():
        out = training.forward_backward(
            datums(name, data), name, loss_fn_config=config or None
        ).result()
        total, scale = 0.0, 1.0
        for (tokens, targets, inputs, mask, weights), record in zip(
            data, out.loss_fn_outputs, strict=True
        ):
            lp = logprobs(model, tokens, targets)
            loss = torch_loss(name, config, lp, inputs, mask, weights)
            loss.backward()
            total, scale = total + loss.item(), scale + abs(loss.item())
            worst_lp = max(
                worst_lp, np.abs(record["logprobs"].to_numpy() - lp.detach().numpy()).max()
            )
        worst_loss = max(worst_loss, abs(total - out.metrics["loss:sum"]) / scale)
    return worst_loss, worst_lp


def compare_custom(service, training, model, data):
    """The gradient of a loss of the client's own, read as the movement of the weights."""

    def custom(each, lps):
        loss = sum((lp**2).mean() + torch.logsumexp(lp, 0) for lp in lps)
        return loss, {}

    training.forward_backward_custom(datums("cross_entropy", data), custom).result()
    before = downloaded(service, training, "before")
    read = types.AdamParams(learning_rate=1e9, beta1=0.0, beta2=0.0, eps=1e9)
    training.optim_step(read).result()
    after = downloaded(service, training, "after")
    names = parameters(model)
    for parameter in names.values():
        parameter.grad = None
    custom(None, [logprobs(model, tokens, targets) for tokens, targets, *_ in data])[0].backward()
    largest = max(p.grad.abs().max().item() for p in names.values())
    return (
        max((before[n] - after[n] - p.grad).abs().max().item() for n, p in names.items()) / largest
    )


def compare_steps(service, training, model, data):
    names = parameters(model)
    adam = {"lr": 2e-3, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.01}
    optimizer = torch.optim.AdamW(names.values(), **adam)
    first = None
    for _ in range(STEPS):
        first = first or compare_losses(training, model, data)
        compare_losses(training, model, data)
        torch.nn.utils.clip_grad_norm_(names.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        params = types.AdamParams(
            learning_rate=2e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-12,
            weight_decay=0.01,
            grad_clip_norm=1.0,
        )
        training.optim_step(params).result()
    end = downloaded(service, training, "end")
    return *first, max((end[n] - p.detach()).abs().max().item() for n, p in names.items())


def main(url, directory):
    warnings.simplefilter("ignore", FutureWarning)
    service = tinker.ServiceClient(base_url=url)

    def new(seed):
        client = service.create_lora_training_client(base_model=directory, rank=RANK, seed=seed)
        return client.result() if hasattr(client, "result") else client

    training = new(1)
    model = torch_model(directory, downloaded(service, training, "start"))
    data = rounded(make_data(model))
    loss, lp, weights = compare_steps(service, training, model, data)
    other = new(2)
    other.forward_backward(datums("cross_entropy", data), "cross_entropy").result()
    other.optim_step(types.AdamParams(learning_rate=1e-2)).result()  # B = 0 has no gradient by A
    gradient = compare_custom(
        service, other, torch_model(directory, downloaded(service, other, "one")), data
    )
    rows = (
        ("loss, relative", loss, 1e-5),
        ("log-probability", lp, 1e-5),
        ("gradient of a custom loss, of the largest", gradient, 1e-5),
        (f"weights after {STEPS} steps", weights, 1e-4),
    )
    for name, value, wanted in rows:
        print(f"{name:45} {value:.1e}  (wanted {wanted:.0e})")
    service.close("success")
    return int(any(value > wanted for _, value, wanted in rows))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
