"""Bodies and answers of the routes, as the OpenAPI document shows them. No MLX."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from mlx_parallm.errors import RequestError
from mlx_parallm.server.protocol.fields import Body, ListOf
from mlx_parallm.systems.prompt_policy.mutations import Effect
from mlx_parallm.systems.prompt_policy.phrases import Category
from mlx_parallm.types import MAX_REWARD

LARGEST = 1e6  # number of an embedding, and value: float32 and its squares hold it
LONGEST_PROMPT, MOST_PROMPTS = 20_000, 256
MOST_CHARACTERS = 400_000  # in the prompts of one request
SCORES = (1, 5)  # a person's


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("it holds half a surrogate pair, which is not a character") from error
    return text


Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST)]
Vector = Annotated[ListOf[Number], Field(min_length=1, max_length=65536)]
Prompt = Annotated[
    str, Field(min_length=1, max_length=LONGEST_PROMPT), AfterValidator(_whole_characters)
]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_whole_characters)]
Reward = Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class ActionBody(Body):
    """`allowed`: names of the mutations that may be chosen; without it all."""

    embedding: Vector
    deterministic: bool = False
    allowed: ListOf[Name] | None = None


class DistributionBody(Body):
    embedding: Vector
    allowed: ListOf[Name] | None = None


class ExperienceBody(Body):
    """`log_prob` and `value` as /select_action gave them, `allowed` as it was sent there. Steps
    of one episode have the same `episode_id`; without one the step is an episode."""

    state: Vector
    action: int = Field(ge=0)
    reward: Reward
    next_state: Vector
    done: bool
    log_prob: float = Field(ge=-LARGEST, le=0)
    value: Number
    allowed: ListOf[Name] | None = None
    episode_id: Name | None = None


class SaveBody(Body):
    path: Name | None = None


class LoadCheckpointBody(Body):
    path: Name


class EmbedBody(Body):
    input: Annotated[ListOf[Prompt], Field(min_length=1, max_length=MOST_PROMPTS)]

    @model_validator(mode="after")
    def _not_too_much(self) -> Self:
        if (characters := sum(map(len, self.input))) > MOST_CHARACTERS:
            raise RequestError(
                f"'input' has {characters} characters: send at most {MOST_CHARACTERS} in a request",
                param="input",
            )
        return self


class MutateBody(Body):
    """`mutation`: take this one. `conservative`: leave the prompt as it is where little is known
    about such prompts."""

    prompt: Prompt
    deterministic: bool = False
    conservative: bool = False
    allowed: ListOf[Name] | None = None
    mutation: Name | None = None


class RolloutBody(MutateBody):
    """`columns`: arguments of the reward functions, e.g. {"answer": "42"}."""

    columns: dict[str, Any] = Field(default_factory=dict)


class PolicyFeedbackBody(Body):
    """`reward`, or `score` from 1 to 5, which is the reward (score - 1) / 4. Steps that depend
    on each other have the same `episode_id`; `next_prompt` is the prompt that the mutation led
    to, and without it the episode has ended."""

    id: Name
    reward: Reward | None = None
    score: float | None = Field(None, ge=SCORES[0], le=SCORES[1])
    episode_id: Name | None = None
    next_prompt: Prompt | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.reward is None) == (self.score is None):
            raise RequestError("send 'reward', or 'score' from 1 to 5", param="reward")
        if self.next_prompt is not None and self.episode_id is None:
            raise RequestError(
                "'next_prompt' needs the 'episode_id' of the steps that go together",
                param="episode_id",
            )
        return self

    @property
    def value(self) -> float:
        if self.reward is not None:
            return self.reward
        assert self.score is not None
        return (self.score - SCORES[0]) / (SCORES[1] - SCORES[0])


class HealthAnswer(BaseModel):
    status: Literal["ok"] = "ok"


class MessageAnswer(BaseModel):
    message: str


class StatsAnswer(BaseModel):
    """Rewards of the last 100 experiences, losses of the last 10 updates."""

    total_updates: int
    total_episodes: int
    total_experiences: int
    buffer_size: int
    avg_reward: float
    max_reward: float
    avg_policy_loss: float | None
    avg_value_loss: float | None
    avg_entropy: float | None
    avg_kl: float | None
    mutations: dict[str, int]


class ActionAnswer(BaseModel):
    action: int
    mutation_type: str
    probability: float
    log_prob: float
    value: float
    uncertainty: float


class DistributionAnswer(BaseModel):
    probabilities: list[float]
    mutation_types: list[str]
    uncertainty: float


class StoredAnswer(BaseModel):
    stored: Literal[True] = True
    buffer_size: int


class UpdateAnswer(BaseModel):
    policy_loss: float
    value_loss: float
    entropy: float
    approx_kl: float
    clip_fraction: float
    learning_rate: float
    first_ratio: float
    experiences: int
    buffer_size: int
    update_count: int


class SavedAnswer(BaseModel):
    saved: Literal[True] = True
    path: str


class LoadedAnswer(BaseModel):
    loaded: Literal[True] = True
    path: str


class EmbedAnswer(BaseModel):
    embeddings: list[list[float]]
    dimensions: int


class ImpactAnswer(BaseModel):
    quality: Effect
    cost: Effect
    latency: Effect
    reliability: Effect


class MutateAnswer(BaseModel):
    """`id` is what /feedback takes; without one the prompt was left as it is, and nothing is to
    be rewarded."""

    id: str | None
    prompt: str
    action: int | None
    mutation_type: str | None
    change_description: str
    expected_impact: ImpactAnswer
    category: Category
    confidence: float
    probability: float | None
    log_prob: float | None
    value: float | None
    uncertainty: float
    score: float = Field(description="what the fitted reward model says of the new prompt, 0 to 1")


class RolloutAnswer(BaseModel):
    """`rewards`: of each answer, null without a score; `reward`: the mean of the others.
    `stored`: it was stored as an experience; not if the prompt was left as it is."""

    mutation: MutateAnswer
    answers: list[str]
    rewards: list[float | None]
    reward: float
    stored: bool
    buffer_size: int


UNCHANGED = ImpactAnswer(
    quality="neutral", cost="neutral", latency="neutral", reliability="neutral"
)
