"""200 strings on which tokenizers disagree: code, CJK, emoji, digits of other scripts, whitespace, special tokens.

Deterministic and independent of a model; `SPECIAL` holds texts that are special tokens in common vocabularies. No
unpaired surrogates: a request with one is refused before it is tokenized.
"""

import random

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>", "<s>", "</s>", "<|eot_id|>")

WHITESPACE = (
    "", " ", "  ", "   ", "\n", "\n\n", "\n\n\n", "\t", "\t\t", "\r\n", "\r\n\r\n", " \n", "\n ", " \n ", "\n \n",
    "a  b", "a   b", " a", "a ", "  a  ", "\ta\tb", "a\n\nb", "a\n \n b", "\u00a0", "a\u00a0b", "\u3000漢\u3000",
    "x\u2028y", "x\u2003\u2003y", "\u200b", "\v\f", "\x85", "    return x", "\t\treturn\n\t\t", " " * 40, "\n" * 20,
    "a" + " " * 17 + "b", "end   \n", "end \t \n\n  next",
)  # fmt: skip

DIGITS = (
    "0", "12", "123", "1234567890", "3.14159", "1,000,000", "-42", "1e-9", "0xDEADBEEF", "v2.0.1", "2024-01-02T03:04",
    "٠١٢٣٤٥٦٧٨٩", "०१२३", "১২৩৪", "๑๒๓", "１２３４", "Ⅷ", "½ ¾", "x² + y³", "①②③", "㊿", "𝟘𝟙𝟚", "1️⃣", "a1b22c333", "10%",
    "$5.99", "№ 7", " 7", "7 7 77", "९९ problems", "٣.١٤",
)  # fmt: skip

SCRIPTS = (
    "Hello, world!", "The quick brown fox jumps over the lazy dog.", "naïve café déjà vu", "Grüße aus Köln",
    "El niño comió piñas", "Žluťoučký kůň", "Ελληνικά", "Привет, мир", "שלום עולם", "مرحبا بالعالم", "हिन्दी में",
    "বাংলা", "தமிழ்", "ไทยไม่มีวรรค", "你好，世界。", "日本語のテキストです", "カタカナ ﾊﾝｶｸ", "한국어 문장입니다",
    "漢字かな交じり文123",
    "繁體中文與简体中文", "𠮷野家", "e\u0301 vs \u00e9", "a\u0300\u0301\u0302", "ﬁ ligature", "ǅ titlecase", "İstanbul",
    "straße STRASSE", "I'm you're they've we'll he'd it's", "I'M YOU'RE THEY'VE", "rock'n'roll's", "'s 't 're",
    "don’t", "…—–-", "“quoted” ‘text’", "¿qué? ¡sí!", "email@example.com", "https://example.com/a?b=c&d=%20#f",
    "snake_case camelCase kebab-case", "UPPER lower MiXeD", "word" * 30, "a" * 100, "!?" * 20, "....", "- - -",
)  # fmt: skip

EMOJI = (
    "😀", "🦊 ok", "👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇯🇵", "☺️ ☺", "text😀text", "😀😀😀", " 😀 ", "❤️‍🔥",
    "🫠", "\U0001f9ff\U0001faa9",
    "\U000f0000 private", "\U0010ffff", "\ue000", "\ufffd", "\ufeffBOM", "a\u0000b",
    "\x01\x02\x03\x04\x05\x06", "\x13x\x14",
    "\x1b[31mred\x1b[0m", "\x7f", "🜁 \U0001d538 ∀x∈ℝ", "\u202eRTL\u202c",
)  # fmt: skip

CODE = (
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < 10; ++i) {\n\tsum += a[i];\n}\n",
    "SELECT * FROM t WHERE a = 'b' AND c >= 10;",
    '{"key": [1, 2.5, null, true], "nested": {"a": "\\u00e9"}}',
    "<html><body class=\"x\">&nbsp;</body></html>",
    "#include <stdio.h>\nint main(void){return 0;}",
    "let f = |x: &'static str| -> Vec<u8> { vec![] };",
    "print(f'{a!r:>{width}}')  # comment",
    "git commit -m \"msg\" && git push || exit 1",
    "x = [[0] * 10 for _ in range(20)]\n\n\n\n",
    "```python\nimport os\n```",
    "\\begin{equation} \\frac{1}{2} \\end{equation}",
    "a->b::c<d>>e<<=f!=g===h",
    "if x == 1:\r\n\tpass\r\nelse:\r\n\tpass",
    "| a | b |\n|---|---|\n| 1 | 2 |",
)  # fmt: skip

WITH_SPECIAL = (
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>", "<|im_start|><|im_start|>",
    "a<|endoftext|>b", " <|im_end|> ", "<|im_end|>\n\n", "<|im_start", "im_end|>", "<|im_end|", "<<|im_end|>>",
    "<repo_name>x<file_sep>y", "<reponame><repo_name>", "<|IM_END|>", "<s>hello</s>", "<|eot_id|>x", "1<|im_end|>2",
    "\n<|im_start|>\n", "漢<|im_end|>字", "<jupyter_code>print(1)<jupyter_output>1", "< |im_end|>",
)  # fmt: skip


def mixed_strings(count: int = 200) -> list[str]:
    """The fixed strings, then random mixtures of their pieces up to `count`."""
    fixed = [*WHITESPACE, *DIGITS, *SCRIPTS, *EMOJI, *CODE, *WITH_SPECIAL]
    rng = random.Random(20)
    pieces = [*fixed, *SPECIAL]
    while len(fixed) < count:
        fixed.append("".join(rng.choices(pieces, k=rng.randint(2, 6))))
    return fixed[:count]
