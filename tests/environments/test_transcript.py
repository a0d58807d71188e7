import pytest
from scripted_client import end_of_turn, finished

from mlx_parallm.environments.transcript import Transcript, continuation
from mlx_parallm.errors import RequestError


def test_spans_keep_mask_logprobs_and_versions():
    transcript = Transcript([5, 6])
    transcript.sample(finished(0, "x", [7, 2], version=3))
    transcript.give([8])
    transcript.sample(finished(0, "y", [9], version=4))
    rollout = transcript.rollout(temperature=0.7, stop_reason="stop")
    assert rollout.tokens == (5, 6, 7, 2, 8, 9)
    assert rollout.mask == (0, 0, 1, 1, 0, 1)
    assert rollout.logprobs == (0.0, 0.0, -0.5, -0.51, 0.0, -0.5)
    assert rollout.policy_versions == (3, 3, 3, 3, 4, 4)
    assert (rollout.temperature, rollout.stop_reason, rollout.sampled_tokens) == (0.7, "stop", 3)


@pytest.mark.parametrize("closed", [True, False])
def test_a_continued_conversation_is_the_rendered_one(tokenizer, closed):
    """Prompt + sampled turn + continuation = what the template makes of the whole, whether or not EOS was sampled."""
    ask, answer, reply = (
        {"role": "user", "content": "Sort: cab"},
        {"role": "assistant", "content": "bac"},
        {"role": "user", "content": "Wrong. Again."},
    )
    sampled = tokenizer.encode("bac", add_special_tokens=False)
    if closed:
        sampled += [end_of_turn(tokenizer)]
    tail = continuation(tokenizer, [ask], [reply], last_token=sampled[-1])
    whole = tokenizer.render_chat_text([ask, answer, reply], add_generation_prompt=True)
    ids = tokenizer.render_chat([ask]) + sampled + tail
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole


def test_a_template_without_assistant_turns_is_refused(tokenizer):
    class Forgetful:
        eos_token_ids = tokenizer.eos_token_ids

        def render_chat_text(self, messages, **_):
            return "".join(message["content"] for message in messages if message["role"] == "user")

    with pytest.raises(RequestError, match="leaves out earlier assistant turns"):
        continuation(Forgetful(), [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}], last_token=0)
