"""Files are written whole or not at all, and a lock touches nothing but itself."""

import os
import stat
from pathlib import Path

import pytest

from hypermlp.errors import RunError
from hypermlp.files import LOCK, lock, whole_file, write_whole
from hypermlp.models.lm import LanguageModel, ModelConfig
from hypermlp.models.saved import save_model


def test_a_link_in_the_place_of_a_lock_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / LOCK).symlink_to(thesis)
    with pytest.raises(OSError, match="lock is a link"):
        lock(folder)
    assert thesis.read_text() == "years of work"


def test_a_lock_keeps_others_out_and_what_it_finds(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("what an older version wrote")
    with lock(tmp_path), pytest.raises(RunError, match="in use"):
        lock(tmp_path)
    lock(tmp_path, wait=True).close()
    assert (tmp_path / LOCK).read_text() == "what an older version wrote"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    write_whole(path, b"old")

    def stop_halfway() -> None:
        with whole_file(path) as temporary:
            temporary.write_bytes(b"half of the n")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_halfway()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_all_files_of_a_saved_model_can_be_read_by_the_same_people(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(LanguageModel(ModelConfig(vocabulary=5, width=16, depth=1, length=8)), tmp_path, {})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}
