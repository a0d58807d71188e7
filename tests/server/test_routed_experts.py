"""The experts of sampled tokens in answers over HTTP, and back again in scored groups."""

import base64
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import numpy as np
import pytest

from mlx_parallm.config.load import Config
from mlx_parallm.daemon import Serving
from mlx_parallm.errors import ConfigError, RolloutRejectedError
from mlx_parallm.faces.atropos.queue import AtroposQueue
from mlx_parallm.faces.atropos.wire import from_scored_data
from mlx_parallm.models.experts.routing import ForwardRouting, prepare_routing, routed
from mlx_parallm.models.loading import load_model
from mlx_parallm.rollout_store.checks import check_group
from mlx_parallm.rollout_store.companions import with_fitting_experts
from mlx_parallm.rollout_store.payload import decode_group, encode_group
from mlx_parallm.rollout_store.store import RolloutStore
from mlx_parallm.server.protocol.routing import as_int32, as_npy, read_npy
from mlx_parallm.types import RoutedExperts
from mlx_parallm.weights import SharedWeights
from tests.atropos.groups import ATROPOS_SETTINGS
from tests.tiny_models import EXPERTS, QWEN3, save_checkpoint

MIXTURE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe"}
PROMPT, LENGTH = [5, 6, 7, 8, 9], 6


def serve(directory: Path, **server: Any) -> Iterator[tuple[httpx.Client, Path]]:
    settings = {"port": 0, "batch_size": 4, **server}
    serving = Serving(
        Config.model_validate({"model": {"base_path": str(directory)}, "server": settings})
    )
    try:
        serving.listen()
        loaded = serving.load()
        weights = SharedWeights(loaded.model, keep_versions=1)
        serving.open(loaded, weights, adapters={}, main_adapter=None)
        with httpx.Client(base_url=serving.url, timeout=60) as http:
            yield http, directory
    finally:
        serving.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("mixture") / "model", MIXTURE)


@pytest.fixture(scope="module")
def recording(directory: Path) -> Iterator[tuple[httpx.Client, Path]]:
    yield from serve(directory, enable_return_routed_experts=True)


def rows_of(directory: Path, tokens: list[int]) -> np.ndarray:
    """The experts of a forward over the tokens, sorted, by the model itself."""
    model = load_model(Config.model_validate({"model": {"base_path": str(directory)}}).model).model
    prepare_routing(model)
    routing = ForwardRouting()
    with routed(routing):
        model(mx.array([tokens]))
    return np.sort(np.array(routing.by_token()), axis=-1)


def npy(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def test_each_route_returns_the_experts_that_the_model_took(recording: Any) -> None:
    """vLLM's field always on its route; on /generate in the two forms where a request asks."""
    http, directory = recording
    sampling = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
    body = {"token_ids": PROMPT, "sampling_params": sampling}
    choice = http.post("/inference/v1/generate", json=body).json()["choices"][0]
    tokens = PROMPT + choice["token_ids"]
    array = npy(choice["routed_experts"])
    assert array.shape == (len(tokens) - 1, 2, 2) and array.dtype == np.int16
    assert (array[: len(PROMPT) - 1] == -1).all(), "a prompt's are not recorded"
    wanted = rows_of(directory, tokens[:-1])[len(PROMPT) - 1 :]
    np.testing.assert_array_equal(np.sort(array[len(PROMPT) - 1 :], axis=-1), wanted)

    vllm = {"prompt": {"prompt_token_ids": PROMPT}, "return_routed_experts": True, **sampling}
    answer = http.post("/generate", json=vllm).json()
    np.testing.assert_array_equal(npy(answer["routed_experts"][0]), array)
    assert (
        "routed_experts"
        not in http.post("/generate", json=vllm | {"return_routed_experts": False}).json()
    )

    sglang: dict[str, Any] = {
        "input_ids": PROMPT,
        "return_routed_experts": True,
        "sampling_params": {"max_new_tokens": LENGTH, "temperature": 0, "ignore_eos": True},
    }
    meta = http.post("/generate", json=sglang).json()["meta_info"]
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32)
    np.testing.assert_array_equal(flat.reshape(-1, 2, 2), array)
    later = http.post("/generate", json=sglang | {"routed_experts_start_len": 4}).json()[
        "meta_info"
    ]
    flat = np.frombuffer(base64.b64decode(later["routed_experts"]), np.int32)
    np.testing.assert_array_equal(flat.reshape(-1, 2, 2), array[4:])


