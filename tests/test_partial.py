"""Partial files beside their targets: nothing is replaced, lost or left lying about."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from svgen import partial
from svgen.errors import FileError, UsageError
from svgen.partial import check_output
from tests.mp4 import read_mp4
from tests.videos import moving, recipe, write


@pytest.mark.parametrize("links", [True, False])
def test_target_that_appears_meanwhile_is_kept(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "video.mp4"
    (tmp_path / "video-1.mp4").write_text("another")

    def chunks():
        yield moving(5, 16, 32)
        path.write_text("theirs")

    with pytest.raises(UsageError) as caught:
        write(path, chunks(), recipe=recipe())
    saved = tmp_path / "video-2.mp4"
    assert caught.value.code == "E_OUTPUT_EXISTS"
    assert caught.value.details["saved"] == str(saved) and str(saved) in caught.value.hint
    assert path.read_text() == "theirs"
    assert read_mp4(saved).frames == 5
    assert sorted(os.listdir(tmp_path)) == ["video-1.mp4", "video-2.mp4", "video.mp4"]


def refuse(*_):
    raise OSError(errno.EPERM, "no hard links here")


def test_file_system_without_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "video.mp4")
    assert read_mp4(tmp_path / "video.mp4").frames == 5
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_overwrite_replaces_only_when_whole(tmp_path):
    path = tmp_path / "video.mp4"
    path.write_text("old")

    def chunks(fail):
        yield moving(5, 16, 32)
        assert path.read_text() == "old"
        if fail:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(path, chunks(True), overwrite=True)
    assert path.read_text() == "old"
    write(path, chunks(False), overwrite=True)
    assert read_mp4(path).frames == 5
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_overwrite_that_fails_keeps_the_video(tmp_path):
    path = tmp_path / "video.mp4"

    def chunks():
        yield moving(5, 16, 32)
        path.mkdir()

    with pytest.raises(FileError) as caught:
        write(path, chunks(), overwrite=True)
    assert caught.value.code == "E_WRITE"
    assert read_mp4(tmp_path / "video-1.mp4").frames == 5
    assert sorted(os.listdir(tmp_path)) == ["video-1.mp4", "video.mp4"]


def test_two_runs_to_one_name_do_not_mix(tmp_path):
    path = tmp_path / "video.mp4"

    def outer():
        yield moving(3, 16, 32)
        write(path, overwrite=True)
        assert sorted(os.listdir(tmp_path)) == [".video.partial.mp4", "video.mp4"]
        yield moving(4, 16, 32)

    assert write(path, outer(), overwrite=True).frames == 7
    assert read_mp4(path).frames == 7
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_partial_file_of_a_killed_run_is_taken_over(tmp_path):
    (tmp_path / ".video.partial.mp4").write_bytes(b"old" * 10**6)
    write(tmp_path / "video.mp4")
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_partial_file_that_is_the_video_too_is_not_written_into(tmp_path, monkeypatch):
    """As a run leaves it that is killed between its video's new name and the end of the old one."""
    path = tmp_path / "video.mp4"
    write(path)
    os.link(path, tmp_path / ".video.partial.mp4")
    whole = path.read_bytes()

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("svgen.video.publish", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(path, [moving(9, 16, 32)], overwrite=True)
    assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_partial_name_that_is_a_link_is_passed_by(tmp_path):
    (tmp_path / "precious").write_text("data")
    (tmp_path / ".video.partial.mp4").symlink_to("precious")
    (tmp_path / ".video.1.partial.mp4").symlink_to("nowhere")
    write(tmp_path / "video.mp4")
    assert (tmp_path / "precious").read_text() == "data"
    assert not (tmp_path / "nowhere").exists()
    assert read_mp4(tmp_path / "video.mp4").frames == 5


def test_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    write(tmp_path / "video.mp4")
    assert os.listdir(tmp_path) == ["video.mp4"]


def test_system_without_fcntl(tmp_path, monkeypatch):
    monkeypatch.setattr(partial, "fcntl", None)
    write(tmp_path / "video.mp4")
    with pytest.raises(UsageError):
        write(tmp_path / "video.mp4")
    assert sorted(os.listdir(tmp_path)) == ["video-1.mp4", "video.mp4"]


def test_folder_that_vanishes(tmp_path):
    out = tmp_path / "out"
    out.mkdir()

    def chunks():
        yield moving(5, 16, 32)
        os.unlink(out / ".video.partial.mp4")
        out.rmdir()

    with pytest.raises(FileError) as caught:
        write(out / "video.mp4", chunks())
    assert caught.value.code in ("E_ENCODE", "E_WRITE")


def test_check_output_leaves_nothing(tmp_path):
    check_output(tmp_path / "video.mp4", overwrite=False)
    check_output(tmp_path / "video.mp4", overwrite=True)
    assert not os.listdir(tmp_path)


def test_check_output_by_a_bare_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_output(Path("video.mp4"), overwrite=False)
    assert not os.listdir(tmp_path)


def test_check_output_refuses(tmp_path):
    (tmp_path / "there.mp4").write_text("data")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "dangling.mp4").symlink_to("nowhere")
    cases = {
        "there.mp4": "E_OUTPUT_EXISTS",
        "dangling.mp4": "E_OUTPUT_EXISTS",
        "folder.mp4": "E_OUTPUT_NAME",
        "none/video.mp4": "E_WRITE",
        "there.mp4/video.mp4": "E_WRITE",
        "x" * 300 + ".mp4": "E_OUTPUT_NAME",
        "x" * 300 + "/video.mp4": "E_WRITE",
    }
    for name, code in cases.items():
        with pytest.raises((UsageError, FileError)) as caught:
            check_output(tmp_path / name, overwrite=False)
        assert (name, caught.value.code) == (name, code)
        assert caught.value.hint
    check_output(tmp_path / "there.mp4", overwrite=True)
    assert (tmp_path / "there.mp4").read_text() == "data"


def test_check_output_tries_to_write(tmp_path, monkeypatch):
    """Folders like this one let no file be created, whoever asks and whatever their mode says."""
    with pytest.raises(FileError) as caught:
        check_output(Path("/proc/video.mp4"), overwrite=False)
    assert caught.value.code == "E_WRITE"

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(FileError) as caught:
        check_output(tmp_path / "video.mp4", overwrite=False)
    assert caught.value.code == "E_DISK_FULL"
