import pytest

from peagle.bench import folder as module
from peagle.bench.folder import MeasurementFolder
from peagle.errors import ConfigError
from peagle.files import write_json


def test_of_two_commands_that_begin_one_folder_the_second_goes_by_what_the_first_wrote(tmp_path, monkeypatch):
    made = module.make_folder

    def make_folder(path):
        made(path)
        if path.name != tmp_path.name:  # the other command is a moment faster
            write_json(tmp_path / "run.json", {"schema": 1, "fingerprint": {"model": "theirs"}})

    monkeypatch.setattr(module, "make_folder", make_folder)
    with pytest.raises(ConfigError, match="theirs"):
        MeasurementFolder(tmp_path, name="run", fingerprint={"model": "ours"})
