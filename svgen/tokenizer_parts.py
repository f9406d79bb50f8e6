"""What a tokenizer.json may be made of, held against it before the library builds it.

The library trusts its files: thirty parts that each write "aa" for "a", or one line of a character
map with a novel in it, fill the memory and end the process. So only the parts that T5's tokenizers
have are built, none that makes text longer twice, and no pattern that could run for hours.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from svgen.errors import shown

MAX_PARTS = 16
MAX_ENTRY_BYTES = 64  # of a character map: the longest ligature of NFKC has 33
MODEL = "Unigram"
KINDS = {  # part of the file -> types; but for Replace, each may stand there once
    "normalizer": (
        *("Sequence", "Precompiled", "Replace", "Strip", "StripAccents", "Prepend"),
        *("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
    ),
    "pre_tokenizer": ("Sequence", "Whitespace", "WhitespaceSplit", "Metaspace"),
    "post_processor": ("TemplateProcessing",),
    "decoder": ("Sequence", "Metaspace", "Replace", "Strip", "Fuse", "ByteFallback"),
}
# One character or class of them, repeated: it matches no empty text, and in linear time.
PATTERN = re.compile(r"(?:\\s|\[[^\[\]\\]{1,16}\]|[ \w])(?:\+|\{[1-9]\d?,?\d{0,2}\})?")


def check_parts(data: bytes) -> None:
    """Raise ValueError (or RecursionError) for a file with anything else in it."""
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    model = content.get("model")
    if not isinstance(model, dict) or model.get("type", MODEL) != MODEL:
        raise ValueError(f"its model is not of the type {MODEL}")
    for name, kinds in KINDS.items():
        _check_part(name, kinds, content.get(name))


def _check_part(name: str, kinds: tuple[str, ...], part: Any) -> None:
    nodes = list(_nodes(part))
    found = [node.get("type") for node in nodes]
    strange = [kind for kind in found if kind not in kinds]
    if strange:
        raise ValueError(f"its {name} has the type {shown(strange[0], 40)}")
    repeated = [kind for kind in found if kind != "Replace" and found.count(kind) > 1]
    if repeated or len(nodes) > MAX_PARTS:
        raise ValueError(f"its {name} has {len(nodes)} parts, or one of them twice")
    for node in nodes:
        CHECKS.get(node["type"], _pass)(node)


def _nodes(part: Any) -> Iterator[Mapping[str, Any]]:
    """A part and what a Sequence holds; raises ValueError for what is no part."""
    if part is None:
        return
    if not isinstance(part, dict):
        raise ValueError("one of its parts is no JSON object")
    yield part
    if part.get("type") == "Sequence":
        for key in ("normalizers", "pretokenizers", "decoders"):
            inner = part.get(key, [])
            if not isinstance(inner, list) or len(inner) > MAX_PARTS:
                raise ValueError(f"its {key} are no list of at most {MAX_PARTS}")
            for one in inner:
                yield from _nodes(one)


def _pass(_: Mapping[str, Any]) -> None:
    """Nothing of this part makes text longer."""


def _check_replace(node: Mapping[str, Any]) -> None:
    pattern = node.get("pattern")
    kind, text = next(iter(pattern.items())) if isinstance(pattern, dict) and pattern else ("", "")
    known = isinstance(text, str) and text and (kind == "String" or PATTERN.fullmatch(text))
    if not known:
        raise ValueError(f"it replaces by the pattern {shown(pattern, 60)}")
    _check_short(node.get("content"))


def _check_short(content: Any) -> None:
    if not isinstance(content, str) or len(content) > 1:
        raise ValueError(f"it puts {shown(content, 60)} into the text: more than one character")


def _check_prepend(node: Mapping[str, Any]) -> None:
    _check_short(node.get("prepend"))


def _check_precompiled(node: Mapping[str, Any]) -> None:
    """A character map: the size of a trie in four bytes, the trie, and texts that end in NUL."""
    text = node.get("precompiled_charsmap")
    blob = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    texts = blob[4 + int.from_bytes(blob[:4], "little") :]
    if max(map(len, texts.split(b"\0"))) > MAX_ENTRY_BYTES:
        raise ValueError(f"its character map has an entry of more than {MAX_ENTRY_BYTES} bytes")


def _check_template(node: Mapping[str, Any]) -> None:
    single = node.get("single")
    if not isinstance(single, list) or len(single) > MAX_PARTS:
        raise ValueError(f"its template is no list of at most {MAX_PARTS}")
    if sum(isinstance(one, dict) and "Sequence" in one for one in single) != 1:
        raise ValueError("its template does not hold the text once")


CHECKS = {
    "Replace": _check_replace,
    "Prepend": _check_prepend,
    "Precompiled": _check_precompiled,
    "TemplateProcessing": _check_template,
}
