"""Differences between kinds of devices: the one place that asks for the kind, with the reasons.

The rest of the package asks one of these questions, by what it decides with the answer. Kernels of
a CPU's own lie in `models/cpu/`, behind `models/ops.py`. MLX is imported inside functions only.
"""

import os

DEVICE_VARIABLE = "MLX_PARALLM_DEVICE"
GPU_LIKE = "gpu-like"
"""What it may say: on a machine without a GPU the tests then go the way that a GPU takes, with no
kernels of ours, plain layouts, narrow experts and packed weights (CONTRIBUTING.md). The results are
the same, and come slowly."""


def on_cpu() -> bool:
    """True when the way for a CPU is taken: MLX computes on one, and is not asked to go a GPU's
    way."""
    return is_cpu() and not gpu_like()


def is_cpu() -> bool:
    """True when MLX computes on a CPU, whichever way it goes: there is no memory but the
    machine's."""
    import mlx.core as mx

    return bool(mx.default_device().type == mx.DeviceType.cpu)


def kind_of_numbers() -> str:
    """Name the kind of device: another kind computes other last bits."""
    return "cpu" if is_cpu() else "gpu"


def gpu_like() -> bool:
    """True when a CPU is asked to go a GPU's way. Raises ValueError: the variable says something
    else."""
    value = os.environ.get(DEVICE_VARIABLE, "")
    if value not in ("", GPU_LIKE):
        raise ValueError(f"{DEVICE_VARIABLE}={value}: it may be {GPU_LIKE!r}, or unset")
    return value == GPU_LIKE


def half_precision_is_slow() -> bool:
    """Whether float32 is faster than half precision: on a CPU by 10 to 20 times."""
    return is_cpu()


def computes_beside_python() -> bool:
    """Whether the device computes while Python continues. A CPU shares its cores with Python, and
    engine and trainer share them with each other."""
    return not on_cpu()


def arrays_are_in_the_process() -> bool:
    """Whether the memory of MLX's arrays is the process's own. A GPU's memory holds arrays only."""
    return on_cpu()


def adds_in_order() -> bool:
    """Whether a row's numbers are added one after the other, so that small ones are lost. A GPU
    adds in a tree."""
    return on_cpu()


def rounds_every_layout_alike() -> bool:
    """Whether a row's result does not depend on how rows are laid out: a GPU picks its kernels by
    the shapes."""
    return on_cpu()


def multiplies_rows_alone() -> bool:
    """Whether a product of several rows is computed row by row, if each row is to be what it is
    alone."""
    return on_cpu()


def unpacks_weights() -> bool:
    """Whether a product with quantised weights, keys or values unpacks them first."""
    return on_cpu()


def widens_experts() -> bool:
    """Whether stacked experts are multiplied in float32 only (`gather_mm`)."""
    return on_cpu()


def compiles_gradients() -> bool:
    """Whether a large gradient is compiled as a whole (`ops.fused`)."""
    return on_cpu()


def writes_attention_scores() -> bool:
    """Whether MLX's attention writes all scores to memory."""
    return on_cpu()


def fails_on_wide_products() -> bool:
    """Whether a product whose inner dimension is a large vocabulary may fail: on Metal it ends in
    an "Internal Error" (ml-explore/mlx#1363)."""
    return not on_cpu()


def fails_at_exit() -> bool:
    """Whether MLX's destructors fail at the process's end: a kernel of our own that ran last makes
    them (0.32). A finished run would look like a crash."""
    return not on_cpu()


def may_lose_results() -> bool:
    """Whether an evaluation may end without an error and leave zeros in place of a result
    (ml-explore/mlx#3979). A CPU computes an operation or ends the process."""
    return not on_cpu()
