"""The solver against UniPC's formulas written out another way, by hand, and in the limit."""

import math
from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svgen.programs import StepTable
from svgen.scheduler import (
    DenoiseState,
    SolverTable,
    _correct_row,
    _predict_row,
    flow_sigmas,
    solver_table,
    start_state,
    update,
)

RUNS = [(1, 5.0), (2, 3.0), (3, 1.0), (4, 12.0), (8, 5.0), (25, 0.5), (50, 5.0), (50, 8.0)]
ROUNDING = 2.0**-23  # of float32 coefficients and levels, relative


# Times and levels


@pytest.mark.parametrize(
    ("steps", "shift"), [(50, 5.0), (50, 8.0), (40, 12.0), (50, 3.0), (8, 1.0)]
)
def test_sigmas_are_wans_shifted_list(steps, shift):
    sigmas = flow_sigmas(steps, shift)
    for i in range(1, steps):
        even = 1 - i * (1 - 0.001) / steps
        assert math.isclose(sigmas[i], shift * even / (1 + (shift - 1) * even), rel_tol=1e-12)
    assert sigmas[0] == 1 - 1e-6 and len(sigmas) == steps


def test_times_by_hand():
    # 4 steps, shift 5: u = 1, 0.75025, 0.5005, 0.25075 -> 5u / (1 + 4u)
    assert solver_table(4, 5.0).times.tolist() == [999, 937, 833, 625]
    # 8 steps, shift 1: 1000, 875.125, 750.25, 625.375, 500.5, 375.625, 250.75, 125.875
    assert solver_table(8, 1.0).times.tolist() == [999, 875, 750, 625, 500, 375, 250, 125]


@pytest.mark.parametrize("steps", [1, 2, 3, 8, 50, 1000])
@pytest.mark.parametrize("shift", [0.01, 1.0, 5.0, 12.0, 100.0])
def test_table_is_sound_for_every_run_that_can_be_asked_for(steps, shift):
    table = solver_table(steps, shift)
    assert table.steps == steps
    assert table.sigmas.dtype == np.float64 and table.sigmas.shape == (steps + 1,)
    assert table.sigmas[-1] == 0 and (np.diff(table.sigmas) < 0).all()
    np.testing.assert_array_equal(table.sigmas, table.sigmas.astype(np.float32))
    assert table.times.dtype == table.correct.dtype == table.predict.dtype == np.float32
    assert (table.times == np.floor(table.times)).all()
    assert table.times.min() >= 0 and table.times.max() < 1000
    assert (np.diff(table.times) <= 0).all()
    assert table.correct.shape == (steps, 5) and table.predict.shape == (steps, 3)
    assert np.isfinite(table.correct).all() and np.isfinite(table.predict).all()


# What the rows must be, whatever the step


@pytest.mark.parametrize(("steps", "shift"), RUNS)
def test_rows_keep_the_straight_flow_to_a_constant_estimate(steps, shift):
    """With m always the same, x moves on the line to it: weights of x, and of all m, are known."""
    table = solver_table(steps, shift)
    for i in range(steps):
        here, there = table.sigmas[i : i + 2]
        row = table.predict[i].astype(np.float64)
        assert math.isclose(row[0], there / here, rel_tol=ROUNDING)
        assert abs(row[1:].sum() - (1 - there / here)) <= 2 * ROUNDING * np.abs(row).max()
        row = table.correct[i].astype(np.float64)
        ratio = here / table.sigmas[i - 1] if i else 0.0
        assert (row[0], row[1]) == ((0.0, np.float32(ratio)) if i else (1.0, 0.0))
        total = 1 - ratio if i else 0.0
        assert abs(row[2:].sum() - total) <= 4 * ROUNDING * np.abs(row).max()


@pytest.mark.parametrize(("steps", "shift"), RUNS)
def test_order_is_one_at_both_ends_and_two_between(steps, shift):
    table = solver_table(steps, shift)
    assert table.predict[0, 2] == 0 and table.predict[-1, 2] == 0
    assert (table.predict[1:-1, 2] != 0).all()
    assert table.correct[0].tolist() == [1, 0, 0, 0, 0]
    assert (table.correct[1:2, 4] == 0).all()  # the step it corrects had order 1
    assert (table.correct[2:, 4] != 0).all()
    assert (table.correct[1:, 2] != 0).all()


