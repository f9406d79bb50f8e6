"""Looks at frames on their way to the encoder for what a failed run looks like: black, flat, still.

A chunk costs one pass for its extremes, and the difference to the first frame on few pixels.
"""

import numpy as np

TOLERANCE = 2  # of 255: what counts as no difference
SUBSAMPLE = 4


class Watch:
    """What was seen so far of one video."""

    def __init__(self) -> None:
        self.frames = 0
        self._brightest = 0
        self._flat, self._still = True, True
        self._first: np.ndarray | None = None  # [1, h, w, 3], of a subsample

    def see(self, chunk: np.ndarray) -> None:
        """Look at uint8 frames [T, H, W, 3]."""
        self.frames += len(chunk)
        high, low = chunk.max(axis=(1, 2)), chunk.min(axis=(1, 2))  # [T, 3]
        self._brightest = max(self._brightest, int(high.max(initial=0)))
        self._flat &= bool((high - low <= TOLERANCE).all())
        sample = chunk[:, ::SUBSAMPLE, ::SUBSAMPLE].astype(np.int16)
        if self._first is None:
            self._first = sample[:1]
        if self._still:
            self._still = bool((abs(sample - self._first) <= TOLERANCE).all())

    def warnings(self) -> list[str]:
        """What is suspicious about all the frames seen: at most one thing."""
        if not self.frames:
            return []
        if self._brightest <= TOLERANCE:
            return ["every frame is black; another seed or more steps may help"]
        if self._flat:
            return ["every frame is of one colour; another seed or more steps may help"]
        if self._still and self.frames > 1:
            return ["nothing moves: all frames are the same"]
        return []
