"""What the commands of a documentation block meet when `test_docs_code.py` runs it with bash.

A directory of small programs comes first on the PATH; each calls this file with its own name.
Commands of the package run for real, on the tiny model and for one step; a server continues in the
background until its page ends. What would install something or talk to a machine's services is not
run (`docs_blocks.command_problems` has looked at it).

Environment: DOCS_PORT, DOCS_BIN (the real commands), DOCS_PATH (the PATH without this directory).
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mlx_parallm.config.load import Config

OURS = [
    "mlx_parallm",
    "mlx_parallm_train",
    "mlx_parallm_serve",
    "mlx_parallm_merge_lora",
    "mlx_parallm_doctor",
    "mlx_parallm_explain",
    "mlx_parallm_rollouts",
    "mlx_parallm_show_checkpoint",
    "mlx_parallm_convert_adapter",
    "mlx_parallm_replay",
    "mlx_parallm_eval",
]
NOT_RUN = [
    "make",
    "pip",
    "pip3",
    "uv",
    "brew",
    "apt-get",
    "sudo",
    "docker",
    "systemctl",
    "journalctl",
    "launchctl",
    "git",
    "ssh",
    "scp",
    "rsync",
    "wandb",
    "tensorboard",
    "trackio",
    "hf",
    "prometheus",
    "loginctl",
    "pmset",
    "open",
]
NAMES = (*OURS, *NOT_RUN, "curl", "python", "python3", "caffeinate")
PID_FILE = ".daemon"
READY_SECONDS = 60
# One step of two small groups: what is shown is that the command works, not that it learns.
SMALL = {
    "server.batch_size": 16,
    "rl_training.batch_size": 8,
    "evaluation.problems": 0,
    "rl_training.blocks_per_eval": 0,
    "rl_training.atropos.rollout_batch_size": 16,
    "rl_training.atropos.api_url": '"embedded"',
}
MAX_TOKENS, GROUP_SIZE = 16, 8


def main(name: str, words: list[str]) -> int:
    if name == "mlx_parallm":
        from mlx_parallm.cli.table import COMMANDS

        name = next((c.script for c in COMMANDS if c.script and words and c.name == words[0]), name)
        words = words if name == "mlx_parallm" else words[1:]
    own = {
        "mlx_parallm_serve": serve,
        "mlx_parallm_train": train,
        "mlx_parallm_prompt_policy": prompt_policy,
    }
    if name in own:
        return own[name](words)
    if name == "curl":
        ensure_server()
        return real(
            "curl", ["--silent", "--show-error", "--fail-with-body", "--max-time", "60", *words]
        )
    if name.startswith("python"):
        if "--timesteps" in words:  # of an expert's training
            words[words.index("--timesteps") + 1] = "4000"
        elif any(word.endswith("train_gymnasium_expert.py") for word in words):
            words = [*words, "--timesteps", "4000"]
        is_not_run = words[:2] in (["-m", "venv"], ["-m", "pip"]) or bool(
            words and words[0].startswith("scripts/")
        )
        return 0 if is_not_run else real("python", words)
    if name == "caffeinate":
        rest = [word for word in words if not word.startswith("-")]
        return main(rest[0], words[words.index(rest[0]) + 1 :]) if rest else 0
    if name == "mlx_parallm_doctor" and "--contracts" in words:
        return 0  # a minute long; it has tests of its own
    if name in ("mlx_parallm_doctor", "mlx_parallm_explain"):
        code = real(name, words)
        return code if code > 1 else 0  # 1 = there is advice
    return real(name, words) if name in OURS else 0


def real(name: str, words: list[str]) -> int:
    here = Path(os.environ["DOCS_BIN"]) / name
    return subprocess.run(
        [str(here) if here.exists() else name, *words],
        env=os.environ | {"PATH": os.environ["DOCS_PATH"]} if not here.exists() else None,
        check=False,
    ).returncode


def serve(words: list[str]) -> int:
    if {"--help", "--version"} & set(words):
        return real("mlx_parallm_serve", words)
    stop_server()
    port = words[words.index("--port") + 1] if "--port" in words else os.environ["DOCS_PORT"]
    return start("mlx_parallm_serve", [*words, "--port", port], int(port))


def prompt_policy(words: list[str]) -> int:
    if "--server" not in words:
        return 0  # the demonstration has its own test
    stop_server()
    port = words[words.index("--server") + 1]
    return start("mlx_parallm_prompt_policy", words, int(port))


def ensure_server() -> None:
    port = int(os.environ["DOCS_PORT"])
    if not answers(port):
        start("mlx_parallm_serve", ["--model-path", "builtin:tiny", "--port", str(port)], port)


def start(name: str, words: list[str], port: int) -> int:
    """Starts a daemon that outlives this block. Returns 0 when it answers, else its exit code."""
    with Path("daemon.log").open("a+") as log:
        process = subprocess.Popen(
            [str(Path(os.environ["DOCS_BIN"]) / name), *words],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        Path(PID_FILE).write_text(json.dumps({"pid": process.pid, "port": port}))
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline and process.poll() is None:
            if answers(port):
                return 0
            time.sleep(0.05)
        log.seek(0)
        sys.stderr.write(log.read())
    return process.poll() or 1


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except urllib.error.HTTPError:
        return False  # loading
    except OSError:
        return False


def stop_server(directory: Path = Path()) -> None:
    """Ends the page's daemon, in order; kills it when that takes long."""
    file = directory / PID_FILE
    if not file.exists():
        return
    daemon = json.loads(file.read_text())
    file.unlink()
    for number, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(daemon["pid"], number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not answers(daemon["port"]) and not _runs(daemon["pid"]):
                return
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def train(words: list[str]) -> int:
    if {"--help", "--version"} & set(words):
        return real("mlx_parallm_train", words)
    stop_server()
    config = _config(words)
    if "--write-config" in words:
        return real("mlx_parallm_train", words)
    settings = dict(SMALL) | {"server.port": os.environ["DOCS_PORT"]}
    settings["rl_training.total_steps"] = 2 if "--resume" in words else 1
    if config is not None:
        settings |= _of(config)
        if config.data.path is not None:  # rows of a file: nothing is sampled
            settings = {key: value for key, value in settings.items() if ".atropos." not in key}
    elif "--data" in words:
        settings["environments.0.max_tokens"] = MAX_TOKENS
    changed = [*words]
    for key, value in settings.items():
        changed += ["--set", f"{key}={value}"]
    if (
        config is not None
        and not config.environments
        and config.data.path is None
        and "--dry-run" not in words
    ):  # it waits for rollouts: perhaps a later block sends them
        return start("mlx_parallm_train", changed, int(os.environ["DOCS_PORT"]))
    return _go_on_as_train(changed)


def _go_on_as_train(words: list[str]) -> int:
    """Be the command: a start of its own would load once more what was read the configuration
    with."""
    from mlx_parallm import cli

    sys.argv = [str(Path(os.environ["DOCS_BIN"]) / "mlx_parallm_train"), *words]
    return cli.train(words)


def _config(words: list[str]) -> "Config | None":
    """The configuration that the command names, where it names one."""
    from mlx_parallm.config.load import load_config

    source = words[words.index("--config") + 1] if "--config" in words else None
    if (
        source is None
        and "--resume" in words
        and (run := Path(words[words.index("--resume") + 1])).exists()
    ):
        source = next(
            (
                str(d / "config.toml")
                for d in (run, run.resolve().parent)
                if (d / "config.toml").exists()
            ),
            None,
        )
    return load_config(source) if source else None


def _of(config: "Config") -> dict[str, object]:
    found: dict[str, object] = {}
    if "/" in config.model.base_path and not Path(config.model.base_path).exists():
        found["model.base_path"] = '"builtin:tiny"'
    if config.rl_training.checkpoint_dir.is_absolute():
        found["rl_training.checkpoint_dir"] = '"checkpoints"'
    for number, environment in enumerate(config.environments):
        found[f"environments.{number}.max_tokens"] = min(environment.max_tokens, MAX_TOKENS)
        found[f"environments.{number}.group_size"] = min(environment.group_size, GROUP_SIZE)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
