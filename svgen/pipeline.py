"""Drives the programs of one run. Three networks are loaded in turn, each freed before the next
is loaded.

    text = pipeline.embed(request)                   text encoder
    for step in pipeline.denoise(request, text):     transformer, one programs.Step a step
    for view in pipeline.observe(request, text, states):   the same, where its heads look
    for frames in pipeline.decode(latents):          VAE, uint8 frames chunk by chunk
    pipeline.projection(request)                     VAE, latents -> colours, for previews

Progress, files, Ctrl-C are the caller's. Arrays are put on the device, and small sums done on the
host: every operation outside of the programs is a program of its own, compiled for each shape anew.
"""

import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from svgen import programs
from svgen.attention.attend import Setting, chip_of
from svgen.attention.mass import View
from svgen.checkpoint import check_module, load_module, read_specs
from svgen.config import ModelSpecs, Request
from svgen.errors import DownloadError, SvgenError, UsageError, raise_all
from svgen.grid import Grid, Rules, frames_problem, grid_of, size_problem
from svgen.models.keys import Target, text_keys, transformer_keys, vae_keys
from svgen.numerics import bad_frames, bad_step, bad_text
from svgen.preview import Projection, fit
from svgen.scheduler import DenoiseState, solver_table, start_state
from svgen.sharding import (
    Split,
    choose_split,
    collect,
    make_mesh,
    place_columns,
    placer,
    replicate,
    whole_placer,
)
from svgen.tokenizer import TokenIds, Tokenizer, bucket_length, pad_ids

Stage = Callable[[str], AbstractContextManager]


def draw_noise(grid: Grid, channels: int, *, seed: int, item: int = 0) -> np.ndarray:
    """Draw the first latents, float32 [1, F, H, W, Z], on the host, from (seed, item) alone.

    The stream is NumPy's Philox, so it depends neither on the device nor on how the run is spread
    over chips.
    """
    bits = np.random.Philox(key=np.array([seed, item], np.uint64))
    shape = (1, grid.latent_frames, grid.rows, grid.columns, channels)
    return np.random.Generator(bits).standard_normal(shape, np.float32)


def routing_seed(request: Request) -> jax.Array:
    """The seed of the rows that route heads, uint32 []: of the request's seed and item alone."""
    words = np.random.SeedSequence([request.seed, request.item]).generate_state(1)
    return jax.device_put(np.uint32(words[0]))


