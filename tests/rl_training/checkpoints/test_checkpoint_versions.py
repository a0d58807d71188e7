"""Versions of the policy that lie in a run's checkpoints are served from there."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_parallm.errors import AdapterError
from mlx_parallm.models.lora import load_adapter
from mlx_parallm.rl_training.checkpoint import CheckpointVersions
from mlx_parallm.weights import SharedWeights
from tests.rl_training.making import make_config, make_trainer
from tests.rl_training.checkpoints.test_checkpoint import make_checkpointer, state_at
from tests.tiny_models import make_model


def test_checkpoints_whose_weights_were_served_have_their_version(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(tmp_path, make_trainer(make_config()), keep=3)
    archive = CheckpointVersions(tmp_path)
    assert archive.versions() == []
    for step in (1, 2, 3, 4):
        checkpointer.save(state_at(step, unpublished=step == 3))
    assert archive.versions() == [2, 4], "the first is gone, the third was never served"
    with pytest.raises(AdapterError, match="no checkpoint of version 3"):
        archive.load(3)
    saved = load_adapter(tmp_path / "step_000002").layers
    weights = SharedWeights(make_model(), policy="policy", version=5, keep_versions=2, archive=archive)
    weights.add_adapter("policy", saved)
    assert weights.history.versions() == [2, 4, 5]
    load = weights.loader("policy@2")
    assert load is not None
    load()
    place = weights.find("policy@2")
    assert place is not None and place.pinned and place.weights.version == 2
    assert all(mx.array_equal(place.weights.layers[path].a, pair.a) for path, pair in saved.items())
