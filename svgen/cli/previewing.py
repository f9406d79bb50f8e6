"""What `generate --preview-every N` does beside a run: a thread draws and writes, the run goes on.

A preview never stops a run: the first failure is a warning, and there are no more previews.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from svgen.cli.endings import explain
from svgen.cli.output import Console
from svgen.config import Request
from svgen.preview import is_preview, preview_path, shown, write_preview

if TYPE_CHECKING:
    from svgen.pipeline import Pipeline
    from svgen.preview import Projection
    from svgen.scheduler import DenoiseState

T = TypeVar("T")


class Previews:
    """The previews of one run, in one file that is replaced; none at all without `every`."""

    def __init__(self, console: Console, video: Path, every: int | None):
        self.console, self.path, self.every = console, preview_path(video), every
        self.projection: Projection | None = None
        self._steps = 0
        self._writer = ThreadPoolExecutor(1, "preview")  # its thread starts with the first preview
        self._writing: Future | None = None

    def prepare(self, pipeline: "Pipeline", request: Request) -> None:
        """Fit the map from latents to colours. The VAE is loaded for it, and freed."""
        if self.every:
            self._steps = request.steps
            self.projection = self._surviving(lambda: pipeline.projection(request))

    def see(self, state: "DenoiseState") -> None:
        """After a step: begin to write its preview if it has one, unless the last one is still
        being written.
        """
        if self.projection is None:
            return
        self._finish(wait=False)
        if self.projection is None or self._writing or int(state.step) % self.every:
            return
        note = f"step {int(state.step)} of {self._steps}"
        frames = shown(np.asarray(state.estimate))
        arguments = (self.path, self.projection, frames, note)
        self._writing = self._writer.submit(write_preview, *arguments)

    def delete(self) -> None:
        """Sweep up after a run that has ended well: the video shows more."""
        if self.every and is_preview(self.path):
            with suppress(OSError):
                self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: Any) -> None:
        self._finish(wait=True)
        self._writer.shutdown()

    def _finish(self, *, wait: bool) -> None:
        """Tell what became of the preview that was being written."""
        writing = self._writing
        if writing is None or not (wait or writing.done()):
            return
        self._writing = None
        self._surviving(writing.result)
        if self.projection is not None:
            self.console.event("saved", kind="preview", path=self.path)

    def _surviving(self, action: Callable[[], T]) -> T | None:
        """What an action returns; if it fails, None, a warning, and no more previews."""
        try:
            return action()
        except Exception as error:
            self.projection = None
            self.console.warn(f"no more previews: {explain(error).message}")
        return None
