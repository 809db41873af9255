"""The tokenizer of the scripted worker: a token is a byte, or one of the special ones above. *Pure.*

Built of the same parts as any model's, so that tests drive the code that serves models.
"""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from services.gateway.tokenization import Tokenizer
from services.gateway.tokenizer_parts import TokenizerParts
from shared import scripted_vocab as vocab
from shared.vocabulary import BYTE_OF_CHAR, scripted_vocabulary

# What a message says stands at the prompt's end, so that an order to the engine can be given in a chat too.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


def byte_tokenizer() -> Tokenizer:
    texts = {id: text for text, id in vocab.SPECIAL_TOKENS.items()}

    tokens = scripted_vocabulary().tokens
    backend = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF_CHAR | vocab.SPECIAL_TOKENS, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in vocab.SPECIAL_TOKENS])
    parts = TokenizerParts(
        backend=backend,
        token_bytes=tokens.__getitem__,
        vocab_size=vocab.VOCAB_SIZE,
        special_token_ids=frozenset(texts),
        eos_token_ids=(vocab.EOS,),
        bos_token_id=vocab.BOS,
        prefix_ids=(vocab.BOS,),
        chat_template=CHAT_TEMPLATE,
        template_tokens={"bos_token": texts[vocab.BOS], "eos_token": texts[vocab.EOS]},
    )
    return Tokenizer(parts)
