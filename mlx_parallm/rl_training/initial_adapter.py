"""The adapter that a new run begins with: `model.lora_path`."""

from pathlib import Path

from mlx_parallm.config.load import load_config
from mlx_parallm.config.server import ModelConfig
from mlx_parallm.config.training import LoraConfig
from mlx_parallm.errors import AdapterError, ConfigError
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.adapters.rope_length import check_rope_length
from mlx_parallm.models.lora import find_adapter_file, load_adapter
from mlx_parallm.run_files.directory import CONFIG_FILE, FINAL, LATEST
from mlx_parallm.system.log import get_logger

log = get_logger("train")


def initial_adapter(
    model: ModelConfig, lora: LoraConfig, checkpoint_dir: Path
) -> dict[str, LoraPair] | None:
    """`model.lora_path`. One that is not there yet, but would be made by training, starts anew
    with a warning."""
    path = model.lora_path
    if path is None:
        return None
    if not lora.enabled:
        raise ConfigError(
            "model.lora_path is set, but rl_training.lora.enabled = false trains all weights"
        )
    try:
        file = find_adapter_file(path)
    except AdapterError:
        requested = Path(path).expanduser()
        if requested.exists() or checkpoint_dir.resolve() not in requested.resolve().parents:
            raise
        log.warning(
            "model.lora_path does not exist yet: training starts with a new adapter", path=path
        )
        return None
    link = Path(path).expanduser().parent
    named = link.name in (LATEST, FINAL) and link.parent.resolve() == checkpoint_dir.resolve()
    if named and (other := _other_run(file, model.base_path, lora)) is not None:
        log.warning(
            "model.lora_path is of another run's model: training starts with a new adapter",
            run=str(other),
        )
        return None
    run = file.resolve().parent.parent.name if named else ""
    log.info(
        "training continues from an adapter (model.lora_path); leave it out for a new one",
        file=str(file),
        **({"of_run": run} if run else {}),
    )
    adapter = load_adapter(file)
    check_rope_length(adapter.config, adapter.path, model.rope_length)
    return dict(adapter.layers)


def _other_run(file: Path, base: str, lora: LoraConfig) -> Path | None:
    """Return the run that `checkpoints/latest` or `final` means now, if it trained another base
    or other layers. `file`: of its adapter."""
    run = file.resolve().parent.parent
    try:
        saved = load_config(run / CONFIG_FILE, saved=True)
    except ConfigError:
        return None
    same = saved.model.base_path == base and saved.rl_training.lora == lora
    return None if same else run
