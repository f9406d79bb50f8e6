"""What tests of the command line share."""

import pytest


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """A home whose compilation cache the real runs of one file share."""
    home = tmp_path_factory.mktemp("shared")
    names = ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME", "HF_HOME", "TMPDIR")
    return dict.fromkeys(names, str(home)) | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
