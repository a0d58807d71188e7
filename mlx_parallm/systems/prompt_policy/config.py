"""[prompt_policy]: a policy that learns which rewriting helps which prompt, and its HTTP
service."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from mlx_parallm.config.environment import Section

LEAST_EXPERIENCES = 2  # batch normalisation needs a spread


class PromptPPOConfig(Section):
    """Sizes of the two networks, and PPO's numbers."""

    input_dim: int = Field(1536, ge=1, le=65536)
    """Numbers of an embedding."""
    action_dim: int = Field(5, ge=2, le=64)
    """Mutations that the policy chooses from; 6 with `chat_url`."""
    hidden_dim: int = Field(256, ge=2, le=8192)
    """Width of the first two hidden layers; the third is half as wide."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Share of hidden units that an update leaves out."""
    learning_rate: float = Field(3e-4, gt=0)
    """AdamW's."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's."""
    lr_step: int = Field(100, ge=1)
    """Updates between two reductions of the learning rate."""
    lr_decay: float = Field(0.9, gt=0, le=1)
    """Factor of each reduction."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation."""
    eps_clip: float = Field(0.2, gt=0, lt=1)
    """The ratio is clipped to 1 ± eps_clip."""
    value_clip: float = Field(0.2, ge=0)
    """Values are clipped to their old value ± value_clip; 0 = not."""
    entropy_coef: float = Field(0.01, ge=0)
    """Weight of the entropy bonus."""
    value_coef: float = Field(0.5, ge=0)
    """Weight of the value loss."""
    max_grad_norm: float = Field(5.0, gt=0)
    """Gradients of each network are scaled down to this norm."""
    max_importance: float = Field(2.0, ge=1)
    """Largest weight of an experience whose action the policy of today would choose more often."""
    n_epochs: int = Field(4, ge=1, le=1000)
    """Passes over the experiences in one update."""
    batch_size: int = Field(64, ge=LEAST_EXPERIENCES)
    """Experiences in a mini-batch."""
    update_size: int = Field(256, ge=LEAST_EXPERIENCES)
    """An update of more experiences goes in parts of about this many, oldest first."""
    buffer_size: int = Field(2048, ge=LEAST_EXPERIENCES)
    """Experiences at which the service updates by itself."""
    min_buffer_size: int = Field(128, ge=LEAST_EXPERIENCES)
    """Fewest experiences of an update."""
    checkpoint_interval: int = Field(100, ge=1)
    """Updates between two checkpoints that are kept (`update_N`); `latest` is written after
    every update."""
    seed: int = Field(0, ge=0)
    """Of the weights, the sampled actions and the order of mini-batches."""

    @model_validator(mode="after")
    def _check_sizes(self) -> "PromptPPOConfig":
        if self.min_buffer_size > self.buffer_size:
            raise ValueError(
                f"min_buffer_size = {self.min_buffer_size} is above buffer_size ="
                f" {self.buffer_size}"
            )
        return self


class PromptPolicyConfig(Section):
    mount: bool = False
    """Add the routes to this server, below /prompt_policy."""
    checkpoint_dir: Path = Path("checkpoints/prompt_policy")
    """Directory of checkpoints and of the experiences that no update has used yet; /save and
    /load stay below it."""
    embedding: str = "hashed"
    """What turns a prompt into numbers: "hashed" (n-grams, no model), "served" (hidden states of
    the model that this server serves), or the URL of an OpenAI-compatible server, with its /v1."""
    embedding_model: str | None = None
    """Name of the embedding model at that URL."""
    chat_url: str | None = None
    """An OpenAI-compatible server, with its /v1, whose model rewrites prompts: the sixth
    mutation."""
    chat_model: str | None = None
    """Name of that model."""
    api_key_file: Path | None = None
    """File with the API key of the servers at `embedding`, `chat_url` and `task_url`."""
    task_url: str | None = None
    """An OpenAI-compatible server, with its /v1, whose model answers prompts for POST /rollout.
    Without it: the model that this server serves, if it serves one."""
    task_model: str | None = None
    """Name of that model."""
    rewards: tuple[str, ...] = ()
    """Reward functions of POST /rollout, as in `[[environments]] rewards`: "python:file.py:f",
    "builtin:NAME"."""
    rollouts: int = Field(4, ge=1, le=64)
    """Answers to a prompt that POST /rollout takes the mean reward of."""
    max_tokens: int = Field(256, ge=1)
    """Longest answer for POST /rollout."""
    temperature: float = Field(0.7, ge=0)
    """Sampling temperature for POST /rollout."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest time of a request to another server."""
    conservative_above: float = Field(0.5, ge=0, le=1)
    """POST /mutate with conservative = true leaves a prompt as it is if the uncertainty is
    above this."""
    reward_source: Literal["client", "model"] = "client"
    """Who rewards a mutation: the client by POST /feedback, or the fitted reward model at once."""
    open_decisions: int = Field(10_000, ge=1)
    """Newest mutations that wait for feedback; older ones are forgotten."""
    ppo: PromptPPOConfig = PromptPPOConfig()

    @model_validator(mode="after")
    def _check_endpoints(self) -> "PromptPolicyConfig":
        named: dict[str, tuple[Any, Any]] = {
            "embedding_model": (self.embedding_model, self.embedding.startswith("http")),
            "chat_model": (self.chat_model, self.chat_url),
            "task_model": (self.task_model, self.task_url),
        }
        for key, (value, url) in named.items():
            if bool(value) != bool(url):
                raise ValueError(
                    f"{key} and the URL of its server go together: set both or neither"
                )
        if self.embedding not in ("hashed", "served") and not self.embedding.startswith(
            ("http://", "https://")
        ):
            raise ValueError(f'embedding = "{self.embedding}": it is "hashed", "served" or a URL')
        wanted = 6 if self.chat_url else 5
        if self.ppo.action_dim != wanted:
            why = "with chat_url" if self.chat_url else "without chat_url"
            raise ValueError(
                f"ppo.action_dim = {self.ppo.action_dim}: {why} there are {wanted} mutations"
            )
        return self
