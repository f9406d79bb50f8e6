"""The known models: names, pinned revisions, the makers' sampling values."""

import re

import pytest

from svgen.catalog import CATALOG, NEGATIVE_WAN, UNKNOWN, entry_of, sampling_of
from svgen.grid import RESOLUTIONS, WAN21, frames_problem, grid_of


def test_every_entry_is_pinned_and_complete():
    assert list(CATALOG) == ["wan2.1-1.3b", "wan2.1-14b"]
    for name, entry in CATALOG.items():
        assert entry.name == name == name.lower()
        assert re.fullmatch(r"[0-9a-f]{40}", entry.revision)
        assert re.fullmatch(r"[\w-]+/[\w.-]+-Diffusers", entry.repository)
        assert entry.licence == "Apache-2.0"
    assert len({entry.revision for entry in CATALOG.values()}) == len(CATALOG)


@pytest.mark.parametrize(
    ("name", "repository", "parameters", "gigabytes", "official"),
    [
        (
            "wan2.1-1.3b",
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            1_418_996_800,
            28.9,
            (50, 6.0, 8.0, 81, 16, "480p", ("480p",)),
        ),
        (
            "wan2.1-14b",
            "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            14_288_491_584,
            80.4,
            (50, 5.0, 5.0, 81, 16, "720p", ("480p", "720p")),
        ),
    ],
)
def test_values_are_the_official_ones(name, repository, parameters, gigabytes, official):
    entry, sampling = CATALOG[name], sampling_of(name)
    assert (entry.repository, entry.parameters) == (repository, parameters)
    assert round(entry.download_bytes / 1e9, 1) == gigabytes
    found = (sampling.steps, sampling.guidance, sampling.shift, sampling.frames, sampling.fps)
    assert (*found, sampling.resolution, sampling.resolutions) == official
    assert sampling.max_frames == 81
    assert sampling.negative == NEGATIVE_WAN


def test_negative_prompt_is_wans():
    parts = NEGATIVE_WAN.split("，")
    assert (len(parts), parts[0], parts[-1]) == (28, "色调艳丽", "倒着走")
    assert len(set(parts)) == len(parts)


def test_defaults_can_be_made():
    for sampling in (UNKNOWN, *(entry.sampling for entry in CATALOG.values())):
        assert frames_problem(sampling.frames, WAN21) is None
        assert set(sampling.resolutions) <= set(RESOLUTIONS)
        width, height = RESOLUTIONS[sampling.resolution]
        assert grid_of(width, height, sampling.frames, WAN21).latent_frames == 21


def test_model_is_found_by_name_or_repository_in_any_case():
    for name in ("wan2.1-14b", "WAN2.1-14B", "wan-ai/wan2.1-t2v-14b-diffusers"):
        assert entry_of(name) is CATALOG["wan2.1-14b"]
    assert entry_of(CATALOG["wan2.1-1.3b"].repository) is CATALOG["wan2.1-1.3b"]
    for name in ("", "wan2.1", "wan2.1-14b ", "../wan2.1-14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"):
        assert entry_of(name) is None
        assert sampling_of(name) is UNKNOWN
