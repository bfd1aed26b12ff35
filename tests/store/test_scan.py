"""A full scan of a commit: it finds every damaged byte, reads all that counts, and may run beside training."""

import random
import re
import threading

import pytest
from mirrored import Mirrored

from offload.errors import CheckpointError
from offload.store.commits import find_commits
from offload.store.scan import committed_bytes, scan


@pytest.fixture
def run(tmp_path):
    roots = [tmp_path / "a", tmp_path / "b"]
    for root in roots:
        root.mkdir()
    run = Mirrored(roots, trained=(20_000, 100, 0), frozen=(3000, 0, 9000))
    run.fill()
    run.train(2)
    run.commit()
    yield run
    run.remove()


def test_a_scan_reads_what_counts_and_finds_nothing(run, monkeypatch):
    monkeypatch.setattr("offload.store.scan.PIECE_BYTES", 8192)
    found = list(scan(run.path))
    manifest = find_commits(run.path).newest
    assert sum(item.size for item in found) == committed_bytes(manifest) > 100_000
    assert not any(item.damage for item in found) and {item.manifest.serial for item in found} == {1}
    run.check()


def test_every_byte_of_a_commit_is_looked_at_and_no_other(run):
    run.die()
    manifest = find_commits(run.path).newest
    committed = [[False] * file.size for file in manifest.files]
    for kind, owner, item in manifest.shapes.items().each():
        if entry := manifest.items[item.index]:
            stripes = manifest.extents[entry.extent].of(kind, owner)
            for _, _, extent in stripes.part(item.begin, item.begin + entry.written):
                committed[extent.path][extent.offset : extent.offset + extent.size] = [True] * extent.size
    rng = random.Random(0)
    for _ in range(40):
        path = rng.randrange(2)
        at = rng.randrange(manifest.files[path].size)
        name = f"{manifest.files[path].directory}/planes.swap"
        with open(name, "r+b") as file:
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ 2]))
            file.flush()
            damaged = [item for item in scan(run.path) if item.damage]
            file.seek(at)
            file.write(before)
        assert len(damaged) == committed[path][at]
        for item in damaged:
            error = item.damage
            assert error.filename == name and error.offset <= at
            assert re.search(r"unit blocks\.(\d) \((blocks\.\1\.(weight|table)|padding)", str(error))
    assert not any(item.damage for item in scan(run.path))
    run.recover()


def test_a_scan_beside_training_is_never_wrong(run):
    """Commits come faster than the scan: it goes on with the newer one."""
    serials, failures, stop = set(), [], threading.Event()

    def look():
        try:
            while not stop.is_set():
                for item in scan(run.path):
                    serials.add(item.manifest.serial)
                    failures.extend([str(item.damage)] if item.damage else [])
        except BaseException as error:
            failures.append(repr(error))

    scanner = threading.Thread(target=look)
    scanner.start()
    for _ in range(25):
        run.train(1)
        run.commit()
    stop.set()
    scanner.join()
    assert not failures and len(serials) > 2


def test_what_holds_no_commit_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="it has no manifest"):
        list(scan(tmp_path))