def test_the_prompts_experts_are_recorded_in_prefill_by_setting(directory: Path) -> None:
    """A prompt of several chunks, two that share a prefill, and one whose beginning the prefix cache
    holds."""
    rng = np.random.default_rng(0)
    long, other = rng.integers(0, 300, 40).tolist(), rng.integers(0, 300, 7).tolist()
    settings = {"enable_return_routed_experts": True, "record_prompt_experts": True}
    for http, _ in serve(directory, prefill_chunk=16, prefix_cache_bytes=1 << 22, **settings):
        sampling = {"max_tokens": 3, "temperature": 1.0, "ignore_eos": True, "n": 2}
        for prompt in (long, other, PROMPT):
            body = {"token_ids": prompt, "sampling_params": sampling}
            for choice in http.post("/inference/v1/generate", json=body).json()["choices"]:
                wanted = rows_of(directory, (prompt + choice["token_ids"])[:-1])
                array = np.sort(npy(choice["routed_experts"]), axis=-1)
                np.testing.assert_array_equal(array, wanted)
        again = {"token_ids": [*long, 5, 6], "sampling_params": sampling | {"n": 1}}
        [choice] = http.post("/inference/v1/generate", json=again).json()["choices"]
        array = np.sort(npy(choice["routed_experts"]), axis=-1)
        wanted = rows_of(directory, [*long, 5, 6, *choice["token_ids"][:-1]])
        np.testing.assert_array_equal(array, wanted)


def test_a_stream_has_none_and_says_so(recording: Any) -> None:
    body = {"token_ids": PROMPT, "stream": True, "return_routed_experts": True}
    answer = recording[0].post("/inference/v1/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_routed_experts"


def test_a_server_that_records_nothing_refuses(directory: Path) -> None:
    for http, _ in serve(directory):
        bodies: dict[str, dict[str, Any]] = {
            "/inference/v1/generate": {"token_ids": PROMPT},
            "/generate": {"input_ids": PROMPT},
        }
        for route, body in bodies.items():
            answer = http.post(route, json=body | {"return_routed_experts": True})
            assert answer.status_code == 400
            assert "server.enable_return_routed_experts = true" in answer.json()["error"]["message"]
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        plain = http.post("/inference/v1/generate", json=body).json()
        assert "routed_experts" not in plain["choices"][0]


def test_a_dense_model_cannot_record() -> None:
    with pytest.raises(ConfigError, match="enable_return_routed_experts"):
        next(serve(Path("builtin:tiny"), enable_return_routed_experts=True))


# ---------------------------------------------------------------------- in scored groups

RECORDED = RoutedExperts(2, 2, bytes([0, 1, 2, 3, 3, 1, 0, 2]))


def scored(text: str | None, **fields: Any) -> dict[str, Any]:
    """One sequence of three given tokens and two sampled ones."""
    data = {
        "tokens": [[5, 6, 7, 8, 9]],
        "masks": [[-100, -100, -100, 8, 9]],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25]],
        "scores": [1.0],
        "routed_experts": None if text is None else [text],
    }
    return data | fields


def test_what_an_answer_returns_comes_back_in_a_group() -> None:
    group = from_scored_data(scored(as_npy(RECORDED, 3)), policy_version=1, environment="e")
    group = with_fitting_experts(group, (2, 2, 4))
    check_group(group, vocab_size=300, max_token_length=16)
    assert group.rollouts[0].routed_experts == RECORDED
    assert decode_group(encode_group(group)) == group
    without = from_scored_data(scored(None), policy_version=1, environment="e")
    assert without.rollouts[0].routed_experts is None and "ignored_fields" not in without.metadata


