"""What a checkpoint says comes back as it was written; from a stranger it is refused in one line, or it is sound."""

import copy
import itertools
import json
import math
import os
import shutil
import tracemalloc
from pathlib import Path

import pytest
import test_manifest as stores
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tampering import places_in, tampered, values, with_value
from typer.testing import CliRunner

from offload.cli.main import app
from offload.errors import CheckpointError
from offload.models.pretrained import TensorSpec
from offload.models.safetensors_file import read_header
from offload.placement import STATE_PLANES, Formats
from offload.portable.layout import plan_files
from offload.portable.manifest import (
    FORMAT,
    NAME,
    Checkpoint,
    FileEntry,
    Place,
    SavedParam,
    SavedTensor,
    plane_elements,
    planes_of,
)
from offload.portable.reader import decode, read_checkpoint
from offload.store.committed import sum_of
from offload.store.manifest import ITEMSIZES
from offload.untrusted import seal

PARAMS = [
    SavedParam("tokens.weight", (5, 300), (300, 1), "bfloat16", True, ("head.weight",)),
    SavedParam("conv.weight", (4, 3, 2), (6, 1, 3), "bfloat16", True, ()),
    SavedParam("frozen", (7,), (1,), "float32", False, ()),
    SavedParam("table", (3, 2), (2, 1), "uint8", False, ()),
    SavedParam("empty", (0, 9), (9, 1), "bfloat16", True, ()),
    SavedParam("scalar", (), (), "bfloat16", True, ()),
]

INT8 = Formats("adam", "bf16", "int8")


def checkpoint_of(formats=INT8, exclude_frozen=False, shard_bytes=4000):
    params = [
        param
        if not param.trainable or formats.precision == "bf16"
        else SavedParam(param.name, param.shape, param.stride, "float32", True, param.aliases)
        for param in PARAMS
    ]
    tensors = {"buffer.mean": TensorSpec("buffer.mean", (3, 2), "torch.float32")}
    plan = plan_files(
        [params[:2], params[2:]], formats, tensors,
        nonce="0123abcd", exclude_frozen=exclude_frozen, shard_bytes=shard_bytes,
    )  # fmt: skip

    def place(key):
        return Place(*plan.places.get(key, (None, 0)), crc32c=0xDEADBEEF)

    return Checkpoint(
        step=41,
        time=1_790_000_000,
        formats=formats,
        files=tuple(
            FileEntry(file.name, file.layout.size, len(file.layout.header), 7) for file in plan.files
        ),
        params=tuple(params),
        places=tuple(
            {plane: place((param.name, plane)) for plane in planes_of(formats, param)} for param in params
        ),
        tensors=(SavedTensor("buffer.mean", (3, 2), "float32", place(("", "buffer.mean"))),),
        model={"hidden": 8},
        training={"rng": [1, 2.5, None, "é"]},
    )


GOOD = checkpoint_of()
BODY = json.loads(GOOD.encode().split(b"\n")[1])


def signed(body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return seal(text, format=FORMAT, version=1)


def refusal(data):
    """Why data is refused, in one line of reasonable length; None where it is taken, and then it is sound."""
    try:
        checkpoint = decode(data)
    except CheckpointError as error:
        text = str(error)
        assert text and "\n" not in text and text.isprintable() and len(text) < 1000
        return text
    assert_sound(checkpoint)
    return None


def assert_sound(checkpoint):
    """Whoever uses its numbers stays inside the files, which lie in the directory, and inside the tensors."""
    taken = []
    for file in checkpoint.files:
        assert Path(file.name).name == file.name and file.name.endswith(".safetensors")
        assert 8 <= file.header_bytes <= file.size <= 1 << 56
    for param, places in zip(checkpoint.params, checkpoint.places, strict=True):
        reach = 1 + sum((size - 1) * step for size, step in zip(param.shape, param.stride, strict=True))
        assert param.numel == 0 or reach <= param.numel
        for plane, dtype in checkpoint.planes(param).items():
            size = plane_elements(plane, param.numel) * ITEMSIZES[dtype]
            if places[plane].file is None:
                assert plane == "weight" and not param.trainable
            else:
                taken.append((places[plane].file, places[plane].offset, size))
    for tensor in checkpoint.tensors:
        taken.append(
            (tensor.place.file, tensor.place.offset, math.prod(tensor.shape) * ITEMSIZES[tensor.dtype])
        )
    for file, offset, size in taken:
        entry = checkpoint.files[file]
        assert entry.header_bytes <= offset and offset + size <= entry.size
    taken = sorted(each for each in taken if each[2])
    assert all(a[0] < b[0] or a[1] + a[2] <= b[1] for a, b in itertools.pairwise(taken))


@pytest.mark.parametrize("formats", STATE_PLANES, ids="-".join)
@pytest.mark.parametrize("exclude_frozen", [False, True])
def test_it_comes_back_as_it_was_written(formats, exclude_frozen):
    checkpoint = checkpoint_of(formats, exclude_frozen)
    encoded = checkpoint.encode()
    assert decode(encoded) == checkpoint and decode(encoded).encode() == encoded
    assert_sound(checkpoint)
    assert len(checkpoint.files) >= 2 + bool(STATE_PLANES[formats])


def test_every_bit_and_every_length_counts():
    data = GOOD.encode()
    for at in range(0, len(data), 5):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        assert refusal(bytes(flipped)) or decode(bytes(flipped)) == GOOD, at  # white space of the first line
        assert refusal(data[:at])
    assert refusal(data + b"\n") and refusal(data + data)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data):
    assert refusal(data) and refusal(signed(data))


