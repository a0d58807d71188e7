"""A teacher that is a server: vLLM's `prompt_logprobs` (also our own server's), SGLang's /generate,
or /v1/completions with `echo`. It gets token ids: the policy's, whose tokenizer is compared at the
first answer, by its /tokenize or by the files of `path`; with tokenizer = "own" those of `path`.

Its log-probabilities are at temperature 1, and of its K best tokens at most; the rest of the mass
is 1 minus theirs.
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.errors import ConfigError, EndpointError
from mlx_parallm.execution.openai_client import OpenAIEndpoint, UnusableAnswerError
from mlx_parallm.losses.distillation import LEAST_LOGPROB
from mlx_parallm.models.loading import load_tokenizer, resolve_model_path
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.rl_training.distillation.model import model_config
from mlx_parallm.rl_training.distillation.scoring import Answer, Scored
from mlx_parallm.rl_training.distillation.tokenizers import (
    CHAT,
    TextIds,
    check_tokenizers,
    compare,
    texts,
)
from mlx_parallm.rl_training.factory import CompanionContext
from mlx_parallm.system.files import local_path
from mlx_parallm.system.foreign_http import Bounds
from mlx_parallm.system.log import get_logger
from mlx_parallm.system.loop_thread import LoopThread

LARGEST_ANSWER, MOST_CONTAINERS = 512 << 20, 8 << 20  # a hundred tokens for each of 32 thousand
MASS_TOLERANCE = 0.01  # for rounding in half precision
UNUSABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Errors that an answer of another form than the API's causes."""
TURN_S = 0.1
"""Between two looks at a stop request, while answers are on their way."""
log = get_logger("distillation")

Top = Sequence[tuple[int, float]]
"""A position's best tokens and their log-probabilities."""


class LostError(EndpointError):
    """The server does not answer; `scored` holds the earlier answers."""

    def __init__(self, error: EndpointError, scored: list[Scored | None]) -> None:
        super().__init__(str(error), status=error.status)
        self.scored = scored


