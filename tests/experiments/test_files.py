import os

import pytest

from ccfa.errors import ModelError
from ccfa.experiments.files import read_bounded
from ccfa.experiments.weights import MAX_HEADER, MAX_TENSORS, pack, parsed, unpack
from toys import tiny


def test_a_file_within_its_bound_is_read_whole(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(tmp_path / "file", 5) == b"12345"
    with pytest.raises(ModelError, match="has 5 bytes, more than the 4 it may have"):
        read_bounded(tmp_path / "file", 4)


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless", "."):
        with pytest.raises((ModelError, IsADirectoryError)):
            read_bounded(tmp_path / name, 2**20)


def test_weights_of_any_size_are_not_read_into_memory(tmp_path):
    path = tmp_path / "stage-000.safetensors"
    path.write_bytes(pack(tiny("podnet").backbone(3)))
    os.truncate(path, MAX_TENSORS + 1)
    with pytest.raises(
        ModelError, match=r"stage-000\.safetensors is damaged .*more than the 4,294,967,296.* Mend it\."
    ):
        unpack(path, "Mend it.")


@pytest.mark.parametrize("length", [0, 2, MAX_HEADER + 1, 2**63])
def test_a_header_that_lies_about_its_length_is_refused(length):
    with pytest.raises(ValueError, match="safetensors file"):
        parsed(length.to_bytes(8, "little") + b"{" + bytes(100))


def test_a_file_may_say_nothing_about_itself():
    content = b'{"__metadata__": null}'
    assert parsed(len(content).to_bytes(8, "little") + content) == ({}, {})
