"""Many adapters in one batch, unloaded and replaced while they are in use, and versions of the
policy side by side.

The twin of an adapter is a plain mlx-lm tree with scale · (AB)ᵀ added to its weights.
"""

import copy
import re
from dataclasses import replace
from io import StringIO

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.engine.cache import batch
from mlx_parallm.engine.decoding.forward import ForwardContext
from mlx_parallm.engine.engine import Engine
from mlx_parallm.errors import AdapterError, ModelNotFoundError
from mlx_parallm.models.adapters.adapter import AdapterSlot, AdapterWeights, LoraPair
from mlx_parallm.models.adapters.served import LoraContext, ServedLinear
from mlx_parallm.models.adapters.stack import STACK_LIFETIME, AdapterStack, Entries
from mlx_parallm.models.lora import linear_layers, prepare_for_serving
from mlx_parallm.models.quantize import quantize_layers
from mlx_parallm.system.device.traits import DEVICE_VARIABLE, GPU_LIKE
from tests.active_memory import active_memory
from tests.engine.helpers import (
    Served,
    collect,
    naive_greedy,
    qwen3_model,
    ragged_prompts,
    random_adapter,
    request,
    run,
    serve,
)

TOKENS = mx.array(
    [[1, 2, 3, 4], [5, 6, 7, 8], [1, 2, 3, 4], [9, 1, 2, 3], [4, 4, 4, 4], [7, 7, 1, 2]]
)


def twin(served: Served, layers: dict[str, LoraPair]) -> nn.Module:
    model = copy.deepcopy(served.plain)
    for path, layer in linear_layers(model).items():
        if path in layers:
            layer.weight = layer.weight + layers[path].scale * (layers[path].a @ layers[path].b).T
    return model


def slot(name: str, layers: dict[str, LoraPair]) -> AdapterSlot:
    return AdapterSlot(name, AdapterWeights(name, 0, layers))


def greedy(name: str, prompt: list[int], adapter: str | None, tokens: int = 24):
    return request(
        name, prompt, adapter=adapter, temperature=0.0, max_tokens=tokens, ignore_eos=True
    )


def tokens_of(outputs, name: str) -> list[int]:
    return list(outputs[name].completions[0].token_ids)


@pytest.mark.parametrize("quantized", [False, True])
def test_mixed_ranks_and_targets_give_what_each_adapter_gives_alone(quantized: bool) -> None:
    served = serve(qwen3_model())
    layers = [
        random_adapter(served, seed, scale=0.5 * seed, rank=rank)
        for seed, rank in ((1, 2), (2, 9), (3, 4))
    ]
    layers[1] = {
        path: pair for path, pair in layers[1].items() if "q_proj" in path or "down_proj" in path
    }
    model = copy.deepcopy(served.plain)
    if quantized:
        quantize_layers(model)
    base = model(TOKENS)
    context = prepare_for_serving(model)
    slots = [slot(str(index), each) for index, each in enumerate(layers)]
    context.activate([slots[0], slots[1], None, slots[2], slots[1], None])
    mixed = model(TOKENS)
    assert mx.array_equal(mixed[2], base[2]) and mx.array_equal(mixed[5], base[5]), (
        "rows without one are bit-equal"
    )
    for row, adapter in ((0, 0), (1, 1), (3, 2), (4, 1)):
        context.activate([slots[adapter]] * 6)
        assert mx.allclose(mixed[row], model(TOKENS)[row], rtol=1e-4, atol=1e-4)
        assert not mx.allclose(mixed[row], base[row], atol=0.1)


