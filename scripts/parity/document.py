"""Columns of docs/models.md that say how far an architecture is from transformers: made of
scripts/parity/results.json, which `python -m scripts.parity.compare OUT --write` writes.

    .venv/bin/python -m scripts.parity.document      writes the column into docs/models.md
"""

import json
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
RESULTS = json.loads((Path(__file__).parent / "results.json").read_text())
ROUNDING = json.loads((Path(__file__).parent / "rounding.json").read_text())
COLUMN = "beside transformers"
TEXT_OF = {
    "bailing_moe_v3": "bailing_hybrid",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "minimax": "minimax_m2",
    "mistral3": "mistral",
    "pixtral": "mistral",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""mlx-lm's module → the architecture that was compared: its text part's, or its name in
transformers."""


BESIDES = {"gemma4": ("gemma4_unified",), "llama": ("iquestcoder",)}
"""mlx-lm's module → architectures that were compared too, each with its own numbers."""


def cell(name: str) -> str:
    """Return what docs/models.md says of a module of mlx-lm."""
    others = [f"`{other}`: {_numbers_of(other, other)}" for other in BESIDES.get(name, ())]
    return ". ".join((_numbers_of(name, TEXT_OF.get(name, name)), *others))


def _numbers_of(name: str, compared: str) -> str:
    if name == "bailing_hybrid":
        return "transformers' model of that name is `bailing_moe_v3`"
    result: dict[str, Any] | None = RESULTS["architectures"].get(compared)
    if result is None:
        return "not compared" if name in CONFIG_MAPPING else "transformers has no such class"
    words = [] if compared == name else [f"as `{compared}`"]
    if result["difference"] is None:
        return "refused for training: another model"
    words.append(f"{result['difference']:.1g}, gradient {result['gradient']:.1g}")
    if rounding := ROUNDING.get(compared):
        words.append(", ".join(f"{name} {ratio:g} ×" for name, (_, ratio) in rounding.items()))
    words.append(f"{result['equal']} of {result['tried']} options")
    if refused := result["refused"]:
        words.append(f"refused: {', '.join(refused)}")
    if rest := [*result["wrong"], *result["crashed"]]:
        words.append(f"off: {', '.join(rest)}")
    return "; ".join(words)


_BY_SEED = """
Where other seeds, sizes and texts were further from float64 than 5e-5: the largest difference and
the root of the mean square over 16 texts (of 53 tokens; of Qwen3-Next's second row 48), of ours and
of torch's float32 (transformers, eager) on the same texts.

| checkpoint | ours: largest, mean | torch's float32: largest, mean | mean, ours / torch's |
|---|---|---|---|
| granitemoe, `hidden_size` 192 | 2.7e-4, 2.1e-5 | 2.3e-4, 1.8e-5 | 1.15 |
| … and GELU | 1.2e-4, 1.6e-5 | 1.7e-4, 1.6e-5 | 1.01 |
| gemma4_text, `use_double_wide_mlp` | 3.6e-5, 3.9e-6 | 4.3e-5, 4.1e-6 | 0.95 |
| olmo_hybrid, layers reversed | 4.8e-5, 4.9e-6 | 5.5e-5, 4.9e-6 | 1.00 |
| olmo_hybrid, `linear_a_log_min` 0.1 | 4.1e-5, 3.9e-6 | 2.7e-5, 3.6e-6 | 1.10 |
| qwen3_next, `linear_value_head_dim` 32 | 1.6e-4, 9.9e-6 | 5.0e-4, 2.5e-5 | 0.39 |
| qwen3_next, `num_key_value_heads` 4 | 1.5e-4, 8.0e-6 | 1.4e-4, 1.1e-5 | 0.73 |
| qwen3_5_text, `intermediate_size` 72 | 2.6e-4, 1.3e-5 | 3.9e-4, 2.5e-5 | 0.53 |
| qwen3_5_moe_text, 16 experts | 4.1e-4, 1.8e-5 | 1.0e-3, 4.2e-5 | 0.43 |

All gated delta nets there have `rms_norm_eps` = 1e-6. Seven further ones of theirs: 0.57 to 0.83."""


def explanation() -> list[str]:
    """Return the lines that explain the column."""
    return [
        f"**{COLUMN}**: the largest difference of one log-probability, and of the trainer's gradient"
        " (relative), to",
        f"transformers {RESULTS['transformers']} in float64, over tiny checkpoints as transformers"
        " saves them: plain, and each option of the",
        "configuration changed alone (ropes, windows, activations, biases, heads, experts, every"
        " boolean). The forward as it",
        "is trained and as it is served, with caches, are compared. Options that are refused are"
        " refused for training by name; `serve`",
        "warns. The number behind bfloat16 and float16 is our own rounding in that type divided by"
        " transformers'.",
        "transformers computes norms, softmax and recurrences in float32 whatever its model's type"
        " is; here they are computed",
        "in float64 (`scripts/parity/exact.py`). Gated delta nets divide by the size of what leaves"
        " the recurrence: with `rms_norm_eps`",
        "= 1e-6 a tiny random model is off by up to 3e-4 in torch's float32 as in ours, so theirs is"
        " 1e-2 here. Falcon-H1's gradient",
        "is of weights that hold the configuration's factors. Two options are between 2e-5 and 3e-5"
        " at one token of one text",
        "(Gemma 4's `final_logit_softcapping`, OLMo Hybrid's `rms_norm_eps`): over 48 texts the"
        " largest difference is 1.4e-5 and 7.9e-6",
        "here, 1.9e-5 and 1.3e-5 in torch's own float32. DeepSeek's sparse attention (`index_topk`"
        " shorter than the text) is compared where no two tokens have the same index score: in a"
        " tiny model several have exactly 0, and which of them is left out, no specification says."
        " The table below has what is above that with other seeds.",
        "mlx-lm has no class for Bamba (`bamba`), and its `minimax` computes MiniMax-M2: MiniMax-Text-01,"
        " which has lightning attention, is refused by that name.",
        "OLMo Hybrid's ratios are 1.25 in both types over 64 texts: mlx-lm rounds the sigmoid within SiLU,"
        " the normalised queries and keys and the gates' sum once more. Without these three roundings"
        " they are 1.22 and 1.11, and its class would have to be written anew.",
        "`scripts/parity/` makes the checkpoints (torch) and compares; a part of",
        "them runs in the default tests. `mlx_parallm doctor --model M` says what of one model's"
        " config.json is understood.",
        "Gemma 3n's published models share keys between layers (`num_kv_shared_layers`):"
        " they are trained as one graph.",
        "A rope that depends on a text's length (longrope, dynamic) is that of short texts, and longer ones are"
        " refused: a text's",
        "first keys would have to be turned anew when it grows. `model.rope_length` chooses the way of"
        " longer texts for all, as vLLM",
        "does: it is recorded with the run and in its adapters, and what is saved, merged or exported"
        " has it in its config.json.",
        _BY_SEED,
    ]


def with_column(page: str) -> str:
    """Return the table of architectures, or a page that ends with it, with the column written
    anew."""
    lines = []
    start = page.rfind("\n| model_type |")
    head, table = page[: start + 1], page[start + 1 :]
    for line in table.splitlines():
        cells = [part.strip() for part in line.split("|")[1:-1]]
        if line.startswith("| model_type |"):
            cells = [c for c in cells if c != COLUMN]
            cells.insert(3, COLUMN)
        elif line.startswith("|---"):
            lines.append("|" + "---|" * 8)
            continue
        elif line.startswith("| `"):
            if len(cells) == 8:
                cells.pop(3)
            cells.insert(3, cell(cells[0].strip("`")))
        else:
            lines.append(line)
            continue
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join(lines) + "\n"


def main() -> None:
    head, mark, rest = PAGE.read_text().partition("\n**turns**")
    head = head.partition(f"\n**{COLUMN}**")[0]
    page = "\n".join((head, *explanation(), "")) + mark + rest
    PAGE.write_text(with_column(page))


if __name__ == "__main__":
    main()
