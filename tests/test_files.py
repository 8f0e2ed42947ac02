"""Folders that cannot be made and files that cannot be read are refused by name."""

from __future__ import annotations

import pytest

from hooked_ssm.errors import CheckpointError, ConfigError
from hooked_ssm.files import make_folder, read_json


def test_folders_are_made_once_and_not_under_files(tmp_path):
    folder = tmp_path / "a" / "b"
    assert make_folder(folder, "out") == make_folder(folder, "out") == folder
    file = tmp_path / "file"
    file.write_text("")
    for path in (file, file / "under"):
        with pytest.raises(ConfigError, match=r"out='.*file.*' is, or lies in, a file"):
            make_folder(path, "out")
    with pytest.raises(ConfigError, match="cannot be made: File name too long"):
        make_folder(tmp_path / ("x" * 300), "out")


@pytest.mark.parametrize(
    ("name", "message"), [("a", "cannot be read"), ("b", "does not exist"), ("c", "is no JSON")]
)
def test_what_is_no_json_file(tmp_path, name, message):
    (tmp_path / "a").mkdir()
    (tmp_path / "c").write_bytes(b"\xff{")
    with pytest.raises(CheckpointError, match=f"{name} {message}"):
        read_json(tmp_path / name)
