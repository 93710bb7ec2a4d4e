"""A checkpoint holds regular files: opening a pipe would wait forever."""

import os

import pytest

from mimo_edge.errors import BadInputError
from mimo_edge.export.families import open_checkpoint


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "model.gguf"])
def test_pipes_and_folders_in_place_of_files_are_refused(name, make, tmp_path):
    make(tmp_path / name)
    with pytest.raises(BadInputError, match=f"{name} is not a regular file"):
        open_checkpoint(tmp_path)


def test_a_pipe_in_place_of_the_checkpoint_is_refused(tmp_path):
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(BadInputError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.gguf")
