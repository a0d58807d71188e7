"""`mlx_parallm prompt-policy`: the service of the prompt policy, or a demonstration. Imports no
MLX at first."""

import os
import sys
import threading
from argparse import ArgumentParser, Namespace

from mlx_parallm.cli.command import Run, add_set, load, toml_value
from mlx_parallm.system.packages import require_mlx
from mlx_parallm.system.signals import END_S, Shutdown


def prompt_policy(parser: ArgumentParser) -> Run:
    """Serve the policy, or show it learn."""
    parser.add_argument(
        "--server", metavar="PORT", type=int, help="serve on this port, e.g. 8765; 0: a free one"
    )
    parser.add_argument(
        "--host",
        help="address to bind; anything but loopback needs an API key (default 127.0.0.1)",
    )
    parser.add_argument("--checkpoint-dir", metavar="DIR", help="for checkpoints and experiences")
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key that clients send"
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file; [server] and [prompt_policy] are read"
    )
    parser.add_argument(
        "--until-stdin-ends",
        action="store_true",
        help="end in order when standard input ends",
    )
    add_set(parser)

    def run(args: Namespace) -> int:
        with Shutdown() as shutdown:
            return _run(args, shutdown)

    return run


def _run(args: Namespace, shutdown: Shutdown) -> int:
    overrides = list(args.set)
    named = {
        "server.port": args.server,
        "server.host": args.host,
        "server.api_key_file": args.api_key_file,
        "prompt_policy.checkpoint_dir": args.checkpoint_dir,
    }
    overrides += [f"{key}={toml_value(value)}" for key, value in named.items() if value is not None]
    config = load(args.config, overrides)
    require_mlx()
    from mlx_parallm.models.threads import mlx_thread
    from mlx_parallm.system.log import configure_logging
    from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig

    configure_logging(level=config.logging.level)
    if args.server is None:
        from mlx_parallm.systems.prompt_policy.demo import demonstrate

        with shutdown.interrupts(), mlx_thread():
            demonstrate(config.section(PromptPolicyConfig).ppo)
        return 0
    from mlx_parallm.systems.prompt_policy.app import PromptPolicyServer

    shutdown.limit_s = config.server.drain_timeout_s + END_S
    with shutdown.interrupts():
        server = PromptPolicyServer(
            config.section(PromptPolicyConfig), config.server, config.resolve_api_key()
        )
        server.start()
    if args.until_stdin_ends:
        ends = threading.Thread(target=_wait_for_end_of_stdin, args=(shutdown.stop,))
        ends.daemon = True
        ends.start()
    sys.stdout.write(f"RL Server started at {server.url}\n")
    sys.stdout.flush()
    shutdown.stop.wait()
    server.close()
    return 0


def _wait_for_end_of_stdin(stop: threading.Event) -> None:
    """Set `stop` when standard input ends. Not `sys.stdin`: its lock would stop the
    interpreter's end."""
    try:
        while os.read(0, 4096):
            pass
    finally:
        stop.set()
