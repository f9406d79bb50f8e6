"""Prompt clean-up and the checkpoint's own `tokenizer.json`: a prompt becomes token ids."""

import html
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import ftfy
import numpy as np
import tokenizers

from svgen.config import TEXT_TOKENS
from svgen.errors import DownloadError, FileError, SvgenError, UsageError, shown
from svgen.tokenizer_parts import check_parts
from svgen.untrusted import read_start

PAD_ID = 0  # what fills a row of ids past its true length
BUCKET = 64  # padded lengths are multiples of this
MAX_FILE_BYTES = 32 << 20  # Wan's tokenizer.json has 17 MB
EOS_TOKEN = "</s>"  # unless tokenizer_config.json names another
SHOWN_WORDS = 12
SHOWN_LETTERS = 120
WORD_LETTERS = 40


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenIds:
    """One prompt as the text encoder reads it: no padding, the last id is the end-of-text token."""

    ids: np.ndarray  # [L] int32
    text: str  # the prompt after clean-up
    cut: str = ""  # the part of `text` that did not fit; empty unless truncated

    @property
    def length(self) -> int:
        """Number of ids, end-of-text included."""
        return len(self.ids)


def clean_prompt(text: str) -> str:
    """Mend a prompt the way diffusers' WanPipeline does, so that the token ids are the same.

    ftfy mends mojibake and drops NUL and control characters, HTML entities are resolved twice,
    white space collapses to single spaces. ftfy also joins surrogate pairs and puts U+FFFD in the
    place of lone surrogates (bytes of a command line that are not UTF-8), so that the result can
    always be encoded.
    """
    text = ftfy.fix_text(text)
    text = html.unescape(html.unescape(text))
    return re.sub(r"\s+", " ", text.strip()).strip()