def test_nan_and_infinity_of_one_adapter_stay_in_its_rows_of_a_mixed_batch() -> None:
    served = serve(qwen3_model())
    good, bad = random_adapter(served, 1), random_adapter(served, 2)
    model = copy.deepcopy(served.plain)
    context = prepare_for_serving(model)
    slots = [slot("good", good), slot("other", random_adapter(served, 3))]
    context.activate([slots[0], slots[1], None] * 2)
    expected = model(TOKENS)
    for poison in (mx.nan, mx.inf):
        broken = slot(
            "bad",
            {path: LoraPair(pair.a * poison, pair.b * poison, 1.0) for path, pair in bad.items()},
        )
        context.activate([slots[0], broken, None] * 2)
        got = model(TOKENS)
        for row in (0, 2, 3, 5):
            assert mx.array_equal(got[row], expected[row]), "other rows are bit-equal"
        assert mx.isnan(got[1]).any().item()


@pytest.mark.parametrize("shape", [(6, 1, 64), (6, 64), (18, 64), (18, 1, 64), (6, 2, 3, 64)])
def test_layers_that_see_their_rows_in_another_shape(shape: tuple[int, ...]) -> None:
    served = serve(qwen3_model())
    path = "model.layers.0.self_attn.q_proj"
    context, layer = LoraContext(), served.layers[path]
    adapted = ServedLinear(layer, path, context)
    pairs = [random_adapter(served, seed)[path] for seed in (1, 2)]
    slots = [slot(str(index), {path: pair}) for index, pair in enumerate(pairs)]
    x = mx.random.normal(shape, key=mx.random.key(0))
    for rows in ([0, 1, None, 1, 0, None], [0, None, None, 0, 0, None]):
        context.activate([None if index is None else slots[index] for index in rows])
        got, each = adapted(x), shape[0] // 6
        assert got.shape == (*shape[:-1], layer.weight.shape[0])
        for row, index in enumerate(rows):
            part = x[row * each : (row + 1) * each]
            added = 0.0 if index is None else (part @ pairs[index].a) @ pairs[index].b
            assert mx.allclose(got[row * each : (row + 1) * each], layer(part) + added, atol=1e-4)


def test_eight_adapters_in_one_batch_equal_their_twins() -> None:
    served = serve(qwen3_model(), prefill_chunk=64)
    layers = {f"a{i}": random_adapter(served, i + 1, rank=2 + i % 3) for i in range(8)}
    for name, each in layers.items():
        served.weights.add_adapter(name, each)
    prompts = ragged_prompts(9, shortest=3)
    outputs = run(
        served.engine, [greedy(f"r{i}", prompts[i], f"a{i}" if i < 8 else None) for i in range(9)]
    )
    for i in range(8):
        assert tokens_of(outputs, f"r{i}") == naive_greedy(
            twin(served, layers[f"a{i}"]), prompts[i], 24, eos=None
        )
    assert tokens_of(outputs, "r8") == naive_greedy(served.plain, prompts[8], 24, eos=None)
    assert len({token for i in range(8) for token in tokens_of(outputs, f"r{i}")}) >= 20


def test_an_unloaded_adapter_serves_its_requests_to_their_end() -> None:
    served = serve(qwen3_model(), prefill_chunk=16, max_rows=2)
    old, new = random_adapter(served, 1), random_adapter(served, 2)
    prompts = ragged_prompts(4, shortest=40)
    served.weights.add_adapter("a", old)
    for i in range(3):  # one decodes, one is in prefill, one waits
        served.engine.add(greedy(f"old{i}", prompts[i], "a"))
    served.engine.add(request("scored", prompts[0], adapter="a", prompt_logprobs=0, max_tokens=0))
    for _ in range(5):
        served.engine.step()
    served.weights.remove_adapter("a")
    with pytest.raises(ModelNotFoundError, match="'a' does not exist"):
        served.engine.add(greedy("late", [1, 2], "a"))
    served.engine.step()
    served.weights.add_adapter("a", new)
    served.engine.add(greedy("new", prompts[0], "a"))
    outputs = collect(served.engine)
    for i in range(3):
        assert tokens_of(outputs, f"old{i}") == naive_greedy(
            twin(served, old), prompts[i], 24, eos=None
        )
    assert tokens_of(outputs, "new") == naive_greedy(twin(served, new), prompts[0], 24, eos=None)
    assert tokens_of(outputs, "new") != tokens_of(outputs, "old0")