def test_last_step_gives_the_estimate_itself():
    for steps, shift in RUNS:
        assert solver_table(steps, shift).predict[-1].tolist() == [0, 1, 0]


# Whole runs, from the paper's formulas with D1 differences and R p(h) = phi, in float64


def log_snr(sigma: float) -> float:
    return math.inf if sigma == 0 else math.log((1 - sigma) / sigma)


def phi(order: int, h: float) -> float:
    """phi_k(-h): the integral of e^(-(1-t)h) t^(k-1) / (k-1)! over [0, 1], as a power series."""
    return sum((-h) ** n / math.factorial(n + order) for n in range(120))


def by_the_paper(model: Callable, noise: float, steps: int, shift: float) -> list[float]:
    """UniPC-2 of data prediction for one number: the sample after every step (algorithms 1, 2)."""
    sigmas = [float(np.float32(sigma)) for sigma in flow_sigmas(steps, shift)] + [0.0]
    x, start, samples, estimates = noise, noise, [], []
    for i in range(steps):
        estimates.append(x - sigmas[i] * model(x, sigmas[i]))
        if i > 0:
            x = one_step(start, sigmas, i - 1, 2 if i > 1 else 1, estimates)
        start = x
        order = 2 if 0 < i < steps - 1 else 1
        x = one_step(x, sigmas, i, order, estimates)
        samples.append(x)
    return samples


def one_step(x: float, sigmas: list[float], i: int, order: int, estimates: list[float]) -> float:
    """Go from level i to i + 1; an estimate at level i + 1, where there is one, corrects the step.

    x' = (s'/s) x + a' (1 - e^-h) m + a' B sum_p rho_p (m_p - m) / r_p, where rho solves
    sum_p r_p^(n-1) rho_p = n! h phi_(n+1)(-h) / B and is 1/2 for a single point.
    """
    here, there = sigmas[i], sigmas[i + 1]
    m = estimates[i]
    if there == 0:
        return m
    h = log_snr(there) - log_snr(here)
    alpha, b = 1 - there, 1 - math.exp(-h)
    points = {} if order == 1 else {(log_snr(sigmas[i - 1]) - log_snr(here)) / h: estimates[i - 1]}
    if len(estimates) > i + 1:
        points[1.0] = estimates[i + 1]
    weights = [0.5]
    if len(points) == 2:
        right = [h * math.factorial(n) * phi(n + 1, h) / b for n in (1, 2)]
        weights = np.linalg.solve([[1.0, 1.0], list(points)], right)
    slopes = [
        weight * (other - m) / r
        for weight, (r, other) in zip(weights, points.items(), strict=False)
    ]
    return there / here * x + alpha * b * (m + sum(slopes))


def traced(x: jax.Array, sigma: jax.Array) -> jax.Array:
    return jnp.sin(jnp.float32(3) * x) + sigma * x - jnp.float32(0.3)


def plain(x: float, sigma: float) -> float:
    return math.sin(3 * x) + sigma * x - 0.3


def run(table: SolverTable, model, noise: np.ndarray) -> list[np.ndarray]:
    """What a pipeline does with a table, one update a step."""
    rows = StepTable.of(table)
    state, samples = start_state(jnp.asarray(noise)), []
    take = jax.jit(update)
    for i in range(table.steps):
        velocity = model(state.latents, rows.sigmas[i])
        state = take(state, velocity, rows.sigmas[i], rows.correct[i], rows.predict[i])
        samples.append(np.asarray(state.latents))
    assert int(state.step) == table.steps
    return samples


@pytest.mark.parametrize(("steps", "shift"), [(1, 5.0), (2, 5.0), (3, 5.0), (3, 1.0), (8, 8.0)])
def test_run_matches_the_papers_formulas(steps, shift):
    noise = np.array([-1.3, -0.4, 0.2, 0.9, 2.1], np.float32)

    expected = [by_the_paper(plain, float(one), steps, shift) for one in noise]
    found = run(solver_table(steps, shift), traced, noise)
    np.testing.assert_allclose(found, np.transpose(expected), atol=2e-5)


