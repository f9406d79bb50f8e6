"""The tokenizer of the small model: every word of the captions is one token, the rest is spelled.

T5's own class in transformers drops a lower-casing step that it finds in a file; the general
class keeps it. So `model_index.json` must name TOKENIZER_CLASS too.
"""

import json
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from svgen.demo.captions import words

SPECIAL = ("<pad>", "</s>", "<unk>")  # ids 0, 1, 2 as in T5
SPACE = "▁"  # begins each word
CHARACTERS = (*string.ascii_lowercase, *string.digits, *".,!?;:-'\"()/&")
WORD_SCORE, CHARACTER_SCORE = -1.0, -10.0  # a word is always likelier than its letters
TOKENIZER_CLASS = "PreTrainedTokenizerFast"


def pieces() -> list[str]:
    """Return the vocabulary in the order of its ids."""
    return [*SPECIAL, SPACE, *CHARACTERS, *(SPACE + word for word in words())]


def make_tokenizer() -> tokenizers.Tokenizer:
    """Build a tokenizer that ignores case and ends every text with `</s>`."""
    made = tokenizers.Tokenizer(
        models.Unigram([(piece, _score(piece)) for piece in pieces()], unk_id=2)
    )
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    made.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 1)]
    )
    made.add_special_tokens(list(SPECIAL))
    return made


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into a checkpoint's `tokenizer` folder."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": TOKENIZER_CLASS,
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(config, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _score(piece: str) -> float:
    if piece in SPECIAL:
        return 0.0
    return WORD_SCORE if len(piece) > 1 else CHARACTER_SCORE
