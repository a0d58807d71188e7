"""SharedWeights: two-sided lock, a publish copies nothing, and one that cannot have the lock
changes nothing."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_parallm.errors import AdapterError, PublishTimeoutError
from mlx_parallm.models.adapters.adapter import AdapterWeights, LoraPair
from mlx_parallm.models.loading import evaluate_module
from mlx_parallm.models.lora import prepare_for_serving
from mlx_parallm.weights import PolicyHistory, SharedWeights
from tests.active_memory import active_memory


def layers(fill: float, size: int = 8) -> dict[str, LoraPair]:
    pair = LoraPair(mx.full((size, 2), fill), mx.full((2, size), fill), 2.0)
    return {"proj": pair}


class TinyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)


def shared(policy: str | None = "policy", version: int = 0) -> SharedWeights:
    model = TinyModel()
    evaluate_module(model)
    weights = SharedWeights(model, policy=policy, version=version, keep_versions=1)
    if policy:
        weights.add_adapter(policy, layers(0.0))
    return weights


def test_publish_rebinds_the_very_arrays_under_the_next_version() -> None:
    weights = shared(version=7)
    with weights.read() as view:
        held = view.adapters["policy"]
    new = layers(1.0)
    report = weights.publish_adapter(new)
    assert report.version == weights.version == 8
    assert held.version == 7 and held.layers["proj"].a[0, 0].item() == 0.0, (
        "what is in use survives"
    )
    with weights.read() as view:
        assert view.policy_version == 8
        assert view.adapters["policy"].version == 8
        assert view.adapters["policy"].layers["proj"].a is new["proj"].a


def test_publish_adds_no_active_memory() -> None:
    weights = shared()
    new = layers(3.0, size=1024)
    mx.eval([new["proj"].a, new["proj"].b])
    weights.publish_adapter(new)
    before = active_memory()
    for _ in range(50):
        weights.publish_adapter(new)
    assert active_memory() <= before


def test_full_weights_are_rebound_in_the_tree_being_served() -> None:
    model = TinyModel()
    evaluate_module(model)
    trainer = copy.deepcopy(model)
    weights = SharedWeights(model, keep_versions=1)
    array = mx.ones((8, 8))
    weights.publish_parameters({"proj.weight": array})
    assert model.proj.weight is array
    assert not mx.array_equal(trainer.proj.weight, array)


def test_a_layer_multiplies_with_the_new_weight_and_keeps_no_old_one() -> None:
    model = TinyModel()
    model.proj = nn.Linear(512, 512, bias=False)
    evaluate_module(model)
    weights = SharedWeights(model, keep_versions=1)
    context, x = prepare_for_serving(model), mx.ones((2, 1, 512))
    before = active_memory()
    for fill in (1.0, 2.0, 3.0):
        context.activate([None, None])
        mx.eval(model.proj(x), model.proj(x[:1]))  # it has views of its weight now
        weights.publish_parameters({"proj.weight": mx.full((512, 512), fill)})
        assert active_memory() < before + 512 * 512
        context.activate([None, None])
        assert model.proj(x)[1, 0, 0].item() == model.proj(x[:1])[0, 0, 0].item() == 512 * fill
    model.proj.weight = mx.zeros((512, 512))  # as Gemma 3n does in its forward
    assert model.proj(x)[1, 0, 0].item() == 0


def test_a_reader_delays_the_writer_and_a_timeout_changes_nothing() -> None:
    weights = shared()
    with weights.read(), pytest.raises(PublishTimeoutError, match="20 ms"):
        weights.publish_adapter(layers(1.0), timeout_s=0.02)
    assert weights.version == 0
    assert weights.publish_adapter(layers(1.0), timeout_s=0.02).version == 1


def test_a_waiting_writer_goes_before_new_readers() -> None:
    weights = shared()
    order: list[str] = []
    reading, release = threading.Event(), threading.Event()

    def first_reader() -> None:
        with weights.read():
            reading.set()
            release.wait()

    def writer() -> None:
        weights.publish_adapter(layers(1.0))
        order.append("writer")

    def second_reader() -> None:
        with weights.read() as view:
            order.append(f"reader saw {view.policy_version}")

    threads = [threading.Thread(target=target) for target in (first_reader, writer, second_reader)]
    threads[0].start()
    reading.wait()
    threads[1].start()
    while not weights.lock._writers_waiting:
        pass
    threads[2].start()
    assert order == []
    release.set()
    for thread in threads:
        thread.join()
    assert "reader saw 1" in order


def test_readers_share_the_lock() -> None:
    weights = shared()
    barrier = threading.Barrier(2, timeout=5)

    def reader() -> None:
        with weights.read():
            barrier.wait()  # passes only if both are inside at once

    with ThreadPoolExecutor(2) as pool:
        for reading in [pool.submit(reader), pool.submit(reader)]:
            reading.result()


def test_the_policy_cannot_be_replaced_or_removed_from_outside() -> None:
    weights = shared()
    with pytest.raises(AdapterError, match="policy being trained"):
        weights.add_adapter("policy", layers(1.0))
    with pytest.raises(AdapterError, match="policy being trained"):
        weights.remove_adapter("policy")
    weights.add_adapter("other", layers(1.0))
    weights.remove_adapter("other")
    with pytest.raises(AdapterError, match="no adapter 'other'"):
        weights.remove_adapter("other")


def test_a_version_is_kept_until_the_last_who_holds_it_lets_go() -> None:
    history = PolicyHistory("policy", 1, None)
    history.keep(AdapterWeights("policy", 1, {}))
    history.hold(1)
    history.hold(1)
    history.keep(AdapterWeights("policy", 2, {}))
    history.release(1)
    assert history.versions() == [1, 2]
    history.release(1)
    assert history.versions() == [2] and history.in_memory(1) is None
    with pytest.raises(AdapterError, match="version 1 is not kept"):
        history.hold(1)
