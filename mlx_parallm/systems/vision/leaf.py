"""Vision-language models, plugged in: their towers are loaded if a checkpoint has one that is
known and the extra `vision` is there."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_parallm.config.leaves import Leaf
from mlx_parallm.errors import ConfigError, ModelError
from mlx_parallm.system.packages import is_installed, needs

if TYPE_CHECKING:
    from mlx_parallm.systems.vision.config import VisionConfig
    from mlx_parallm.systems.vision.reader import FamilySupport

LEAF = Leaf(
    "vision",
    section="mlx_parallm.systems.vision.config:VisionConfig",
    images="mlx_parallm.systems.vision.leaf:image_support",
    environments={"pictures": "mlx_parallm.systems.vision.picture_tasks:PicturesSource"},
)
FAMILIES = {
    "gemma3": "mlx_parallm.systems.vision.gemma3",
    "idefics3": "mlx_parallm.systems.vision.idefics3",
    "smolvlm": "mlx_parallm.systems.vision.idefics3",
    "lfm2_vl": "mlx_parallm.systems.vision.lfm2_vl",
    "qwen2_vl": "mlx_parallm.systems.vision.qwen_vl",
    "qwen2_5_vl": "mlx_parallm.systems.vision.qwen_vl",
    "qwen3_vl": "mlx_parallm.systems.vision.qwen_vl",
    "qwen3_vl_moe": "mlx_parallm.systems.vision.qwen_vl",
    "qwen3_5": "mlx_parallm.systems.vision.qwen_vl",
    "qwen3_5_moe": "mlx_parallm.systems.vision.qwen_vl",
}
"""`model_type` → the module with its `load`."""
PACKAGES = ("mlx_vlm", "PIL")
TOWERS = ("visual.", "vision_tower.", "vision_model.")


def image_support(
    settings: "VisionConfig", path: Path, model_config: Mapping[str, Any]
) -> "FamilySupport | None":
    """Return what reads images for a model; None: it reads text alone.

    Raises ConfigError: `vision.enabled = true`, or `vision.train` something, and a package is
    missing; ModelError: and the model has no tower that is known; the checkpoint has no processor
    of images.
    """
    from mlx_parallm.system.log import get_logger
    from mlx_parallm.systems.vision.reader import FamilySupport

    if settings.enabled is False:
        return None
    needed = "vision.enabled = true" if settings.enabled is True else ""
    if settings.train != "none":
        needed = f'vision.train = "{settings.train}"'
    if reason := why_blind(model_config) or why_without_tower(path):
        if needed:
            raise ModelError(f"{needed}, but {reason}")
        return None
    absent = next((module for module in PACKAGES if not is_installed(module)), None)
    if absent is not None:
        line = needs("reading images", absent)
        if needed:
            raise ConfigError(line)
        get_logger(__name__).info("only the model's text part is used", images=line)
        return None
    family: Any = import_module(FAMILIES[model_config["model_type"]])
    return FamilySupport(settings, family, family.processor(path), path)


def why_blind(config: Mapping[str, Any]) -> str:
    """Return why a model's images cannot be read, by its config.json; "" when they can."""
    if not isinstance(config.get("vision_config"), dict):
        return "the model has no part that sees (config.json has no vision_config)"
    if (name := config.get("model_type")) not in FAMILIES:
        return f"the part of {name!r} that sees is not known here: {', '.join(sorted(FAMILIES))}"
    return ""


def why_without_tower(path: Path) -> str:
    """Return why a checkpoint cannot see, by the names of its arrays; "" when it can."""
    from safetensors import SafetensorError, safe_open

    from mlx_parallm.models.checkpoint_files import weight_files

    for file in weight_files(path):
        try:
            with safe_open(file, framework="numpy") as arrays:
                if any(part in name for name in arrays.keys() for part in TOWERS):  # noqa: SIM118
                    return ""
        except (OSError, SafetensorError):
            return ""  # loading it reports the fault
    return f"{path} has no arrays of the part that sees"
