"""Texts on which a GGUF file is verified: 200 for its tokenizer, conversations for its chat
template.

The texts are in Unicode's NFC: if a tokenizer normalises, llama.cpp does not.
"""

import random

COUNT = 200

PIECES = (
    "The quick brown fox jumps over the lazy dog.",
    "It's Anna's book, isn't it? They'll say we've lost; I'd say you're wrong.",
    "IT'S SHE'LL THEY'RE don't DON'T o'clock 'quoted' ''twice''",
    "Sum: 47+38 = 85, and 12345678901234567890 is a large number.",
    "3.14159, 1e-6, 0xFF, 1_000_000, 50%, $12.99, 2026-11-22T17:30:00Z",
    "¼ ½ ¾ ² ³ Ⅳ ١٢٣ १२३ ㊿",
    "def sorted_max(items: list[int]) -> int:\n    return max(sorted(items), default=0)\n",
    "for (int i = 0; i < n; ++i) { count[i] += state->sum(i); }",
    'print(f"user={user!r}", file=sys.stderr)\n\n\nif __name__ == "__main__":\n\tmain()',
    '{"role": "user", "content": "Count b: abcab", "n": [1, 2, 3], "ok": true, "none": null}',
    '<div class="a-b">x &amp; y</div><!-- comment -->',
    "SELECT count(*) FROM t WHERE word LIKE 'example%' -- the end",
    "https://example.org/a/b?c=d&e=f#g and me@example.org",
    "C:\\Users\\me\\file.txt /usr/local/bin ~/.config $HOME",
    (
        "(example: sun -> nus): [Sort] {Reverse} <Largest> \"Spell\" 'State' -count +max *user*"
        " _system_ (assistant)"
    ),
    "a  b   c    d     e\tf\t\tg",
    "   leading spaces, trailing spaces   ",
    "\n\nblank lines\n\n\n   \n\tindented\r\nwindows\r\n\r\n",
    " ",
    "\n",
    "\t \n \t",
    "Größe, naïve café, Übermut, Straße, œuvre, façade, señor, Łódź, žluťoučký kůň",
    "Привет, мир! Сколько будет два плюс два?",
    "Καλημέρα κόσμε, τι κάνεις;",
    "שלום עולם, مرحبا بالعالم",
    "नमस्ते दुनिया, สวัสดีชาวโลก, வணக்கம்",
    "你好，世界。今天天气怎么样？",
    "こんにちは世界、カタカナとひらがな。",
    "안녕하세요 세계, 오늘 날씨가 어때요?",
    "🙂🚀👩‍💻🇩🇪 emoji: ❤️, ✓ → ∞ ≤ ≥ ≠ ± × ÷ √ ∑",
    "„German“ «French» “English” ‘single’ – — … • · § ¶ © ® ™ €",
    "zero\u200bwidth no\u00a0break thin\u2009space",
    "snake_case camelCase PascalCase kebab-case SCREAMING_SNAKE x1y2z3 v2.0.1-rc.1",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbb!!!!!!!! ........ ======== --------",
    "Sort: hgfa. Reverse: dcba? Count b: abcab! Largest: 48,47,90",
    "<think>\nLet me see.\n</think>\n\nThe answer is \\boxed{42}.",
    (
        "# Title\n\n* one\n* two\n  1. three\n\n| a | b |\n|---|---|\n| 1"
        " | 2 |\n\n```python\nx = 1\n```"
    ),
    "$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$",
    "Dr. Smith (b. 1970) vs. Mr. Jones, etc.; i.e. e.g. U.S.A.",
    "mixed漢字kanaかなLatin中文123abcДа",
)
SEPARATORS = ("", " ", "\n", "\n\n", ", ", ": ", " - ", "\t")


def texts() -> list[str]:
    """Return 200 texts, always the same: each piece, then pieces joined in twos and threes."""
    draw = random.Random(0)
    joined = [
        draw.choice(SEPARATORS).join(draw.sample(PIECES, draw.choice((2, 2, 3))))
        for _ in range(COUNT - len(PIECES))
    ]
    return [*PIECES, *joined]


CHATS: tuple[tuple[dict[str, str], ...], ...] = (
    ({"role": "user", "content": "Sort: hgfa"},),
    ({"role": "user", "content": "  Two lines\nand spaces around  "},),
    (
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Grüße! What is 47+38?"},
    ),
    (
        {"role": "user", "content": "Reverse: abc"},
        {"role": "assistant", "content": "cba"},
        {"role": "user", "content": "And (example: 你好)?"},
    ),
    (
        {"role": "system", "content": "Be exact."},
        {"role": "user", "content": "Count b: abcab"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "def f(x):\n\treturn x"},
    ),
)
