"""svgen: a prompt becomes a video, with Wan's diffusion transformers in JAX."""

__version__ = "0.1.0"
