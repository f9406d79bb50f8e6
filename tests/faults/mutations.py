"""Broken files from whole ones: every change is drawn from one seeded generator."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

HUGE = (2**31, 2**32 - 1, 2**53 + 1, 2**63, 2**64 - 1, 10**30)
TEXTS = (
    *("", " ", "x" * 100_000, "\x00", "a\x00b", "\x1b[31m", "\u202eabc", "🐉", "\ud800"),
    *("../x", "../canary.safetensors", "/etc/passwd", "a/../../x", "..", ".", "/dev/zero", "~/x"),
    *("CON", "nul.mp4", "a:b*?", '"quoted"', "{seed}", "{", "{x.__class__}", "%s", "-", "@x"),
    *("NaN", "true", "1e999", "0", "F32", "BF16", "BOOL", "</s>", "dense", "mine", "720p", "0x0"),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 64, 1023, 10**6, *HUGE, -(2**63), 0.5, -0.0, 1e-320),
    *(1e308, float("nan"), float("inf"), float("-inf"), [], {}, [[]], {"": {}}, [None], [0, 0]),
)
DEEP = 100_000
MOST_PLACES = 100_000

Mutate = Callable[[random.Random, bytes], bytes]


# Bytes.


def flip(rng: random.Random, data: bytes) -> bytes:
    """Change single bits, near the beginning more often."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(min(len(data), rng.choice((64, 4096, len(data)))))
        changed[at] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut(rng: random.Random, data: bytes) -> bytes:
    """Keep a beginning, or leave a piece out."""
    first, second = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:first] + rng.choice((b"", data[second:]))


def insert(rng: random.Random, data: bytes) -> bytes:
    """Put strange bytes somewhere."""
    piece = rng.choice(
        (b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b'"', b"{", b"[" * 2000, rng.randbytes(20))
    )
    at = rng.randrange(len(data) + 1)
    return data[:at] + piece + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    """Say a piece many times."""
    at = rng.randrange(len(data))
    piece = data[at : at + rng.choice((1, 10, 1000))]
    return data[:at] + piece * rng.choice((2, 100, 10_000)) + data[at:]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    """Put a number where one may stand: a length, a count, an offset."""
    form, value = rng.choice((("<Q", 2**64 - 1), ("<Q", 1 << 40), ("<I", 2**32 - 1), ("<Q", 0)))
    form = rng.choice((form, form.replace("<", ">")))
    at = rng.randrange(min(len(data), 256)) if rng.random() < 0.5 else 0
    piece = struct.pack(form, value)
    return data[:at] + piece + data[at + len(piece) :]


def nothing(rng: random.Random, data: bytes) -> bytes:
    """Files of another kind altogether."""
    deep = (b"[" * DEEP, b'{"a":' * DEEP, b"9" * 20_000)
    return rng.choice((b"", b"\0" * 100, b"\xff" * 100, *deep, rng.randbytes(500)))


BYTES: tuple[Mutate, ...] = (flip, flip, cut, insert, repeat, overwrite, nothing)


def break_bytes(rng: random.Random, data: bytes) -> bytes:
    """Break a file without knowing what it is."""
    return rng.choice(BYTES)(rng, data)


# Structure.


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    for key in _keys(value):
        yield value, key
        yield from places(value[key])


def strange(rng: random.Random) -> Any:
    """A value that few expect."""
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(VALUES)
    if kind < 0.95:
        return rng.choice(TEXTS)
    return [rng.choice(VALUES)] * rng.choice((2, 100, 5000))


