"""Make the sequences of a request: one for each choice, with its stop tokens, companions, grammar
and random stream."""

import random
from collections.abc import Callable, Iterable
from functools import partial

from mlx_parallm.engine.companions.companion import EngineCompanions
from mlx_parallm.engine.grammar import Grammars, OnlyTokens, TokenMatcher
from mlx_parallm.engine.logit_edits import LogitEdits, spellings
from mlx_parallm.engine.output_text import OutputText
from mlx_parallm.engine.sequence import Sequence, random_stream
from mlx_parallm.engine.thinking_budget import ThinkingBudget
from mlx_parallm.engine.validation import RequestLimits
from mlx_parallm.execution.thinking import thinking_after, tokens_of_thought
from mlx_parallm.models.adapters.adapter import AdapterSlot
from mlx_parallm.models.tokenizer import Tokenizer
from mlx_parallm.types import Request, SamplingParams


class SequenceMaker:
    """
    Args:
        seed: of requests without one.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        grammars: Grammars,
        limits: RequestLimits,
        companions: EngineCompanions,
        *,
        seed: int,
    ) -> None:
        self._tokenizer, self._grammars, self._limits = tokenizer, grammars, limits
        self._random = random.Random(seed)
        self._companions = companions

    def make(self, request: Request, adapter: AdapterSlot | None) -> list[Sequence]:
        """Return one sequence for each choice of a request that `check_request` lets through.
        Raises RequestError."""
        params, prompt = request.params, request.prompt_token_ids
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._tokenizer.eos_token_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        # With a grammar min_tokens is the matcher's business: an end may be all that the grammar
        # leaves.
        forbidden = stop_ids if params.structure is None else frozenset()
        bad_words = [
            ids
            for word in params.bad_words
            for ids in spellings(word, self._tokenizer.encode_within)
        ]
        longest = self._limits.default_length(len(prompt))
        budget = self._budget(request)
        prompt, carried = self._companions.carry(request)
        make_detokenizer = partial(
            self._tokenizer.detokenizer,
            opens_text=request.opens_text,
            skip_special_tokens=params.skip_special_tokens,
        )
        return [
            Sequence(
                request_id=request.request_id,
                index=index,
                prompt=prompt,
                carried=carried,
                params=params,
                adapter=adapter,
                records=self._companions.records(),
                max_tokens=longest if params.max_tokens is None else params.max_tokens,
                cache_salt=request.cache_salt,
                priority=request.priority,
                random_stream=random_stream(seed, index),
                stop_ids=stop_ids,
                text=OutputText(
                    make_detokenizer,
                    params.stop,
                    include_stop=params.include_stop_str_in_output,
                    eager=request.stream,
                    reasoning=self._shown_reasoning(params),
                ),
                edits=LogitEdits(params, request.prompt_token_ids, forbidden, bad_words)
                if LogitEdits.needed(params)
                else None,
                matcher=self._matcher(params, stop_ids, budget),
                processed_logprobs=[] if params.reshapes_distribution else None,
                forced=[] if params.is_constrained else None,
                top_logprobs=[] if params.logprobs else None,
            )
            for index in range(params.n)
        ]

    def _shown_reasoning(self, params: SamplingParams) -> tuple[str, str] | None:
        """Return the markers of reasoning that its text shows, in which stop strings do not
        count."""
        if params.reasoning is None or not params.stop:
            return None
        hides = params.skip_special_tokens and any(map(self._tokenizer.hides, params.reasoning))
        return None if hides else params.reasoning

    def _matcher(
        self,
        params: SamplingParams,
        ends: Iterable[int],
        budget: Callable[[TokenMatcher | None], ThinkingBudget] | None,
    ) -> TokenMatcher | None:
        """Return the matcher of one choice. `budget`: makes the one that ends its reasoning.
        Raises RequestError, as `Grammars.prepare`."""
        matcher: TokenMatcher | None = None
        if params.structure is not None:
            matcher = self._grammars.matcher(params.structure, params.min_tokens, ends)
        if budget is not None:
            matcher = budget(matcher)
        if params.allowed_token_ids:
            matcher = OnlyTokens(params.allowed_token_ids, self._grammars.width, matcher)
        return matcher

    def _budget(self, request: Request) -> Callable[[TokenMatcher | None], ThinkingBudget] | None:
        """Return what makes the matcher that ends a choice's reasoning; None: it has no budget, or
        the prompt has ended the reasoning."""
        params, tokenizer = request.params, self._tokenizer
        if not params.has_thinking_budget:
            return None
        reasoning = params.reasoning
        ids = request.prompt_token_ids
        thought = tokens_of_thought(tokenizer, ids, tokenizer.eos_token_ids)
        if reasoning is None:
            thinking = thinking_after(tokenizer, ids)
            if thinking is None:
                return None
            reasoning = thinking.reasoning if thought is None else ("", thinking.markers[1])
        left = params.thinking_token_budget
        assert left is not None
        if not reasoning[0]:
            left -= thought or 0
        end = tuple(tokenizer.encode_within(reasoning[1]))
        return lambda matcher: ThinkingBudget(
            left,
            reasoning,
            end,
            tokenizer.detokenizer(opens_text=request.opens_text, skip_special_tokens=False),
            self._grammars.width,
            matcher,
        )
