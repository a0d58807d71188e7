"""Print how configurations resolve, as JSON, or compare with what another version printed.

    .venv/bin/python scripts/resolved_configs.py > before.json
    .venv/bin/python scripts/resolved_configs.py --against before.json

Resolves every shipped TOML, every TOML block of the documentation, every configuration of the
tests, and generated combinations of keys, refused ones too: algorithms and losses with each other's
keys, as `--set`, as a file, and as the saved configuration of a run under other settings.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tomli_w

from mlx_parallm.config.algorithm import LOSSES as LOSS_KINDS
from mlx_parallm.config.algorithm import AlgorithmName
from mlx_parallm.config.load import load_config
from mlx_parallm.config.training import RLTrainingConfig
from mlx_parallm.errors import ConfigError

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```toml\n(.*?)^```", re.MULTILINE | re.DOTALL)
LOSSES = (*LOSS_KINDS, "python:losses.py:mine", "nothing")
TEXTS = {
    "loss": list(LOSSES),
    "advantage": ["std", "std_sample", "mean", "rloo", "none", "python:a.py:f", "median"],
    "layers": ["all", "last 8", "first 3"],
}
ONE_IN_TEN = 0.1


def values_of(name: str, annotation: Any) -> list[Any]:
    """Return values to try for a key, most of them valid."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if name in TEXTS:
        return TEXTS[name]
    if origin is Literal:
        return list(parts)
    if origin is Annotated:
        return values_of(name, parts[0])
    if origin in (Union, UnionType):
        return [value for part in parts for value in values_of(name, part)]
    if origin is tuple:
        return [[], values_of(name, parts[0])[:1]]
    kinds: dict[Any, list[Any]] = {
        bool: [True, False],
        int: [0, 1, 2, 4, 10_000],
        float: [0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0],
        str: ["x"],
        Path: ["runs"],
    }
    return kinds.get(annotation, [])


def keys_of(section: Any, prefix: str) -> Iterator[tuple[str, list[Any]]]:
    for name, field in section.model_fields.items():
        if hasattr(field.annotation, "model_fields"):
            yield from keys_of(field.annotation, f"{prefix}.{name}")
        elif values := values_of(name, field.annotation):
            yield f"{prefix}.{name}", values


def resolved(arguments: dict[str, Any]) -> Any:
    """Return every key of a configuration, or its error. `arguments`: those of `load_config`."""
    try:
        return load_config(None, **arguments).redacted()
    except ConfigError as error:
        return {"error": str(error)}


def settings_of(pairs: dict[str, Any]) -> list[str]:
    return [f"{key}={tomli_w.dumps({'v': value})[4:].strip()}" for key, value in pairs.items()]


def generated(count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield combinations of keys of [rl_training] and [data], each in three ways."""
    draw = random.Random(seed)
    keys = dict(keys_of(RLTrainingConfig, "rl_training"))
    few = [key for key in keys if key.count(".") == 1 or ".lora." in key or ".preference" in key]
    names, saved = get_args(AlgorithmName), list[tuple[str, str]]()
    for number in range(count):
        pairs: dict[str, Any] = {"rl_training.algorithm": draw.choice(names)}
        if draw.random() < 0.5:
            pairs["rl_training.loss"] = draw.choice(LOSSES)
        for key in draw.sample(
            few if draw.random() < 0.8 else list(keys), draw.choice([0, 1, 1, 2, 3])
        ):
            pairs[key] = draw.choice(keys[key])
        rows = pairs["rl_training.algorithm"] in (
            "dpo",
            "kto",
            "orpo",
            "simpo",
            "cpo",
            "sft",
            "reward_model",
        )
        if rows != (draw.random() < ONE_IN_TEN):
            pairs["data.path"] = "rows.jsonl"
        settings = settings_of(pairs)
        yield f"{number} --set {settings}", {"overrides": settings}
        text = "\n".join(settings)
        yield f"{number} file {settings}", {"text": text}
        with suppress(ConfigError):
            saved.append((str(settings), load_config(None, text=text).to_toml()))
        if saved:
            origin, toml = draw.choice(saved)
            yield f"{number} saved {origin}", {"text": toml, "saved": True}
            again = {"text": toml, "saved": True, "overrides": settings}
            yield f"{number} saved {origin} --set {settings}", again


def shipped(root: Path) -> Iterator[tuple[str, Any]]:
    """Yield the configurations of a checkout, and those in its pages."""
    for place in ("train_configs", "examples", "tests/data", "scripts/bench/studies"):
        for path in sorted((root / place).rglob("*.toml")):
            name, text = str(path.relative_to(root)), path.read_text()
            yield name, {"text": text, "saved": place == "tests/data"}
            yield f"{name} dapo", {"text": text, "overrides": ["rl_training.algorithm='dapo'"]}
    for page in sorted([*(root / "docs").rglob("*.md"), root / "README.md"]):
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            yield f"{page.relative_to(root)} {number}", {"text": block}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help="where the TOML files are")
    parser.add_argument("--count", type=int, default=200, help="generated combinations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--against", type=Path, help="resolve the cases of this file again")
    args = parser.parse_args()
    if args.against is None:
        cases = [*shipped(args.root), *generated(args.count, args.seed)]
        results = {name: [arguments, resolved(arguments)] for name, arguments in cases}
        json.dump(results, sys.stdout, indent=1)
        return 0
    before = json.loads(args.against.read_text())
    differ = 0
    for name, (arguments, then) in before.items():
        if (now := resolved(arguments)) != then:
            keys = then.keys() | now.keys()
            differences = [(k, then.get(k), now.get(k)) for k in keys if then.get(k) != now.get(k)]
            print(f"{name}\n  {differences}")
            differ += 1
    print(f"{len(before)} configurations, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
