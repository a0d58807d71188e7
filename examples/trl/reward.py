"""A reward model, as in TRL's quickstart; import line, model and data are others."""

from mlx_parallm import RewardConfig, RewardTrainer

dataset = [
    {"prompt": f"Which is first: {a} or {b}?", "chosen": a, "rejected": b}
    for a, b in (("ab", "yz"), ("cd", "wx"), ("ef", "uv"), ("bd", "xz"))
]
training_args = RewardConfig(
    output_dir="tiny-Reward", learning_rate=1e-3, num_train_epochs=10, logging_steps=5
)
trainer = RewardTrainer(
    model="builtin:tiny",
    args=training_args,
    train_dataset=dataset,
    peft_config={"r": 16, "lora_alpha": 32},
)
trainer.train()
trainer.save_model("tiny-reward-model")
print("accuracy", trainer.state.log_history[-1]["rewards/accuracies"])
