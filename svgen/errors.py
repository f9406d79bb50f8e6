"""What can go wrong that a user can mend: kinds of error, their exit codes, and the registry of
stable codes.

A message has three parts: what was given (`message`), the rule it breaks (`why`) and the way out
(`hint`).
"""

import errno
from collections.abc import Sequence
from typing import Any

# What a write says when a disk, a quota or the largest size of a file is reached.
FULL_DISK = frozenset({errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)})


class SvgenError(Exception):
    """Something that the user can mend. Printed in three lines, never with a traceback."""

    exit_code = 1

    def __init__(
        self,
        code: str,
        message: str,
        *,
        why: str = "",
        hint: str = "",
        details: dict[str, Any] | None = None,
    ):
        assert CODES.get(code, (None,))[0] is type(self), (
            f"{code} is not registered as {type(self)}"
        )
        super().__init__(message)
        self.code, self.message, self.why, self.hint = code, message, why, hint
        self.details = details or {}
        self.problems: tuple[SvgenError, ...] = (self,)

    def as_json(self) -> dict[str, Any]:
        """The `error` object of `--json`; with several problems, `details` lists all of them."""
        body = self._alone()
        if len(self.problems) > 1:
            body["details"]["problems"] = [problem._alone() for problem in self.problems]
        return body

    def _alone(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "why": self.why,
            "hint": self.hint,
            "details": dict(self.details),
        }


class InternalError(SvgenError):
    """A defect of svgen itself, or a batch that finished only in part."""

    exit_code = 1


class UsageError(SvgenError):
    """A flag, a preset or a prompt that cannot be used."""

    exit_code = 2


class MachineError(SvgenError):
    """The machine lacks something: no TPU, a TPU that is busy, versions that do not fit."""

    exit_code = 3


class AccessError(SvgenError):
    """The Hub wants a token, or a licence to be accepted."""

    exit_code = 4


class DownloadError(SvgenError):
    """The network failed, or a checkpoint is missing, incomplete or corrupt."""

    exit_code = 5


class FileError(SvgenError):
    """A disk is full, a folder cannot be written, an encoder failed."""

    exit_code = 6


class OutOfMemory(SvgenError):
    """Host or accelerator memory does not suffice."""

    exit_code = 7


class NumericalError(SvgenError):
    """NaN or infinity in the numbers of a run."""

    exit_code = 8
    state: Any = None  # the last good one, of a run that has taken a step


class Interrupted(SvgenError):
    """Ctrl-C or SIGTERM (which exits with 143)."""

    exit_code = 130


# Stable codes: each belongs to one kind, with one line that says when it appears.
CODES: dict[str, tuple[type[SvgenError], str]] = {
    "E_INTERNAL": (InternalError, "a defect of svgen; please report it"),
    "E_PARTIAL": (InternalError, "some items of a batch failed"),
    "E_USAGE": (UsageError, "an unknown command, flag or value"),
    "E_SIZE": (UsageError, "a width or height that the model cannot make"),
    "E_FRAMES": (UsageError, "a number of frames that the model cannot make"),
    "E_CONFIG": (UsageError, "a config file that is not valid"),
    "E_VALUE": (UsageError, "a number outside its range"),
    "E_PROMPT_EMPTY": (UsageError, "the prompt has no text"),
    "E_PROMPT_LONG": (UsageError, "the prompt has more tokens than the text encoder reads"),
    "E_PROMPTS": (UsageError, "a file of prompts that cannot be used"),
    "E_MODEL": (UsageError, "a model that is neither known nor a checkpoint folder"),
    "E_TPU_NAME": (UsageError, "a name of TPU chips that is not known"),
    "E_MESH": (UsageError, "a split of the run over chips that cannot be made"),
    "E_STATE": (UsageError, "a saved state that is not one of this run"),
    "E_PRESET": (UsageError, "a preset that is unknown or not valid"),
    "E_OUTPUT_EXISTS": (UsageError, "the output file is there already"),
    "E_OUTPUT_NAME": (UsageError, "an output name that cannot be used"),
    "E_RECIPE": (UsageError, "a file that holds no recipe of svgen"),
    "E_BENCH": (UsageError, "a file that holds no timings of svgen, or those of something else"),
    "E_LATENTS": (UsageError, "a file that holds no latents of svgen"),
    "E_NO_TPU": (MachineError, "no TPU is attached and none of the fallbacks was allowed"),
    "E_TPU_BUSY": (MachineError, "another process holds the TPU"),
    "E_DEVICE": (MachineError, "the device asked for is not there"),
    "E_PEER": (MachineError, "another process of the run does not come, or has died"),
    "E_LIBRARY": (MachineError, "a library is missing or does not work here"),
    "E_AUTH": (AccessError, "the Hub refuses access to a repository"),
    "E_NETWORK": (DownloadError, "the Hub cannot be reached, or a download failed"),
    "E_OFFLINE": (DownloadError, "a file is not on disk and the network may not be used"),
    "E_CHECKPOINT": (
        DownloadError,
        "a checkpoint is missing, incomplete, corrupt or of another shape",
    ),
    "E_DISK_FULL": (FileError, "too little space on the disk"),
    "E_WRITE": (FileError, "a file or folder cannot be written"),
    "E_HELD": (FileError, "another run is making the same output"),
    "E_READ": (FileError, "a file or folder cannot be read"),
    "E_ENCODE": (FileError, "ffmpeg failed"),
    "E_MEMORY": (OutOfMemory, "too little host or accelerator memory"),
    "E_DOCTOR": (MachineError, "`svgen doctor` found a problem"),
    "E_INTERRUPTED": (Interrupted, "Ctrl-C or SIGTERM ended the run"),
    "E_NAN": (NumericalError, "NaN or infinity in the latents or frames"),
}


def shown(value: Any, letters: int) -> str:
    """A value out of a file as text for a message, however long it is and deeply nested."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} in many others"
    return text if len(text) <= letters else f"{text[: letters - 3]}..."


def raise_all(problems: Sequence[SvgenError]) -> None:
    """Raise every problem as one error; do nothing when there is none.

    The first problem gives the kind, the code and the exit status; `problems` holds all of them.
    """
    if not problems:
        return
    first = problems[0]
    flat = tuple(dict.fromkeys(one for problem in problems for one in problem.problems))
    first.problems = flat
    raise first
