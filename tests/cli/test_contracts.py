"""mlx_parallm_doctor --contracts: each contract holds on the tiny model, and is seen to be
broken when it is."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_parallm
from mlx_parallm import cli
from mlx_parallm.cli import contracts, probes
from mlx_parallm.cli.contracts import (
    ROUNDING,
    ContractResult,
    RoundingTrial,
    Subject,
    block,
    compare,
    memory_bandwidth,
    rounding,
    subject_of,
    tried,
)
from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import ModelError, ParallmError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.types import Completion
from tests.tiny_models import save_checkpoint

EXACT, HALF = RoundingTrial(1e-4, 1e-5, exact=True), RoundingTrial(0.25, 0.0625)
CONFIG = ["server.port=8000", "model.base_path=builtin:tiny"]  # the port is not taken


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contracts, "memory_bandwidth", lambda: 1e10)
        with subject_of(load_config(None, CONFIG)) as made:
            made.rate = 6 * contracts.NEW_TOKENS / contracts.ALONE_S  # six sequences a comparison
            yield made


@pytest.fixture(autouse=True)
def one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ones are tried in test_probes."""
    monkeypatch.setattr(probes, "PROBES", probes.PROBES[:1])


def answer(tokens: Sequence[int], logprob: float = -1.0) -> Completion:
    return Completion(
        0, "", tuple(tokens), (logprob,) * len(tokens), None, None, (0,) * len(tokens), "length"
    )


def test_equal_answers_pass() -> None:
    assert compare([answer(range(24))], [answer(range(24), -1.00001)], EXACT).passed is True


def test_float32_that_is_tf32_has_wider_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rounding(mx.float32) == ROUNDING[mx.float32]
    monkeypatch.setattr(contracts, "float32_is_tf32", lambda: True)
    assert rounding(mx.float32) == ROUNDING[mx.float16]
    assert rounding(mx.bfloat16) == ROUNDING[mx.bfloat16]


def test_a_tie_passes_in_float32() -> None:
    """The likeliest token of both has the same log-probability, so both were the likeliest."""
    result = compare([answer(range(24))], [answer([*range(20), 7, 8, 9, 10])], EXACT)
    assert result.passed is True
    assert (
        "0 of 1 sequences identical, 1 up to a tie, 20 of 24 tokens before a difference"
        in result.measured
    )


def test_one_other_token_fails_in_float32_and_is_rounding_in_half_precision() -> None:
    alone, other = [answer(range(24))], answer([*range(20), 7, 8, 9, 10])
    batched = [replace(other, logprobs=(*other.logprobs[:20], -1.001, *other.logprobs[21:]))]
    result = compare(alone, batched, EXACT)
    assert result.passed is False
    assert "0 of 1 sequences identical, 20 of 24 tokens before a difference" in result.measured
    assert compare(alone, batched, HALF).passed is True
    assert compare(alone, [answer([*range(6), *range(50, 68)])], HALF).passed is False, (
        "too early for rounding"
    )


@pytest.mark.parametrize(("bound", "logprob"), [(EXACT, -1.001), (HALF, -1.5)])
def test_other_log_probabilities_fail(bound: RoundingTrial, logprob: float) -> None:
    assert compare([answer(range(24))], [answer(range(24), logprob)], bound).passed is False


def test_a_comparison_of_few_tokens_is_not_judged() -> None:
    result = compare([answer([5] * 24)], [answer([5] * 24)], EXACT)
    assert result.passed is None
    assert "1 distinct" in result.measured


def test_batched_is_alone(subject: Subject) -> None:
    greedy, seeded = contracts.batched_is_alone(subject)
    assert (greedy.contract, seeded.contract) == (
        "batched = alone, greedy",
        "batched = alone, seeded",
    )
    for result in (greedy, seeded):
        assert result.passed is not False, result
        assert "6 of 6 sequences identical" in result.measured or "up to a tie" in result.measured