def test_two_steps_by_hand():
    # Step 0 has order 1: Euler. It is corrected once, by UniC of order 1, and step 1 ends at m1.
    table = solver_table(2, 1.0)
    a, b = table.sigmas[:2]
    np.testing.assert_allclose(table.predict[0], [b / a, 1 - b / a, 0], rtol=ROUNDING)
    # With one point the weight is 1/2: y = (b/a) y0 + (1 - b/a) (m0 + m1) / 2, the trapezium.
    half = (1 - b / a) / 2
    np.testing.assert_allclose(table.correct[1], [0, b / a, half, half, 0], rtol=ROUNDING)


def test_constant_estimate_is_reached_exactly_along_the_line():
    noise = np.array([2.0, -1.0, 0.5], np.float32)
    target = np.array([0.25, 0.75, -3.0], np.float32)
    table = solver_table(10, 5.0)
    samples = run(table, lambda x, sigma: (x - target) / sigma, noise)
    for i, sample in enumerate(samples):
        ratio = table.sigmas[i + 1] / table.sigmas[0]
        np.testing.assert_allclose(sample, ratio * noise + (1 - ratio) * target, atol=2e-5)


@pytest.mark.parametrize(("corrected", "factor"), [(False, 4), (True, 8)])
@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.0, 0.0), (2.0, 1.0)])
def test_error_falls_with_the_order_when_steps_double(a, b, corrected, factor):
    """dx/ds = a x + b s has a known solution. UniP-2 has order 2; UniC adds one (theorem 3.1)."""
    found = [abs(error_of(steps, a, b, corrected)) for steps in (20, 40, 80, 160, 320)]
    for index, (first, second) in enumerate(pairwise(found)):
        assert abs(first / second / factor - 1) < 0.16 / 2**index, found


def error_of(steps: int, a: float, b: float, corrected: bool) -> float:
    """Go from level 0.9 to 0.1 in even steps of log SNR, in float64, both rows of order 2."""
    ends = math.log(0.1 / 0.9), math.log(0.9 / 0.1)
    sigmas = 1 / (1 + np.exp(np.linspace(*ends, steps + 1)))
    x, y, m1, m2 = 1.0, 0.0, 0.0, 0.0
    for i in range(steps):
        m = x - sigmas[i] * (a * x + b * sigmas[i])
        unchanged = [1.0, 0.0, 0.0, 0.0, 0.0]
        row = _correct_row(sigmas, i, min(2, i)) if corrected and i else unchanged
        y = np.dot(row, [x, y, m, m1, m2])
        x = np.dot(_predict_row(sigmas, i, min(2, i + 1)), [y, m, m1])
        m1, m2 = m, m1
    special = -b * (sigmas + 1 / a) / a
    growth = math.exp(a * (sigmas[-1] - sigmas[0]))
    return x - ((1.0 - special[0]) * growth + special[-1])


# The state


def test_start_state_holds_the_noise_and_its_own_buffers():
    noise = jnp.ones((1, 2, 3, 4, 5), jnp.float32)
    state = start_state(noise)
    assert state.step.dtype == jnp.int32 and int(state.step) == 0
    assert state.latents is noise
    for empty in (state.corrected, state.estimate, state.older_estimate):
        assert empty.shape == noise.shape and not np.asarray(empty).any()
    pointers = {leaf.unsafe_buffer_pointer() for leaf in state[1:]}
    assert len(pointers) == 4  # a step reuses each of them


def test_update_shifts_the_history_and_leaves_no_other_trace():
    arrays = [jnp.full((2,), value, jnp.float32) for value in (3, 5, 7, 11)]
    state = DenoiseState(jnp.int32(4), *arrays)
    correct = jnp.asarray([2, 3, 5, 7, 11], jnp.float32)
    predict = jnp.asarray([13, 17, 19], jnp.float32)
    new = update(state, jnp.full((2,), 2, jnp.float32), jnp.float32(0.5), correct, predict)
    estimate = 3 - 0.5 * 2  # 2
    corrected = 2 * 3 + 3 * 5 + 5 * estimate + 7 * 7 + 11 * 11  # 201
    latents = 13 * corrected + 17 * estimate + 19 * 7  # 2780
    found = [np.asarray(leaf).tolist() for leaf in new]
    assert found == [5, [latents] * 2, [corrected] * 2, [estimate] * 2, [7.0] * 2]
