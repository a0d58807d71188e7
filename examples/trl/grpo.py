"""GRPO, as in TRL's quickstart: only the import line, the model and the data are others. About
ten seconds."""

from mlx_parallm import GRPOConfig, GRPOTrainer

dataset = [
    {"prompt": [{"role": "user", "content": f"Reverse: {word}"}], "answer": word[::-1]}
    for word in ("abc", "dog", "cat", "xyz", "sun", "map", "red", "bit")
]


def correct(completions, answer, **kwargs):
    """1 for the whole answer, else the share of its letters that are in their place."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [
        sum(map(str.__eq__, text, right)) / 3 for text, right in zip(texts, answer, strict=True)
    ]


training_args = GRPOConfig(
    output_dir="tiny-GRPO", max_completion_length=8, max_steps=10, learning_rate=1e-3
)
trainer = GRPOTrainer(
    model="builtin:tiny",
    reward_funcs=correct,
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
print("reward", trainer.state.log_history[-1]["reward"])
