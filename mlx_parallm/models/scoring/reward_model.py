"""Reward models: a conversation → one number, the value head's at its last token (Bradley–Terry).

A run with `rl_training.algorithm = "reward_model"` leaves one in each of its checkpoints:

    step_000100/  adapters.safetensors  adapter_config.json   the adapter; or a whole model's files
                  value_head.safetensors                      value_head.weight [1, D] and .bias [1]
                  reward_model.json                           `RewardModelCard`, which makes it one

`TrainedRewardModel.load` takes such a directory, or a run, whose `final`, else `latest`, it
reads. The card names the base, and holds a checksum of its tokens of some texts.
"""

import atexit
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Lock
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from mlx_parallm.config.server import ModelConfig
from mlx_parallm.errors import ModelError, RequestError
from mlx_parallm.models.adapters.linear import DoRALinear, LoRALinear
from mlx_parallm.models.blockwise import BlockwiseModel
from mlx_parallm.models.heads.value_head import (
    VALUE_HEAD,
    VALUE_HEAD_FILE,
    attach_value_head,
    value_head_of,
)
from mlx_parallm.models.layouts.layout import TokenBatch, padded_length
from mlx_parallm.models.loading import LoadedModel, load_model, load_tokenizer
from mlx_parallm.models.lora import (
    adapted_layer,
    fit_adapter,
    linear_layers,
    linear_shapes,
    load_adapter,
)
from mlx_parallm.models.scoring.card import (
    PLACES,
    RewardModelCard,
    check_tokenizer,
    find_reward_model,
)
from mlx_parallm.models.scoring.conversation_tokens import Conversation, conversation_tokens
from mlx_parallm.models.threads import MLXThread
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.system.device.faults import DeviceFaults
from mlx_parallm.system.files import sampled_digest

TOKEN_BUDGET = 8192  # tokens computed together, padding included
_SHARED: dict[str, "RewardScorer"] = {}
_LOADED_AS: dict[str, str] = {}  # by the paths of `load_shared_scorers`: what the files were
_SHARED_LOCK = Lock()


