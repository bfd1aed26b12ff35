"""Manifests come back as they were written; one from a stranger is refused in one line, or is sound."""

import hashlib
import itertools
import json
import os
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirrored import PAGE, plan_of, shapes_for
from tampering import places_in, tampered, values, with_value

from offload.errors import CheckpointError, StoreError
from offload.store.layout import StoreLayout
from offload.store.manifest import FORMAT, ITEMSIZES, FileEntry, ItemEntry, Manifest
from offload.store.reader import decode, read_manifest


def manifest_of(plan=None, shares=(1.0,), **more):
    plan = plan or plan_of()
    layout, shapes = StoreLayout(plan, shares, shares), shapes_for(plan)
    items = []
    for kind, _, item in shapes.items().each():
        entry = ItemEntry(0, item.end - item.begin, 0xDEADBEEF + item.index & 0xFFFFFFFF)
        items.append(None if kind == "states" and item.index % 2 else entry)
    files = tuple(FileEntry(f"/mnt/{path}/offload-1-2-rank0", size) for path, size in enumerate(layout.sizes))
    fields = {
        "run": "5f", "serial": 3, "step": 41, "time": 1_790_000_000, "files": files, "shapes": shapes,
        "extents": tuple(layout.generations), "items": tuple(items), "training": {"rng": [1, 2.5, None, "é"]},
    }  # fmt: skip
    return Manifest(**{**fields, **more})