def break_value(rng: random.Random, value: Any) -> Any:
    """Change some places of a JSON value (in place): other types, sizes, more or fewer keys."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        found = list(islice(places(value), MOST_PLACES))
        if not found:
            return strange(rng)
        container, key = rng.choice(found)
        kind = rng.random()
        if kind < 0.6:
            container[key] = strange(rng)
        elif kind < 0.75:
            del container[key]
        elif kind < 0.9:
            other, name = rng.choice(found)
            container[key] = json.loads(json.dumps(other[name])) if name in _keys(other) else 0
        elif isinstance(container, dict):
            container[rng.choice(TEXTS)[:200]] = strange(rng)
        else:
            container.extend(container[:50])
    return value


def _keys(container: Any) -> Any:
    if isinstance(container, dict):
        return container
    return range(len(container)) if isinstance(container, list) else ()


def break_json(rng: random.Random, data: bytes) -> bytes:
    """Break a JSON file as a value, sometimes its text too."""
    if rng.random() < 0.25:
        return break_bytes(rng, data)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # broken already
        return break_bytes(rng, data)
    text = json.dumps(break_value(rng, value))
    if rng.random() < 0.1:  # a key twice
        text = text.replace("{", '{"a": 1, "a": [], ', 1)
    if rng.random() < 0.05:
        text = text.replace("1", "9" * 5000, 1)
    if rng.random() < 0.05:
        text = text.replace(":", ":" + "[" * DEEP, 1)
    return text.encode()


def break_lines(rng: random.Random, data: bytes) -> bytes:
    """Break some lines of JSON."""
    lines = data.splitlines()
    for _ in range(rng.choice((1, 2))):
        at = rng.randrange(len(lines))
        lines[at] = break_json(rng, lines[at] or b"{}")
    return b"\n".join(lines)


def break_safetensors(rng: random.Random, data: bytes) -> bytes:
    """Break the header of a safetensors file: its length, its JSON, its offsets and shapes."""
    if rng.random() < 0.3:
        return break_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    for _ in range(rng.choice((1, 1, 2))):
        one = header.get(rng.choice(names))
        if rng.random() < 0.5 or not isinstance(one, dict) or "data_offsets" not in one:
            header = break_value(rng, header)
            if not isinstance(header, dict):
                break
            continue
        _break_tensor(rng, one, len(body))
    text = json.dumps(header).encode()
    if rng.random() < 0.2:
        text = break_bytes(rng, text)
    claimed = len(text) if rng.random() < 0.9 else rng.choice((0, 1, 2**63, len(data), 100 << 20))
    body = body if rng.random() < 0.8 else rng.choice((body[:-1], body + b"\0", b"", body[:100]))
    return claimed.to_bytes(8, "little") + text + body


def _break_tensor(rng: random.Random, one: dict[str, Any], size: int) -> None:
    """Give a tensor another place, shape or type; its offsets may be broken already."""
    kinds = ("F64", "F16", "BF16", "I64", "BOOL", "F4", "F8_E8M0", "C64", "")
    given = one["data_offsets"]
    whole = isinstance(given, list) and len(given) == 2 and all(type(x) is int for x in given)
    begin, end = given if whole else (0, 0)
    one |= rng.choice(
        (
            {"data_offsets": [0, size]},
            {"data_offsets": [end, begin]},
            {"data_offsets": [begin, 2**64 - 1]},
            {"data_offsets": [begin + 1, end + 1]},
            {"data_offsets": [2**63, 2**63]},
            {"shape": [2**40, 2**40]},
            {"shape": [2**63, 2]},
            {"shape": [0]},
            {"shape": []},
            {"shape": [-1]},
            {"dtype": rng.choice(kinds)},
        )
    )


def break_toml(rng: random.Random, data: bytes) -> bytes:
    """Break a TOML file line by line: other values, other keys, tables in tables."""
    if rng.random() < 0.3:
        return break_bytes(rng, data)
    lines = data.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0].strip() if "=" in lines[at] else "steps"
        lines[at] = rng.choice(
            (
                f"{key} = {_toml(strange(rng))}",
                f"{_toml(rng.choice(TEXTS)[:50])} = 1",
                f"[{key}]",
                f"[[{key}]]",
                f"{'a.' * 5000}b = 1",
                f"{key} = {'[' * 3000}",
                f"{lines[at]}\n{lines[at]}",
                "",
            )
        )
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | dict):
        return "[]" if isinstance(value, list) else "{}"
    return json.dumps(value, ensure_ascii=False)


def break_mp4(rng: random.Random, data: bytes) -> bytes:
    """Break an MP4, or the recipe inside an MP4 that is whole."""
    if rng.random() < 0.4:
        return break_bytes(rng, data)
    at = data.index(b'{"')
    recipe = json.loads(data[at:])
    return mp4_of(break_json(rng, json.dumps(recipe).encode()))


def _atom(name: bytes, body: bytes) -> bytes:
    return (len(body) + 8).to_bytes(4, "big") + name + body


def mp4_of(comment: bytes) -> bytes:
    """The least MP4 with a comment, which ends the file."""
    data = _atom(b"\xa9cmt", _atom(b"data", bytes(8) + comment))
    meta = _atom(b"meta", bytes(4) + _atom(b"ilst", data))
    return _atom(b"ftyp", b"isom") + _atom(b"moov", _atom(b"udta", meta))
