"""How many operations a decode step asks of the device: on a GPU a step of a small model costs what
they cost to start. Counted on the way of a GPU, from the graph that is evaluated."""

import re
from collections import Counter
from io import StringIO
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair
from mlx_parallm.models.adapters.served import LoraContext, ServedLinear
from mlx_parallm.models.cpu import attention, kernels
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from tests.engine.helpers import qwen3_model, random_adapter, request, serve

# they cost nothing: other shapes of the same memory
VIEWS = {"Broadcast", "Transpose", "Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"}
VIEWS |= {"Slice", "Split", "StopGradient", "NumberOfElements", "Full"}
LAYERS = 2  # that the deeper model has more
# what is one operation on a GPU, and several on a CPU: the tokens mean nothing then
FUSED = {
    "rms_norm": lambda x, *_, **__: mx.tanh(x),
    "rope": lambda x, *_, **__: -x,
    "scaled_dot_product_attention": lambda queries, keys, values, **__: mx.maximum(
        queries, mx.maximum(keys[:, :1, :1], values[:, :1, :1])
    ),
}
# of a layer: 7 projections, 4 norms, 2 ropes, 2 written arrays, attention (2 here), 2 sums, SwiGLU
A_LAYER = 20
BFLOAT16: dict[str, Any] = {"dtype": mx.bfloat16}
BESIDE = 23  # head, sampling, and what all layers share


@pytest.fixture(autouse=True)
def _the_way_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, GPU_LIKE)
    for module in (attention, kernels):
        monkeypatch.setattr(module, "available", lambda: False)


def nodes(*arrays: mx.array) -> Counter[str]:
    """Return what the graph that makes these arrays consists of, views and all."""
    text = StringIO()
    mx.export_to_dot(text, *arrays)
    return Counter(re.findall(r'\[label ="([^"]*)", shape=rectangle\]', text.getvalue()))


def operations(
    layers: int,
    rows: int,
    adapters: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    params: dict[str, Any] | None = None,
    bare: int = 0,
    longer: int = 5,
    dtype: mx.Dtype = mx.float32,
    **options: Any,
) -> Counter[str]:
    """Return the operations of a step of ragged rows, by kind. `bare`: rows without an adapter.
    `longer`: how many tokens a row has more than the one before."""
    model = qwen3_model(num_hidden_layers=layers)
    model.set_dtype(dtype)
    served = serve(model, prefix_cache_bytes=0, **options)
    for name, stand_in in FUSED.items():
        monkeypatch.setattr(mx.fast, name, stand_in)
    for number in range(adapters):
        served.weights.add_adapter(f"a{number}", random_adapter(served, seed=number))
    for number in range(rows):
        prompt = [3 + (7 * number + place) % 50 for place in range(12 + longer * number)]
        adapter = f"a{number % adapters}" if adapters and number >= bare else None
        served.engine.add(
            request(
                f"r{number}",
                prompt,
                adapter=adapter,
                **{"max_tokens": 40, "ignore_eos": True, **(params or {})},
            )
        )
    for _ in range(3):
        served.engine.step()
    found: Counter[str] = Counter()

    def counted(*arrays: Any) -> None:
        found.update(nodes(*[a for _, a in tree_flatten(arrays) if isinstance(a, mx.array)]))

    evaluate = mx.eval
    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", lambda *arrays: (counted(*arrays), evaluate(*arrays))[1])
        served.engine.step()
    return Counter({kind: count for kind, count in found.items() if kind not in VIEWS})


@pytest.mark.parametrize(
    ("rows", "adapters", "options", "most"),
    [
        pytest.param(1, 0, {}, A_LAYER, id="one row"),
        pytest.param(6, 0, {}, A_LAYER, id="ragged rows"),
        pytest.param(6, 0, {"by_tokens": False}, A_LAYER, id="a rectangle"),
        # of a class more: 2 writes, an attention, and the outputs put together
        pytest.param(6, 0, {"longer": 30}, A_LAYER + 5, id="two size classes"),
        pytest.param(6, 1, {}, A_LAYER + 7 * 2, id="one adapter"),
        pytest.param(6, 1, {"bare": 2}, A_LAYER + 16, id="one adapter, and rows without"),
        pytest.param(6, 3, {}, A_LAYER + 16, id="three adapters"),
        # their factors are float32: x is cast once for layers that are given the same
        pytest.param(6, 1, BFLOAT16, A_LAYER + 7 * 3 + 4, id="one adapter, bfloat16"),
        pytest.param(6, 3, BFLOAT16, A_LAYER + 16 + 4, id="three adapters, bfloat16"),
    ],
)
def test_a_layer_costs_no_more_operations(
    rows: int,
    adapters: int,
    options: dict[str, Any],
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        few = operations(1, rows, adapters, patch, **options)
    with monkeypatch.context() as patch:
        many = operations(1 + LAYERS, rows, adapters, patch, **options)
    more = many - few
    casts = 4 if "dtype" in options else 0
    assert not more["Arange"], "indices and masks are made once for all layers"
    assert more["AsType"] <= casts * LAYERS, "indices and masks are made once for all layers"
    assert sum(more.values()) / LAYERS <= most, more
    beside = sum(few.values()) - sum(more.values()) / LAYERS
    of_head = -((A_LAYER - most) // 7) + 2 * ("dtype" in options)  # it is adapted too
    assert beside <= BESIDE + of_head, few


@pytest.mark.parametrize(
    ("params", "more"),
    [
        pytest.param({"logprobs": 1}, 3, id="alternatives"),
        pytest.param({"temperature": 0.7}, 1, id="temperature"),
        pytest.param({"temperature": 0.7, "top_p": 0.9}, 26, id="a filter"),
    ],
)
def test_what_sampling_adds(
    params: dict[str, Any], more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters that all rows have gather no rows, and divide the logits once."""
    counts = []
    for each in ({}, params):
        with monkeypatch.context() as patch:
            counts.append(operations(1, 6, 0, patch, params=each))
    assert sum((counts[1] - counts[0]).values()) <= more, counts[1] - counts[0]


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_changes_no_shapes_for_one_row(bias: bool) -> None:
    """A view costs the host as much as an operation."""
    linear, x = nn.Linear(8, 6, bias=bias), mx.random.normal((1, 1, 8))
    pair = LoraPair(mx.random.normal((8, 2)), mx.random.normal((2, 6)), 0.5)
    context = LoraContext()
    layer = ServedLinear(linear, "proj", context)
    slot = AdapterSlot("a", AdapterWeights("a", 0, {"proj": pair}))
    exact = linear(x)
    product = Counter({"AddMM": 1, "Broadcast": 1}) if bias else Counter({"Matmul": 1})
    for adapter, expected, beside in (
        (None, exact, Counter()),
        (slot, exact + 0.5 * (x @ pair.a @ pair.b), Counter({"Matmul": 1, "AddMM": 1})),
    ):
        for _ in range(2):  # the first makes the views
            context.activate([adapter])
            y = layer(x)
            found = nodes(y)
            assert mx.allclose(y, expected, rtol=1e-6, atol=1e-6)
        assert found == product + beside
