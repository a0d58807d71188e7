"""`mlx_parallm doctor --model M`: which keys of a model's config.json are understood, and, where
torch is installed, how far its log-probabilities are from transformers' own."""

from importlib.util import find_spec

from rich.markup import escape

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError
from mlx_parallm.system.terminal import Console

EQUAL = 1e-4
"""A larger difference in float32 is another model."""


def run(config: ModelConfig) -> int:
    """Print the report; return 1 if the model is not the published one. Raises ModelError."""
    from mlx_parallm.models.loading import check_model, load_model
    from mlx_parallm.models.published.report import (
        COMPARED,
        compare_with_transformers,
        describe,
    )

    console = Console()
    read = check_model(config, train=False)
    console.print(escape(describe(read)), soft_wrap=True, highlight=False)
    trained = True
    try:
        check_model(config, train=True)
    except ModelError as error:
        trained = False
        console.print(f"[yellow]not trained:[/yellow] {escape(str(error))}", soft_wrap=True)
    if find_spec("torch") is None:
        if trained:
            console.print("[green]understood[/green]; with torch installed it is compared, too")
        return 0 if trained else 1
    if "quantization" in read:
        console.print("not compared: transformers does not read MLX's quantisation")
        return 0 if trained else 1
    loaded = load_model(config.model_copy(update={"dtype": "float32"}))
    tokens = min(COMPARED, loaded.max_model_len)
    try:
        apart = compare_with_transformers(loaded.path, loaded.model, loaded.vocab_size, tokens)
    except ModelError as error:
        console.print(f"[yellow]not compared:[/yellow] {escape(str(error))}", soft_wrap=True)
        return 0 if trained else 1
    equal = apart <= EQUAL
    verdict = "[green]equal[/green]" if equal else "[red]another model[/red]"
    difference = f"{tokens} tokens in float32: log-probabilities differ by {apart:.2g} nats at most"
    console.print(f"beside transformers, {difference}: {verdict}", soft_wrap=True, highlight=False)
    return 0 if equal and trained else 1