class TrainedRewardModel:
    """A loaded reward model. Used by one thread.

    Args:
        model: the base with its adapter and its head.
        longest: tokens of the longest conversation.
    """

    def __init__(
        self, model: BlockwiseModel, tokenizer: Tokenizer, card: RewardModelCard, *, longest: int
    ) -> None:
        self._model, self._tokenizer, self.card, self.longest = model, tokenizer, card, longest

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        loaded: LoadedModel | None = None,
        between_blocks: Callable[[], None] = lambda: None,
    ) -> "TrainedRewardModel":
        """Load a reward model.

        Args:
            loaded: a model as its checkpoint has it, of the dtype and revision of the card; where
                it is the card's base, its arrays are shared.
            between_blocks: as in `BlockwiseModel`.

        Raises ConfigError: `path` holds none, or the tokenizer is another one. ModelError,
        AdapterError: the base cannot be loaded, or adapter or head do not fit it.
        """
        directory = find_reward_model(path)
        card = RewardModelCard.read(directory)
        config = card.model_config(directory)
        if loaded is None or not card.is_of(loaded.name):
            loaded, model = _load_policy(config, quantize=card.quantized and card.adapter)
        else:
            model = copy.deepcopy(loaded.model)
        tokenizer = load_tokenizer(loaded.path, config)
        check_tokenizer(tokenizer, card, directory)
        if card.adapter:
            _put_adapter(model, directory)
        _put_head(model, directory)
        blockwise = BlockwiseModel(model, blocks_per_eval=1, between_blocks=between_blocks)
        return cls(blockwise, tokenizer, card, longest=loaded.max_model_len)

    def tokens(
        self, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids of a conversation, as in training. Raises RequestError: messages for
        a model that was trained on texts, or the reverse; too long; refused by the template."""
        is_text = isinstance(conversation, str)
        if is_text != (self.card.prompt_format == "text"):
            wanted = "texts" if self.card.prompt_format == "text" else "messages"
            raise RequestError(
                f"this reward model was trained on {wanted} (data.prompt_format ="
                f' "{self.card.prompt_format}"), and got {"a text" if is_text else "messages"}'
            )
        tokens = conversation_tokens(
            self._tokenizer,
            conversation,
            tools=tools,
            template_kwargs=self.card.chat_template_kwargs,
            end_token=self.card.end_token,
        )
        if len(tokens) > self.longest:
            raise RequestError(
                f"the conversation has {len(tokens)} tokens, and this reward model reads"
                f" {self.longest} at most"
            )
        return tokens

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence of token ids."""
        scores = [0.0] * len(sequences)
        for rows in _batches([len(tokens) for tokens in sequences]):
            width = padded_length(max(len(sequences[row]) for row in rows))
            inputs = np.zeros((len(rows), width), np.int32)
            for place, row in enumerate(rows):
                inputs[place, : len(sequences[row])] = sequences[row]
            ends = np.array([len(sequences[row]) - 1 for row in rows], np.int32)
            batch = TokenBatch(
                inputs=mx.array(inputs),
                positions=mx.array(np.arange(len(rows), dtype=np.int32) * width + ends),
                targets=mx.array(inputs[np.arange(len(rows)), ends]),
            )
            values = np.array(self._model.score(batch)[2])
            for row, value in zip(rows, values.tolist(), strict=True):
                scores[row] = value
        return scores


class RewardScorer:
    """A reward model on its own thread, which loads it. Any thread may ask; `close` ends it.

    Conversations are read in the order of the calls. If the model could not be loaded, every
    answer fails with the reason. `faults`: of the device, for the whole process.
    """

    def __init__(
        self, path: str | Path, base: Callable[[], LoadedModel | None] = lambda: None
    ) -> None:
        """Begin to load the reward model at `path`.

        Args:
            base: called on the scorer's thread: a model that is loaded already, or None.

        Raises ConfigError: there is no reward model.
        """
        directory = find_reward_model(path)
        self.name = _name_of(directory)
        self.prompt_format = RewardModelCard.read(directory).prompt_format
        self.faults = DeviceFaults()
        self._thread = MLXThread("reward model")
        self._model: Future[TrainedRewardModel] = self._thread.submit(
            lambda: TrainedRewardModel.load(directory, loaded=base())
        )
        atexit.register(self.close)

    def wait(self) -> None:
        """Wait until the model is loaded. Raises what loading it raises."""
        self._model.result()

    def score_each(
        self,
        conversations: Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> "Future[list[float | RequestError]]":
        """Return a future of the score of each conversation, or why it cannot be read."""

        def run() -> list[float | RequestError]:
            readable, problems = self._tokens(conversations, tools)
            scores = iter(self._scores_of([tokens for tokens in readable if tokens]))
            return [problems.get(i) or next(scores) for i in range(len(conversations))]

        return self._thread.submit(run)

    def score(
        self,
        conversations: Sequence[Conversation],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> "Future[tuple[list[float], int]]":
        """Return a future of the scores of conversations, and of the number of their tokens. It
        raises the first problem, as RequestError."""

        def run() -> tuple[list[float], int]:
            readable, problems = self._tokens(conversations, tools)
            if problems:
                raise problems[min(problems)]
            return self._scores_of(readable), sum(map(len, readable))

        return self._thread.submit(run)

    def _scores_of(self, texts: list[list[int]]) -> list[float]:
        """Raises DeviceFaultError: the device has failed, there or elsewhere."""
        with self.faults.watched():
            return self._model.result().score(texts)

    def _tokens(
        self, conversations: Sequence[Conversation], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[int]], dict[int, RequestError]]:
        """Return the tokens of each conversation, and the errors of unreadable ones by their
        index; the tokens of these are empty."""
        model = self._model.result()
        readable: list[list[int]] = []
        problems: dict[int, RequestError] = {}
        for place, conversation in enumerate(conversations):
            try:
                readable.append(model.tokens(conversation, tools))
            except RequestError as error:
                readable.append([])
                problems[place] = error
        return readable, problems

    def close(self) -> None:
        """End the thread. May be called again."""
        atexit.unregister(self.close)
        self._thread.close()


def shared_scorer(path: str, base: LoadedModel | None = None) -> RewardScorer:
    """Return this process's scorer of a reward model; the first call begins to load it, and shares
    the arrays of `base` if it can."""
    with _SHARED_LOCK:
        if path not in _SHARED:
            _SHARED[path] = RewardScorer(path, lambda: base)
        return _SHARED[path]


def load_shared_scorers(
    paths: Iterable[str], base: LoadedModel | None, faults: DeviceFaults | None = None
) -> None:
    """Load this process's scorers of reward models, before the tree of `base` is wrapped; one whose
    files have changed since an earlier run, again. Raises ConfigError, ModelError, AdapterError:
    one does not fit its base."""
    for directory in map(find_reward_model, paths):
        path, files = str(directory), sorted(each for each in directory.iterdir() if each.is_file())
        now = sampled_digest(files)
        with _SHARED_LOCK:
            old = _SHARED.pop(path, None) if _LOADED_AS.get(path, now) != now else None
            _LOADED_AS[path] = now
        if old is not None:
            old.close()
        scorer = shared_scorer(path, base)
        scorer.faults = faults or DeviceFaults()  # the run's own
        scorer.wait()


def _name_of(directory: Path) -> str:
    """The name of the run, if the directory is one of its checkpoints; else its own."""
    here = directory.absolute()
    in_run = here.name in (*PLACES, "best") or here.name.startswith("step_")
    return here.parent.name if in_run else here.name


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Rows of nearly equal length together, within the budget of tokens."""
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: lengths[row]):
        width = padded_length(lengths[row])
        if batches and (len(batches[-1]) + 1) * width <= TOKEN_BUDGET:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _load_policy(config: ModelConfig, *, quantize: bool) -> tuple[LoadedModel, nn.Module]:
    loaded = load_model(config, quantize=quantize)
    return loaded, loaded.model


def _put_adapter(model: nn.Module, directory: Path) -> None:
    stored = load_adapter(directory).layers
    pairs = fit_adapter(linear_shapes(model), stored, str(directory))
    layers, adapted = linear_layers(model), []
    for path, pair in pairs.items():
        kind = LoRALinear if pair.magnitude is None else DoRALinear
        layer = adapted_layer(layers[path], int(pair.a.shape[-1]), pair.scale, kind=kind)
        layer.lora_a, layer.lora_b = pair.a, pair.b
        if pair.magnitude is not None:
            layer.m = pair.magnitude
        layer.freeze()
        adapted.append((path, layer))
    model.update_modules(tree_unflatten(adapted))
    for _, layer in adapted:
        mx.eval(layer)


def _put_head(model: nn.Module, directory: Path) -> None:
    attach_value_head(model)
    head = value_head_of(model)
    assert head is not None, "it was attached"
    file = directory / VALUE_HEAD_FILE
    try:
        tensors = mx.load(str(file))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    assert isinstance(tensors, dict)
    for name in ("weight", "bias"):
        stored, wanted = tensors.get(f"{VALUE_HEAD}.{name}"), head[name]
        if stored is None or stored.shape != wanted.shape:
            shape = "missing" if stored is None else list(stored.shape)
            raise ModelError(
                f"{file}: {VALUE_HEAD}.{name} is {shape}, and this base needs {list(wanted.shape)}"
            )
        head[name] = stored.astype(mx.float32)
    mx.eval(head.parameters())
