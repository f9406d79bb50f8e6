"""The errors of a run whose numbers go bad: in which stage, at which step, of which branch of
guidance, and what can be done.
"""

from collections.abc import Sequence
from typing import Any

from svgen.errors import NumericalError

TEXT_ENCODER, TRANSFORMER, SOLVER, VAE = "text encoder", "transformer", "solver", "vae"
PROMPT, NEGATIVE, BOTH = "prompt", "negative", "both"
WORDS = {
    PROMPT: "the prompt",
    NEGATIVE: "the negative prompt",
    BOTH: "both the prompt and the negative prompt",
}
VERIFY = "`svgen models verify NAME` checks the files"
WIDER = "--dtype float32, if bfloat16 is too narrow"


def bad_branch(finite: Sequence[bool]) -> str | None:
    """Which branch is not finite, of one (the prompt) or two; None if all are."""
    wrong = [name for name, good in zip((PROMPT, NEGATIVE), finite, strict=False) if not bool(good)]
    return BOTH if len(wrong) == 2 else next(iter(wrong), None)


def bad_text(finite: Sequence[bool]) -> NumericalError | None:
    """The error of embedded prompts, of which some are not finite; None if all are."""
    branch = bad_branch(finite)
    if branch is None:
        return None
    why = f"the text encoder made them of {WORDS[branch]}; the video would be noise"
    return _error("the text embeddings", why, _hint(VERIFY, WIDER), TEXT_ENCODER, branch=branch)


def bad_step(finite: Sequence[bool], step: int, steps: int, state: Any = None) -> NumericalError:
    """The error of a step, counted from 1, whose latents are not finite, given which branches'
    velocities are. `state` is the last good one.
    """
    branch = bad_branch(finite)
    if branch is None:
        stage, why = SOLVER, "the velocities are finite, but guidance and the solver overflow"
        hint = "a lower --guidance, or other --steps"
    else:
        stage, why = TRANSFORMER, f"the transformer's velocity is not finite for {WORDS[branch]}"
        hint = _hint(VERIFY, WIDER)
    where = f"the latents after step {step} of {steps}"
    error = _error(where, why, hint, stage, branch=branch, step=step, steps=steps)
    error.state = state
    return error


def bad_frames(first: int, last: int) -> NumericalError:
    """The error of decoded frames that are not finite, counted from 1."""
    which = f"the decoded frame {first}" if first == last else f"the decoded frames {first}-{last}"
    why = "the latents are finite, but the VAE makes no video of them"
    return _error(which, why, VERIFY, VAE, frame=first)


def _error(what: str, why: str, hint: str, stage: str, **details: Any) -> NumericalError:
    verb = "holds" if what.startswith("the decoded frame ") else "hold"
    return NumericalError(
        "E_NAN",
        f"{what} {verb} NaN or infinity",
        why=why,
        hint=hint,
        details={"stage": stage, **details},
    )


def _hint(*ways: str) -> str:
    return ", or ".join(ways)
