"""Trains the demo's text encoder and transformer together, by flow matching on latents.

At noise level s the network sees (1 - s) z + s noise and learns noise - z (arXiv 2210.02747). A
tenth of the captions is empty, which teaches the unconditional branch of guidance. Everything is
float32, which two cores multiply faster than bfloat16; the running average of the weights is kept.
Batches are split over all devices: two virtual ones use two cores better than one does.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec
from optax.contrib import MuonDimensionNumbers

from svgen.config import TextSpec, TransformerSpec
from svgen.demo import captions, scenes
from svgen.demo.optimizer import falling
from svgen.models.text_encoder import TextEncoder
from svgen.models.transformer import Transformer
from svgen.tokenizer import Tokenizer, pad_ids

TEXT_ROWS = 32  # the longest caption has 21 tokens; rows past it are padding, as in a run
DROPPED_CAPTIONS = 0.1
AVERAGE_DECAY = 0.999
PROBED = 2, 3  # layers whose values are asked where they lie, and where the object is
PLACE_WEIGHT, PATH_WEIGHT, TOLD_WEIGHT = 0.3, 10.0, 0.1  # of all questions in the loss
TOLD = {  # what the text encoder is asked for: each token is to know all that the caption tells
    "color": tuple(scenes.COLORS),
    "shape": scenes.SHAPES,
    "motion": scenes.MOTIONS,
    "background": tuple(scenes.BACKGROUNDS),
}
ASKED = 64  # captions for that, besides those of the clips: they cost next to nothing
SHIFT = 5.0  # of the noise levels: where things are and go is decided while little is seen


class Networks(NamedTuple):
    """The graphs of both networks."""

    text: nnx.GraphDef
    transformer: nnx.GraphDef


class Batch(NamedTuple):
    """What one step learns from."""

    latents: jax.Array  # float32 [B, F, H, W, Z], normalised
    ids: jax.Array  # int32 [B, TEXT_ROWS]
    lengths: jax.Array  # int32 [B]
    paths: jax.Array  # float32 [B, F, 2], the object's middle at each latent frame, from -1 to 1
    asked_ids: jax.Array  # int32 [ASKED, TEXT_ROWS]
    asked_lengths: jax.Array  # int32 [ASKED]
    told: jax.Array  # int32 [ASKED, 4], which words of TOLD each caption holds


def new_networks(text: TextSpec, transformer: TransformerSpec, seed: int) -> tuple[Networks, Any]:
    """The networks and their first float32 weights, (text, transformer).

    Gates, modulations and the last projection start at zero, so that every layer starts as nothing.
    """
    rngs = nnx.Rngs(seed)
    parts = (
        TextEncoder(text, dtype=jnp.float32, rngs=rngs),
        Transformer(transformer, dtype=jnp.float32, rngs=rngs),
    )
    for linear in (parts[1].time_modulation, parts[1].patch_out):
        linear.kernel[...] = jnp.zeros_like(linear.kernel[...])
    (text_graph, text_state), (graph, state) = (nnx.split(part) for part in parts)
    words = sum(map(len, TOLD.values()))
    shapes = ((transformer.width, 3), (transformer.width, 2), (text.width, words))
    probes = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
    return Networks(text_graph, graph), (text_state, state, probes)


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Contract one axis of each of two matrices; float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attend in heads [n, N, D], q scaled already, one after the other: scores stay in cache."""
    return _heads_forward(q, k, v)[0]


