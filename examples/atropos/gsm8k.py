"""Atropos' own environments/gsm8k_server.py, as their documentation starts it, against this server.

As it stands it ignores `--openai.base_url` (its `config_init` returns one APIServerConfig, and
atroposlib then uses localhost:9004 to 9007) and asks for text only. The directory that it lies in
has to be on the PYTHONPATH.
"""

from gsm8k_server import GSM8kEnv


class GSM8k(GSM8kEnv):
    @classmethod
    def config_init(cls):
        config, servers = super().config_init()
        server = servers[0] if isinstance(servers, list) else servers
        defaults = {"server_type": "vllm", "base_url": "http://localhost:8000/v1"}
        ours = {
            "use_wandb": False,
            "rollout_server_url": "http://localhost:8001",
            "total_steps": -1,
        }
        return config.model_copy(update=ours), [server.model_copy(update=defaults)]


if __name__ == "__main__":
    GSM8k.cli()