def signed(body):
    """The file of a body that is what its first line says."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    serial = body.get("serial", 1) if isinstance(body, dict) else 3
    head = {
        "format": FORMAT,
        "version": 1,
        "serial": serial,
        "bytes": len(text),
        "sha256": hashlib.sha256(text).hexdigest(),
    }
    return json.dumps(head).encode() + b"\n" + text + b"\n"


GOOD = manifest_of()
BODY = json.loads(GOOD.encode().split(b"\n")[1])


def refusal(data):
    """Why data is refused, in one line of reasonable length; None where it is taken, and then it is sound."""
    try:
        manifest = decode(data)
    except CheckpointError as error:
        text = str(error)
        assert text and "\n" not in text and text.isprintable() and len(text) < 1000
        return text
    assert_sound(manifest)
    return None


def assert_sound(manifest):
    """Whoever uses its numbers stays inside the files and inside the planes."""
    taken = []
    for extents in manifest.extents:
        for stripes in extents.all:
            for extent in stripes.extents:
                assert 0 <= extent.offset < extent.offset + extent.size <= manifest.files[extent.path].size
                assert extent.offset % PAGE == extent.size % PAGE == 0
                taken.append((extent.path, extent.offset, extent.offset + extent.size))
    taken.sort()
    assert all(a[0] < b[0] or a[2] <= b[1] for a, b in itertools.pairwise(taken))
    for kind, owner, item in manifest.shapes.items().each():
        entry = manifest.items[item.index]
        if entry is None:
            assert kind == "states"
        else:
            assert item.begin + entry.written <= manifest.extents[entry.extent].of(kind, owner).size
    for unit in manifest.shapes.units:
        for param in unit.params:
            count = 1
            for size in param.shape:
                count *= size
            assert param.offset + count * ITEMSIZES[param.dtype] <= unit.weight_bytes
    for file in manifest.files:
        assert file.directory.startswith("/") and ".." not in file.directory.split("/")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.2, 0.3)])
def test_a_manifest_comes_back_as_it_was_written(precision, shares):
    plan = plan_of(precision, trained=(700_000, 0, 100), frozen=(0, 900_000, 10), chunk=1 << 17)
    manifest = manifest_of(plan, shares)
    encoded = manifest.encode()
    assert decode(encoded) == manifest and decode(encoded).encode() == encoded


def test_every_bit_counts():
    data = GOOD.encode()
    for at in range(0, len(data), 7):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        found = refusal(bytes(flipped))
        assert found is not None or decode(bytes(flipped)) == GOOD, (
            at
        )  # white space of the first line is free


def test_every_length_counts():
    data = GOOD.encode()
    for size in range(len(data)):
        assert refusal(data[:size]), size
    assert refusal(data + b"\n") and refusal(data + data)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    assert refusal(data)


@given(st.binary(max_size=300))
def test_random_bytes_that_are_signed_are_refused(data):
    assert refusal(signed(data))


PLACES = [at for at in places_in({**BODY, "training": {}}) if at]
VALUES = values(
    [PAGE, -PAGE],
    ["../x", "/mnt/../etc", "/etc/./x", "//x", "bfloat16", "object", "a\nb", "\x00", "/x\x1b[2J"],
)
STEPS = [1, -1, 512, PAGE, -PAGE, 2 * PAGE, 2**40]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tampered(BODY, PLACES, VALUES, STEPS))
def test_whatever_is_changed_is_refused_or_sound(body):
    refusal(signed(body))


def changed(**values):
    return signed({**BODY, **values})


def changed_at(value, *at):
    return signed(with_value(BODY, value, *at))


FIRST = BODY["weights"][0][0]
PARAM = BODY["units"][0][3][0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no manifest"),
        (b"{}\n{}\n", "no manifest"),
        (b'{"format": "offload swap store", "version": 2}\n{}\n', "version 2 and this program reads version 1"),
        (signed(b"[" * 100_000), "not JSON"),
        (signed(b'{"a": 1, "a": 2}'), "occurs twice"),
        (signed(b'{"a": NaN}'), "NaN is no number"),
        (signed(b"9" * 10_000), "not JSON"),
        (signed([1]), "the manifest: an object belongs here, not list"),
        (changed(more=1), "more: no manifest has it"),
        (signed({key: value for key, value in BODY.items() if key != "items"}), "items: it is missing"),
        (changed_at([0, 4096], "weights", 0, 0), "2 numbers are no extents"),
        (signed(json.dumps({**BODY, "serial": 5}).encode()), "its two lines do not say the same"),
        (changed(serial=0), "its first line is damaged"),
        (changed(step=-1), "step: -1 is not from 0"),
        (changed(step=True), "step: a whole number belongs here, not True"),
        (changed(step=1.0), "step: a whole number belongs here, not 1.0"),
        (changed(step=1 << 60), "step: 1152921504606846976 is not from 0"),
        (changed(run="a\nb"), "cannot be printed"),
        (changed(training=[]), "training: an object belongs here"),
        (changed(files=[]), "files: there is none"),
        (changed(files=[["/mnt/../etc", 8192]]), "absolute path without"),
        (changed(files=[["etc", 8192]]), "absolute path without"),
        (changed(files=[["/mnt/0\x00", 8192]]), "cannot be printed"),
        (changed(files=[["/mnt/0", 4096]]), "no pages of a file of 4096"),
        (changed(files=[["/mnt/0", 1 << 60]]), "files[0][1]"),
        (changed(files=BODY["files"] * 2), "one twice"),
        (changed(files=BODY["files"] * 100), "100 entries where at most 64 belong"),
        (changed(planes=BODY["planes"] * 9), "27 entries where at most 16 belong"),
        (changed(planes=[["residual", "object"]]), "'object' is not known"),
        (changed(weight_dtype="float32"), "do not hold"),
        (changed_at(1, "weights", 0, 0, 0), "file 1 of 1"),
        (changed_at(FIRST[1] + 512, "weights", 0, 0, 1), "no pages of a file"),
        (changed_at((1 << 56) - PAGE, "weights", 0, 0, 1), "no pages of a file"),
        (changed_at(FIRST[2] + PAGE, "weights", 0, 0, 2), "bytes of extents for"),
        (changed_at(BODY["weights"][0][0], "weights", 1, 0), "bytes of extents for|two overlap"),
        (changed_at(BODY["states"][0][0], "states", 0, 1), "two overlap"),
        (changed_at([], "weights", 0, 0), "0 bytes of extents"),
        (changed_at([2, 8192, 0], "items", 0), "are none that can be"),
        (changed_at([0, 4096, 0], "items", 0), "are none that can be"),
        (changed_at([0, 8192, 1 << 32], "items", 0), "are none that can be"),
        (changed_at(None, "items", 0), "a part of the weights of blocks.0 was never written"),
        (changed_at([1, 3 * PAGE, 0], "items", 9), "are none that can be|no such extent"),
        (changed(items=[[0, 0, 0]] * 1_000_000), "1000000 entries where 18 belong"),
        (changed(units=[BODY["units"][0]] * 2), "a parameter occurs twice"),
        (changed_at([1 << 55, 1 << 55], "units", 0, 3, 0, 1), "1 entries where 2 belong"),
        (changed_at([1 << 55], "units", 0, 3, 0, 1), "lie outside its part"),
        (changed_at([2], "units", 0, 3, 0, 2), "strides [2] do not fit shape [20000]"),
        (changed_at("float32", "units", 0, 3, 0, 3), "lie outside its part|trained weights are bfloat16"),
        (changed_at(1, "units", 0, 3, 0, 5), "not a multiple of its elements"),
        (changed_at([4096, 4096], "units", 0, 2), "chunks do not follow each other"),
        (changed_at([100], "units", 0, 2), "a chunk does not end on a page"),
        (changed_at([PARAM, [*PARAM[:1], *PARAM[1:]]], "units", 0, 3), "overlap"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(data, message):
    found = refusal(data)
    assert found is not None and any(part in found for part in message.split("|")), found


@pytest.mark.parametrize("claim", [1_000_000, 1 << 40])
def test_nothing_is_allocated_by_what_is_claimed(claim):
    """The file of a few kilobytes says that it has so many parameters, bytes or dimensions."""
    claims = [
        changed(files=[["/mnt/0", (1 << 56) - PAGE]]),
        changed_at([claim] * 30, "units", 0, 3, 0, 1),
        changed_at(claim * PAGE, "units", 0, 1),
        changed_at([4096, claim * 4096], "units", 0, 2),
        changed_at([claim, claim, claim], "plane_bytes", 0),
    ]
    tracemalloc.start()
    for data in claims:
        refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_manifest_that_would_be_too_large_is_not_written():
    with pytest.raises(StoreError, match=r"18 items takes 33\.0 MiB, and a manifest holds 32\.0 MiB"):
        manifest_of(training={"x": "y" * (33 << 20)}).encode()
    with pytest.raises(ValueError):
        manifest_of(training={"x": float("nan")}).encode()


# -- files ------------------------------------------------------------------------------------------------


def test_a_file_is_read_without_following_links_and_named_when_it_is_bad(tmp_path):
    path = tmp_path / "manifest-1.json"
    with pytest.raises(FileNotFoundError):
        read_manifest(path)
    path.write_bytes(GOOD.encode())
    assert read_manifest(path) == GOOD
    link = tmp_path / "link"
    link.symlink_to(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 1 << 40)
    for bad, message in (
        (link, "symbolic link"), (pipe, "not a regular file"), (tmp_path, "not a regular file"),
        (large, "it has 1.00 TiB, and nothing of its kind has more than 32.0 MiB"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message) as caught:
            read_manifest(bad)
        assert str(caught.value).startswith(f"{bad}: ") and "\n" not in str(caught.value)
