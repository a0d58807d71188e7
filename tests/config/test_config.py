"""The configuration tree: strict, with errors that say what would be right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import tomli
from pydantic import ValidationError

from mlx_parallm.config.load import Config, load_config, parse_config
from mlx_parallm.config.number_fields import TRUTH_COUNTS, NumberFields
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_override_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[server]\nport = 9000\nbatch_size = 4\n[[environments]]\nkind = "tasks"\nname = "sum"\n'
    )
    overrides = ["server.port=9001", "model.base_path=builtin:tiny", "rl_training.lora.rank=2"]
    config = load_config(file, [*overrides, "environments.0.weight=3"])
    assert (config.server.port, config.server.batch_size, config.server.prefill_chunk) == (
        9001,
        4,
        512,
    )
    assert (config.model.base_path, config.rl_training.lora.rank) == ("builtin:tiny", 2)
    assert config.environments[0].weight == 3
    with pytest.raises(ConfigError, match="not an index below 1"):
        load_config(file, ["environments.1.weight=3"])


def test_a_mistake_is_looked_for_where_it_was_made(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rl_training]\nlearning_rate = -1\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["sever.port=1", "server.port=x"])
    message = str(caught.value)
    assert f"{file}: rl_training.learning_rate: Input should be greater than 0 (got -1)" in message
    assert "--set sever.port=1: unknown key 'sever'; did you mean 'server'?" in message
    assert "--set server.port=x: server.port: Input should be a valid integer" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rl_training.learning_rate=-1"], "rl_training.learning_rate"),
        (["rl_training.learning_rate=inf"], r"learning_rate: Input should be a finite number"),
        (["rl_training.max_grad_norm=nan"], r"max_grad_norm: Input should be a finite number"),
        (["rl_training.deterministic=true", "rl_training.max_staleness=1"], "max_staleness = 0"),
        (["rl_training.batch_size=4096"], "rollout_batch_size"),
        (
            ["rl_training.learningrate=1e-4"],
            r"'rl_training.learningrate'.*'rl_training.learning_rate'",
        ),
        (
            ["environments=[{kind='tasks', name='sum', wieght=2}]"],
            r"'environments.0.wieght'.*weight",
        ),
        (["sever.port=1"], r"'sever'.*'server'"),
        (["server"], "section.key=value"),
        (["foo=1"], r"^--set foo=1: unknown key 'foo'; docs/config.md lists every key$"),
        (
            ["total_steps=5"],
            r"^--set total_steps=5: unknown key 'total_steps'; did you mean 'rl_training.total_steps'\?$",
        ),
        (["rollout_batch_size=5"], r"did you mean 'rl_training.atropos.rollout_batch_size'\?$"),
        (["server.port=1", "server.port.x=1"], "is a value, not a section"),
    ],
)
def test_bad_keys_and_values_say_where_and_what_would_be_right(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, overrides)


def test_missing_and_malformed_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a file.*quickstart"):
        load_config(tmp_path / "nowhere.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[server\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(bad)


def test_secrets_are_redacted_and_the_rest_round_trips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLX_PARALLM_API_KEY", raising=False)
    config = load_config(None, ["server.api_key=hunter2", "rl_training.total_steps=7"])
    saved = config.to_toml()
    assert "hunter2" not in saved
    assert "hunter2" not in repr(config)
    assert config.resolve_api_key() == "hunter2"
    again = parse_config(tomli.loads(saved))
    assert again.rl_training == config.rl_training
    # a run must not lose its key in silence
    with pytest.raises(ConfigError, match="MLX_PARALLM_API_KEY"):
        again.resolve_api_key()


def test_the_key_comes_from_environment_before_file_before_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("from-file\n")
    config = load_config(None, [f"server.api_key_file={file}", "server.api_key=from-config"])
    monkeypatch.delenv("MLX_PARALLM_API_KEY", raising=False)
    assert config.resolve_api_key() == "from-file"
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "from-environment")
    assert config.resolve_api_key() == "from-environment"
    file.unlink()
    monkeypatch.setenv("MLX_PARALLM_API_KEY", "  ")
    with pytest.raises(ConfigError, match="MLX_PARALLM_API_KEY"):
        config.resolve_api_key()
    monkeypatch.delenv("MLX_PARALLM_API_KEY")
    with pytest.raises(ConfigError, match=r"server\.api_key"):
        load_config(None, ["server.api_key='  '"]).resolve_api_key()
    with pytest.raises(ConfigError, match="api_key_file"):
        config.resolve_api_key()


def test_a_bound_on_oversampling_needs_something_to_replace() -> None:
    with pytest.raises(ConfigError, match=r"max_oversampling.*dynamic_sampling"):
        load_config(None, text="[rl_training]\ndynamic_sampling = false\nmax_oversampling = 2.0")
    with pytest.raises(ConfigError, match="at least 1, or 0"):
        load_config(None, text="[rl_training]\nmax_oversampling = 0.5")


def test_evaluations_are_short_where_chats_come_first(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    metal = {"rl_training.max_eval_ms": 1000}
    for text, expected in (
        ('serve_priority = "chat"', 100),
        ('serve_priority = "chat"\nmax_eval_ms = 30', 30),
        ('serve_priority = "serve"', 1000),
    ):
        file.write_text(f"[rl_training]\n{text}\n")
        assert load_config(file, defaults=metal).rl_training.max_eval_ms == expected
    assert RLTrainingConfig(serve_priority="chat").max_eval_ms == 100


@pytest.mark.parametrize(
    "setting",
    [
        "rl_training.learning_rate=true",
        "rl_training.kl_beta=false",
        "rl_training.max_grad_norm=true",
        "rl_training.keep_checkpoints=true",
        "rollouts.keep=true",
        "environments.0.group_size=true",
        "server.port=true",
    ],
)
def test_true_is_no_number(setting: str) -> None:
    """A learning rate of `true` was 1.0."""
    with pytest.raises(ConfigError, match="number"):
        load_config("quickstart", [setting])


def test_where_true_is_an_alternative_it_stays() -> None:
    assert load_config("quickstart", ["rl_training.keep_best=false"]).rl_training.keep_best is False
    assert load_config("quickstart", ["server.open_objects=true"]).server.open_objects is True


def test_a_run_is_never_its_own_teacher(tmp_path: Path) -> None:
    """`checkpoints/final` links to what finished last: behind it, too."""
    run = tmp_path / "mine"
    (run / "final").mkdir(parents=True)
    (tmp_path / "final").symlink_to(run / "final")

    def config(teacher: Path, name: str) -> Config:
        return parse_config(
            {
                "rl_training": {
                    "checkpoint_dir": str(tmp_path),
                    "run_name": name,
                    "distillation": {
                        "teachers": [{"name": "t", "kind": "checkpoint", "path": str(teacher)}]
                    },
                }
            }
        )

    for teacher in (run, run / "final", tmp_path / "final"):
        with pytest.raises(ConfigError, match="would learn from itself"):
            config(teacher, "mine")
        config(teacher, "another")


def test_true_is_no_number_in_any_collection() -> None:
    class Held(NumberFields):
        of_tuple: tuple[int, ...] = ()
        fixed: tuple[str, float] | None = None
        sequence: Sequence[int] = ()
        numbers: set[int] | frozenset[int] = frozenset()
        mapping: Mapping[str, int] | None = None
        nested: Mapping[str, tuple[list[float], ...]] | None = None
        scores: tuple[Annotated[float, TRUTH_COUNTS], ...] = ()
        switches: tuple[int | bool, ...] | list[str] = ()
        anything: Sequence[Any] = ()

    refused: dict[str, Any] = {
        "of_tuple": [2, True],
        "fixed": ["a", False],
        "sequence": (1, False),
        "numbers": {True},
        "mapping": {"a": True},
        "nested": {"a": [[1.0], [True]]},
    }
    for name, value in refused.items():
        with pytest.raises(ValidationError, match="a number is wanted, not true or false"):
            Held(**{name: value})
    taken = {"scores": [True], "switches": [True, 2], "anything": [True], "of_tuple": [1, 2]}
    assert Held(**taken).model_dump(include={*taken}) == {
        name: tuple(value) if name != "anything" else value for name, value in taken.items()
    }
    for name, data in (
        ("layers", {"rl_training": {"lora": {"layers": [True, 4]}}}),
        (
            "reward_weights",
            {"environments": [{"kind": "tasks", "name": "sum", "reward_weights": [True]}]},
        ),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*not true or false"):
            parse_config(data)
