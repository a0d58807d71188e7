"""Each mend of a class of mlx-lm is still needed: without it the class computes another model, or
cannot load it. Where a test here fails, mlx-lm computes that itself now: delete our mend."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.models.logprobs import token_logprobs
from mlx_parallm.models.mlx_lm_api import mlx_lm_classes
from mlx_parallm.models.published.architectures import ARCHITECTURES, class_arguments
from mlx_parallm.models.published.mend import argument_names
from mlx_parallm.models.published.reader import read_published
from scripts.parity.compare import EQUAL
from scripts.parity.weights import tensor
from tests.models.published.test_parity import DATA, cases

MENDED = sorted(
    name
    for name, architecture in ARCHITECTURES.items()
    if architecture.mend and (DATA / f"{name}.json").exists()
)


def plain(value):
    """Return a value of config.json without transformers' tags of infinite numbers."""
    if isinstance(value, dict):
        tag = value.get("__float__")
        return float(tag) if tag else {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, list) else value


def unmended(name: str, case: dict) -> float:
    """Return how far mlx-lm's own class is off, with the arguments that we give it; infinite: it
    does not load the checkpoint."""
    config = plain(case["config"])
    published = read_published(config)
    assert published is not None
    model_class, args_class = mlx_lm_classes(config)
    arguments = class_arguments(published, argument_names(args_class), config)
    weights = {key: mx.array(tensor(key, shape)) for key, shape in case["tensors"].items()}
    try:
        model = model_class(args_class.from_dict(arguments))
        if hasattr(model, "sanitize"):
            weights = model.sanitize(weights)
        model.load_weights(list(weights.items()))
    except (ValueError, KeyError):
        return float("inf")
    model.eval()
    ids = mx.array(case["ids"])[None]
    scores = token_logprobs(model(ids)[0, :-1], ids[0, 1:])
    return float(np.abs(np.array(scores) - np.array(case["logprobs"])).max())


def test_every_mend_has_a_case() -> None:
    without = {name for name, architecture in ARCHITECTURES.items() if architecture.mend}
    assert without - set(MENDED) <= {"kimi_linear", "olmo_hybrid"}, Path(DATA)


@pytest.mark.parametrize("name", MENDED)
def test_a_mend_is_still_needed(name: str) -> None:
    assert max(unmended(name, case) for case in cases(name)) > EQUAL