class RemoteTeacher:
    """Args:
        tokenizer: the policy's, of the trainer's thread.
        keep: as `Teacher.score` will be asked.
        note: called with the reason if an answer has no score.

    Raises ConfigError: this API cannot do the requested thing, or a file that cannot be read.
    """

    reads_images = False

    def __init__(
        self,
        config: TeacherConfig,
        context: CompanionContext,
        tokenizer: Tokenizer,
        keep: int | None,
        note: Callable[[str], None],
    ) -> None:
        self._note, self._has_scored = note, False
        self.name, self._config, self.vocab_size = config.name, config, context.vocab_size
        self._what = f"distillation: teacher {config.name!r} ({config.url})"
        if keep is not None and config.api == "completions":
            raise ConfigError(
                f'{self._what}: api = "completions" names its best tokens by their texts, not by'
                ' ids: use mode = "advantage", or another api'
            )
        if keep == 0:
            raise ConfigError(
                f"{self._what}: a server does not send its whole vocabulary: set"
                " rl_training.distillation.top_k"
            )
        if (temperature := context.training.temperature) != 1.0:
            raise ConfigError(
                f"{self._what}: its log-probabilities are at temperature 1, and"
                f" rl_training.temperature is {temperature:g}: set it to 1"
            )
        self.tokenizer = tokenizer
        self._compared = False
        if config.path:
            teacher_model = model_config(config, context.model)
            path = resolve_model_path(config.path, config.revision)
            self.tokenizer = load_tokenizer(path, teacher_model)
            if config.tokenizer == "own":
                self.vocab_size = self.tokenizer.vocab_size
            else:
                check_tokenizers(config, tokenizer, self.tokenizer)
            self._compared = True
        root = config.url.rstrip("/").removesuffix("/v1")
        key = _key(config)
        self._model = config.served_name
        self._loop = LoopThread(f"teacher {config.name}")
        self._server = OpenAIEndpoint(
            root,
            key,
            timeout_s=config.timeout_s,
            retries=config.tries - 1,
            max_in_flight=config.requests_at_once,
            bounds=Bounds(body=LARGEST_ANSWER, containers=MOST_CONTAINERS),
        )
        self._models = OpenAIEndpoint(f"{root}/v1", key, timeout_s=config.timeout_s, retries=0)

    def close(self) -> None:
        async def end() -> None:
            await asyncio.gather(self._server.aclose(), self._models.aclose())

        self._loop.run(end())
        self._loop.stop(timeout_s=1.0)

    # ------------------------------------------------------------------ asking

    def score(
        self, answers: Sequence[Answer], keep: int | None, should_stop: Callable[[], bool]
    ) -> list[Scored | None] | None:
        future = self._loop.submit(self._all(answers, keep))
        while True:
            try:
                return future.result(timeout=TURN_S)
            except FutureTimeout:
                if future.done():  # its own, which no turn makes
                    raise
                if should_stop():
                    future.cancel()
                    return None

    async def _all(self, answers: Sequence[Answer], keep: int | None) -> list[Scored | None]:
        """Raises LostError: some have no answer; ConfigError: the server refuses one."""
        try:
            await self._begin()
        except EndpointError as error:
            raise self._lost(error, [None] * len(answers)) from error
        replies = await asyncio.gather(
            *(self._one(answer, keep) for answer in answers), return_exceptions=True
        )
        scored: list[Scored | None] = []
        lost: EndpointError | None = None
        for reply in replies:
            if isinstance(reply, BaseException):
                if not isinstance(reply, EndpointError):
                    raise reply
                lost = reply
                scored.append(None)
            else:
                scored.append(reply)
        if lost is not None:
            raise self._lost(lost, scored) from lost
        return scored

    def _lost(
        self, error: EndpointError, scored: list[Scored | None]
    ) -> EndpointError | ConfigError:
        if error.may_pass:
            return LostError(error, scored)
        return ConfigError(f"{self._what} refuses the request: {error}")

    async def _begin(self) -> None:
        """Read the model's name and compare the tokenizer, at the first contact."""
        if not self._model and self._config.api != "sglang":
            names = await self._models.models()
            if not names:
                raise ConfigError(f"{self._what} lists no model: set served_name")
            self._model = names[0]
        if not self._compared:
            await self._compare()
            self._compared = True

    async def _compare(self) -> None:
        """Raises ConfigError: it reads a text as other tokens, or cannot say."""
        compared = list(texts())
        if self.tokenizer.has_chat_template:
            compared.append(self.tokenizer.render_chat_text(CHAT))
        replies = await asyncio.gather(*(self._tokens(text) for text in compared))
        for text, ids in zip(compared, replies, strict=True):
            compare(
                TextIds(self._config, text, self.tokenizer.encode(text, add_special_tokens=False)),
                ids,
            )

    async def _tokens(self, text: str) -> list[int]:
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        try:
            reply = await self._server.post("/tokenize", body)
        except EndpointError as error:
            if error.may_pass:
                raise
            raise ConfigError(
                f"{self._what} does not tokenise texts ({error}), so its tokenizer cannot be"
                " compared with the policy's: set path to the directory of its tokenizer"
            ) from error
        ids = reply.get("tokens")
        if not isinstance(ids, list) or not all(isinstance(entry, int) for entry in ids):
            raise ConfigError(
                f"{self._what}: /tokenize answered {str(reply)[:80]!r}: set path to the directory"
                " of its tokenizer"
            )
        return ids

    # ------------------------------------------------------------------ one answer

    async def _one(self, answer: Answer, keep: int | None) -> Scored | None:
        """Return the scores; None, noted, if the answer is not of this API: one of them ends
        no run. Raises ConfigError: none was of it so far; EndpointError: there
        is not an answer."""
        try:
            scored = await self._ask(answer, keep)
        except ConfigError as error:
            if not self._has_scored:
                raise
            self._note(str(error).removeprefix(f"{self._what}").lstrip(": "))
        except UnusableAnswerError as error:
            self._note(str(error))
        except UNUSABLE as error:
            self._note(
                f"an answer is not of the api {self._config.api!r}:"
                f" {type(error).__name__}: {str(error)[:80]}"
            )
        else:
            self._has_scored = True
            return scored
        return None

    async def _ask(self, answer: Answer, keep: int | None) -> Scored:
        tokens = list(answer.rollout.tokens)
        count = 1 if keep is None else keep
        if self._config.api == "sglang":
            body: dict[str, Any] = {
                "input_ids": tokens,
                "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 0 if keep is None else count,
            }
            reply = await self._server.post("/generate", body)
            rows = self._of_sglang(reply, tokens, keep)
        else:
            body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0}
            if self._config.api == "vllm":
                body["prompt_logprobs"] = count
            else:
                body |= {"echo": True, "logprobs": 1}
            reply = await self._server.post("/v1/completions", body)
            choice = self._choice(reply)
            rows = (
                self._of_vllm(choice, tokens)
                if self._config.api == "vllm"
                else self._of_echo(choice, tokens)
            )
        trained = answer.rollout.trained_mask
        places = [place for place, chosen in enumerate(trained) if chosen and place]
        return self._scored([rows[place] for place in places], keep)

    def _choice(self, reply: Mapping[str, Any]) -> Mapping[str, Any]:
        choices = reply.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            raise ConfigError(f"{self._what} answered {str(reply)[:120]!r}: no choices")
        return choices[0]

    def _of_vllm(self, choice: Mapping[str, Any], tokens: Sequence[int]) -> list["_TokenScore"]:
        entries = self._list(choice.get("prompt_logprobs"), len(tokens), "prompt_logprobs")
        rows = []
        for token, entry in zip(tokens, entries, strict=True):
            if entry is None:
                rows.append(_TokenScore(token, math.nan, None, ()))
                continue
            by_id = {int(key): value for key, value in entry.items()}
            if token not in by_id:
                raise ConfigError(f"{self._what}: prompt_logprobs without the token itself")
            best = [(key, float(value["logprob"])) for key, value in by_id.items()]
            logprob = float(by_id[token]["logprob"])
            rows.append(
                _TokenScore(token, logprob, logprob >= max(number for _, number in best), best)
            )
        return rows

    def _of_sglang(
        self, reply: Mapping[str, Any], tokens: Sequence[int], keep: int | None
    ) -> list["_TokenScore"]:
        meta = reply.get("meta_info") or {}
        entries = self._list(meta.get("input_token_logprobs"), len(tokens), "input_token_logprobs")
        tops: Sequence[Any] = [()] * len(tokens)
        if keep is not None:
            tops = self._list(meta.get("input_top_logprobs"), len(tokens), "input_top_logprobs")
        rows = []
        for token, entry, top in zip(tokens, entries, tops, strict=True):
            if int(entry[1]) != token:
                raise ConfigError(f"{self._what}: it scored token {entry[1]} in place of {token}")
            number = math.nan if entry[0] is None else float(entry[0])
            best = [(int(other[1]), float(other[0])) for other in top or () if other[0] is not None]
            agrees = number >= max(value for _, value in best) if best else None
            rows.append(_TokenScore(token, number, agrees, best))
        return rows

    def _of_echo(self, choice: Mapping[str, Any], tokens: Sequence[int]) -> list["_TokenScore"]:
        reply = choice.get("logprobs") or {}
        numbers = reply.get("token_logprobs")
        if not isinstance(numbers, list) or len(numbers) < len(tokens):
            numbers = self._list(numbers, len(tokens), "logprobs.token_logprobs")
        tops = reply.get("top_logprobs") or [None] * len(numbers)
        rows = []
        for token, number, top in zip(tokens, numbers, tops, strict=False):
            value = math.nan if number is None else float(number)
            best = max(map(float, top.values())) if top else None
            rows.append(_TokenScore(token, value, None if best is None else value >= best, ()))
        return rows

    def _list(self, value: Any, length: int, what: str) -> list[Any]:
        if not isinstance(value, list) or len(value) != length:
            size = f"{len(value)} entries" if isinstance(value, list) else repr(value)[:40]
            raise ConfigError(
                f"{self._what}: {what} has {size} for {length} tokens: does it speak this api"
                f" ({self._config.api})?"
            )
        return value

    def _scored(self, rows: Sequence["_TokenScore"], keep: int | None) -> Scored:
        logprobs = np.array([row.logprob for row in rows], np.float32)
        if any(row.agrees is None for row in rows):
            agrees = None
        else:
            agrees = np.array([float(bool(row.agrees)) for row in rows], np.float32)
        if keep is None:
            return Scored(logprobs, agrees)
        ids = np.zeros((len(rows), keep), np.int32)
        targets = np.full((len(rows), keep + 1), np.nan, np.float32)
        for place, row in enumerate(rows):
            best = sorted(row.best, key=lambda entry: -entry[1])[:keep]
            if len(best) < keep:
                raise ConfigError(
                    f"{self._what}: it sent {len(best)} of the {keep} best tokens: lower"
                    " rl_training.distillation.top_k, or raise the server's limit (vLLM:"
                    " --max-logprobs)"
                )
            chosen = [token for token, _ in best]
            if (largest := max(chosen)) >= self.vocab_size and self._config.tokenizer == "policy":
                raise ConfigError(
                    f"{self._what} likes token {largest}, and the policy has {self.vocab_size}"
                )
            if min(chosen) < 0 or len(set(chosen)) < keep:
                raise ValueError(f"its best tokens are {str(chosen)[:60]}")
            if math.fsum(math.exp(number) for _, number in best) > 1 + MASS_TOLERANCE:
                raise ValueError("the probabilities of its best tokens have a sum above 1")
            ids[place] = chosen
            targets[place] = [*(number for _, number in best), rest_of([n for _, n in best])]
        return Scored(logprobs, agrees, ids, targets)


class _TokenScore:
    """One position of a text: its token's log-probability, whether that is the best, and the
    best."""

    def __init__(self, token: int, logprob: float, agrees: bool | None, best: Top) -> None:
        self.token, self.logprob, self.agrees, self.best = token, logprob, agrees, best


def rest_of(logprobs: Sequence[float]) -> float:
    """log(1 - Σ exp), at least LEAST_LOGPROB.

    Worked: ln ½ and ln ¼ leave ¼: -1.386294.
    """
    left = 1.0 - math.fsum(math.exp(number) for number in logprobs)
    return max(math.log(left), LEAST_LOGPROB) if left > 0 else LEAST_LOGPROB


def _key(config: TeacherConfig) -> str | None:
    if not config.api_key_file:
        return None
    try:
        return local_path(config.api_key_file).read_text(encoding="utf-8").strip() or None
    except OSError as error:
        raise ConfigError(
            f"distillation: teacher {config.name!r}: api_key_file: {error}"
        ) from error