def bucket_length(tokens: int) -> int:
    """Return the padded length for so many tokens: the next larger multiple of 64, at most 512.

    At least one row is padding, because cross-attention needs one to stand for all of those up to
    512: 63 -> 64, 64 -> 128, 511 -> 512. Only a full 512 has none.
    """
    if not 0 <= tokens <= TEXT_TOKENS:
        raise ValueError(f"{tokens} tokens: between 0 and {TEXT_TOKENS} are allowed")
    return min((tokens // BUCKET + 1) * BUCKET, TEXT_TOKENS)


def pad_ids(prompts: list[TokenIds], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Stack prompts into int32 ids [B, L], padded to `length`, and their true lengths [B]."""
    lengths = np.array([prompt.length for prompt in prompts], np.int32)
    if lengths.max(initial=0) > length:
        raise ValueError(f"{lengths.max()} tokens do not fit a length of {length}")
    ids = np.full((len(prompts), length), PAD_ID, np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: prompt.length] = prompt.ids
    return ids, lengths


def shorten_words(text: str) -> str:
    """Keep about a dozen words of a text, with an ellipsis where more follow."""
    words = " ".join(text.split()[:SHOWN_WORDS])[:SHOWN_LETTERS]
    return words if words == text.strip() else words + " …"


class Tokenizer:
    """A checkpoint's own tokenizer. Padding and truncation stored in its file are not used."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        eos_id: int,
        *,
        path: Path = Path("tokenizer.json"),
        vocabulary: int | None = None,
    ):
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._eos_id = eos_id
        self._path, self._vocabulary = path, vocabulary
        # transformers' T5 class adds the token where the file's post-processor does not.
        self._adds_eos = backend.encode("").ids[-1:] == [eos_id]

    @classmethod
    def load(cls, checkpoint: Path, *, vocabulary: int | None = None) -> Self:
        """Read `tokenizer/tokenizer.json` of a checkpoint folder.

        Raises DownloadError when it is missing or broken, or when it has ids that the text
        encoder's `vocabulary` lacks.
        """
        path = Path(checkpoint) / "tokenizer" / "tokenizer.json"
        backend = _parse(path)
        name = _eos_token(path.with_name("tokenizer_config.json"))
        with _explained(path):  # half of a surrogate pair is no name
            eos_id = backend.token_to_id(name)
        if eos_id is None:
            raise _corrupt(path, f"it has no end-of-text token {name[:SHOWN_LETTERS]!r}")
        largest = max(backend.get_vocab(with_added_tokens=True).values())
        if vocabulary is not None and largest >= vocabulary:
            raise _corrupt(path, f"it has ids up to {largest}, the text encoder {vocabulary} rows")
        return cls(backend, eos_id, path=path, vocabulary=vocabulary)

    def encode(
        self, prompt: str, *, truncate: bool, allow_empty: bool = False, name: str = "prompt"
    ) -> TokenIds:
        """Clean a prompt and turn it into at most 512 ids, the last being the end-of-text token.

        Raises UsageError when nothing is left after clean-up (unless `allow_empty`) or when the
        prompt is longer (unless `truncate`: then 511 ids and the end-of-text token stay). `name`
        is what messages call the prompt.
        """
        text = clean_prompt(prompt)
        encoding = _encoded(self._backend, text, self._path)
        added = 1 if self._adds_eos else 0
        body = np.array(encoding.ids[: len(encoding.ids) - added], np.int64)
        if not (len(body) or allow_empty):
            raise _empty(prompt, name)
        room = TEXT_TOKENS - 1
        cut = _cut_text(text, encoding.offsets[room][0]) if len(body) > room else ""
        if len(body) > room and not truncate:
            raise _too_long(name, len(body) + 1, cut)
        ids = np.append(body[:room], np.int64(self._eos_id))
        if self._vocabulary is not None and ids.max() >= self._vocabulary:
            why = f"it gives the id {ids.max()}, the text encoder has {self._vocabulary} rows"
            raise _corrupt(self._path, why)
        return TokenIds(ids=ids.astype(np.int32), text=text, cut=cut)


def _cut_text(text: str, start: int) -> str:
    """Return the text from `start` on, or from the beginning of its word if that is near.

    Languages without spaces would otherwise name all of the text.
    """
    word = text.rfind(" ", 0, start + 1) + 1
    return text[word if start - word <= WORD_LETTERS else start :].strip()


def _empty(prompt: str, name: str) -> SvgenError:
    return UsageError(
        "E_PROMPT_EMPTY",
        f"the {name} {shorten_words(ascii(prompt))} has no text",
        why="after clean-up of white space and control characters nothing is left to encode",
        hint='say what the video shows, for example "a cat walks through snow"',
    )


def _too_long(name: str, tokens: int, cut: str) -> SvgenError:
    return UsageError(
        "E_PROMPT_LONG",
        f"the {name} has {tokens} tokens; these words would be cut: {shorten_words(cut)}",
        why=f"the text encoder reads {TEXT_TOKENS} tokens, the end-of-text token included",
        hint="shorten it, or accept the cut with --truncate",
        details={"tokens": tokens, "limit": TEXT_TOKENS, "cut": shorten_words(cut)},
    )


def _corrupt(path: Path, why: str) -> SvgenError:
    return DownloadError(
        "E_CHECKPOINT",
        f"{path} is not a usable tokenizer",
        why=why,
        hint="fetch the model again with `svgen models verify NAME`, or use another checkpoint",
    )


def _read(path: Path) -> bytes:
    """Read a file that should be small; a larger one is never taken into memory."""
    try:
        data = read_start(path, MAX_FILE_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _corrupt(path, "the file is missing") from error
    except OSError as error:
        raise FileError("E_READ", f"{path} cannot be read", why=str(error)) from error
    if len(data) > MAX_FILE_BYTES:
        raise _corrupt(path, f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
    return data


def _parse(path: Path) -> tokenizers.Tokenizer:
    data = _read(path)
    try:
        check_parts(data)
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, str(error)[:SHOWN_LETTERS]) from error
    with _explained(path):
        backend = tokenizers.Tokenizer.from_buffer(data)
    _encoded(backend, "a \U0001f409 \ue000", path)  # some faults of a file show only in use
    return backend


def _encoded(backend: tokenizers.Tokenizer, text: str, path: Path) -> tokenizers.Encoding:
    with _explained(path):
        return backend.encode(text)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of what the library raises that the file is at fault: it is handed plain text alone."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics are not of type Exception
        said = str(error)[:SHOWN_LETTERS]
        raise _corrupt(path, f"the tokenizers library says: {said}") from error


def _eos_token(path: Path) -> str:
    """Return the end-of-text token of `tokenizer_config.json`: a string or an object around it."""
    if not path.exists():
        return EOS_TOKEN
    try:
        config = json.loads(_read(path))
        token = config.get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise _corrupt(path, f"its JSON is broken: {error}") from error
    if not isinstance(token, str | None):
        raise _corrupt(path, f"its eos_token is {shown(token, SHOWN_LETTERS)}, not a string")
    return token or EOS_TOKEN
