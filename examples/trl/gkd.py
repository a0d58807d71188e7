"""Generalised knowledge distillation, as in TRL's documentation; import line, models and data are
others. Here the teacher is the same small model after it was trained on the answers."""

from mlx_parallm import GKDConfig, GKDTrainer, SFTConfig, SFTTrainer

dataset = [
    {
        "messages": [
            {"role": "user", "content": f"Reverse: {word}"},
            {"role": "assistant", "content": word[::-1]},
        ]
    }
    for word in ("abc", "dog", "cat", "xyz", "sun", "map", "red", "bit")
]
quick = {"learning_rate": 1e-3, "logging_steps": 5}
teacher = SFTTrainer(
    model="builtin:tiny",
    args=SFTConfig(output_dir="tiny-teacher", max_steps=20, **quick),
    train_dataset=dataset,
)
teacher.train()
teacher.save_model("tiny-teacher-model")
teacher.close()

trainer = GKDTrainer(
    model="builtin:tiny",
    teacher_model="tiny-teacher-model",
    args=GKDConfig(output_dir="tiny-GKD", max_new_tokens=8, max_steps=20, **quick),
    train_dataset=dataset,
    peft_config={"r": 16, "lora_alpha": 32},
)
trainer.train()
trainer.save_model("tiny-gkd-adapter")
print("divergence", trainer.state.log_history[-1]["distill_loss"])
