from dataclasses import fields, replace

import pytest

from mlx_parallm.environments.trajectory import SequenceRecorder, continuation
from mlx_parallm.rollout_store.completions import rollout_of
from mlx_parallm.types import (
    Completion,
    PromptExperts,
    Request,
    Rollout,
    RoutedExperts,
    SamplingParams,
)
from tests.environments.scripted_client import end_of_turn, finished
from tests.environments.templates import QWEN3, with_template
from tests.tokenizer_families import make_tokenizer


def test_spans_keep_mask_logprobs_and_versions():
    recorder = SequenceRecorder([5, 6])
    recorder.add_sampled(finished(0, "x", [7, 2], version=3))
    recorder.add_prompt([8])
    recorder.add_sampled(finished(0, "y", [9], version=4))
    rollout = recorder.rollout(temperature=0.7, stop_reason="stop")
    assert rollout.tokens == (5, 6, 7, 2, 8, 9)
    assert rollout.mask == (0, 0, 1, 1, 0, 1)
    assert rollout.logprobs == (0.0, 0.0, -0.5, -0.51, 0.0, -0.5)
    assert rollout.policy_versions == (3, 3, 3, 3, 4, 4)
    assert (rollout.temperature, rollout.stop_reason, rollout.sampled_tokens) == (0.7, "stop", 3)


def test_no_field_of_a_completion_is_lost():
    """A rollout of an episode, and one of a client's request, have all that was sampled with it."""
    experts = RoutedExperts(layers=1, each=1, ids=b"\x03\x01", wide=False)
    read = PromptExperts(0, RoutedExperts(layers=1, each=1, ids=b"\x02", wide=False))
    completion = replace(
        finished(0, "x", [7, 2], version=3),
        processed_logprobs=(-0.1, -0.2),
        forced=(0, 1),
        routed_experts=experts,
        prompt_experts=(read,),
        finish_reason="length",
    )
    recorder = SequenceRecorder([5, 6])
    recorder.add_sampled(completion)
    only = (7, 2)
    params = SamplingParams(temperature=0.7, top_p=0.9, allowed_token_ids=only)
    request = Request("r", (5, 6), params)
    rollouts = [
        recorder.rollout(temperature=0.7, stop_reason="length"),
        rollout_of(request, [completion]),
    ]
    assert rollouts[0] == rollouts[1]
    shared = {f.name for f in fields(Completion)} & {f.name for f in fields(Rollout)}
    assert shared >= {"processed_logprobs", "forced", "routed_experts", "prompt_experts"}
    assert [name for name in shared - {"error"} if not getattr(rollouts[0], name)] == []
    assert rollouts[0].processed_logprobs == (0.0, 0.0, -0.1, -0.2)
    assert (rollouts[0].forced, rollouts[0].trained_mask) == ((0, 0, 0, 1), (0, 0, 1, 0))


def test_a_turn_that_was_not_reshaped_has_its_own_log_probabilities():
    recorder = SequenceRecorder([5])
    recorder.add_sampled(replace(finished(0, "x", [7], version=1), processed_logprobs=(-0.1,)))
    recorder.add_sampled(finished(0, "y", [9], version=1))
    assert recorder.rollout(temperature=1, stop_reason=None).processed_logprobs == (0.0, -0.1, -0.5)


TRIMMING = (
    "{% for m in messages %}<{{ m.role }}> {{ m.content | trim }}<|im_end|>{% endfor %}<assistant>"
)
FORGETFUL = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ASK, REPLY = {"role": "user", "content": "Sort: cab"}, {"role": "user", "content": "Wrong. Again."}
TOOL = {"role": "tool", "content": "abc"}
THOUGHT = "<think>\nHm.\n</think>\n\nbac"


