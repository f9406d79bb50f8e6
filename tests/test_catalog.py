"""The known models: names, pinned revisions, the makers' sampling values."""

import json
import re

import pytest

from svgen.catalog import CATALOG, NEGATIVE_WAN, UNKNOWN, entry_of, read_sampling, sampling_of
from svgen.errors import DownloadError
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
            (50, 6.0, 8.0, 81, 16, (832, 480), ((832, 480),)),
        ),
        (
            "wan2.1-14b",
            "Wan-AI/Wan2.1-T2V-14B-Diffusers",
            14_288_491_584,
            80.4,
            (50, 5.0, 5.0, 81, 16, (1280, 720), ((832, 480), (1280, 720))),
        ),
    ],
)
def test_values_are_the_official_ones(name, repository, parameters, gigabytes, official):
    entry, sampling = CATALOG[name], sampling_of(name)
    assert (entry.repository, entry.parameters) == (repository, parameters)
    assert round(entry.download_bytes / 1e9, 1) == gigabytes
    found = (sampling.steps, sampling.guidance, sampling.shift, sampling.frames, sampling.fps)
    assert (*found, sampling.size_px, sampling.trained_px) == official
    assert sampling.max_frames == 81
    assert sampling.negative == NEGATIVE_WAN


def test_negative_prompt_is_wans():
    parts = NEGATIVE_WAN.split("，")
    assert (len(parts), parts[0], parts[-1]) == (28, "色调艳丽", "倒着走")
    assert len(set(parts)) == len(parts)


def test_defaults_can_be_made():
    for sampling in (UNKNOWN, *(entry.sampling for entry in CATALOG.values())):
        assert frames_problem(sampling.frames, WAN21) is None
        assert set(sampling.trained_px) <= set(RESOLUTIONS.values())
        width, height = sampling.size_px
        assert grid_of(width, height, sampling.frames, WAN21).latent_frames == 21


def test_model_is_found_by_name_or_repository_in_any_case():
    for name in ("wan2.1-14b", "WAN2.1-14B", "wan-ai/wan2.1-t2v-14b-diffusers"):
        assert entry_of(name) is CATALOG["wan2.1-14b"]
    assert entry_of(CATALOG["wan2.1-1.3b"].repository) is CATALOG["wan2.1-1.3b"]
    for name in ("", "wan2.1", "wan2.1-14b ", "../wan2.1-14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers"):
        assert entry_of(name) is None
        assert sampling_of(name) is UNKNOWN


def test_a_folder_brings_its_own_defaults(tmp_path):
    assert read_sampling(tmp_path) is None
    values = {"steps": 12, "guidance": 3, "size_px": [128, 96], "trained_px": [[128, 96]]}
    (tmp_path / "svgen.json").write_text(json.dumps(values))
    found = read_sampling(tmp_path)
    assert (found.steps, found.guidance, found.size_px) == (12, 3, (128, 96))
    assert found.trained_px == ((128, 96),)
    assert found.frames == UNKNOWN.frames


@pytest.mark.parametrize(
    "text",
    [
        '{"stepz": 3}',
        '{"steps": "3"}',
        '{"steps": 2.5}',
        '{"steps": true}',
        '{"guidance": NaN}',
        '{"guidance": -1}',
        '{"max_frames": 1.5}',
        '{"size_px": [1]}',
        '{"size_px": [128, 128, 128]}',
        '{"trained_px": [[128, "x"]]}',
        '{"negative": 3}',
        "[]",
        "{",
        '{"negative": "' + "x" * 70_000 + '"}',
    ],
)
def test_bad_defaults_of_a_folder_are_refused(tmp_path, text):
    (tmp_path / "svgen.json").write_text(text)
    with pytest.raises(DownloadError) as caught:
        read_sampling(tmp_path)
    assert "svgen.json" in str(caught.value)
