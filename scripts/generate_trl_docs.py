"""Writes the tables of docs/trl.md, of TRL's arguments here: `.venv/bin/python
scripts/generate_trl_docs.py`.

tests/trl/test_docs.py fails while the page differs from what this makes of it.
"""

from pathlib import Path

from mlx_parallm.faces.trl.config import (
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    RewardConfig,
    RowsConfig,
    SampledConfig,
    SFTConfig,
    TaughtConfig,
    TrainerConfig,
)
from mlx_parallm.faces.trl.mapping import HOW, SAME

TARGET = Path(__file__).resolve().parents[1] / "docs" / "trl.md"
MARK = (
    "<!-- generated from here on by scripts/generate_trl_docs.py: edit"
    " faces/trl/{config,mapping}.py instead -->\n"
)
TITLES: dict[str, type[TrainerConfig]] = {
    "All of them": TrainerConfig,
    "`GRPOConfig`, `DistillationConfig` and `GKDConfig`": SampledConfig,
    "`GRPOConfig`": GRPOConfig,
    "`DistillationConfig` and `GKDConfig`": TaughtConfig,
    "`DistillationConfig`": DistillationConfig,
    "`GKDConfig`": GKDConfig,
    "`SFTConfig`, `DPOConfig`, `KTOConfig` and `RewardConfig`": RowsConfig,
    "`SFTConfig`": SFTConfig,
    "`DPOConfig`": DPOConfig,
    "`KTOConfig`": KTOConfig,
    "`RewardConfig`": RewardConfig,
}


def render(page: str) -> str:
    """Return the page with its tables made anew."""
    # each of the others has a learning rate of its own
    abstract = (TrainerConfig, SampledConfig, RowsConfig)
    parts, seen = [page.partition(MARK)[0], MARK], dict[type[TrainerConfig], set[str]]()
    for title, kind in TITLES.items():
        inherited = {
            name
            for base in kind.__mro__[1:]
            for name in seen.get(base, ())
            if base.model_fields[name].default == kind.model_fields[name].default
        }
        skipped = inherited | ({"learning_rate"} if kind in abstract else set())
        arguments = [name for name in kind.model_fields if name not in skipped]
        seen[kind] = set(arguments)
        parts.append(f"\n### {title}\n\n| argument | default | here | |\n|---|---|---|---|\n")
        parts += [_row(name, kind) for name in arguments]
    return "".join(parts)


def _row(name: str, kind: type[TrainerConfig]) -> str:
    field = kind.model_fields[name]
    value = field.get_default(call_default_factory=True)
    here = ""
    if name == "beta" and kind is not GRPOConfig:
        section = "distillation" if issubclass(kind, TaughtConfig) else "preference"
        here = f"`rl_training.{section}.beta`"
    here = here or (f"`{SAME[name]}`" if name in SAME else HOW[name])
    cells = (f"`{name}`", f"`{value!r}`", here, " ".join((field.description or "").split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    TARGET.write_text(render(TARGET.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {TARGET}")
