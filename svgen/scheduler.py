"""Flow-matching times and the UniPC multistep update, as one linear rule per step.

With noise level s_i at step i, the sample is x_i = (1 - s_i) video + s_i noise, the network
predicts the velocity v = noise - video, and m_i = x_i - s_i v estimates the video. UniPC of order 2
with B_2(h) = e^h - 1 (arXiv 2302.04867, equations 3 and 9) first corrects x_i with the new estimate
and then predicts x_(i+1). Both are linear in the arrays at hand, so their coefficients are worked
out here once, in float64, and a step is two weighted sums:

    y_i     = a0 x_i + a1 y_(i-1) + a2 m_i + a3 m_(i-1) + a4 m_(i-2)    (the corrected sample)
    x_(i+1) = b0 y_i + b1 m_i + b2 m_(i-1)
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

TRAIN_TIMES = 1000


@dataclass(frozen=True, slots=True)
class SolverTable:
    """The numbers of every step of one run; row i belongs to step i."""

    sigmas: np.ndarray  # float64 [steps + 1], noise levels; the last is 0
    times: np.ndarray  # float32 [steps], what the network is told, whole numbers
    correct: np.ndarray  # float32 [steps, 5]
    predict: np.ndarray  # float32 [steps, 3]

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.times)


class DenoiseState(NamedTuple):
    """Everything a run needs to go on from where it is."""

    step: jax.Array  # int32 [], steps done
    latents: jax.Array  # float32 [B, F, H, W, Z], at noise level sigmas[step]
    corrected: jax.Array  # the corrected sample of the step before
    estimate: jax.Array  # estimate of the video, one step back
    older_estimate: jax.Array  # two steps back


def flow_sigmas(steps: int, shift: float) -> np.ndarray:
    """Noise levels of the steps of a run, float64 [steps], falling from nearly 1.

    Even levels u from 1 to 1/1000 are shifted to `shift` u / (1 + (`shift` - 1) u). As upstream
    does, the first is taken off 1 by 1e-6: its log signal-to-noise ratio would be infinite.
    """
    even = np.linspace(1, 1 / TRAIN_TIMES, steps + 1)[:-1]
    sigmas = shift * even / (1 + (shift - 1) * even)
    if abs(sigmas[0] - 1) < 1e-6:
        sigmas[0] -= 1e-6
    return sigmas


def _log_snr(sigma: float) -> float:
    with np.errstate(divide="ignore"):
        return float(np.log1p(-sigma) - np.log(sigma))


def _phis(h: float) -> tuple[float, float, float]:
    """e^-h - 1 (which is also B_2), and the two right-hand sides of UniC's system of order 2."""
    base = np.expm1(-h)
    if np.isinf(h):
        return -1.0, 1.0, 1.0  # unused limit: the last step has order 1
    first = base / -h - 1
    second = first / -h - 0.5
    return float(base), float(first / base), float(2 * second / base)


def _predict_row(sigmas: np.ndarray, i: int, order: int) -> list[float]:
    """Coefficients of y_i, m_i, m_(i-1) in x_(i+1)."""
    here, there = sigmas[i], sigmas[i + 1]
    h = _log_snr(there) - _log_snr(here)
    base, alpha = _phis(h)[0], 1 - there
    row = [there / here, -alpha * base, 0.0]
    if order == 2:
        ratio = (_log_snr(sigmas[i - 1]) - _log_snr(here)) / h
        slope = -alpha * base * 0.5 / ratio  # times (m_(i-1) - m_i)
        row[1] -= slope
        row[2] += slope
    return row


def _correct_row(sigmas: np.ndarray, i: int, order: int) -> list[float]:
    """Coefficients of x_i, y_(i-1), m_i, m_(i-1), m_(i-2) in y_i; `order` is step i-1's."""
    before, here = sigmas[i - 1], sigmas[i]
    h = _log_snr(here) - _log_snr(before)
    base, first, second = _phis(h)
    alpha = 1 - here
    row = [0.0, here / before, 0.0, -alpha * base, 0.0]
    weight_new = 0.5
    if order == 2:
        ratio = (_log_snr(sigmas[i - 2]) - _log_snr(before)) / h
        weight_old, weight_new = np.linalg.solve([[1.0, 1.0], [ratio, 1.0]], [first, second])
        slope = -alpha * base * weight_old / ratio  # times (m_(i-2) - m_(i-1))
        row[3] -= slope
        row[4] += slope
    row[2] -= alpha * base * weight_new  # times (m_i - m_(i-1))
    row[3] += alpha * base * weight_new
    return row


def solver_table(steps: int, shift: float) -> SolverTable:
    """Work out the coefficients of a run of `steps` steps with flow shift `shift`.

    Orders are those of diffusers' UniPCMultistepScheduler: 1 at the first step and
    (lower_order_final) at the last, 2 between; no correction at the first step. Levels are rounded
    to float32 as there, times are not.
    """
    exact = flow_sigmas(steps, shift)
    sigmas = np.append(exact, 0.0).astype(np.float32).astype(np.float64)
    orders = [min(2, i + 1, steps - i) for i in range(steps)]
    predict = [_predict_row(sigmas, i, orders[i]) for i in range(steps)]
    correct = [[1.0, 0.0, 0.0, 0.0, 0.0]]
    correct += [_correct_row(sigmas, i, orders[i - 1]) for i in range(1, steps)]
    return SolverTable(
        sigmas=sigmas,
        times=np.floor(exact * TRAIN_TIMES).astype(np.float32),
        correct=np.asarray(correct, np.float32),
        predict=np.asarray(predict, np.float32),
    )


def start_state(noise: jax.Array) -> DenoiseState:
    """Begin a run at `noise`, float32 [B, F, H, W, Z]."""
    # Three buffers, because a step reuses each; put, because jnp.zeros would compile a program.
    empty = [jax.device_put(np.zeros(noise.shape, np.float32)) for _ in range(3)]
    return DenoiseState(jax.device_put(np.int32(0)), noise, *empty)


def update(
    state: DenoiseState,
    velocity: jax.Array,  # float32, the shape of the latents
    sigma: jax.Array,  # float32 [], row `state.step` of the table, like the two below
    correct: jax.Array,  # float32 [5]
    predict: jax.Array,  # float32 [3]
) -> DenoiseState:
    """Take one step of UniPC."""
    estimate = state.latents - sigma * velocity
    corrected = (
        correct[0] * state.latents
        + correct[1] * state.corrected
        + correct[2] * estimate
        + correct[3] * state.estimate
        + correct[4] * state.older_estimate
    )
    latents = predict[0] * corrected + predict[1] * estimate + predict[2] * state.estimate
    return DenoiseState(state.step + 1, latents, corrected, estimate, state.estimate)
