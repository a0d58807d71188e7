"""Where a run starts from: what `--resume` means, and which adapter `model.lora_path` gives it."""

from pathlib import Path

from mlx_parallm.config.load import Config, load_config
from mlx_parallm.errors import AdapterError, CheckpointError, ConfigError
from mlx_parallm.system.log import get_logger
from mlx_parallm.models.adapters.adapter import LoraPair
from mlx_parallm.models.lora import find_adapter_file, load_adapter
from mlx_parallm.rl_training.checkpoint import find_checkpoint
from mlx_parallm.rl_training.checkpoints.resume_keys import check_resume, refuse_redacted
from mlx_parallm.rl_training.run_directory import CONFIG_FILE, FINAL, LATEST, STORE_FILE

log = get_logger("train")


def what_to_resume(config: Config, resume: str | None) -> tuple[Config, Path | None, bool]:
    """(configuration, checkpoint, start over). A run that was killed before its first checkpoint starts over in its
    directory, where its accepted groups lie. Raises CheckpointError: nothing there. ConfigError: a key that may not
    change on a resume, or a secret that is not given again."""
    refuse_redacted(config)
    training = config.rl_training
    if resume is None:
        return config, None, False
    try:
        checkpoint = find_checkpoint(resume, training.checkpoint_dir, training.run_name)
    except CheckpointError:
        directory = Path(resume).expanduser().resolve()
        if not (directory / STORE_FILE).is_file():
            raise
        return _placed(config, directory), None, True
    if checkpoint is None:
        return config, None, True
    check_resume(config, checkpoint.parent, checkpoint.parent / CONFIG_FILE)
    return _placed(config, checkpoint.parent), checkpoint, False


def _placed(config: Config, run: Path) -> Config:
    """A run directory may have been moved: where it lies now is what counts."""
    training = config.rl_training.model_copy(update={"checkpoint_dir": run.parent, "run_name": run.name})
    return config.model_copy(update={"rl_training": training})


def initial_adapter(config: Config) -> dict[str, LoraPair] | None:
    """`model.lora_path`. One that is not there yet, but would be made by training, starts anew with a warning."""
    path, training = config.model.lora_path, config.rl_training
    if path is None:
        return None
    if not training.lora.enabled:
        raise ConfigError("model.lora_path is set, but rl_training.lora.enabled = false trains all weights")
    try:
        file = find_adapter_file(path)
    except AdapterError:
        given = Path(path).expanduser()
        if given.exists() or training.checkpoint_dir.resolve() not in given.resolve().parents:
            raise
        log.warning("model.lora_path does not exist yet: training starts with a new adapter", path=path)
        return None
    if (other := _other_run(config, path, file)) is not None:
        log.warning("model.lora_path is of another run's model: training starts with a new adapter", run=str(other))
        return None
    return dict(load_adapter(file).layers)


def _other_run(config: Config, path: str, file: Path) -> Path | None:
    """The run that `checkpoints/latest` or `final` means now, if it trained another base or other layers."""
    link = Path(path).expanduser().parent
    if link.name not in (LATEST, FINAL) or link.parent.resolve() != config.rl_training.checkpoint_dir.resolve():
        return None
    run = file.resolve().parent.parent
    try:
        saved = load_config(run / CONFIG_FILE, saved=True)
    except ConfigError:
        return None
    same_model = saved.model.base_path == config.model.base_path
    return None if same_model and saved.rl_training.lora == config.rl_training.lora else run
