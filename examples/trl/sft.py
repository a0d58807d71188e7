"""Supervised fine-tuning, as in TRL's quickstart: only the import line, the model and the data
are others."""

from mlx_parallm import SFTConfig, SFTTrainer

dataset = [
    {
        "messages": [
            {"role": "user", "content": f"Spell {word}"},
            {"role": "assistant", "content": "-".join(word)},
        ]
    }
    for word in ("abc", "dog", "cat", "xyz", "sun", "map", "red", "bit")
]
trainer = SFTTrainer(
    model="builtin:tiny",
    args=SFTConfig(output_dir="tiny-SFT", learning_rate=1e-3, num_train_epochs=10, logging_steps=5),
    train_dataset=dataset,
)
trainer.train()
print("loss", trainer.state.log_history[-1]["loss"])
