"""DPO, as in TRL's quickstart: only the import line, the model and the data are others."""

from mlx_parallm import DPOConfig, DPOTrainer

dataset = [
    {"prompt": f"Which is first: {a} or {b}?", "chosen": a, "rejected": b}
    for a, b in (("ab", "cd"), ("xy", "ij"), ("op", "mn"), ("qr", "st"))
]
training_args = DPOConfig(
    output_dir="tiny-DPO", learning_rate=1e-4, num_train_epochs=10, logging_steps=5
)
trainer = DPOTrainer(model="builtin:tiny", args=training_args, train_dataset=dataset)
trainer.train()
print("margin", trainer.state.log_history[-1]["rewards/margins"])
