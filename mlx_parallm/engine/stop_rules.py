"""Decide after each token whether its sequence ends: stop tokens, stop strings, length. No MLX."""

from collections.abc import Set

from mlx_parallm.engine.sequence import Sequence


def apply_stop_rules(sequence: Sequence, token: int, eos: Set[int]) -> None:
    """Feed the newest token to the text, and end the sequence when it stops, or has no room for
    more."""
    params = sequence.params
    if token in sequence.stop_ids:
        is_eos = token in eos
        if params.include_stop_str_in_output and not is_eos:
            sequence.text.add(token, check_stop=False)
        sequence.finish("stop", None if is_eos and token not in params.stop_token_ids else token)
        return
    matched = sequence.text.add(token, check_stop=len(sequence.tokens) > params.min_tokens)
    if matched is not None:
        sequence.finish("stop", matched)
    elif len(sequence.tokens) >= sequence.max_tokens:
        sequence.finish("length")
