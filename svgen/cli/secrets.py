"""Tokens of the Hub, taken out of whatever is printed or logged."""

import logging
import os
import re

TOKEN = re.compile(r"hf_[A-Za-z0-9]{30,}")
VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHORTEST = 8  # letters; a shorter value is no token, and would blot out plain words
HIDDEN = "hf_***"


def hide(text: str) -> str:
    """Put stars in the place of tokens: what looks like one, and what the environment holds."""
    for name in VARIABLES:
        value = os.environ.get(name, "").strip()
        if len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    return TOKEN.sub(HIDDEN, text)


def hide_in_log(record: logging.LogRecord) -> bool:
    """Be a filter of a handler: what libraries log may hold a token too."""
    record.msg, record.args = hide(record.getMessage()), ()
    return True
