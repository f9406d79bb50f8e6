"""Every test runs on eight virtual CPU devices, with strict promotion, in a home of its own."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import pytest

# What a shell starts in the background ignores Ctrl-C, and so would all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

PREFIXES = ("SVGEN_", "HF_", "HUGGING", "XDG_", "TPU_", "JAX_COMPILATION_CACHE")
NAMES = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch):
    """An empty home: nothing of the machine reaches a test, nor the other way."""
    folder = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
        monkeypatch.setenv(f"XDG_{kind}_HOME", str(folder / kind.lower()))
    monkeypatch.setenv("HF_HOME", str(folder / "huggingface"))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    monkeypatch.setenv("TERM", "xterm")
    return folder
