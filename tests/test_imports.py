"""Who may import whom, and what a quick command loads."""

import ast
import subprocess
import sys

import pytest

from tests.helpers import ROOT

LEAVES = {"errors", "config", "grid"}
ALLOWED = {  # part of svgen -> parts that it may import
    "errors": set(),
    "config": {"errors"},
    "grid": {"config", "errors"},
    "untrusted": set(),
    "private": set(),
    "catalog": {"config", "errors", "untrusted"},
    "presets": LEAVES | {"untrusted"},
    "cycles": {"attention", "errors", "kernels"},
    "hlo": {"errors"},
    "shapes": {"config"},
    "tpus": {"errors"},
    "plan": LEAVES
    | {"attention", "cycles", "hlo", "kernels.heads", "programs", "sharding", "tpus"},
    "sharding": {"errors"},
    "scheduler": {"errors"},
    "kernels": {"errors"},
    "attention": {"kernels", "config", "grid", "errors"},
    "models": {"attention", "config", "errors", "kernels.heads"},
    "partial": {"errors"},
    "lock": {"errors", "partial"},
    "preview": {"errors", "partial"},
    "recipe": {"config", "errors", "untrusted"},
    "tokenizer": {"config", "errors", "tokenizer_parts", "untrusted"},
    "tokenizer_parts": {"errors"},
    "checkpoint": {"config", "models.keys", "sharding", "tensors", "untrusted"},
    "tensors": {"errors", "models.keys"},
    "hub": {"catalog", "config", "errors", "private", "untrusted"},
    "video": LEAVES | {"partial", "recipe"},
    "quality": set(),
    "memory": LEAVES | {"programs", "sharding"},
    "numerics": {"errors"},
    "processes": set(),
    "comparison": LEAVES | {"attention", "pipeline", "quality"},
    "comparison_plot": {"errors"},
    "resume": {"config", "errors", "partial", "scheduler", "untrusted"},
    "programs": LEAVES | {"attention", "models", "scheduler", "sharding"},
    "pipeline": LEAVES
    | {
        "attention",
        "checkpoint",
        "models.keys",
        "numerics",
        "preview",
        "programs",
        "scheduler",
        "sharding",
        "tokenizer",
    },
    "profile_heads": LEAVES | {"attention", "pipeline", "programs", "scheduler"},
    "head_pictures": {"attention", "config", "profile_heads"},
    "stopwatch": set(),
    "baseline": {"errors", "partial", "untrusted"},
    "flops": {"config", "grid"},
    "stand_in": LEAVES | {"pipeline", "programs", "sharding", "tokenizer"},
    "fitting": LEAVES | {"flops", "pipeline", "stopwatch"},
    "bench": LEAVES
    | {
        "attention",
        "flops",
        "pipeline",
        "programs",
        "scheduler",
        "sharding",
        "stopwatch",
        "tokenizer",
    },
    "demo": LEAVES
    | {
        "attention",
        "catalog",
        "checkpoint",
        "models",
        "pipeline",
        "programs",
        "scheduler",
        "tensors",
        "tokenizer",
    },
    "__main__": {"cli"},
}
EVERYONE = {""}  # `svgen` itself: its version
WITHOUT_JAX = {
    "errors",
    "config",
    "grid",
    "catalog",
    "presets",
    "hub",
    "video",
    "recipe",
    "partial",
    "preview",
}
NEVER = {"torch", "transformers", "diffusers"}  # references, in tests only
KERNEL_LIBRARIES = {"jax", "numpy", "svgen"}


def imports_of(source: str) -> set[str]:
    """Every module that a file imports, late imports included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module}
            found |= {f"svgen.{name.name}" for name in node.names if node.module == "svgen"}
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return found - {"svgen.__version__"}


def modules() -> dict[str, set[str]]:
    """Each module of svgen, without the leading `svgen.`, with what it imports."""
    found = {}
    for path in (ROOT / "svgen").rglob("*.py"):
        parts = path.relative_to(ROOT / "svgen").with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name] = imports_of(path.read_text(encoding="utf-8"))
    return found


def is_within(module: str, part: str) -> bool:
    return module == part or (part != "" and module.startswith(part + "."))


def violations(name: str, imported: set[str]) -> list[str]:
    """Which imports of a module the table forbids."""
    part = name.partition(".")[0]
    if part in ("cli", ""):
        return []
    targets = {one.partition(".")[2] for one in imported if one.partition(".")[0] == "svgen"}
    allowed = EVERYONE | {part} | ALLOWED.get(part, set())
    wrong = {one for one in targets if not any(is_within(one, other) for other in allowed)}
    return [f"{name} -> {one}" for one in sorted(wrong)]


def test_every_part_is_in_the_table():
    parts = {name.partition(".")[0] for name in modules()} - {"", "cli"}
    assert parts <= set(ALLOWED)


def test_imports_follow_the_table():
    assert [line for name, found in modules().items() for line in violations(name, found)] == []


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("kernels.splash", "from svgen.grid import Grid"),
        ("models.vae", "def late():\n    from svgen.checkpoint import load"),
        ("pipeline", "import svgen.cli.output"),
        ("checkpoint", "from svgen.models.vae import Decoder"),
        ("hub.cache", "from svgen import pipeline"),
    ],
)
def test_violation_is_seen_when_a_module_imports_what_it_may_not(name, source):
    assert len(violations(name, imports_of(source))) == 1


def test_libraries_stay_where_they_belong():
    for name, imported in modules().items():
        libraries = {module.partition(".")[0] for module in imported}
        assert not libraries & NEVER, name
        if name.partition(".")[0] in WITHOUT_JAX:
            assert "jax" not in libraries, name
        if name.partition(".")[0] == "kernels":
            assert libraries <= KERNEL_LIBRARIES | sys.stdlib_module_names, name


@pytest.mark.parametrize("args", [None, ["--help"], ["--version"], ["-h"], ["presets", "--help"]])
def test_quick_commands_load_no_heavy_library(args):
    code = "import sys, svgen\n"
    if args is not None:
        code += f"from svgen.cli import run\nassert run({args!r}) == 0\n"
    code += "print('loaded', *sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    heavy = {
        "jax",
        "jaxlib",
        "numpy",
        "flax",
        "huggingface_hub",
        "tokenizers",
        "safetensors",
        "tqdm",
    }
    assert "svgen" in loaded
    assert not loaded & heavy
