"""[rl_training.lora]: the adapter that is trained. Part of `config.py`'s tree."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from mlx_parallm.config.environment import Section


class LoraConfig(Section):
    enabled: bool = True
    """Train an adapter; false trains all weights."""
    rank: int = Field(16, ge=1)
    """Rank r of the update B·A."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Accepted, and off in RL: every pass yields a compared log-probability. A value > 0 warns once."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names (last path component, or a dotted suffix) that get an adapter."""
    quantize_base: bool = False
    """Quantise the frozen base to 4 bits on load (QLoRA)."""
    use_rslora: bool = False
    """Scale the update by alpha / √rank (rsLoRA, arXiv:2312.03732): a larger rank does not learn more slowly."""
    use_dora: bool = False
    """Train each output's magnitude too (DoRA, arXiv:2402.09353); its adapters are served like any other."""
    loraplus_ratio: float = Field(1.0, gt=0)
    """Learning rate of B in units of A's (LoRA+, arXiv:2402.12354, which suggests 16); 1 = the same."""
    layers: tuple[int, int] | str = "all"
    """Transformer blocks that get an adapter: "all", "last 8", or [start, end) counted from 0, e.g. [4, 12]."""

    @field_validator("layers")
    @classmethod
    def _range(cls, value: tuple[int, int] | str) -> tuple[int, int] | str:
        if isinstance(value, str) and not re.fullmatch(r"all|last [1-9]\d*", value):
            raise ValueError(f'{value!r} is not "all", "last 8" or [start, end)')
        if not isinstance(value, str) and not 0 <= value[0] < value[1]:
            raise ValueError(f"{list(value)} holds no block: [start, end) needs 0 <= start < end")
        return value

    @model_validator(mode="after")
    def _used(self) -> "LoraConfig":
        unused = [key for key in ("use_rslora", "use_dora") if getattr(self, key)]
        unused += ["loraplus_ratio"] if self.loraplus_ratio != 1.0 else []
        unused += ["layers"] if self.layers != "all" else []
        if not self.enabled and unused:
            raise ValueError(f"{unused[0]} is set, but enabled = false trains all weights, not an adapter")
        return self
