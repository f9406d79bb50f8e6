"""A model by its sizes: what a run is given in the place of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from svgen.checkpoint import read_specs
from svgen.pipeline import Pipeline
from svgen.stand_in import TEXT_TOKENS, StandIn
from tests.equality import request_for
from tests.helpers import ROOT

TINY = ROOT / "tests/golden/tiny"


@pytest.mark.parametrize(
    ("part", "mesh"), [("text_encoder", "auto"), ("transformer", "2x2"), ("vae", "2x2")]
)
def test_parts_are_those_of_a_checkpoint_but_for_the_numbers(part, mesh):
    request = request_for(32, 32, 5)
    ours = StandIn(read_specs(TINY), dtype="bfloat16", mesh=mesh).load(part, request)
    theirs = Pipeline(TINY, dtype="bfloat16", mesh=mesh).load(part, request)
    assert ours[0] == theirs[0]
    same = jax.tree.map(
        lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding),
        ours[1],
        theirs[1],
    )
    assert all(jax.tree.leaves(same))
    values = np.concatenate(
        [np.asarray(leaf, np.float32).reshape(-1) for leaf in jax.tree.leaves(ours[1])]
    )
    assert np.isfinite(values).all() and values.std() > 0


def test_prompts_are_as_many_as_branches():
    made_up = StandIn(read_specs(TINY))
    assert [one.length for one in made_up.tokens(request_for(32, 32, 5))] == [TEXT_TOKENS] * 2
    assert made_up.parameters == Pipeline(TINY).parameters
    assert jnp.dtype("float32") == made_up.start(request_for(32, 32, 5)).latents.dtype