def test_an_adapter_unloaded_while_its_request_comes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve(qwen3_model())
    served.weights.add_adapter("a", random_adapter(served, 1))
    find = served.weights.find

    def found_once(name: str) -> AdapterSlot | None:
        slot = find(name)
        if slot is not None:
            served.weights.remove_adapter(name)  # as by the thread of /v1/unload_lora_adapter
        return slot

    monkeypatch.setattr(served.weights, "find", found_once)
    outputs = run(
        served.engine, [request("r", [1, 2, 3], adapter="a", max_tokens=2, prompt_logprobs=0)]
    )
    assert outputs["r"].prompt_logprobs is not None
    served.engine.release_memory()
    assert served.engine._runner._rows == (), "nothing keeps an unloaded adapter alive"


def test_a_replaced_adapter_is_obeyed_by_the_requests_that_run() -> None:
    served = serve(qwen3_model())
    served.weights.add_adapter("a", random_adapter(served, 1))
    served.weights.add_adapter("b", random_adapter(served, 2))
    fresh = random_adapter(served, 3)
    prompts = ragged_prompts(2, shortest=20)
    served.engine.add(greedy("a", prompts[0], "a"))
    served.engine.add(greedy("b", prompts[1], "b"))
    for _ in range(5):
        served.engine.step()
    served.weights.add_adapter(
        "a", {path: LoraPair(p.a, p.b * mx.nan, 1.0) for path, p in fresh.items()}
    )
    outputs = collect(served.engine)
    assert "not finite" in outputs["a"].completions[0].error
    assert tokens_of(outputs, "b") == naive_greedy(
        twin(served, random_adapter(served, 2)), prompts[1], 24, eos=None
    )


def test_versions_of_the_policy_are_decoded_beside_the_newest_and_the_base() -> None:
    served = serve(qwen3_model(), policy="policy", keep_versions=3)
    layers = {version: random_adapter(served, version) for version in range(1, 6)}
    for each in layers.values():
        served.weights.publish_adapter(each)
    prompt = ragged_prompts(1, shortest=30)[0]
    assert served.weights.history.versions() == [3, 4, 5]
    requests = [greedy(f"v{version}", prompt, f"policy@{version}") for version in (3, 4, 5)]
    for item in (*requests, greedy("newest", prompt, "policy"), greedy("base", prompt, None)):
        served.engine.add(item)
    for _ in range(6):
        served.engine.step()
    served.weights.publish_adapter(random_adapter(served, 6))
    outputs = collect(served.engine)
    for version in (3, 4, 5):
        completion = outputs[f"v{version}"].completions[0]
        assert list(completion.token_ids) == naive_greedy(
            twin(served, layers[version]), prompt, 24, eos=None
        )
        assert set(completion.policy_versions) == {version} and completion.prompt_version == version
    assert set(outputs["newest"].completions[0].policy_versions) == {5, 6}
    assert tokens_of(outputs, "base") == naive_greedy(served.plain, prompt, 24, eos=None)
    with pytest.raises(ModelNotFoundError):
        served.engine.add(greedy("gone", prompt, "policy@3"))
    again = run(served.engine, [greedy("again", prompt, "policy@4")])
    assert tokens_of(again, "again") == tokens_of(outputs, "v4")


class Archive:
    """Versions 1 and 2 "on disk"; counts what is read."""

    def __init__(self, layers: dict[int, dict[str, LoraPair]]) -> None:
        self.layers, self.loads = layers, []

    def versions(self) -> list[int]:
        return sorted(self.layers)

    def load(self, version: int) -> dict[str, LoraPair]:
        self.loads.append(version)
        if version not in self.layers:
            raise AdapterError("gone")
        return self.layers[version]


