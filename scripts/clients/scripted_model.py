"""A checkpoint that says a script: one answer for each turn of an agent, whatever the agent tells
it.

It is an ordinary model for an ordinary server. The chat template counts the results of tools and
ends the prompt with a token for that turn; the model's head holds, for each token of the script,
the one that comes next, with certainty (a margin of more than 30 in the logits, so at temperature 1
as well). Attention and MLP are there, and add nothing.
"""

import itertools
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import mlx_parallm

# isort: split
import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.qwen3 import Model, ModelArgs

TINY = Path(mlx_parallm.__file__).parent / "models" / "tiny"
WIDTH, SHARPNESS = 128, 12.0
CONTEXT = 1 << 18
PIECE = 24  # characters of a token of the script, at least
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor"
    " %}<|im_end|>\n{% endif %}{% set turn = namespace(number=0) %}{% for message in messages %}{%"
    " if COUNTED %}{% set turn.number = turn.number + 1 %}{% endif %}<|im_start|>{{ message.role"
    " }}\n{{ message.content }}{% for tool_call in message.tool_calls or [] %}{% set tool_call ="
    ' tool_call.function %}\n<tool_call>\n{"name": "{{ tool_call.name }}", "arguments": {{'
    " tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if"
    " add_generation_prompt %}<|im_start|>assistant\n{% if OFFERED %}<|turn{{ [turn.number, LAST] |"
    " min }}|>{% else %}<|aside|>{% endif %}{% endif %}"
)


def tool_call(function: str, /, **arguments: object) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': function, 'arguments': arguments})}\n</tool_call>"


def make_scripted_model(
    directory: Path, answers: Sequence[str], *, aside: str = "ok", counted_text: str | None = None
) -> Path:
    """Write the checkpoint.

    Args:
        answers: what it says when it has this many results of tools; the last one also when it has
            more.
        aside: what it says where no tools are offered: agents ask for titles and summaries too.
        counted_text: for an agent without tools: messages with this text are counted, not results
            of tools.
    """
    directory.mkdir(parents=True)
    content = json.loads((TINY / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"] | {
        token["content"]: token["id"] for token in content["added_tokens"]
    }
    first = 1 + max(vocab.values())
    turns = [f"<|turn{number}|>" for number in range(len(answers))]
    special, replies = ["<|aside|>", *turns], [aside, *answers]
    taken: set[str] = set()
    parts = {turn: [answer] for turn, answer in zip(special, replies, strict=True)}
    # tokens of their own, as a grammar wants them; they are followed once
    if "".join(replies).count("<tool_call>") == 1:
        parts = {turn: re.split("(</?tool_call>)", answer) for turn, [answer] in parts.items()}
    pieces = {
        turn: [piece for part in texts for piece in _pieces(part, taken)]
        for turn, texts in parts.items()
    }
    texts = list(
        dict.fromkeys(
            ["<tool_call>", "</tool_call>", *itertools.chain.from_iterable(pieces.values())]
        )
    )
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    ids = dict(vocab)
    for number, text in enumerate(
        [*special, *(text for text in texts if text not in vocab)], first
    ):
        ids[text] = number
        content["added_tokens"].append(
            {"id": number, "content": text, "special": text in special, **flags}
        )
    (directory / "tokenizer.json").write_text(json.dumps(content))
    counted = (
        f"{json.dumps(counted_text)} in message.content"
        if counted_text
        else "message.role == 'tool'"
    )
    template = TEMPLATE.replace("LAST", str(len(answers) - 1)).replace("COUNTED", counted)
    template = template.replace("OFFERED", "true" if counted_text else "tools")
    settings = json.loads((TINY / "tokenizer_config.json").read_text()) | {
        "chat_template": template
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(TINY / "generation_config.json", directory)
    end = ids[settings["eos_token"]]
    follows: dict[int, int] = {}  # token → the next one
    for turn, said_pieces in pieces.items():
        chain = [ids[turn], *(ids[piece] for piece in said_pieces), end]
        for token, following in itertools.pairwise(chain):
            assert follows.setdefault(token, following) == following, (
                "a part of one answer is also in another"
            )
    # a grammar may force the answer character by character: its first one, then its end
    instead: dict[int, int] = {}
    for turn, answer in zip(special, replies, strict=True):
        if answer[:1] in vocab:
            instead[ids[turn]] = vocab[answer[0]]
        if answer[-1:] in vocab:
            follows.setdefault(vocab[answer[-1]], end)
    _save(directory, 1 + max(ids.values()), follows, instead, end)
    return directory


def _pieces(answer: str, taken: set[str]) -> list[str]:
    """The answer in parts, none of them twice: a token knows what follows it."""
    pieces: list[str] = []
    start = 0
    for end in range(1, len(answer) + 1):
        piece = answer[start:end]
        if (
            len(piece) >= PIECE and piece not in taken and len(answer) - end >= PIECE
        ) or end == len(answer):
            pieces.append(piece)
            taken.add(piece)
            start = end
    return pieces


def _save(
    directory: Path, size: int, follows: dict[int, int], instead: dict[int, int], end: int
) -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "vocab_size": size,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": end,
    }
    model = Model(ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    source = np.random.default_rng(0)
    embedding = source.standard_normal((size, WIDTH)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    head = np.zeros((size, WIDTH), np.float32)
    for token, following in follows.items():
        head[following] += SHARPNESS * embedding[token]
    for token, following in instead.items():
        head[following] += SHARPNESS / 2 * embedding[token]
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = (
        mx.array(embedding),
        mx.array(head),
    )
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        weights[name] = mx.zeros_like(weights[name])
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
