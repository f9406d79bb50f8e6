"""Keeps the state of a training: a tree of arrays in one file, replaced only when whole."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

Tree = TypeVar("Tree")


def save_tree(path: Path, tree: Any, **numbers: Any) -> None:
    """Write the leaves of a tree, in order, and a few numbers beside them."""
    leaves = {f"{i:05}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))}
    partial = path.with_suffix(".partial")
    save_file(leaves, partial, {"numbers": json.dumps(numbers)})
    os.replace(partial, path)


def load_tree(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Read what `save_tree` wrote into a tree of the same structure; also the numbers."""
    with safe_open(path, framework="np") as file:
        leaves = [file.get_tensor(name) for name in sorted(file.keys())]
        numbers = json.loads(file.metadata()["numbers"])
    structure = jax.tree.structure(like)
    old = jax.tree.leaves(like)
    if [leaf.shape for leaf in leaves] != [leaf.shape for leaf in old]:
        raise ValueError(f"{path} was written by a training of other sizes")
    return jax.tree.unflatten(structure, [jax.numpy.asarray(leaf) for leaf in leaves]), numbers