class Pipeline:
    """One checkpoint folder, ready to run requests. `stage(name)` is entered around each part that
    takes time; `mesh` is "CFGxSEQ" or "auto", which means all chips of a TPU or GPU, and one CPU.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "float32",
        stage: Stage = nullcontext,
        mesh: str = "auto",
    ):
        self.folder = Path(folder)
        self._set_up(read_specs(self.folder), dtype, stage, mesh)
        self.tokenizer = Tokenizer.load(self.folder, vocabulary=self.specs.text.vocabulary)

    def _set_up(self, specs: ModelSpecs, dtype: str, stage: Stage, mesh: str) -> None:
        """What needs no folder."""
        self.specs, self.stage, self.asked_mesh = specs, stage, mesh
        self.rules = Rules.of(specs.transformer, specs.vae)
        self._abstract = programs.abstract_parts(specs, jnp.dtype(dtype))
        self._kept: dict[Hashable, Any] | None = None  # loaded and compiled parts, in `keeping`
        self._crowded = False  # whether a network was loaded before

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Load each network and compile each step once for all runs of the block, and free them at
        its end. A block for each part of many runs holds one network at a time.
        """
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None
            gc.collect()

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns; inside `keeping`, what it returned for the same key before."""
        if self._kept is None:
            return make()
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @property
    def parameters(self) -> int:
        """Number of weights of the transformer."""
        leaves = jax.tree.leaves(nnx.state(self._abstract["transformer"]))
        return sum(math.prod(leaf.shape) for leaf in leaves)

    def check(self, request: Request) -> None:
        """Raise every problem that a request has with this checkpoint. Loads no weights."""
        found = [
            size_problem(request.width_px, request.height_px, self.rules),
            frames_problem(request.frames, self.rules),
        ]
        problems = [problem for problem in found if problem is not None]
        for check in (self.tokens, self.split):
            try:
                check(request)
            except UsageError as error:
                problems.extend(error.problems)
        raise_all(problems)

    def split(self, request: Request) -> Split:
        """How chips share a run; raises UsageError (E_MESH) for a split that cannot be made."""
        devices, asked = jax.devices(), self.asked_mesh
        if asked == "auto" and devices[0].platform == "cpu":
            return Split(1, 1)
        branches = 2 if request.guidance > 1 else 1
        return choose_split(len(devices), self.specs.transformer.heads, branches, asked)

    def _mesh(self, request: Request) -> Mesh | None:
        split = self.split(request)
        return make_mesh(split) if split.chips > 1 else None

    def check_files(self, *parts: str) -> None:
        """Raise every problem that the headers of the weights' files show, of some parts or of all.
        Loads no weights.
        """
        problems: list[SvgenError] = []
        for part in parts or self._abstract:
            try:
                check_module(self.folder, part, self._abstract[part], self._keys(part))
            except DownloadError as error:
                problems.extend(error.problems)
        raise_all(problems)

    def check_latents(self, latents: np.ndarray, request: Request) -> None:
        """Raise unless latents are those of `request` for this checkpoint."""
        shape = self.latents_shape(request)
        if latents.shape != shape:
            raise UsageError(
                "E_LATENTS",
                f"the latents are {'x'.join(map(str, latents.shape))}",
                why=f"this model's VAE reads {'x'.join(map(str, shape))} for their request",
                hint="--model with the model that made them",
            )

    def latents_shape(self, request: Request) -> tuple[int, ...]:
        """[1, F, H, W, Z] of a request's latents."""
        grid = self.grid(request)
        return 1, grid.latent_frames, grid.rows, grid.columns, self.specs.vae.z_channels

    def grid(self, request: Request) -> Grid:
        """The latent grid of a request."""
        return grid_of(request.width_px, request.height_px, request.frames, self.rules)

    def tokens(self, request: Request) -> list[TokenIds]:
        """Token ids of the prompt and, with guidance, of the negative prompt. Raises both prompts'
        problems at once.
        """
        wanted = [(request.prompt, "prompt")]
        if request.guidance > 1:
            wanted.append((request.negative, "negative prompt"))
        found: list[TokenIds] = []
        problems: list[SvgenError] = []
        for text, name in wanted:
            try:
                empty_ok = name != "prompt"
                options = {"truncate": request.truncate, "allow_empty": empty_ok, "name": name}
                found.append(self.tokenizer.encode(text, **options))
            except UsageError as error:
                problems.append(error)
        raise_all(problems)
        return found

    def _keys(self, part: str) -> Mapping[str, Target]:
        if part == "text_encoder":
            return text_keys(self.specs.text)
        if part == "transformer":
            return transformer_keys(self.specs.transformer)
        return vae_keys(self.specs.vae)

    def _load(self, part: str, mesh: Mesh | None = None) -> tuple[programs.Graph, programs.Weights]:
        return self._once((part, mesh), lambda: self._read(part, mesh))

    def _read(self, part: str, mesh: Mesh | None = None) -> tuple[programs.Graph, programs.Weights]:
        options = {}
        if mesh is not None:
            options["place"] = whole_placer(mesh) if part == "vae" else placer(mesh)
        arguments = (self.folder, part, self._abstract[part], self._keys(part))
        with self.stage(f"load {part.replace('_', ' ')}"):
            if self._crowded:
                gc.collect()  # a network's modules hold one another, and its weights, until then
            self._crowded = True
            return nnx.split(load_module(*arguments, **options))

    def load(
        self, part: str, request: Request
    ) -> tuple[programs.Graph, programs.Weights, Mesh | None]:
        """Load one network as a run of `request` does: graph, weights, and the mesh they lie on."""
        mesh = self._mesh(request)
        return *self._load(part, mesh), mesh

    def embed(self, request: Request) -> jax.Array:
        """Encode the prompts of a request: text [1 or 2, L, C]."""
        tokens = self.tokens(request)
        length = bucket_length(max(one.length for one in tokens))
        ids, lengths = pad_ids(tokens, length)
        mesh = self._mesh(request)
        graph, weights = self._load("text_encoder", mesh)
        with self.stage("encode the prompt"):
            arguments = jax.device_put((ids, lengths))
            if mesh is not None:
                arguments = replicate(mesh, arguments)
            text = programs.embed(graph, weights, *arguments, mesh=mesh)
            text.block_until_ready()
        bad = bad_text(np.isfinite(np.asarray(text)).all(axis=(1, 2)))
        if bad:
            raise bad
        return text

    def start(self, request: Request) -> DenoiseState:
        """The state that a request's run begins with."""
        channels = self.specs.vae.z_channels
        noise = draw_noise(self.grid(request), channels, seed=request.seed, item=request.item)
        return start_state(jax.device_put(noise))

    def denoise(
        self, request: Request, text: jax.Array, start: DenoiseState | None = None
    ) -> Iterator[programs.Step]:
        """Denoise from `start` (default: the request's noise), yielding every step.

        A yielded state is valid until the next one is asked for: its buffers are reused. Raises
        NumericalError at the first step whose latents are not finite, with the state before it.
        """
        weights, step, state, fixed, mesh = self._ready(request, text, start)
        for index in range(int(state.step), request.steps):
            found = step(weights, state, *fixed)
            state = found.state
            if mesh is not None:
                found = found._replace(record=collect(mesh, found.record))
            if not bool(found.finite):
                branches = np.asarray(found.branches)
                raise bad_step(branches, index + 1, request.steps, state)
            yield found

    def observe(
        self, request: Request, text: jax.Array, states: Iterable[DenoiseState]
    ) -> Iterator[View]:
        """See where each head looks in the steps that states of a request's run are at; yields
        arrays [layers, B, A, ...]. The transformer is loaded once more, outside of `keeping`.
        """
        mesh = self._mesh(request)
        graph, weights = self._load("transformer", mesh)
        static = {"setting": self.setting(request), "mesh": mesh}
        for state in states:
            state, fixed = self._arguments(request, text, state, mesh)
            with self.stage("look at the heads"):
                view = programs.observe(graph, weights, state, *fixed, **static)
                view = jax.block_until_ready(view if mesh is None else collect(mesh, view))
            yield view

    def warm(self, request: Request, text: jax.Array) -> None:
        """Load and compile, inside `keeping`, what `denoise` would before its first step."""
        self._ready(request, text)

    def setting(self, request: Request) -> Setting:
        """How a request attends on the devices at hand."""
        return Setting(request.sparsity, chip_of(jax.devices()[0].device_kind))

    def _arguments(
        self, request: Request, text: jax.Array, state: DenoiseState, mesh: Mesh | None
    ) -> tuple[DenoiseState, tuple]:
        """What a step takes besides the weights: the state, and the inputs that stay."""
        rows = programs.StepTable.of(solver_table(request.steps, request.shift))
        fixed = (text, rows, jax.device_put(np.float32(request.guidance)), routing_seed(request))
        return (state, fixed) if mesh is None else replicate(mesh, (state, fixed))

    def _ready(
        self, request: Request, text: jax.Array, start: DenoiseState | None = None
    ) -> tuple[programs.Weights, Callable, DenoiseState, tuple, Mesh | None]:
        """The weights, the compiled step, and its inputs before the first step of a run."""
        state = self.start(request) if start is None else jax.device_put(start)
        mesh = self._mesh(request)
        graph, weights = self._load("transformer", mesh)
        state, fixed = self._arguments(request, text, state, mesh)
        step = self._compile_step(graph, weights, (state, *fixed), (self.setting(request), mesh))
        return weights, step, state, fixed, mesh

    def _compile_step(
        self,
        graph: programs.Graph,
        weights: programs.Weights,
        inputs: tuple,
        static: tuple[Setting, Mesh | None],
    ) -> Callable:
        options = dict(zip(("setting", "mesh"), static, strict=True))

        def compile_step() -> Callable:
            with self.stage("compile the step"):
                return programs.denoise_step.lower(graph, weights, *inputs, **options).compile()

        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(inputs))
        return self._once((static, shapes), compile_step)

    def projection(self, request: Request) -> Projection:
        """Fit the map from a request's latents to colours that previews are drawn with. One chip of
        this process does it, whatever the mesh; the VAE is freed again.
        """

        def make() -> Projection:
            graph, weights = self._read("vae")

            def decode(frame: np.ndarray) -> np.ndarray:
                frames, _, _ = programs.decode_first(graph, weights, frame)
                return np.asarray(frames)[0, 0]

            with self.stage("fit the previews"):
                return fit(decode, self.latents_shape(request))

        return self._once("projection", make)

    def decode(self, latents: np.ndarray, request: Request) -> Iterator[np.ndarray]:
        """Decode a request's latents [1, F, H, W, Z] to uint8 frames [T, h, w, 3], a chunk at a
        time, as computed (uncropped).
        """
        mesh = self._mesh(request)
        graph, weights = self._load("vae", mesh)
        z = latents if mesh is None else place_columns(mesh, latents)
        done = 0
        for frames, finite in programs.decode(graph, weights, z):
            if mesh is not None:
                frames = collect(mesh, frames)
            if not bool(finite):
                raise bad_frames(done + 1, done + frames.shape[1])
            done += frames.shape[1]
            yield np.asarray(frames)[0]
