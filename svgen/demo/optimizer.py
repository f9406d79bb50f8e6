"""The optimiser of both trainings."""

from collections.abc import Callable
from typing import Any

import optax
from optax.contrib import muon

MUON_RATE = 3.0  # of the matrices, as a multiple of that of the rest


def falling(
    steps: int, rate: float, *, matrices: Callable[[Any], Any], weight_decay: float
) -> optax.GradientTransformation:
    """Muon for what `matrices` marks, AdamW for the rest; a short warm-up, then a rate that falls
    to a fiftieth along a cosine.
    """
    warm_up = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, warm_up, steps, rate / 50)
    transform = muon(
        lambda count: MUON_RATE * schedule(count),
        adam_learning_rate=schedule,
        weight_decay=weight_decay,
        adam_b2=0.99,
        muon_weight_dimension_numbers=matrices,
        consistent_rms=0.2,
    )
    return optax.chain(optax.clip_by_global_norm(1.0), transform)
