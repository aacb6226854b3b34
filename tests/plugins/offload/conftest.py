"""A small file system of its own, where the machine lets one be mounted."""

import os
import subprocess

import pytest

MIB = 2**20


def attempt(*command):
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip(f"no {command[0]} here")
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    image, place = tmp_path / "image", tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(16 * MIB)
    place.mkdir()
    attempt("mkfs.ext4", "-q", "-m", "0", str(image))
    attempt("mount", "-o", "loop", str(image), str(place))
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
