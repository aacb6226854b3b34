"""A checkpoint that is not what was written is refused, by file, with expected and found."""

import hashlib

import pytest
import torch

from drivetrain.checkpoint.encoding import Contents
from drivetrain.checkpoint.loading import open_checkpoint
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.saving import Save
from drivetrain.errors import CheckpointError
from drivetrain.runtime.parts import Part
from drivetrain.runtime.world import World
from drivetrain.shards import Shard
from manifests import rewrite

WORLD = World()
WEIGHTS = "model-0-weights-00000-of-00001.safetensors"


@pytest.fixture
def directory(tmp_path):
    def shards(value):
        tensor = torch.full((8,), value)
        return [Shard("w", "", tensor, (8,), Part.whole((8,)))]

    contents = Contents(models=[shards(1.0), shards(2.0)], state={"epoch": 1})
    Save(tmp_path / "ck", WORLD).finish(contents)
    return tmp_path / "ck"


def refuses(directory, message, verify="full"):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(directory, WORLD, verify=verify)


def test_flipped_bit_anywhere(directory):
    for name in (WEIGHTS, "state.json", "manifest.json"):
        path = directory / name
        content = path.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        said = f"expected sha256 {digest} of .*{name}, found [0-9a-f]{{64}}"
        for at in (10, len(content) // 2, len(content) - 2):
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            refuses(directory, "manifest.json" if name == "manifest.json" else said)
        path.write_bytes(content)
    open_checkpoint(directory, WORLD)


def test_truncated_and_missing_file(directory):
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:-4])
    message = f"expected {len(content)} bytes in .*{WEIGHTS}, found {len(content) - 4}"
    for verify in ("full", "size"):
        refuses(directory, message, verify)
    (directory / WEIGHTS).unlink()
    for verify in ("full", "size"):
        refuses(directory, f"expected the file .*{WEIGHTS} of .* bytes, found none", verify)
    refuses(directory, "'full' or 'size', found 'none'", "none")


def test_header_that_does_not_match_the_manifest(directory):
    content = (directory / WEIGHTS).read_bytes()
    for changed, message in (
        (content.replace(b'"F32"', b'"I32"'), r"expected 8 elements of F32 .* found \('I32', 8\)"),
        (b"\xff" * len(content), "not a whole safetensors file"),
    ):
        (directory / WEIGHTS).write_bytes(changed)
        refuses(directory, message, "size")


def test_no_checkpoint_at_all(tmp_path):
    refuses(tmp_path / "none", "there is no checkpoint .*none")
    refuses(tmp_path, "expected manifest.json in")
    other = "expected the format 'drivetrain-checkpoint' .* found 'other'"
    for text, message in (
        ("{", "is damaged: expected JSON, found the end of the text in line 1"),
        ("[" * 100_000, "is damaged"),
        ('{"format": "other"}', other),
    ):
        (tmp_path / "manifest.json").write_text(text)
        refuses(tmp_path, message)


def part(body):
    return body["models"][0]["tensors"][0]["parts"][0]


def test_manifest_that_was_made_to_mislead(directory):
    manifest = (directory / "manifest.json").read_text()
    unsigned = {"size": 1, "sha256": ""}
    invalid, name = "not a valid manifest", "plain file name"
    for message, change in (
        ("expected format version 1 .* found 2.*newer", lambda body: body.update(version=2)),
        (name, lambda body: body["files"].update({"../x": unsigned})),
        (name, lambda body: body["files"].update({"/etc/x": unsigned})),
        (name, lambda body: body["files"].update({"..": unsigned})),
        (name, lambda body: part(body).update(file="../../x")),
        (name, lambda body: body["rank_files"].update({"0": "a/b"})),
        ("without listing its digest", lambda body: part(body).update(file="unlisted")),
        ("has a part outside", lambda body: part(body).update(offsets=[1])),
        ("its 8 elements exactly once, found 7", lambda body: part(body).update(sizes=[7])),
        ("unknown dtype 'Q4'", lambda body: body["models"][0]["tensors"][0].update(dtype="Q4")),
        (invalid, lambda body: part(body).update(flat=[0, 1, 2])),
        (f"{invalid}: expected the key 'offsets'", lambda body: part(body).pop("offsets")),
        (invalid, lambda body: body.pop("files")),
        (invalid, lambda body: body["files"][WEIGHTS].update(size=1e999)),
        (invalid, lambda body: body.update(models=3)),
    ):
        (directory / "manifest.json").write_text(manifest)
        rewrite(directory, change)
        refuses(directory, message)


def test_what_no_digest_finds_out(directory):
    with open_checkpoint(directory, WORLD) as found:
        (directory / "planted").write_bytes(b"x")
        with pytest.raises(CheckpointError, match="expected the file 'planted' among those of"):
            found.encoded("planted")

    def overlap(body):
        body.pop("finite")
        parts = [part(body) | {"flat": [0, 4]} for _ in range(2)]
        body["models"][0]["tensors"][0]["parts"] = parts

    rewrite(directory, overlap)
    assert Manifest.read(directory).finite, "a manifest that does not tell is trusted"
    refuses(directory, "expected 4 elements of F32")