def said(text):
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    ("template", "text", "answer", "expected"),
    [
        (
            QWEN3,
            "bac",
            REPLY,
            "<|im_end|>\n<|im_start|>user\nWrong. Again.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN3,
            "",
            REPLY,
            "<|im_end|>\n<|im_start|>user\nWrong. Again.<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN3,
            THOUGHT,
            TOOL,
            "<|im_end|>\n<|im_start|>tool\nabc<|im_end|>\n<|im_start|>assistant\n",
        ),
        (QWEN3, THOUGHT, REPLY, None),
        (TRIMMING, " bac\n", REPLY, "<|im_end|><user> Wrong. Again.<|im_end|><assistant>"),
        (FORGETFUL, "bac", REPLY, None),
    ],
)
def test_a_turn_goes_on_unless_the_template_rewrites_what_came_before(
    template, text, answer, expected
):
    tokenizer = with_template(template)
    before, after = (
        tokenizer.render_chat_text(turns) for turns in ([ASK], [ASK, said(text), answer])
    )
    tail = continuation(tokenizer, before, text, after, last_token=0)
    assert (tail and tokenizer.decode(tail, skip_special_tokens=False)) == expected


@pytest.mark.parametrize("closed", [True, False])
def test_a_continued_conversation_is_the_rendered_one(tokenizer, closed):
    """Prompt + sampled turn + continuation = what the template makes of the whole, whether or
    not EOS was sampled."""
    before, whole = (
        tokenizer.render_chat_text(turns) for turns in ([ASK], [ASK, said("bac"), REPLY])
    )
    sampled = tokenizer.encode("bac", add_special_tokens=False)
    if closed:
        sampled += [end_of_turn(tokenizer)]
    tail = continuation(tokenizer, before, "bac", whole, last_token=sampled[-1])
    ids = tokenizer.render_chat([ASK]) + sampled + tail
    assert tokenizer.decode(ids, skip_special_tokens=False) == whole


@pytest.mark.parametrize(
    ("said", "after", "ended_by", "expected"),
    [
        # the stop string was sampled: it is not given twice
        ("4", "Q: 2+2\nA:4\nQ: 3+3\nA:", "\n", "Q: 3+3\nA:"),
        ("4", "Q: 2+2\nA:4\nQ: 3+3\nA:", None, "\nQ: 3+3\nA:"),
        (" 4 ", "Q: 2+2\nA:4, then?", None, ", then?"),
        ("4", "Q: 2+2\nA: four", None, None),
        ("4", "Q: 1+1\nA:4\n", None, None),
    ],
)
def test_a_text_goes_on_where_the_next_one_begins_with_it(
    tokenizer, said, after, ended_by, expected
):
    [last] = tokenizer.encode(ended_by or "4", add_special_tokens=False)
    tail = continuation(tokenizer, "Q: 2+2\nA:", said, after, last_token=last, stop=ended_by)
    assert (None if tail is None else tokenizer.decode(tail)) == expected


@pytest.mark.parametrize("family", ["llama2", "mistral", "gemma", "metaspace decoder", "gpt2"])
def test_what_an_environment_answers_has_the_tokens_of_its_place(tmp_path, family):
    """No dummy space before an observation, in a text or a chat; a sampled one is not part of a
    chat's answer."""
    tokenizer = make_tokenizer(tmp_path, family)
    before, said, after = "Q: 2+2\nA:", " 4", "Q: 2+2\nA: 4world is 5\nA:"
    tail = continuation(tokenizer, before, said, after, last_token=tokenizer.encode("4")[-1])
    ids = [*tokenizer.encode(before), *tokenizer.encode_after(before, said), *tail]
    assert tokenizer.decode(ids) == after and ids == tokenizer.encode(after)
    turns = [ASK, {"role": "assistant", "content": "world"}, REPLY]
    before, whole = tokenizer.render_chat_text(turns[:1]), tokenizer.render_chat_text(turns)
    sampled = [*tokenizer.encode("world", add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.decode(sampled) == "world"
    tail = continuation(tokenizer, before, "world", whole, last_token=sampled[-1])
    rendered = tokenizer.render_chat(turns)
    assert tail == rendered[len(rendered) - len(tail) :]
