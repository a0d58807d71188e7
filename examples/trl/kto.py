"""KTO, as in TRL's quickstart: only the import line, the model and the data are others."""

from mlx_parallm import KTOConfig, KTOTrainer

dataset = [
    {"prompt": f"Which is first: {a} or {b}?", "completion": a if label else b, "label": label}
    for a, b, label in (
        ("ab", "cd", True),
        ("xy", "ij", False),
        ("op", "mn", True),
        ("qr", "st", False),
    )
]
training_args = KTOConfig(
    output_dir="tiny-KTO", learning_rate=1e-4, num_train_epochs=10, logging_steps=5
)
trainer = KTOTrainer(model="builtin:tiny", args=training_args, train_dataset=dataset)
trainer.train()
print("margin", trainer.state.log_history[-1]["rewards/margins"])
