"""A dense model made a mixture of experts ("sparse upcycling", arXiv:2212.05055): each MLP becomes
EXPERTS copies of itself with noise, of which a random router takes two."""

import json
from pathlib import Path

import mlx.core as mx

EXPERTS, EACH, NOISE = 8, 2, 0.1


def upcycle(source: Path, target: Path, seed: int = 0) -> None:
    """Write a mixture of experts that begins as the dense qwen3 model in `source`."""
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": EACH,
        "moe_intermediate_size": config["intermediate_size"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "torch_dtype": "float32",
    }
    keys = iter(mx.random.split(mx.random.key(seed), 10_000))
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("*.safetensors")):
        for name, array in mx.load(str(file)).items():  # type: ignore[union-attr]
            wide = array.astype(mx.float32)
            if ".mlp." not in name:
                weights[name] = wide
                continue
            layer, _, projection = name.partition(".mlp.")
            spread = NOISE * mx.std(wide)
            for expert in range(EXPERTS):
                noise = spread * mx.random.normal(wide.shape, key=next(keys))
                weights[f"{layer}.mlp.experts.{expert}.{projection}"] = wide + noise
    for layer in range(config["num_hidden_layers"]):
        shape = (EXPERTS, config["hidden_size"])
        router = mx.random.normal(shape, key=next(keys)) / config["hidden_size"] ** 0.5
        weights[f"model.layers.{layer}.mlp.gate.weight"] = router
    target.mkdir(parents=True)
    mx.save_safetensors(str(target / "model.safetensors"), weights, metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