def test_publish_under_load(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are the machine's business; that every request is answered is ours."""
    monkeypatch.setattr(contracts, "PUBLISHES", 30)
    before = subject.weights.version
    held, whole, requests = contracts.publish_under_load(subject)
    assert requests.passed, requests
    assert subject.weights.version == before + 31, "30, and the policy's own adapter again"
    assert "30 publishes, 8 sequences" in whole.measured
    assert float(held.measured.split()[0]) <= float(whole.measured.split()[0])


def test_engine_is_trainer_and_memory_is_as_predicted(subject: Subject) -> None:
    (result,) = contracts.engine_is_trainer(subject)
    assert result.passed, result
    (memory,) = contracts.memory(subject)
    assert memory.passed, memory


def test_a_model_that_cannot_be_trained_is_tried_as_it_is_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(contracts, "memory_bandwidth", lambda: 1e10)
    monkeypatch.setattr(
        contracts, "layer_without_gradient", lambda model: "layer 3 (mixer: Kernel) has none"
    )
    monkeypatch.setattr(contracts, "ALONE_S", 0.0)
    assert contracts.run(load_config(None, [*CONFIG, "model.dtype=float32"])) == 0
    printed = capsys.readouterr().out
    assert printed.count("| 4 of 4 sequences identical") == 2, printed
    assert printed.count("| not judged | not tried: layer 3 (mixer: Kernel) has none |") == 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rl_training.lora.enabled=false", "tried with an adapter"),
        ("model.base_path=no/such/place", "no model at"),
    ],
)
def test_what_cannot_be_tried_is_said_first(
    setting: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        contracts, "memory_bandwidth", lambda: pytest.fail("something was measured")
    )
    with (
        pytest.raises(ParallmError, match=message),
        subject_of(load_config(None, [*CONFIG, setting])),
    ):
        pass


def test_an_engine_with_other_weights_than_the_trainer_is_found_out(subject: Subject) -> None:
    layers = subject.policy.adapter()
    subject.weights.publish_adapter(
        {path: LoraPair(p.a, p.b * 1.1, p.scale) for path, p in layers.items()}
    )
    try:
        (result,) = contracts.engine_is_trainer(subject)
    finally:
        subject.weights.publish_adapter(subject.policy.adapter())
    assert result.passed is False, result


def test_a_slow_engine_is_judged_only_on_weights_that_matter(subject: Subject) -> None:
    (small,) = contracts.bandwidth(replace(subject))
    assert (small.passed, "too small to judge" in small.bound) == (None, True)
    # bound: 100 tokens/s
    (large,) = contracts.bandwidth(replace(subject, bandwidth=subject.weight_bytes * 100.0))
    assert large.bound.startswith("≥ half of 100.0 tok/s")
    slow = replace(subject, bandwidth=subject.weight_bytes * 1e5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contracts, "LARGE_STEP_S", 0.0)
        assert contracts.bandwidth(slow)[0].passed is False


def test_what_a_contract_raises_is_its_result(subject: Subject) -> None:
    def broken(_: Subject) -> list[ContractResult]:
        raise ModelError("no kernel\n for |this|")

    assert tried("x", broken, subject) == [
        ContractResult("x", False, "no kernel for /this/", "no error")
    ]


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (None, 0), (False, 1)])
def test_the_block_and_the_exit_code(
    passed: bool | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = ContractResult("memory", passed, "1 GB", "≤ 2 GB")
    monkeypatch.setattr(contracts, "CONTRACTS", {"memory": lambda _: [result]})
    monkeypatch.setattr(contracts, "memory_bandwidth", lambda: 1e10)
    assert contracts.run(load_config(None, [*CONFIG, "model.dtype=float32"])) == code
    printed = capsys.readouterr().out
    assert printed.startswith("### mlx_parallm contracts\n")
    for fact in (
        f"mlx-parallm {mlx_parallm.__version__}",
        "mlx-lm ",
        "Python 3.",
        "builtin:tiny (qwen3), float32",
    ):
        assert fact in printed
    word = {True: "passed", False: "**FAILED**", None: "not judged"}[passed]
    assert printed.endswith(block([], [result]).splitlines()[-1] + "\n")
    assert f"| memory | {word} | 1 GB | ≤ 2 GB |\n" in printed


def test_every_dtype_that_can_be_asked_for_has_its_bound() -> None:
    names = {str(dtype).removeprefix("mlx.core.") for dtype in ROUNDING}
    assert names == {"float32", "float16", "bfloat16"}


def test_the_flags_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Config] = []
    monkeypatch.setattr(contracts, "run", lambda config: given.append(config) or 1)
    assert cli.doctor(["--contracts", "--model", "own/model", "--set", "model.dtype=float16"]) == 1
    assert (given[0].model.base_path, given[0].model.dtype) == ("own/model", "float16")


def test_contracts_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.doctor(["--contracts"])
    assert end.value.code == 2
    assert "--contracts needs --model M" in capsys.readouterr().err


def test_a_model_alone_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.doctor(["--model", "builtin:tiny"])
    told = capsys.readouterr().out
    assert "qwen3, as transformers" in told
    assert "not followed: none" in told
    path = save_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text()) | {"attention_bias": True}
    (path / "config.json").write_text(json.dumps(config))
    assert cli.doctor(["--model", str(path)]) == 1
    assert "not followed: attention_bias = True" in capsys.readouterr().out


def test_the_measured_bandwidth_is_a_bandwidth() -> None:
    assert 1e7 < memory_bandwidth(1 << 20) < 1e14
