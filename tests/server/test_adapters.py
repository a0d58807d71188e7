"""`model` chooses base or adapter, in one batch; each answer tells the version it was sampled under."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest
from openai import NotFoundError

from mlx_parallm.models.lora import LoraPair

NAME = "other"


def random_adapter(shapes, rank=4):
    mx.random.seed(3)
    pairs = {
        path: LoraPair(mx.random.normal((inputs, rank)) * 0.3, mx.random.normal((rank, outputs)) * 0.3, 1.0)
        for path, (inputs, outputs) in shapes.items()
    }
    mx.eval([array for pair in pairs.values() for array in (pair.a, pair.b)])
    return pairs


@pytest.fixture
def adapter(tiny_engine):
    tiny_engine.weights.add_adapter(NAME, random_adapter(tiny_engine.linear_shapes))
    yield NAME
    tiny_engine.weights.remove_adapter(NAME)


def ask(client, model):
    return client.completions.create(
        model=model, prompt="12 + 7 =", temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )


def test_an_adapter_is_listed_with_its_parent_and_answers_by_name(client, adapter):
    base, listed = client.models.list().data
    assert (listed.id, listed.parent) == (adapter, base.id)
    alone = {model: ask(client, model).choices[0].text for model in (adapter, base.id)}
    assert alone[adapter] != alone[base.id]
    models = [adapter, base.id, "default"] * 5
    with ThreadPoolExecutor(len(models)) as pool:
        together = list(pool.map(lambda model: ask(client, model), models))
    assert {answer.model for answer in together} == {adapter, base.id}
    assert [answer.choices[0].text for answer in together] == [
        alone[adapter if model == adapter else base.id] for model in models
    ]


def test_a_removed_adapter_is_404(client, tiny_engine):
    tiny_engine.weights.add_adapter(NAME, random_adapter(tiny_engine.linear_shapes))
    ask(client, NAME)
    tiny_engine.weights.remove_adapter(NAME)
    with pytest.raises(NotFoundError, match=NAME):
        ask(client, NAME)
