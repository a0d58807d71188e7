"""GGUF out, plugged in: the command `mlx_parallm export`."""

from mlx_parallm.config.leaves import Command, Leaf

LEAF = Leaf(
    "export",
    commands=(
        Command(
            "export",
            "deploy",
            "Write a trained model as GGUF, for llama.cpp, Ollama and LM Studio.",
            "mlx_parallm.deploy.export.command:Export",
            "mlx_parallm_export",
            (
                "Compares the file with the model that is served here, by a real llama.cpp,"
                " before it is kept."
            ),
            writes_models=True,
        ),
    ),
)
