"""Which name means which weights."""

import pytest

from mlx_parallm.engine.served_models import ServedModels
from mlx_parallm.errors import ModelNotFoundError


def directory(**options) -> ServedModels:
    versions = {"policy": 7, "other": 2}
    names = {"aliases": ("mine",), "policy_versions": lambda: [3, 6, 7]} | options
    return ServedModels("org/base", adapter_versions=lambda: versions, version=lambda: 7, **names)


@pytest.mark.parametrize("name", ["org/base", "base", "default", "mine", "", None])
def test_serving_the_common_names_mean_the_base(name):
    model = directory().resolve(name)
    assert (model.id, model.adapter, model.parent) == ("org/base", None, None)


@pytest.mark.parametrize("name", ["org/base", "base", "default", "mine", "", None, "policy"])
def test_training_the_common_names_mean_the_policy(name):
    models = directory(policy_adapter="policy")
    assert models.resolve(name).adapter == "policy"
    assert models.resolve(name).policy_version == 7
    assert models.list()[0].id == "org/base"
    assert models.resolve("org/base:base").adapter is None


def test_full_weight_training_has_no_untouched_base():
    models = directory(trains_base=True)
    assert models.resolve("default").adapter is None
    with pytest.raises(ModelNotFoundError):
        models.resolve("org/base:base")


def test_adapters_answer_to_their_names_and_strangers_are_told_the_list():
    models = directory()
    other = models.resolve("other")
    assert (other.adapter, other.parent, other.policy_version) == ("other", "org/base", 2)
    with pytest.raises(ModelNotFoundError, match="org/base, other, policy"):
        models.resolve("gpt-4")


@pytest.mark.parametrize("name", ["policy@6", "org/base@6", "base@6", "default@6", "mine@6", "@6"])
def test_a_version_of_the_policy_is_asked_for_by_number(name):
    model = directory(policy_adapter="policy").resolve(name)
    assert (model.id, model.adapter, model.policy_version) == (name, "policy@6", 6)
    assert name not in [each.id for each in directory(policy_adapter="policy").list()]


@pytest.mark.parametrize(
    ("options", "name", "why"),
    [
        ({"policy_adapter": "policy"}, "policy@5", "available versions: 3, 6, 7"),
        ({"policy_adapter": "policy"}, "policy@x", "available versions: 3, 6, 7"),
        pytest.param(
            {"policy_adapter": "policy"},
            "policy@" + "6" * 5000,
            "available versions: 3, 6, 7",
            id="endless",
        ),
        ({"policy_adapter": "policy"}, "other@7", "only the policy being trained has versions"),
        (
            {"policy_adapter": "policy"},
            "org/base:base@7",
            "only the policy being trained has versions",
        ),
        ({"trains_base": True}, "default@6", "versions are not kept when all weights are trained"),
        ({"policy_versions": tuple}, "default@6", "available versions: none"),
    ],
)
def test_why_a_version_cannot_be_had_is_said(options, name, why):
    with pytest.raises(
        ModelNotFoundError, match=f"'{name}' does not exist: {why}. Served models: org/base"
    ):
        directory(**options).resolve(name)
