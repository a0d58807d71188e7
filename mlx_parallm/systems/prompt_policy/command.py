"""`mlx_parallm prompt-policy`: the service of the prompt policy, or a demonstration. Imports no
MLX at first."""

import os
import sys
import threading
from typing import Annotated

from mlx_parallm.cli.command import load
from mlx_parallm.config.arguments import Configured, KeyFile, setting
from mlx_parallm.system.packages import require_mlx
from mlx_parallm.system.signals import END_S, Shutdown


class PromptPolicy(Configured):
    """Serve the policy, or show it learn."""

    server: Annotated[int, "PORT"] | None = setting("server.port")
    """serve on this port, e.g. 8765; 0: a free one"""
    host: str | None = setting("server.host")
    """address to bind; anything but loopback needs an API key; default: 127.0.0.1"""
    checkpoint_dir: Annotated[str, "DIR"] | None = setting("prompt_policy.checkpoint_dir")
    """for checkpoints and experiences"""
    api_key_file: KeyFile | None = setting("server.api_key_file")
    """file with the API key that clients send"""
    config: Annotated[str, "FILE"] | None = None
    """a TOML file; [server] and [prompt_policy] are read"""
    until_stdin_ends: bool = False
    """end in order when standard input ends"""

    def run(self) -> int:
        with Shutdown() as shutdown:
            return self._run(shutdown)

    def _run(self, shutdown: Shutdown) -> int:
        config = load(self.config, self.overrides)
        require_mlx()
        import mlx.core as mx

        from mlx_parallm.models.threads import mlx_thread
        from mlx_parallm.system.log import configure_logging
        from mlx_parallm.systems.prompt_policy.config import PromptPolicyConfig

        configure_logging(level=config.logging.level)
        # a GPU takes longer to start such small products than a CPU to compute them, and may fail
        mx.set_default_device(mx.cpu)
        if self.server is None:
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
        if self.until_stdin_ends:
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
