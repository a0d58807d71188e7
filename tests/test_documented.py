"""What a new part needs beside its code: its row of documentation and, where it computes,
independent numbers.

`make check` runs this. A message says what to add and where; docs/extending.md has an example of
each part. What the rows say is compared with the registries too.
"""

import ast
import importlib
import inspect
import re
import runpy
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

from mlx_parallm.config.algorithm import (
    ADVANTAGES,
    BOUNDS,
    PRESETS,
    AlgorithmName,
    AlgorithmSection,
    bounds_of,
    keys_of,
)
from mlx_parallm.config.algorithm import (
    LOSSES as LOSS_KINDS,
)
from mlx_parallm.config.data import DPOLossName, PreferenceConfig
from mlx_parallm.config.load import Config
from mlx_parallm.environments.registry import ENVIRONMENTS
from mlx_parallm.losses.advantages import AdvantageKind
from mlx_parallm.losses.kl import KL_ESTIMATORS
from mlx_parallm.losses.policy_gradient import LOSSES
from mlx_parallm.losses.preference import PAIR_LOSSES
from mlx_parallm.rewards.parts import BUILT_IN, PARTS, WEIGHTS
from mlx_parallm.rl_training.step.algorithms import ALGORITHMS, DATA_LOSSES
from mlx_parallm.run_files.resume import MAY_CHANGE
from tests.docs.docs_blocks import COMMANDS, flags_of
from tests.losses import oracle, test_preference, test_reward_model
from tests.source_trees import ROOT, Source, report, sources

ALGORITHMS_PAGE = "docs/algorithms.md"
COMMANDS_PAGE = "docs/stability.md"
CONFIG_PAGE = "docs/config.md"
INPUTS_PAGE = "docs/extending.md"
PARTS_PAGE = "docs/rewards.md"
METHODS = ("get", "post", "put", "patch", "delete", "head")


@cache
def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


@cache
def all_pages() -> str:
    return "\n".join(
        text(str(page.relative_to(ROOT))) for page in sorted((ROOT / "docs").glob("*.md"))
    )


@cache
def table(page: str, first: str, last: str) -> dict[str, list[str]]:
    """The cells of each row of the table with these headers, by the name in the first cell."""
    head = re.search(
        rf"^\| `?{first}`? \|(?:.*\|)? {last} \|\n\|[-|]+\|\n((?:\|.*\n)+)",
        text(page),
        re.MULTILINE,
    )
    assert head, f"{page} has no table with the headers {first} … {last}"
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in head[1].splitlines()
    ]
    return {row[0].split(" ")[0].strip('`"'): row[1:] for row in rows}


def values_of(settings: dict[str, float | None]) -> str:
    values = (
        f"`{key}` {'the same' if value is None else f'{value:g}'}"
        for key, value in settings.items()
    )
    return ", ".join(values) or "–"


def names_in_tests(folder: str) -> set[str]:
    """Every short string that stands in the tests of a folder."""
    return {
        node.value
        for source in sources(folder)
        for node in source.nodes(ast.Constant)
        if isinstance(node.value, str)
    }


# ---------------------------------------------------------------------- losses of one's own


