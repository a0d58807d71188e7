"""Secrets are hidden by value, by place, by form and by name; other text stays as it is."""

import pytest

from mlx_parallm.config.load import parse_config
from mlx_parallm.system.redaction import REDACTED, Redactor, environment_secrets

HIDE = Redactor(["s3cret-value", "s3cret-value-longer", "tiny", None])


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("key s3cret-value!", f"key {REDACTED}!"),
        ("s3cret-value-longer", REDACTED),
        ("http://env:KEY99@host:8000/x", f"http://{REDACTED}@host:8000/x"),
        ("https://TOKEN@host", f"https://{REDACTED}@host"),
        ("http://host/x?token=abc&n=1", f"http://host/x?token={REDACTED}&n=1"),
        ("Authorization: Bearer abcdef123", f"Authorization: Bearer {REDACTED}"),
        ("hf_abcdefghijklmnop and sk-abcdefghijklmnop", f"{REDACTED} and {REDACTED}"),
    ],
)
def test_text(text: str, hidden: str) -> None:
    assert HIDE.text(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "tiny",
        "http://host:8000/v1",
        "mail a@b.c",
        "Bearer $MLX_PARALLM_API_KEY",
        "step_000100",
        "max_tokens=16",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert HIDE.text(text) == text


def test_nested_values_go_by_their_names_too() -> None:
    judge = {"hub_token": ["a"], "url": "http://u:p@h"}
    value = {"api_key": "x", "n": 3, "max_tokens": 16, "judge": judge, "password": ""}
    assert HIDE.value(value) == {
        "api_key": REDACTED,
        "n": 3,
        "max_tokens": 16,
        "judge": {"hub_token": REDACTED, "url": f"http://{REDACTED}@h"},
        "password": "",
    }


def test_a_configuration_without_secrets_is_saved_as_it_is() -> None:
    saved = parse_config(
        {
            "data": {"path": "a.jsonl", "end_token": "tokenizer"},
            "rl_training": {"algorithm": "sft"},
        },
        "x",
    )
    assert REDACTED not in saved.to_toml() and 'end_token = "tokenizer"' in saved.to_toml()


def test_variables_that_are_named_like_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MLX_PARALLM_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, f"value of {name}")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "not one")
    found = environment_secrets()
    assert {"value of HF_TOKEN", "value of WANDB_API_KEY", "value of AWS_SECRET_ACCESS_KEY"} <= set(
        found
    )
    assert "not one" not in found


def test_a_saved_configuration_holds_none() -> None:
    environment = {"kind": "tasks", "name": "sort", "options": {"judge_api_key": "KEY1"}}
    config = parse_config(
        {
            "server": {"api_key": "KEY2"},
            "rl_training": {"atropos": {"api_url": "http://env:KEY3@host"}},
            "environments": [environment],
        }
    )
    assert "KEY" not in config.to_toml()
    assert "@host" in config.to_toml()


def test_the_word_behind_an_option_is_its_value() -> None:
    redactor = Redactor()
    words = ["serve", "--password", "X", "--host", "h", "--api-key=abcdefgh1", "--token", "$TOKEN"]
    assert redactor.value({"command": words}) == {
        "command": [
            *("serve", "--password", REDACTED, "--host", "h", f"--api-key={REDACTED}"),
            *("--token", "$TOKEN"),
        ]
    }


@pytest.mark.parametrize(
    "text",
    [
        "the password is required",
        "password is incorrect",
        "the password was changed yesterday",
        "localhost:8000:x:y:z",
        "10:20:30:40:50",
        '{"eos_token": "</s>x1", "pad_token": "<pad_12>"}',
        "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ",
        "SGVsbG8gd29ybGQsIHRoaXMgaXMgcGxhaW4gdGV4dA==",
        "a family 👨\u200d👩\u200d👧 is not a secret",
    ],
)
def test_ordinary_text_beside_the_new_forms_stays(text: str) -> None:
    assert Redactor().text(text) == text