def _heads_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    def one(head: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v = head
        scores = _product(q, k, (1, 1))
        peak = scores.max(axis=1, keepdims=True)
        weights = jnp.exp(scores - peak)
        total = weights.sum(axis=1, keepdims=True)
        out = _product(weights.astype(v.dtype), v, (1, 0)) / total
        return out.astype(v.dtype), peak + jnp.log(total)

    out, log_total = jax.lax.map(one, (q, k, v))
    return out, (q, k, v, out, log_total)


def _heads_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    def one(head: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        q, k, v, out, log_total, wanted = head
        weights = jnp.exp(_product(q, k, (1, 1)) - log_total)
        inner = (wanted.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=1, keepdims=True)
        change = (weights * (_product(wanted, v, (1, 1)) - inner)).astype(q.dtype)
        parts = (
            _product(change, k, (1, 0)),
            _product(change, q, (0, 0)),
            _product(weights.astype(v.dtype), wanted, (0, 0)),
        )
        return tuple(part.astype(q.dtype) for part in parts)

    return jax.lax.map(one, (*kept, gradient))


_heads.defvjp(_heads_forward, _heads_backward)


def attend_head_by_head(
    q: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Dense attention that is quick to differentiate: scores are computed again going backward.

    Its record is the values of all heads, float32 [B, N, C].
    """
    del layer
    batch, heads, tokens, size = q.shape
    scaled = q * jnp.asarray(size**-0.5, q.dtype)
    flat = [x.reshape(-1, tokens, size) for x in (scaled, k, v)]
    out = _heads(*flat).reshape(batch, heads, tokens, size)
    return out, v.transpose(0, 2, 1, 3).reshape(batch, tokens, -1).astype(jnp.float32)


def places(sides: tuple[int, ...], patch: tuple[int, ...]) -> np.ndarray:
    """Where each token lies, float32 [N, 3] from -1 to 1."""
    counts = [side // p for side, p in zip(sides, patch, strict=True)]
    lines = [np.linspace(-1, 1, count, dtype=np.float32) for count in counts]
    return np.stack(np.meshgrid(*lines, indexing="ij"), -1).reshape(-1, 3)


def loss(
    networks: Networks, weights: Any, batch: Batch, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Mean squared error of the velocity, at even noise levels shifted towards noise; with and
    without the errors of what linear probes read: in a layer's values their own place in the
    video; in the next one's the object's at their time, which only the caption tells while all is
    noise; in every token of a caption what it tells.
    """
    encoder = nnx.merge(networks.text, weights[0])
    text = encoder(batch.ids, batch.lengths)
    noise_key, time_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, batch.latents.shape, jnp.float32)
    count = len(batch.latents)
    even = (jnp.arange(count) + jax.random.uniform(time_key, (count,))) / count
    sigma = SHIFT * even / (1.0 + (SHIFT - 1.0) * even)
    level = sigma[:, None, None, None, None]
    mixed = (1 - level) * batch.latents + level * noise
    model = nnx.merge(networks.transformer, weights[1])
    velocity, values = model(mixed, sigma * 1000.0, text, attend_head_by_head)
    grid = batch.latents.shape[1:4]
    probes = weights[2]
    place, path = (values[layer] @ probe for layer, probe in zip(PROBED, probes[:2], strict=True))
    place = place - jnp.asarray(places(grid, model.spec.patch))
    path = path.reshape(count, grid[0], -1, 2) - batch.paths[:, :, None]
    error = jnp.square(velocity - (noise - batch.latents)).mean()
    asked = PLACE_WEIGHT * jnp.square(place).mean() + PATH_WEIGHT * jnp.square(path).mean()
    asked += TOLD_WEIGHT * _misunderstood(encoder, probes[2], batch)
    return error + asked, error


def _misunderstood(encoder: TextEncoder, probe: jax.Array, batch: Batch) -> jax.Array:
    """Mean cross-entropy of what a probe reads in each token of the captions asked about."""
    logits = encoder(batch.asked_ids, batch.asked_lengths) @ probe
    ends = np.cumsum([len(words) for words in TOLD.values()])[:-1]
    parts = jnp.split(logits, ends, axis=-1)
    losses = [
        optax.softmax_cross_entropy_with_integer_labels(
            part, jnp.broadcast_to(batch.told[:, None, index], part.shape[:2])
        )
        for index, part in enumerate(parts)
    ]
    there = jnp.arange(logits.shape[1])[None] < batch.asked_lengths[:, None]
    return (sum(losses) * there).sum() / there.sum()


def _loss_and_gradient(
    networks: Networks, weights: Any, batch: Batch, key: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Mean loss and gradient of a batch split evenly over as many devices as divide it."""

    def part(weights: Any, batch: Batch, key: jax.Array) -> tuple[Any, Any]:
        key = jax.random.fold_in(key, jax.lax.axis_index("data"))
        found = jax.value_and_grad(partial(loss, networks), has_aux=True)(weights, batch, key)
        return jax.lax.pmean(found, "data")

    count = math.gcd(len(batch.latents), jax.device_count())
    devices = jax.devices()[:count]
    mesh = jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    everywhere, split = PartitionSpec(), PartitionSpec("data")
    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=(everywhere, split, everywhere),
        out_specs=everywhere,
        check_vma=False,
    )(weights, batch, key)


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """Muon for the layers' matrices, AdamW for the rest."""
    return falling(steps, rate, matrices=_matrices, weight_decay=0.01)


def _matrices(weights: Any) -> Any:
    """Mark the kernels of stacked layers [layers, in, out]; `None` elsewhere."""

    def mark(path: tuple, leaf: jax.Array) -> MuonDimensionNumbers | None:
        is_kernel = any("kernel" in str(key) for key in path)
        return MuonDimensionNumbers(1, 2) if is_kernel and leaf.ndim == 3 else None

    return jax.tree_util.tree_map_with_path(mark, weights)


class TrainState(NamedTuple):
    """Weights, their running average, and the optimiser's moments."""

    weights: Any
    average: Any
    moments: Any


@partial(jax.jit, static_argnames=("networks", "transform"), donate_argnames=("state",))
def train_step(
    networks: Networks,
    transform: optax.GradientTransformation,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    done: jax.Array | float,
) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
    """One step of the optimiser and of the running average; returns the new state and `loss`."""
    value, gradient = _loss_and_gradient(networks, state.weights, batch, key)
    updates, moments = transform.update(gradient, state.moments, state.weights)
    weights = optax.apply_updates(state.weights, updates)
    decay = jnp.minimum(AVERAGE_DECAY, (1 + done) / (10 + done))
    average = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, state.average, weights)
    return TrainState(weights, average, moments), value


class Captioner:
    """Draws captions of scenes and turns them into ids."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer, self.rng = tokenizer, np.random.default_rng(seed)

    def __call__(self, some: list[scenes.Scene]) -> tuple[np.ndarray, np.ndarray]:
        """Ids [B, TEXT_ROWS] and lengths [B] of a fresh caption of each scene, a tenth of them
        empty.
        """
        return self._padded(
            "" if self.rng.random() < DROPPED_CAPTIONS else captions.caption(scene, self.rng)
            for scene in some
        )

    def asked(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids [count, TEXT_ROWS], lengths [count] and words of TOLD [count, 4] of new captions."""
        some = [scenes.sample(self.rng) for _ in range(count)]
        told = [[words.index(getattr(one, name)) for name, words in TOLD.items()] for one in some]
        texts = (captions.caption(one, self.rng) for one in some)
        return *self._padded(texts), np.array(told, np.int32)

    def _padded(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        encode = partial(self.tokenizer.encode, truncate=False, allow_empty=True)
        return pad_ids([encode(text) for text in texts], TEXT_ROWS)


def batches(
    latents: np.ndarray, some: list[scenes.Scene], captioner: Captioner, batch: int
) -> Iterator[Batch]:
    """Endless shuffled batches from a bank of normalised latents and their scenes."""
    while True:
        order = captioner.rng.permutation(len(some))
        for start in range(0, len(order) - batch + 1, batch):
            chosen = order[start : start + batch]
            ids, lengths = captioner([some[i] for i in chosen])
            time = np.linspace(0.0, 1.0, latents.shape[1])
            paths = np.stack([2 * scenes.centers_of(some[i], time) - 1 for i in chosen])
            clips = latents[chosen].astype(np.float32)
            yield Batch(clips, ids, lengths, np.float32(paths), *captioner.asked(ASKED))