def test_what_a_loss_gets() -> None:
    """Every field of `LossInputs`, with the shape and type that its comment has, and when it is
    None."""
    [source] = [source for source in sources("mlx_parallm") if source.module == "losses.types"]
    [class_] = [
        node
        for node in source.tree.body
        if isinstance(node, ast.ClassDef) and node.name == "LossInputs"
    ]
    rows = table(INPUTS_PAGE, "field of `LossInputs`", "None when")
    lines = text(source.path).splitlines()
    fields = {node.target.id: node for node in class_.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    missing = [
        f"`{name}` is not a field any more: remove its row" for name in rows if name not in fields
    ]
    for name, node in fields.items():
        if name not in rows:
            missing.append(f"add a row for `{name}`")
            continue
        shape, _, none = rows[name]
        annotation = ast.unparse(node.annotation)
        above = lines[node.lineno - 2].strip()
        comment = lines[node.lineno - 1].partition("#")[2] or above.removeprefix("#")
        is_array = re.match(r" (\[[^]]*\] \w+)", comment) if "mx.array" in annotation else None
        expected = (
            is_array[1] if is_array else "name → float" if "Mapping" in annotation else "float"
        )
        if shape != expected:
            missing.append(f"`{name}` is {expected}, the row has {shape}")
        if (none == "never") == ("None" in annotation):
            missing.append(f"`{name}` has the type {annotation}: is it None {none}?")
    report(f"{INPUTS_PAGE}, the table of LossInputs: {what}" for what in missing)


# ---------------------------------------------------------------------- algorithms


def missing_of_losses() -> Iterator[str]:
    rows = table(ALGORITHMS_PAGE, "loss", "settings")
    description = AlgorithmSection.model_fields["loss"].description or ""
    for name in LOSSES:
        if name not in LOSS_KINDS:
            yield (
                f"loss {name!r}: add a class of the keys that it reads, with their defaults, to LOSSES"
                " of mlx_parallm/config/algorithm.py"
            )
        if f'"{name}"' not in description:
            yield f"loss {name!r}: name it in the docstring of the key `loss` in mlx_parallm/config/algorithm.py"
        if name not in oracle.FORMULAS:
            yield f"loss {name!r}: add its formula, in numpy and from its paper, to FORMULAS of tests/losses/oracle.py"
        if name not in oracle.SETTINGS:
            yield f"loss {name!r}: add settings at which its bounds act to SETTINGS of tests/losses/oracle.py"
        if name not in rows:
            yield (
                f"loss {name!r}: add a row | `{name}` | formula | source | settings |"
                f" to the table under 'Loss' of {ALGORITHMS_PAGE}"
            )
    for name in {*rows, *LOSS_KINDS} - set(LOSSES):
        yield f"loss {name!r} is documented or has settings, but is not in LOSSES of losses/policy_gradient.py"


def test_losses() -> None:
    report(missing_of_losses())


def test_the_settings_of_losses() -> None:
    for name, (formula, *_, settings) in table(ALGORITHMS_PAGE, "loss", "settings").items():
        assert settings == values_of(bounds_of(name)), f"{ALGORITHMS_PAGE}: the settings of {name}"
        inherited = "the same, " if name == "dual_clip" else ""
        own = [key for key in bounds_of(name) if not (inherited and key.startswith("clip_"))]
        assert [key for key in own if key not in formula] == [], (
            f"{name}: a setting without a place in the formula"
        )


def test_losses_on_rows() -> None:
    tested = [
        (loss, options.get("loss_type")) for loss, _, options in test_preference.CASES.values()
    ]
    made = {
        name: getattr(make(PreferenceConfig(), 0.1), "func", make)
        for name, make in DATA_LOSSES.items()
    }
    made["sft"] = DATA_LOSSES["sft"](PreferenceConfig(), 0.1)
    tested.append((test_reward_model.LOSS, None))
    where = "with a float64 twin to CASES of tests/losses/test_preference.py"
    report(
        f"loss {name!r}: add it {where}"
        for name, loss in made.items()
        if loss not in [one for one, _ in tested]
    )
    kinds = get_args(DPOLossName)
    assert set(kinds) == set(PAIR_LOSSES)
    report(
        f"dpo with loss_type {kind!r}: add it {where}"
        for kind in kinds
        if kind not in [one for _, one in tested]
    )


def missing_of_algorithms() -> Iterator[str]:
    rows = table(ALGORITHMS_PAGE, "algorithm", "source")
    advice = text(ALGORITHMS_PAGE).partition("When to use which")[2].partition("\n## ")[0]
    for name in get_args(AlgorithmName):
        if name in PRESETS:
            if name not in rows:
                yield f"algorithm {name!r}: add a row to the table under 'Which one' of {ALGORITHMS_PAGE}"
            if f"`{name}`" not in advice:
                yield f"algorithm {name!r}: say when to use it, under 'When to use which' of {ALGORITHMS_PAGE}"
        elif name not in ALGORITHMS:
            yield f"algorithm {name!r}: add it to PRESETS of config/algorithm.py or ALGORITHMS of step/algorithms.py"
        elif not re.search(rf"^\|.*\b{name}\b", text("docs/your_data.md"), re.MULTILINE):
            yield f"algorithm {name!r}: add a row to the tables of docs/your_data.md#training-on-data"


def test_algorithms() -> None:
    report(missing_of_algorithms())


def test_presets() -> None:
    rows = table(ALGORITHMS_PAGE, "algorithm", "source")
    assert list(rows) == list(PRESETS)
    for name, (loss, level, aggregation, advantage, bounds, _) in rows.items():
        values = keys_of(name, PRESETS[name]["loss"])
        whitened = ", whitened" if values.get("advantage_whiten") else ""
        assert loss == f"`{values['loss']}`"
        assert level == values.get("ratio_level", "–")
        assert aggregation == values["loss_aggregation"]
        assert advantage == (f"`{values['advantage']}`{whitened}" if "advantage" in values else "–")
        assert bounds == values_of({key: values[key] for key in bounds_of(values["loss"])})


def missing_of_advantages() -> Iterator[str]:
    rows, tested = table(ALGORITHMS_PAGE, "advantage", "source"), names_in_tests("tests/losses")
    for name in ADVANTAGES:
        if name not in get_args(AdvantageKind):
            yield f"advantage {name!r}: add it to AdvantageKind and group_advantages of losses/advantages.py"
        if name not in rows:
            yield (
                f'advantage {name!r}: add a row | `"{name}"` | formula | source | to the table'
                f" under 'Advantage' of {ALGORITHMS_PAGE}"
            )
        if name not in tested:
            yield f"advantage {name!r}: add its numbers of a group, worked by hand, to tests/losses/test_advantages.py"
    for name in set(get_args(AdvantageKind)) - set(ADVANTAGES):
        yield f"advantage {name!r}: add it to ADVANTAGES of mlx_parallm/config/algorithm.py"


def test_advantages() -> None:
    report(missing_of_advantages())


def missing_of_kl_estimators() -> Iterator[str]:
    rows = table(ALGORITHMS_PAGE, "kl_estimator", "as a loss")
    for name in KL_ESTIMATORS:
        if name not in rows:
            yield f"kl_estimator {name!r}: add a row to the table under 'KL to the reference' of {ALGORITHMS_PAGE}"
        if name not in oracle.KL:
            yield f"kl_estimator {name!r}: add its formula to KL of tests/losses/oracle.py"


def test_kl_estimators_levels_and_aggregations() -> None:
    report(missing_of_kl_estimators())
    for key, last in (("ratio_level", "ρ of a token"), ("loss_aggregation", "source")):
        named = get_args(get_args(AlgorithmSection.model_fields[key].annotation)[0])
        rows = table(ALGORITHMS_PAGE, key, last)
        report(
            f"{key} {name!r}: add a row to its table in {ALGORITHMS_PAGE}"
            for name in named
            if name not in rows
        )


# ---------------------------------------------------------------------- rewards and environments


def missing_of_parts() -> Iterator[str]:
    rows, tested = table(PARTS_PAGE, "part", "options"), names_in_tests("tests/rewards")
    for name, factory in PARTS.items():
        if name not in tested:
            yield f"reward part {name!r}: add its scores, worked by hand, to tests/rewards/test_parts.py"
        if name not in rows:
            yield (
                f"reward part {name!r}: add a row | `{name}` | weight | score | options |"
                f" to the table under 'The parts' of {PARTS_PAGE}"
            )
            continue
        weight, _, options = rows[name]
        if weight != f"{WEIGHTS[name]:g}":
            yield f"reward part {name!r}: its weight is {WEIGHTS[name]:g}, its row in {PARTS_PAGE} says {weight}"
        place = text(PARTS_PAGE) if "below" in options else options
        for option in inspect.signature(factory).parameters:
            if f"`{option}`" not in place:
                yield f"reward part {name!r}: name its option `{option}` in its row in {PARTS_PAGE}"
    for name in set(BUILT_IN) - set(PARTS):
        if f"builtin:{name}" not in all_pages():
            yield f"built-in reward {name!r}: describe `builtin:{name}` in docs/rewards.md"


def test_reward_parts() -> None:
    report(missing_of_parts())


def test_environment_kinds() -> None:
    report(
        f'environment kind {name!r}: describe `kind = "{name}"` in docs/environments.md'
        for name in ENVIRONMENTS
        if not re.search(rf'kind = "{name}"|`{name}`', text("docs/environments.md"))
    )


# ---------------------------------------------------------------------- commands, routes, keys


def missing_of_commands() -> Iterator[str]:
    found = re.findall(
        r"^\| `mlx_parallm ([\w-]+)` \| (?:`(\w+)`)? ?\| (.*)\|$", text(COMMANDS_PAGE), re.MULTILINE
    )
    rows = {
        name: (script or None, set(re.findall(r"--[\w-]+", flags))) for name, script, flags in found
    }
    for command in COMMANDS.values():
        name, script = command.name, f"`{command.script}`" if command.script else ""
        if f"`mlx_parallm {name}" not in text("docs/commands.md"):
            yield f"command {name!r}: add a row | `mlx_parallm {name} …` | what it does | of docs/commands.md"
        if name not in rows:  # not promised yet
            continue
        also, promised = rows[name]
        if also != command.script:
            yield f"command {name!r}: 'also as' of its row in {COMMANDS_PAGE} has to be {script or 'empty'}"
        flags = (
            flags_of(name) - {"--help", "--version"} - ({"--output"} if name == "merge" else set())
        )
        yield from (
            f"command {name!r}: add `{flag}` to its row in {COMMANDS_PAGE}"
            for flag in flags - promised
        )
        yield from (
            f"command {name!r}: {COMMANDS_PAGE} promises `{flag}`: it is gone"
            for flag in promised - flags
        )
    yield from (
        f"{COMMANDS_PAGE} promises a command that is gone: {name!r}"
        for name in set(rows) - set(COMMANDS)
    )


def test_commands() -> None:
    report(missing_of_commands())


def _value(source: Source, node: ast.expr) -> str:
    """A path of a route: a string, or a constant by its name."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    return str(getattr(importlib.import_module(f"mlx_parallm.{source.module}"), ast.unparse(node)))


def routes(source: Source) -> Iterator[tuple[str, str]]:
    """Yield (method, path) of every `@router.get("/path")` of a file that the OpenAPI document
    shows."""
    prefixes = [
        _value(source, keyword.value)
        for call in source.nodes(ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id == "APIRouter"
        for keyword in call.keywords
        if keyword.arg == "prefix"
    ]
    for _, function in source.functions:
        for call in function.decorator_list:
            if not (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in METHODS
            ):
                continue
            if not any(
                k.arg == "include_in_schema" and ast.unparse(k.value) == "False"
                for k in call.keywords
            ):
                path = _value(source, call.args[0]).replace(":path}", "}")
                yield call.func.attr.upper(), "".join(prefixes[:1]) + path


def test_routes() -> None:
    found = {(route, source.path) for source in sources("mlx_parallm") for route in routes(source)}
    assert (("POST", "/v1/chat/completions"), "mlx_parallm/server/api/chat.py") in found
    report(
        f"route {method} {path} ({where}): write `{method} {path}` on its page of docs/, or in the"
        " table of routes of"
        f" {COMMANDS_PAGE} if it is promised"
        for (method, path), where in sorted(found)
        if not re.search(rf"`{method} {re.escape(path)}[`?]", all_pages())
    )


def keys(section: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, description) of every key below a section."""
    for name, field in section.model_fields.items():
        inner = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if hasattr(part, "model_fields")
        ]
        if inner:
            yield from keys(inner[0], f"{prefix}{name}.")
        else:
            yield prefix + name, field.description or ""


def test_configuration_keys() -> None:
    report(
        f"key {key}: write what it does, in a docstring under it in mlx_parallm/config/"
        for key, description in keys(Config)
        if not description
    )
    page: str = runpy.run_path(str(ROOT / "scripts" / "generate_config_docs.py"))["render"]()
    now, then = page.splitlines(), text(CONFIG_PAGE).splitlines()
    changed = [line for line in now if line not in then] + [
        line for line in then if line not in now
    ]
    if page != text(CONFIG_PAGE):
        report(
            [
                (
                    f"{CONFIG_PAGE} is not current: run .venv/bin/python"
                    " scripts/generate_config_docs.py"
                ),
                *changed[:3],
            ]
        )


def test_keys_that_a_resume_may_change() -> None:
    page = text("docs/operations.md")
    report(
        f"{key}: a resume may change it: name it under 'Keys that may change on a resume' of"
        " docs/operations.md"
        for key in MAY_CHANGE
        for name in [key.removeprefix("rl_training.")]
        if name not in BOUNDS and f"`{name}`" not in page and f"`{key}`" not in page
    )