WHERE = [at for at in places_in({**BODY, "training": {}, "model": {}}) if at]
VALUES = values(
    [128, -8],
    ["../x", "/etc/passwd", "weights-0123abcd-00001.safetensors", "bf16", "float32", "a\nb", "\x00"],
)
STEPS = [1, -1, 2, 8, 128, -128, 4096, 2**40]


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tampered(BODY, WHERE, VALUES, STEPS))
def test_whatever_is_changed_is_refused_or_sound(body):
    refusal(signed(body))


def changed(**values):
    return signed({**BODY, **values})


def changed_at(value, *at):
    return signed(with_value(BODY, value, *at))


FILE, PARAM = BODY["files"][0], BODY["params"][0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no manifest of an offload checkpoint"),
        (b'{"format": "offload swap store", "version": 1}\n{}\n', "no manifest of an offload checkpoint"),
        (b'{"format": "offload checkpoint", "version": 2}\n{}\n', "version 2 and this program reads version 1"),
        (signed(b"[" * 100_000), "not JSON"),
        (signed(b'{"a": 1, "a": 2}'), "occurs twice"),
        (signed([1]), "an object belongs here, not list"),
        (changed(more=1), "more: no checkpoint has it"),
        (signed({key: value for key, value in BODY.items() if key != "files"}), "files: it is missing"),
        (changed(step=-1), "step: -1 is not from 0"),
        (changed(step=True), "step: a whole number belongs here, not True"),
        (changed(rule="adamax"), "rule: 'adamax' is not known"),
        (changed(rule="lion"), "state_format: 'int8' is not known"),
        (changed(precision="fp8"), "precision: 'fp8' is not known"),
        (changed(precision="fp32"), "state_format: 'int8' is not known"),
        (changed(state_format="fp32"), "4 entries|5 entries"),
        (changed(training=[]), "training: an object belongs here"),
        (changed_at("../../etc/passwd", "files", 0, 0), "no name of a file of a checkpoint"),
        (changed_at("/etc/weights-0123abcd-00001.safetensors", "files", 0, 0), "no name of a file"),
        (changed_at("weights-0123abcd-00001.safetensors\n", "files", 0, 0), "cannot be printed"),
        (changed_at(1 << 60, "files", 0, 1), "files[0][1]: 1152921504606846976 is not from 0"),
        (changed_at(FILE[1] + 1, "files", 0, 2), "files[0][2]"),
        (changed_at(1 << 32, "files", 0, 3), "files[0][3]"),
        (changed(files=[*BODY["files"], FILE]), "files: a name occurs twice"),
        (changed(files=[FILE] * 70_000), "70000 entries where at most 65536 belong"),
        (changed(files=[]), "is not from 0 to -1"),
        (changed(params=[PARAM] * 2), "params: a name occurs twice"),
        (changed_at(["tokens.weight"], "params", 0, 5), "params: a name occurs twice"),
        (changed_at([5, 301], "params", 0, 1), "strides [300, 1] do not fit shape [5, 301]"),
        (changed_at([1, 300], "params", 0, 2), "strides [1, 300] do not fit shape [5, 300]"),
        (changed_at([1 << 40, 1 << 40], "params", 0, 1), "no tensor has so many elements"),
        (changed_at([1] * 33, "params", 0, 1), "33 is not|33 entries"),
        (changed_at("float32", "params", 0, 3), "trained weights are bfloat16 here, not float32"),
        (changed_at("object", "params", 0, 3), "'object' is not known"),
        (changed_at([None, 0, 1], "params", 0, 6, 0), "a whole number belongs here, not NoneType"),
        (changed_at([9, 0, 1], "params", 0, 6, 0), "9 is not from 0"),
        (changed_at([0, 0, 1], "params", 0, 6, 0), "are not in a file of"),
        (changed_at([0, FILE[1] - 10, 1], "params", 0, 6, 0), "are not in a file of"),
        (changed_at(BODY["params"][1][6][0], "params", 0, 6, 0), "are not in a file of|overlap"),
        (changed_at(BODY["params"][0][6][2], "params", 0, 6, 3), "overlap"),
        (changed_at([0, 1, 1 << 32], "params", 0, 6, 0), "is not from 0 to 4294967295"),
        (changed_at(["x", [1 << 50], "float32", [0, 100, 1]], "tensors", 0), "are not in a file of"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(data, message):
    found = refusal(data)
    assert found is not None and any(part in found for part in message.split("|")), found


@pytest.mark.parametrize("claim", [1_000_000, 1 << 40])
def test_nothing_is_allocated_by_what_is_claimed(claim):
    claims = [
        changed_at((1 << 56) - 1, "files", 0, 1),
        changed_at([claim] * 30, "params", 0, 1),
        changed_at([claim, claim], "params", 0, 2),
        changed_at([claim], "tensors", 0, 1),
    ]
    tracemalloc.start()
    for data in claims:
        refusal(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_files_that_are_none_and_links_are_refused(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    path = folder / NAME
    with pytest.raises(FileNotFoundError):
        read_checkpoint(folder)
    path.write_bytes(GOOD.encode())
    assert read_checkpoint(folder) == GOOD
    for make, message in (
        (lambda: path.symlink_to(tmp_path / "x"), "symbolic link"),
        (lambda: os.mkfifo(path), "not a regular file"),
        (path.mkdir, "not a regular file"),
        (lambda: path.touch() or os.truncate(path, 1 << 40), "it has 1.00 TiB"),
    ):
        path.rmdir() if path.is_dir() else path.unlink()
        make()
        for command in ("inspect", "verify", "export"):
            arguments = [command, str(folder), *([str(tmp_path / "out")] if command == "export" else [])]
            result = CliRunner().invoke(app, arguments)
            lines = [line for line in result.output.splitlines() if message in line]
            assert result.exit_code in (1, 2) and len(lines) == 1 and str(path) in lines[0], result.output
    assert not (tmp_path / "out").exists()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(tampered(BODY, WHERE, VALUES, STEPS))
def test_commands_end_in_one_line_whatever_a_stranger_wrote(tmp_path, body):
    """The files that it names are there, empty: nothing is ever a traceback."""
    folder = tmp_path / "one"
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_bytes(signed(body))
    for name, size, *_ in BODY["files"]:
        (folder / name).touch()
        os.truncate(folder / name, size)
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(folder)])
        assert result.exit_code in (0, 1, 2) and "unexpected" not in result.output, result.output
        if result.exit_code == 2:
            assert len(result.output.splitlines()) == 1


def test_a_store_of_zeros_is_exported(tmp_path):
    """So what a stranger changes of it is read by all commands."""
    outcomes = set()
    run_commands(tmp_path, copy.deepcopy(stores.BODY), outcomes)
    assert outcomes == {("inspect", 0), ("verify", 0), ("export", 0)}


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(tampered(stores.BODY, stores.PLACES, stores.VALUES, stores.STEPS))
def test_commands_end_in_one_line_whatever_a_stranger_wrote_of_a_store(tmp_path, body):
    run_commands(tmp_path, body, set())


def run_commands(tmp_path, body, outcomes):
    folder = tmp_path / "store"
    folder.mkdir(exist_ok=True)
    if "training" in body:
        body["training"] = {"state": {}, "tensors": {"file": None, "crc32c": {}}}
    for item in body.get("items") or ():  # with the right sums, so that what is read is used
        if isinstance(item, list) and len(item) == 3 and type(item[1]) is int and 0 <= item[1] < 1 << 20:
            item[2] = sum_of(torch.zeros(item[1], dtype=torch.uint8))
    (folder / "manifest-1.json").write_bytes(stores.signed(body))
    (folder / "owner.json").write_text('{"pid": 1, "host": "elsewhere"}')
    (folder / "planes.swap").touch()
    os.truncate(folder / "planes.swap", stores.BODY["files"][0][1])
    for command in ("inspect", "verify", "export"):
        arguments = [command, str(folder), *([str(tmp_path / "out")] if command == "export" else [])]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code in (0, 1, 2) and "unexpected" not in result.output, result.output
        outcomes.add((command, result.exit_code))
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
}
SIZE = 32


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_headers_of_safetensors_are_refused_or_sound(tmp_path, data):
    header = copy.deepcopy(HEADER)
    for _ in range(data.draw(st.integers(0, 3))):
        *outer, last = data.draw(st.sampled_from([at for at in places_in(HEADER) if at]))
        where = header
        try:
            for key in outer:
                where = where[key]
            where[last] = copy.deepcopy(data.draw(st.one_of(VALUES, st.integers(0, 40))))
        except (LookupError, TypeError):
            continue
    text = data.draw(st.one_of(st.just(json.dumps(header).encode()), st.binary(max_size=60)))
    length = data.draw(st.one_of(st.just(len(text)), st.integers(0, (1 << 64) - 1)))
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(SIZE))
    try:
        entries = read_header(path)
    except CheckpointError as error:
        assert "\n" not in str(error) and str(error).isprintable() and len(str(error)) < 1000
        return
    taken = sorted((entry.offset, entry.size) for entry in entries.values())
    assert all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(taken))
    for entry in entries.values():
        assert entry.offset + entry.size <= path.stat().st_size
        assert math.prod(entry.spec.shape) * ITEMSIZES[entry.spec.dtype] == entry.size
