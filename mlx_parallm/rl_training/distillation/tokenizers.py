"""Whether a teacher reads the student's token ids as the student does: the same ids for many texts
and for a rendered chat. The same vocabulary is not enough: merges and special tokens count."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlx_parallm.config.distillation import TeacherConfig
from mlx_parallm.errors import ConfigError
from mlx_parallm.models.tokenizer import Tokenizer

SENTENCE = (
    "the answer is not what you think it was , because every number between zero and ninety nine"
    " can be written in words or in digits"
)
PIECES = (
    "Hello, world!",
    "  two  spaces\tand a tab\n\nand lines\r\n",
    "0123456789 3.14159 1,000,000 -17 2^10 = 1024",
    "Größe, naïve café, señor, Ελληνικά, кириллица, 日本語, 中文, العربية, हिन्दी, 한국어",
    "😀 👩‍💻 ✓ → ∑ √2 ≤ π",
    "def f(x):\n    return [i ** 2 for i in range(x) if i % 3]\n",
    '{"name": "f", "arguments": {"a": [1, 2.5, null, true]}}',
    "<b>bold</b> & <a href='x'>link</a> <think>why</think>",
    "don't we've I'll THE QUICK BROWN Fox iPhone15 camelCase snake_case",
    "C:\\path\\to file/and/other https://example.org/?q=1&r=2#top",
    "a" * 40 + " " + "ab" * 20 + "!?!?...---",
)
CHAT = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And twice that?"},
)
MANY = 200


def texts() -> Iterator[str]:
    """MANY texts of several alphabets and kinds."""
    yield from PIECES
    vocabulary = SENTENCE.split()
    for number in range(MANY - len(PIECES)):
        start, count = (7 * number) % len(vocabulary), 2 + number % 9
        words = (vocabulary * 2)[start : start + count]
        piece = PIECES[number % len(PIECES)]
        yield f"{' '.join(words)} {number * 37} {piece[number % 7 :][: 5 + number % 23]}"


@dataclass(frozen=True)
class TextIds:
    """A text, and its ids by the policy's tokenizer."""

    teacher: TeacherConfig
    text: str
    ids: Sequence[int]


def are_equal(config: TeacherConfig, student: Tokenizer, teacher: Tokenizer) -> bool:
    """Return whether a teacher reads and ends texts as the student does."""
    try:
        check_tokenizers(config, student, teacher)
    except ConfigError:
        return False
    return True


def check_tokenizers(config: TeacherConfig, student: Tokenizer, teacher: Tokenizer) -> None:
    """Raises ConfigError: they differ, with a text and both ids, or end their answers with other
    tokens. The rendered chat is the student's in either case."""
    compared = list(texts())
    if student.has_chat_template:
        compared.append(student.render_chat_text(CHAT))
    for text in compared:
        ids = student.encode(text, add_special_tokens=False)
        compare(TextIds(config, text, ids), teacher.encode(text, add_special_tokens=False))
    if not student.eos_token_ids & teacher.eos_token_ids:
        raise ConfigError(
            f"{_named(config)} ends its texts with the tokens {sorted(teacher.eos_token_ids)}, and"
            f" the policy with {sorted(student.eos_token_ids)}: the end of"
            " an answer would carry no signal"
        )


def compare(student: TextIds, teacher: Sequence[int]) -> None:
    """Raises ConfigError: the ids differ."""
    ids, teacher_ids = list(student.ids), list(teacher)
    if ids == teacher_ids:
        return
    pairs = enumerate(zip(ids, teacher_ids, strict=False))
    place = next((i for i, pair in pairs if pair[0] != pair[1]), min(len(ids), len(teacher_ids)))
    raise ConfigError(
        f"{_named(student.teacher)} has another tokenizer than the policy: of"
        f" {student.text[:40]!r} the ids from place {place} on are"
        f" {teacher_ids[place : place + 4]} there and {ids[place : place + 4]} here. With tokenizer"
        ' = "own" their texts are aligned (docs/distillation.md#teachers-of-another-family)'
    )


def _named(config: TeacherConfig) -> str:
    return f"distillation: teacher {config.name!r} ({config.path or config.url})"
