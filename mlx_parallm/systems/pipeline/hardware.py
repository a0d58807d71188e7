"""Choose what this machine can train: LoRA rank, micro-batch, generations, quantisation, each with
its reason.

    detect_hardware()                          this machine; `profile` narrows what is looked at
    get_ryzen_optimized_config()               a Ryzen 9 5950X with 40 GB, wherever it is called
    HardwareConfig.settings(parameters)        keys of a training configuration, for a model of this
                                               size

The tiers of memory are those of the pipeline's specification. A model much smaller than its tier's
takes the top tier, since memory does not limit it.
"""

import platform
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import psutil

from mlx_parallm.deploy.export.hosting import fitting_type
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.checkpoint_files import (
    billions_in,
    directory_of,
    numbers_in,
    safetensors_header,
)
from mlx_parallm.system.hardware import GIB, detect, memory_present

Profile = Literal["AUTO_DETECT", "CPU_ONLY", "GPU_ENABLED", "RYZEN_OPTIMIZED"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
AUTO_DETECT: Profile = "AUTO_DETECT"
CPU_ONLY: Profile = "CPU_ONLY"
GPU_ENABLED: Profile = "GPU_ENABLED"
RYZEN_OPTIMIZED: Profile = "RYZEN_OPTIMIZED"
BILLION = 10**9
SMALL_SHARE = 4  # a model of a quarter of its tier's size is small there
BF16_BYTES = 2
# share of the memory for the base's weights; activations, optimizer and system take the rest
BASE_SHARE = 0.5
TARGETS = ("q_proj", "v_proj", "k_proj", "o_proj")


class _Tier(NamedTuple):
    memory_gb: float
    batch: int
    billions: float
    rank: int
    generations: int


CPU_TIERS = (
    _Tier(64, 4, 3, 16, 8),
    _Tier(32, 2, 1.5, 16, 6),
    _Tier(16, 1, 0.5, 8, 4),
    _Tier(0, 1, 0.5, 4, 2),
)
GPU_TIERS = (
    _Tier(24, 8, 7, 32, 8),
    _Tier(16, 4, 3, 16, 8),
    _Tier(8, 2, 1.5, 16, 6),
    _Tier(0, 1, 0.5, 8, 4),
)
# by memory, of a model of its tier
QUANTS = ((32, "q8_0"), (16, "q6_k"), (8, "q4_k_m"), (4, "q3_k_m"), (0, "q2_k"))


@dataclass(frozen=True)
class HardwareConfig:
    """A machine, and its settings.

    Attributes:
        backend: "cpu", "metal" or "cuda".
        memory_gb: GiB of the memory that holds the model: the GPU's, or `ram_gb`.
        recommended_batch_size: sequences of one micro-batch.
        recommended_billions: parameters of the largest model that trains comfortably.
        num_generations: answers to one prompt.
        quantization: type of the exported file.
        quantize_base: train beside a base in 4 bits.
        use_bf16: the processor multiplies bfloat16 quickly.
        why: setting → its reason.
    """

    cpu_name: str
    cpu_cores: int
    cpu_threads: int
    ram_gb: float
    has_avx2: bool
    has_avx512: bool
    backend: str
    memory_gb: float
    recommended_batch_size: int
    recommended_billions: float
    lora_r: int
    lora_alpha: int
    num_generations: int
    quantization: str
    quantize_base: bool = False
    use_bf16: bool = False
    profile: Profile = AUTO_DETECT
    why: dict[str, str] = field(default_factory=dict)

    def for_model(self, parameters: int | None) -> "HardwareConfig":
        """Return what fits a model of so many parameters; None: its size is not known, and the
        tier's stands."""
        if parameters is None:
            return self
        memory, why = self.memory_gb * GIB, dict(self.why)
        chosen = self
        size = f"{parameters / BILLION:.2g} billion parameters"
        if parameters * SMALL_SHARE <= self.recommended_billions * BILLION:
            top = CPU_TIERS[0]
            chosen = replace(
                self,
                recommended_batch_size=max(self.recommended_batch_size, top.batch),
                lora_r=max(self.lora_r, top.rank),
                lora_alpha=max(self.lora_alpha, 2 * top.rank),
                num_generations=max(self.num_generations, top.generations),
            )
            small = (
                f"{size} are few for this machine, which is good for"
                f" {self.recommended_billions:g} billion"
            )
            why |= dict.fromkeys(("rank", "batch", "generations"), small)
        quantize = parameters * BF16_BYTES > BASE_SHARE * memory
        need = f"{parameters * BF16_BYTES / GIB:.1f} GiB in bfloat16, of {self.memory_gb:.0f} GiB"
        why["quantize_base"] = (
            f"the base takes {need}: {'more' if quantize else 'not more'} than half"
        )
        kind = fitting_type(parameters, int(memory)) or QUANTS[-1][1]
        why["quantization"] = f"the finest type in which {size} fit into {self.memory_gb:.0f} GiB"
        return replace(chosen, quantize_base=quantize, quantization=kind, why=why)

    def to_lora_config(self) -> dict[str, Any]:
        return {
            "r": self.lora_r,
            "lora_alpha": self.lora_alpha,
            "lora_dropout": 0.05,
            "target_modules": list(TARGETS),
        }

    def to_training_args(self) -> dict[str, Any]:
        """Return the settings by TRL's names, as `mlx_parallm.faces.trl` takes them."""
        return {
            "per_device_train_batch_size": self.recommended_batch_size,
            "gradient_accumulation_steps": max(1, 8 // self.recommended_batch_size),
            "bf16": self.use_bf16,
        }

    def to_grpo_config(self) -> dict[str, Any]:
        return {"num_generations": self.num_generations, "max_completion_length": 256}

    def settings(self, longest: int) -> dict[str, Any]:
        """Return keys of a training configuration; `longest`: tokens of a sequence."""
        return {
            "rl_training.lora.rank": self.lora_r,
            "rl_training.lora.alpha": float(self.lora_alpha),
            "rl_training.lora.quantize_base": self.quantize_base,
            "rl_training.token_budget": self.recommended_batch_size * longest,
        }

    def summary(self) -> list[str]:
        """Return the machine and every choice with its reason, a line each."""
        chosen = {
            "rank": f"LoRA rank {self.lora_r}, alpha {self.lora_alpha}",
            "batch": f"{self.recommended_batch_size} sequences in a micro-batch",
            "generations": f"{self.num_generations} answers to a prompt",
            "quantize_base": "base in 4 bits while training"
            if self.quantize_base
            else "base not quantised",
            "quantization": f"export as {self.quantization}",
        }
        machine = f"{self.cpu_name}, {self.cpu_cores} cores, {self.ram_gb:.0f} GiB, {self.backend}"
        return [
            machine,
            *(f"{text}: {self.why[name]}" for name, text in chosen.items() if name in self.why),
        ]


def detect_hardware(profile: Profile = AUTO_DETECT) -> HardwareConfig:
    """Return what fits this machine. Loads MLX, except for CPU_ONLY and RYZEN_OPTIMIZED.

    Raises ConfigError: no such profile, or GPU_ENABLED on a machine whose MLX computes on the CPU.
    """
    if profile not in PROFILES:
        raise ConfigError(f"there is no hardware profile {profile!r}: {', '.join(PROFILES)}")
    if profile == RYZEN_OPTIMIZED:
        return get_ryzen_optimized_config()
    machine, flags = detect(), _cpu_flags()
    backend = "cpu" if profile == CPU_ONLY else machine.backend
    if profile == GPU_ENABLED and backend == "cpu":
        raise ConfigError(
            "GPU_ENABLED: MLX computes on the CPU here"
            " (docs/algorithms.md#what-is-trained); use AUTO_DETECT or CPU_ONLY"
        )
    memory = machine.memory_bytes if backend == "cpu" else memory_present()[1]
    return _fitting(
        cpu_name=_cpu_name(),
        cpu_cores=psutil.cpu_count(logical=False) or machine.cores,
        cpu_threads=machine.cores,
        ram_gb=machine.memory_bytes / GIB,
        has_avx2="avx2" in flags,
        has_avx512="avx512f" in flags,
        backend=backend,
        memory_gb=memory / GIB,
        profile=profile,
    )


def get_ryzen_optimized_config() -> HardwareConfig:
    """Return the preset of a Ryzen 9 5950X with 40 GB."""
    return _fitting(
        cpu_name="AMD Ryzen 9 5950X",
        cpu_cores=16,
        cpu_threads=32,
        ram_gb=40.0,
        has_avx2=True,
        has_avx512=False,
        backend="cpu",
        memory_gb=40.0,
        profile=RYZEN_OPTIMIZED,
    )


def parameters_of(model: str) -> int | None:
    """Count a model's parameters: from its files, else from a size in its name ("Qwen3-0.6B"),
    else None. A model in 4 bits has fewer numbers in its files than parameters, so it counts as
    smaller than it is."""
    directory = directory_of(model)
    if directory is not None:
        return sum(map(_numbers_in, directory.glob("*.safetensors"))) or None
    billions = billions_in(model)
    return None if billions is None else round(billions * BILLION)


def _numbers_in(file: Path) -> int:
    try:
        header = safetensors_header(file)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if header is None:
        raise ConfigError(f"{file} is not a file of weights, or is cut short")
    return numbers_in(header)


def _fitting(*, backend: str, memory_gb: float, **machine: Any) -> HardwareConfig:
    tiers = CPU_TIERS if backend == "cpu" else GPU_TIERS
    tier = next(each for each in tiers if memory_gb >= each.memory_gb)
    kind = next(name for least, name in QUANTS if memory_gb >= least)
    where = "memory" if backend == "cpu" else "GPU memory"
    reason = f"{memory_gb:.0f} GiB of {where}, the tier from {tier.memory_gb:g} GiB"
    bf16 = backend != "cpu" or machine["has_avx512"] or machine["profile"] == RYZEN_OPTIMIZED
    return HardwareConfig(
        backend=backend,
        memory_gb=memory_gb,
        recommended_batch_size=tier.batch,
        recommended_billions=tier.billions,
        lora_r=tier.rank,
        lora_alpha=2 * tier.rank,
        num_generations=tier.generations,
        quantization=kind,
        use_bf16=bf16,
        why=dict.fromkeys(("rank", "batch", "generations", "quantization"), reason),
        **machine,
    )


def _cpu_flags() -> set[str]:
    """Flags of the first processor; empty if the system has no /proc/cpuinfo (no Mac with
    Apple silicon has AVX)."""
    return set(_cpuinfo("flags").split())


def _cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next(
        (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key),
        "",
    )
