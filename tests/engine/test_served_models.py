"""Which name means which weights."""

import pytest

from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.errors import ModelNotFoundError


def directory(**options) -> ServedModels:
    versions = {"policy": 7, "other": 2}
    return ServedModels("org/base", adapter_versions=lambda: versions, version=lambda: 7, aliases=("mine",), **options)


@pytest.mark.parametrize("name", ["org/base", "base", "default", "mine", "", None])
def test_serving_the_common_names_mean_the_base(name):
    model = directory().resolve(name)
    assert (model.id, model.adapter, model.is_policy, model.parent) == ("org/base", None, False, None)


@pytest.mark.parametrize("name", ["org/base", "base", "default", "mine", "", None, "policy"])
def test_training_the_common_names_mean_the_policy(name):
    models = directory(policy_adapter="policy")
    assert models.resolve(name).adapter == "policy" and models.resolve(name).is_policy
    assert models.resolve(name).policy_version == 7
    assert models.list()[0].id == "org/base"
    untouched = models.resolve("org/base:base")
    assert (untouched.adapter, untouched.is_policy) == (None, False)


def test_full_weight_training_has_no_untouched_base():
    models = directory(trains_base=True)
    assert models.resolve("default").is_policy and models.resolve("default").adapter is None
    with pytest.raises(ModelNotFoundError):
        models.resolve("org/base:base")


def test_adapters_answer_to_their_names_and_strangers_are_told_the_list():
    models = directory()
    other = models.resolve("other")
    assert (other.adapter, other.parent, other.policy_version) == ("other", "org/base", 2)
    with pytest.raises(ModelNotFoundError, match="org/base, other, policy"):
        models.resolve("gpt-4")
