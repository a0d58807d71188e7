"""A policy that learns which rewriting helps which prompt, and its HTTP service.
docs/systems.md#the-prompt-policy.

networks.py mutation_ppo.py   the two networks; PPO, checkpoints
experience.py store.py experiences, on the disk; how much is known about a prompt
embeddings.py          prompts as numbers
prompt_ratings.py rlaif.py task_reward.py   rewards: fitted to ratings, from a judge and a person,
                                          from a real task
mutations.py classifier.py phrases.py   the rules that rewrite a prompt, and the words they know
service.py rewriting.py protocol.py routes.py app.py   the service, its routes, its process
demo.py                made-up prompts on which one can see it learn
"""

from mlx_parallm.system.moved_names import lazy_names

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "systems.prompt_policy.networks": "PolicyNetwork ValueNetwork",
        "systems.prompt_policy.mutation_ppo": "PPOConfig PPOTrainer",
        "systems.prompt_policy.experience": "Choice Experience",
        "systems.prompt_policy.embeddings": "Embedder EndpointEmbedder HashedEmbedder",
        "systems.prompt_policy.mutations": "ChatMutation Mutation mutate",
        "systems.prompt_policy.classifier": "classify_prompt",
        "systems.prompt_policy.service": "PolicyService",
        "systems.prompt_policy.prompt_ratings": "RewardModel default_reward_model",
        "systems.prompt_policy.rlaif": "RLAIFOptions endpoint_judge learn_from_judge",
        "systems.prompt_policy.task_reward": "TaskReward",
        "systems.prompt_policy.app": "PromptPolicyServer make_deps",
    },
)