def test_archived_versions_are_read_once_and_forgotten_in_turn() -> None:
    served = serve(qwen3_model(), policy="policy", keep_versions=1)
    layers = {version: random_adapter(served, version) for version in (1, 2)}
    archive = Archive(layers)
    served.weights.history._archive = archive
    for _ in range(3):
        served.weights.publish_adapter(random_adapter(served, 9))
    assert served.weights.history.versions() == [1, 2, 3]
    load = served.weights.loader("policy@2")
    assert (
        load is not None
        and served.weights.loader("policy@3") is None
        and served.weights.loader("policy") is None
    )
    load()
    assert served.weights.loader("policy@2") is None
    prompt = ragged_prompts(1, shortest=30)[0]
    outputs = run(served.engine, [greedy(f"v{v}", prompt, f"policy@{v}") for v in (2, 1)])
    for version in (1, 2):
        assert tokens_of(outputs, f"v{version}") == naive_greedy(
            twin(served, layers[version]), prompt, 24, eos=None
        )
    assert archive.loads == [2, 1]
    served.weights.find("policy@2")
    assert archive.loads == [2, 1, 2], "one stays loaded"
    assert served.weights.find("policy@7") is None and served.weights.find("other@1") is None


def test_a_publish_copies_nothing_with_one_adapter_and_its_entry_with_several() -> None:
    context = LoraContext()
    size, rank = 1024, 16

    def layers(fill: float) -> dict[str, LoraPair]:
        made = {
            str(i): LoraPair(mx.full((size, rank), fill), mx.full((rank, size), fill), 2.0)
            for i in range(8)
        }
        mx.eval([(pair.a, pair.b) for pair in made.values()])
        return made

    def evaluated() -> None:
        groups = context.stack.groups
        mx.eval([(group.a.array, group.b[path].array) for path, group in groups.items()])

    one = 8 * 2 * size * rank * 4
    slots = [slot(str(i), layers(float(i))) for i in range(6)]
    context.activate([slots[0]] * 3)
    assert context.pairs is slots[0].weights.layers and not context.stack.groups
    context.activate([*slots, None])
    evaluated()
    groups = context.stack.groups
    held = [groups["3"].a, groups["3"].b["3"]]
    assert [each.array[:, 0, 0].tolist() for each in held] == [
        [0, 0, 1, 2, 3, 4, 5],
        [0, 0, 2, 4, 6, 8, 10],
    ]
    slots[2].weights = AdapterWeights("2", 1, layers(7.0))
    before = active_memory()
    mx.reset_peak_memory()
    context.activate([*slots, None])
    evaluated()
    assert context.stack.groups is groups and held[1].array[3, 0, 0].item() == 14.0
    assert active_memory() <= before + 4096 and mx.get_peak_memory() <= before + one
    context.activate([slots[1], slots[3], slots[4]])
    assert context.stack.groups is groups, "adapters that have left may come again"
    for _ in range(STACK_LIFETIME + 1):
        context.activate([slots[0]])
    del groups, held
    assert active_memory() <= before - 6 * one, "a stack that no row uses is dropped"