def test_experts_that_are_not_repeated_are_listed() -> None:
    group = from_scored_data(scored(as_npy(RECORDED, 3)), policy_version=1, environment="e")
    group = replace(
        group, rollouts=(replace(group.rollouts[0], earlier=(replace(group.rollouts[0]),)),)
    )
    left = with_fitting_experts(group, None)
    assert [part.routed_experts for part in left.rollouts[0].segments] == [None, None]
    assert left.metadata["ignored_fields"] == ["routed_experts"]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((3, 2, 4), "of 2 layers and 2 experts a token; the model has 3 and 2"),
        ((2, 1, 4), "the model has 2 and 1"),
        ((2, 2, 3), "expert 3, but a layer of the model has 3"),
    ],
)
def test_experts_of_another_model_are_rejected(shape: tuple[int, int, int], words: str) -> None:
    group = from_scored_data(scored(as_npy(RECORDED, 3)), policy_version=1, environment="e")
    with pytest.raises(RolloutRejectedError, match=words):
        with_fitting_experts(group, shape)


def saved(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def headed(shape: str) -> str:
    """A .npy file that has a header alone."""
    header = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    file = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    return base64.b64encode(file).decode()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("?", "no base64 of a .npy file"),
        (as_int32(RECORDED, 3), "no base64 of a .npy file"),
        (as_npy(RECORDED, 2), "3 rows for 5 tokens"),
        (saved(np.full((4, 2, 2), -1)), "sampled token 3 has no recorded experts"),
        (saved(np.zeros((4, 2))), r"no array of whole numbers \[tokens - 1, layers"),
        (saved(np.zeros((4, 2, 2))), "no array of whole numbers"),
        (saved(np.zeros((4, 0, 2), np.int16)), "has no experts"),
        (saved(np.full((4, 2, 2), 1 << 20)), "expert 1048576 is above 32767"),
        (saved(np.array([{}], object)), "no base64 of a .npy file"),
        (headed("(100000000000000, 1, 1)"), "no base64 of a .npy file"),
        (headed("(1180591620717411303424, 1, 1)"), "no base64 of a .npy file"),
        (headed("(" * 3000), "no base64 of a .npy file"),
        (base64.b64encode(b"PK\x03\x04garbage").decode(), "no base64 of a .npy file"),
    ],
)
def test_experts_of_another_form_are_rejected(text: str, words: str) -> None:
    with pytest.raises(RolloutRejectedError, match=f"sequence 0: routed_experts: .*{words}"):
        from_scored_data(scored(text), policy_version=1, environment="e")


def test_a_sequence_of_several_turns_keeps_the_rows_of_its_sampled_tokens() -> None:
    rows = np.arange(5 * 2 * 2).reshape(5, 2, 2)
    experts, others = read_npy(saved(rows), [0, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(experts.array(), rows[[0, 3, 4]])
    assert not experts.wide
    [between] = others
    assert between.start == 1
    np.testing.assert_array_equal(between.experts.array(), rows[1:3])
    rows[1] = -1
    [_, [left]] = read_npy(saved(rows), [0, 1, 0, 0, 1, 1])
    assert left == between.behind(2)
    assert read_npy(saved(rows + 250), [0, 1, 0, 0, 1, 1])[0].wide


def test_lists_of_other_lengths_are_rejected() -> None:
    both = scored(None, routed_experts=[None, None])
    with pytest.raises(RolloutRejectedError, match="routed_experts"):
        from_scored_data(both, policy_version=1, environment="e")


def test_the_queue_of_a_run_stores_what_its_trainer_repeats(store: RolloutStore) -> None:
    shapes: list[tuple[int, int, int] | None] = [(2, 2, 4)]
    settings = replace(ATROPOS_SETTINGS, experts=lambda: shapes[-1])
    queue = AtroposQueue(store, settings, current_step=lambda: 0, policy_version=lambda: 1)
    assert queue.submit(scored(as_npy(RECORDED, 3), group_id="first"))
    shapes.append(None)
    assert queue.submit(scored(as_npy(RECORDED, 3), group_id="second"))
    shapes.append((2, 2, 3))
    with pytest.raises(RolloutRejectedError, match=r"expert 3, .*3"):
        queue.submit(scored(as_npy(RECORDED, 3), group_id="third"))
    stored = {group.group_id: group for group in store.groups(store.known_ids())}
    assert stored["first"].rollouts[0].routed_experts == RECORDED
    assert stored["second"].rollouts[0].routed_experts is None
    assert stored["second"].metadata["ignored_fields"] == ["routed_experts"]
    assert stored.keys() == {"first", "second"}
