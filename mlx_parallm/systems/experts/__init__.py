"""Small recurrent policies ("experts") for control: GRU and LSTM, learned by recurrent PPO.
docs/systems.md#experts.

expert.py     the network: `ExpertConfig`, `GRUExpert`, `LSTMExpert`; a `losses.ppo.Policy`
registry.py   experts by name, and the ready-made ones
recurrent_ppo.py  `RecurrentPPO`: rollouts with the hidden state, replayed in the update
vector_tasks.py   vectorised environments: projectile, constant, and any of gymnasium
saving.py     one file an expert (safetensors or npz), and the trainer's directory
"""

from mlx_parallm.systems.experts.expert import ExpertConfig, GRUExpert, LSTMExpert, RNNExpertBase
from mlx_parallm.systems.experts.recurrent_ppo import RecurrentPPO, RecurrentPPOConfig, evaluate
from mlx_parallm.systems.experts.registry import ExpertRegistry
from mlx_parallm.systems.experts.saving import load_expert, save_expert

__all__ = [
    "ExpertConfig",
    "ExpertRegistry",
    "GRUExpert",
    "LSTMExpert",
    "RNNExpertBase",
    "RecurrentPPO",
    "RecurrentPPOConfig",
    "evaluate",
    "load_expert",
    "save_expert",
]