def test_a_stack_keeps_its_arrays_while_adapters_come_and_go() -> None:
    """100 adapters, four at a time: an entry that nobody uses is overwritten."""
    context = LoraContext()

    def layers(number: int, rank: int) -> dict[str, LoraPair]:
        a, b = mx.full((3, rank), number), mx.ones((rank, 2))
        return {"x": LoraPair(a, b, 1.0)}

    slots = [slot(str(number), layers(number, 1 + number % 2)) for number in range(100)]
    groups, places = set(), set()
    for number in range(96):
        context.activate([slots[number + row // 2] for row in range(8)])
        groups.add(id(context.stack.groups["x"]))
        places |= set(context.rows.entries)
        held = context.stack.groups["x"].a.array
        assert held[:, 0, 0][context.rows.array].tolist() == [number + row // 2 for row in range(8)]
        for _ in range(STACK_LIFETIME // 4):
            context.activate([None] * 8)
    assert len(groups) == 1 and max(places) <= 12
    context.activate(slots)
    for _ in range(STACK_LIFETIME):
        context.activate([slots[0], None])
    assert context.stack.groups["x"].a.array.shape[0] == 2, (
        "room for adapters that left is given up"
    )


def test_layers_share_the_product_of_the_array_that_they_were_given_together() -> None:
    served = serve(qwen3_model())
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    context = LoraContext()
    q, k, v = (ServedLinear(served.layers[name], name, context) for name in names)
    pairs = [random_adapter(served, seed, rank=seed) for seed in (1, 2)]
    del pairs[1][names[1]]
    slots = [slot(str(index), each) for index, each in enumerate(pairs)]
    one, other = (mx.random.normal((3, 5, 64), key=mx.random.key(seed)) for seed in (0, 1))
    for calls in (
        [(q, one), (k, one), (v, one)],  # seen to read one array
        [(q, one), (k, one), (v, one)],
        [(q, one), (k, other), (v, one)],
        [(v, other), (q, one), (q, one), (k, one)],
        [(k, one), (k, other), (v, other)],
    ):
        context.activate([slots[0], None, slots[1]])
        for layer, x in calls:
            got, plain, path = layer(x), layer["linear"](x), layer._path
            assert mx.array_equal(got[1], plain[1])
            for row, each in ((0, pairs[0]), (2, pairs[1])):
                pair = each.get(path)
                added = 0.0 if pair is None else (x[row] @ pair.a) @ pair.b
                assert mx.allclose(got[row], plain[row] + added, atol=1e-4)
    assert set(context.leaders.values()) == {names[0]}
    assert context.stack.groups[names[2]].paths == tuple(names)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("rows", [[0, 0], [0, 1], [0, None]])
def test_layers_share_no_array_that_changes_in_place_between_them(
    rows: list[int | None], dtype: mx.Dtype
) -> None:
    served = serve(qwen3_model())
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    layers = [copy.deepcopy(served.layers[name]) for name in names]
    for layer in layers:
        layer.set_dtype(dtype)
    context = LoraContext()
    q, k, v = (
        ServedLinear(layer, name, context) for layer, name in zip(layers, names, strict=True)
    )
    adapters = [random_adapter(served, seed) for seed in (1, 2)]
    slots = [slot(str(index), each) for index, each in enumerate(adapters)]
    for _ in range(3):
        context.activate([None if row is None else slots[row] for row in rows])
        x = mx.random.normal((2, 3, 64), key=mx.random.key(0)).astype(dtype)
        got, held = [q(x)], [x * 1]
        x += 1
        got += [k(x), v(x)]
        held += [x * 1] * 2
        for name, layer, y, array in zip(names, layers, got, held, strict=True):
            for row, index in enumerate(rows):
                wanted = layer(array)[row]
                if index is not None:
                    pair = adapters[index][name]
                    wanted = wanted + pair.scale * (array[row] @ pair.a) @ pair.b
                assert mx.allclose(y[row], wanted, rtol=2e-2, atol=2e-2), name
    assert [context.leaders[name] for name in names] == [names[0], names[1], names[1]]


def written(context: LoraContext) -> int:
    """Return how many writes of the stack have not been started."""
    text = StringIO()
    arrays = [each.array for group in context.stack.groups.values() for each in group.entries]
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("SliceUpdate")


def test_publishes_leave_nothing_unevaluated_of_a_layer_that_no_forward_calls() -> None:
    context = LoraContext()
    slots = [slot(name, {"x": LoraPair(mx.ones((3, 2)), mx.ones((2, 4)), 1.0)}) for name in "ab"]
    for version in range(300):
        slots[0].weights = AdapterWeights(
            "a", version, {"x": LoraPair(mx.full((3, 2), version), mx.ones((2, 4)), 1.0)}
        )
        context.activate(slots)
    assert written(context) == 0
    assert context.stack.groups["x"].a.array[:, 0, 0].tolist() == [0, 299, 1]


def test_adapters_that_no_forward_mixes_are_not_copied() -> None:
    """A prompt under one, rows under another; then a prompt beside rows that are mixed."""
    context = LoraContext()
    pair = LoraPair(mx.ones((3, 2)), mx.ones((2, 4)), 1.0)
    a, b = (slot(name, {"x": pair}) for name in "ab")
    context.hold_for([[a, a], [b], [None]])
    assert not context.stack.groups
    context.hold_for([[a], [b, None]])
    assert context.stack.groups["x"].a.array.shape[0] == 2
    context.hold_for([[a, b], [None]])
    assert context.stack.groups["x"].a.array.shape[0] == 3


def test_a_step_expects_each_forward_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    noted(monkeypatch, log, AdapterStack, "hold")
    served = serve(qwen3_model(), prefill_chunk=16, max_rows=2)
    for seed, name in enumerate("ab"):
        served.weights.add_adapter(name, random_adapter(served, seed))
    served.engine.add(greedy("a", [1, 2, 3], "a", 60))
    served.engine.step()
    served.engine.add(greedy("b", [*range(1, 40)], "b", 2))
    served.engine.step()
    served.engine.step()
    assert not log, "a prompt under b, a row under a"
    collect(served.engine)
    assert log, "rows under both"


def test_rows_that_decode_one_by_one_copy_no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_mask_axes", lambda model: (0, "asked for"))
    log: list[str] = []
    noted(monkeypatch, log, AdapterStack, "hold")
    served = serve(qwen3_model(), by_tokens=False)
    layers = {name: random_adapter(served, seed) for seed, name in enumerate("ab", 1)}
    for name, each in layers.items():
        served.weights.add_adapter(name, each)
    prompts = ragged_prompts(3, longest=8)
    rows = zip(prompts, ("a", "b", None), strict=True)
    for prompt, adapter in rows:
        served.engine.add(greedy(str(adapter), prompt, adapter, 6))
        served.engine.step()  # prompts that come together are computed together
    outputs = collect(served.engine)
    assert served.engine.cache.one_by_one and not log
    for name, prompt in zip("ab", prompts, strict=False):
        adapted = twin(served, layers[name])
        assert tokens_of(outputs, name) == naive_greedy(adapted, prompt, 6, eos=None)


def test_a_dora_adapter_that_joins_a_stack_without_one_keeps_its_gain() -> None:
    served = serve(qwen3_model())
    path = "model.layers.0.self_attn.q_proj"
    context, layer = LoraContext(), served.layers[path]
    adapted = ServedLinear(layer, path, context)
    pairs = [random_adapter(served, seed)[path] for seed in (1, 2, 3)]
    slots = [slot(str(index), {path: pair}) for index, pair in enumerate(pairs)]
    gain = mx.linspace(0.5, 1.5, layer.weight.shape[0])
    x = mx.random.normal((2, 3, 64), key=mx.random.key(0))
    context.activate([*slots[:2], slots[2]])
    context.activate(slots[:2])
    slots[1].weights = AdapterWeights("1", 1, {path: replace(pairs[1], gain=gain)})
    context.activate(slots[:2])
    got = adapted(x)
    for row, factor in ((0, 1.0), (1, gain)):
        wanted = (layer(x[row]) + (x[row] @ pairs[row].a) @ pairs[row].b) * factor
        assert mx.allclose(got[row], wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("device", "dtype", "dora"),
    [("", mx.float16, False), ("", mx.float32, True), (GPU_LIKE, mx.float16, False)],
)
def test_a_row_without_an_adapter_keeps_what_an_infinite_x_gives(
    device: str, dtype: mx.Dtype, dora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 · ∞ is NaN: neither a row of the base, nor one whose adapter lacks the layer, is multiplied
    with zeros."""
    monkeypatch.setenv(DEVICE_VARIABLE, device)
    context, layer = LoraContext(), nn.Linear(4, 3, bias=False)
    layer.weight = mx.ones((3, 4), dtype)
    adapted = ServedLinear(layer, "x", context)
    pair = LoraPair(mx.ones((4, 2)), mx.ones((2, 3)), 1.0, gain=mx.ones(3) if dora else None)
    one, other = slot("a", {"x": pair}), slot("b", {"y": pair})
    x = mx.ones((3, 2, 4), dtype)
    x[:, 1, 0] = mx.inf
    plain = layer(x)
    assert mx.isinf(plain[:, 1]).all().item()
    for rows in ([one, None, other], [one, None, None], [one, other, other]):
        context.activate(rows)
        got = adapted(x)
        assert got.dtype == dtype and mx.array_equal(got[1:], plain[1:])
        assert not mx.array_equal(got[0, 0], plain[0, 0])


def noted(patch: pytest.MonkeyPatch, log: list[str], kind: type, name: str) -> None:
    """Note the calls of a method."""
    called = getattr(kind, name)
    patch.setattr(
        kind, name, lambda self, *args, **kw: (log.append(name), called(self, *args, **kw))[1]
    )


def test_twenty_adapters_in_one_batch_answer_as_each_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks, kinds and layers differ; rows come and go; one is trained meanwhile, and the name of
    one goes to another of a higher rank. An entry is written before the step's first forward."""
    log: list[str] = []
    noted(monkeypatch, log, Entries, "write")
    noted(monkeypatch, log, ForwardContext, "_run")
    noted(monkeypatch, log, Engine, "step")
    served = serve(qwen3_model(), policy="policy", max_rows=14, prefix_cache_bytes=0)
    engine, weights = served.engine, served.weights

    def layers(seed: int, rank: int) -> dict[str, LoraPair]:
        made = random_adapter(served, seed, rank=rank, scale=0.5 + 0.1 * (seed % 4))
        if seed % 3 == 1:
            made = {path: made[path] for path in made if path[-6] in "qvn"}  # q, v, down
        if seed % 5 == 0:
            made = {
                path: replace(pair, magnitude=mx.full((pair.b.shape[1],), 0.6 + i % 7 / 7))
                for i, (path, pair) in enumerate(made.items())
            }
        return made

    adapters = {f"a{seed}": layers(seed, 1 + seed % 7) for seed in range(20)}
    trained = [layers(51, 4), layers(52, 4)]
    weights.publish_adapter(trained[0])
    for name, each in adapters.items():
        weights.add_adapter(name, each)
    names = [*list(adapters)[:3], "policy", None, *list(adapters)[3:], "policy", "a3"]
    prompts = ragged_prompts(len(names), longest=20)
    asked = [
        greedy(f"r{i}", prompt, name, tokens=5 + 3 * i % 14)
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    for each in asked:
        engine.add(each)
    events = [event for _ in range(7) for event in engine.step()]
    weights.publish_adapter(trained[1])
    weights.remove_adapter("a1")
    weights.add_adapter("a1", layers(60, 9))
    asked.append(greedy("late", [9, 8, 7], "a1", tokens=9))
    engine.add(asked[-1])
    outputs = {event.request_id: event.output for event in events} | collect(engine)
    steps = " ".join(log).split("step")
    assert sum("write" in step for step in steps) > 3
    assert not [step for step in steps if re.search("_run.*write", step)]
    adapters |= {"late": layers(60, 9)}
    splits = []
    for each in asked:
        completion = outputs[each.request_id].completions[0]
        if each.adapter == "policy":
            splits.append(completion.policy_versions.count(1))
            weights.publish_adapter(trained[0] if splits[-1] else trained[1])
            engine.add(each)
            for _ in range(splits[-1]):
                engine.step()
            weights.publish_adapter(trained[1])
            alone = collect(engine)
        else:
            if each.adapter:
                weights.add_adapter(
                    "alone", adapters["late" if each == asked[-1] else each.adapter]
                )
            alone = run(engine, [replace(each, adapter=each.adapter and "alone")])
        assert alone[each.request_id].completions[0].token_ids == completion.token_ids, each
    assert (
        0 < splits[0] < 14
        and len({token for o in outputs.values() for token in o.completions[0].token_ids}) > 60
    )
