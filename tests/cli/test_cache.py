"""`svgen cache`: what is counted, what is deleted, and what never is."""

import json
import os
import pty

import pytest

from svgen.cli import run


@pytest.fixture(autouse=True)
def hub_cache(home, monkeypatch):
    """Other tests of this process may have loaded huggingface_hub, which reads HF_HOME once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "huggingface/hub"))


@pytest.fixture
def kept(home):
    """A home with programs, logs, a model and links that lead elsewhere."""
    compiled = home / "cache/svgen/compile/0.10.2-cpu"
    model = home / "huggingface/hub/models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers/blobs"
    for folder in (compiled, home / "state/svgen", model, home / "precious"):
        folder.mkdir(parents=True)
    (compiled / "jit_step-cache").write_bytes(bytes(3000))
    (home / "state/svgen/error-20261201-120000-1.log").write_text("x" * 500)
    (home / "state/svgen/notes.txt").write_text("mine")
    (model / "a").write_bytes(bytes(70))
    (home / "precious/data").write_text("data")
    (compiled / "linked").symlink_to(home / "precious")
    (compiled / "linked-file").symlink_to(home / "precious/data")
    return home


def asked(capsys, *args: str) -> dict:
    assert run(["cache", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["data"]


def test_size_names_programs_logs_and_models(kept, capsys):
    data = asked(capsys, "size")
    sizes = {row["name"]: (row["bytes"], row["cleared"]) for row in data["items"]}
    links = sum(len(str(kept / name)) for name in ("precious", "precious/data"))
    assert sizes == {
        "compiled programs": (3000 + links, True),
        "logs": (500, True),
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (70, False),
    }
    assert data["bytes"] == 3570 + links
    assert run(["cache", "size"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["3.1", "kB", "compiled", "programs"]
    assert lines[-1].split()[2:] == ["in", "all"]


def test_clear_deletes_programs_and_logs_and_nothing_else(kept, capsys):
    freed = asked(capsys, "clear")["freed_bytes"]
    assert freed > 3500
    left = sorted(str(path.relative_to(kept)) for path in kept.rglob("*") if path.is_file())
    assert left == [
        "huggingface/hub/models--Wan-AI--Wan2.1-T2V-1.3B-Diffusers/blobs/a",
        "precious/data",
        "state/svgen/notes.txt",
    ]
    assert os.listdir(kept / "cache/svgen/compile") == []
    assert asked(capsys, "clear")["freed_bytes"] == 0


def test_person_is_asked_first(kept, capsys, monkeypatch):
    for answer, code, freed in (("n", 2, False), ("y", 0, True)):
        leader, follower = pty.openpty()
        os.write(leader, f"{answer}\n".encode())
        with os.fdopen(follower, "r") as stdin:
            monkeypatch.setattr("sys.stdin", stdin)
            assert run(["cache", "clear"]) == code
        os.close(leader)
        assert "Delete 3." in capsys.readouterr().err
        assert (kept / "cache/svgen/compile/0.10.2-cpu").exists() != freed


def test_folder_that_the_user_named_for_jax_is_left_alone(kept, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(kept / "precious"))
    assert run(["cache", "clear", "--yes"]) == 0
    assert "JAX_COMPILATION_CACHE_DIR is set" in capsys.readouterr().err
    assert (kept / "precious/data").exists()


def test_machine_without_anything(capsys):
    assert asked(capsys, "size")["bytes"] == 0
    assert asked(capsys, "clear") == {
        "items": [
            {"name": "compiled programs", "freed_bytes": 0},
            {"name": "logs", "freed_bytes": 0},
        ],
        "freed_bytes": 0,
    }
