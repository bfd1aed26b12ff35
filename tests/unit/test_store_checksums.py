"""The checksums of the swap store: what was changed on disk is found, wherever it lies; what was not, is not."""

import errno
import random
import re

import pytest
import torch

from offload.config.kinds import SwapPath
from offload.config.schema import Aio
from offload.errors import TransferError
from offload.inventory import ParamInfo, build_inventory
from offload.ledger import Ledger
from offload.placement import Placement, SwapPaths
from offload.plan import MemoryPlan
from offload.store import checksums
from offload.store.layout import Extent, Stripes
from offload.store.swap import SwapStore

PAGE = 4096


def plan_of(precision, state_format):
    itemsize = 2 if precision == "bf16" else 4
    params = [
        ParamInfo(f"blocks.{index}.weight", (size,), itemsize, True)
        for index, size in enumerate((300_000, 100, 70_001))
    ]
    placement = Placement(
        precision=precision, state_format=state_format, param_home="nvme", state_home="nvme", update="step",
        grad_itemsize=4, micro_batches=1, host_bytes=1 << 40, chunk_elements_max=50_000,
    )  # fmt: skip
    return MemoryPlan.build(placement, build_inventory(params, weight_itemsize=itemsize))


class Planes:
    """A store and what was written to it."""

    def __init__(self, tmp_path, formats=("bf16", "fp32"), drives=1):
        self.plan = plan_of(*formats)
        paths = []
        for index in range(drives):
            (tmp_path / f"drive{index}").mkdir()
            paths.append(SwapPath(str(tmp_path / f"drive{index}"), 1 + index))
        names = frozenset(path.path for path in paths)
        self.store = SwapStore.open(
            SwapPaths(tuple(paths), names, names), self.plan, Aio(), Ledger(), verify=True
        )
        self.files = [next((tmp_path / f"drive{index}").glob("*/planes.swap")) for index in range(drives)]
        self.generator = torch.Generator().manual_seed(0)
        self.weights = [self.noise(unit.weight_bytes) for unit in self.plan.inventory.units]
        self.states = {chunk: self.noise(self.plan.chunk_bytes(chunk)) for chunk in self.plan.chunks}
        for unit, plane in enumerate(self.weights):
            self.store.write_weight(unit, plane, 0, plane.numel()).wait()
        for chunk, state in self.states.items():
            self.store.write_state(chunk, state).wait()

    def noise(self, size):
        return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=self.generator)

    def errors(self):
        """Reads everything; what was raised. What was not must be what was written."""
        found = []
        reads = [(self.store.read_weight, unit, plane) for unit, plane in enumerate(self.weights)]
        reads += [(self.store.read_state, chunk, state) for chunk, state in self.states.items()]
        for read, which, wanted in reads:
            buffer = torch.empty_like(wanted)
            ticket = read(which, buffer)
            try:
                ticket.wait()
            except TransferError as error:
                found.append(error)
                with pytest.raises(TransferError):
                    ticket.wait()
            else:
                assert torch.equal(buffer, wanted)
        return found


@pytest.fixture(params=[("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "int8")], ids="-".join)
def formats(request):
    """Precision of training and format of state."""
    return request.param


@pytest.mark.parametrize("drives", [1, 3])
@pytest.mark.usefixtures("every_drive")
def test_every_flipped_byte_is_found_and_named(tmp_path, formats, drives):
    planes = Planes(tmp_path, formats, drives)
    rng = random.Random(drives)
    assert planes.errors() == []
    for _ in range(12):
        path = rng.randrange(drives)
        with open(planes.files[path], "r+b") as file:
            at = rng.randrange(planes.files[path].stat().st_size)
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ 1 << rng.randrange(8)]))
        (error,) = planes.errors()
        assert error.errno == errno.EBADMSG and error.filename == str(planes.files[path])
        assert error.offset <= at < error.offset + error.size <= error.offset + checksums.BLOCK_BYTES
        planes_of = r"(residual|exp_avg|exp_avg_sq|scale) of chunk \d+ of"
        names = rf"(weight of|{planes_of}) unit (blocks\.\d) \((\3\.weight|padding)\)"
        sums = r"crc32c 0x[0-9a-f]{8} was written and 0x[0-9a-f]{8} read"
        assert re.search(f"; {names}: {sums}; the drive, or another process, has changed", str(error))
        with open(planes.files[path], "r+b") as file:
            file.seek(at)
            file.write(before)
    assert planes.errors() == []
    planes.store.close()


@pytest.mark.usefixtures("every_drive")
def test_parts_of_planes_are_written_and_checked(tmp_path, formats):
    """Any pages of a weight plane, the residual plane alone, whole chunks, in any order."""
    planes, rng = Planes(tmp_path, formats, drives=2), random.Random(5)
    for _ in range(25):
        unit = rng.randrange(len(planes.weights))
        plane = planes.weights[unit]
        begin, end = sorted(PAGE * rng.randrange(plane.numel() // PAGE + 1) for _ in range(2))
        plane[begin:end] = planes.noise(end - begin)
        planes.store.write_weight(unit, plane, begin, end).wait()
        chunk = rng.choice(list(planes.states))
        residual = chunk.elements * planes.plan.placement.residual_itemsize
        size = residual or planes.states[chunk].numel()
        planes.states[chunk][:size] = planes.noise(size)
        if residual:
            planes.store.write_residual(chunk, planes.states[chunk][:size].clone()).wait()
        else:
            planes.store.write_state(chunk, planes.states[chunk]).wait()
    assert planes.errors() == []
    planes.store.close()


@pytest.mark.usefixtures("every_drive")
def test_a_write_that_is_lost_is_found(tmp_path):
    """The drive says yes and keeps the old bytes."""
    planes = Planes(tmp_path)
    before = planes.files[0].read_bytes()
    planes.weights[2][:] = planes.noise(planes.weights[2].numel())
    planes.store.write_weight(2, planes.weights[2], 0, planes.weights[2].numel()).wait()
    planes.files[0].write_bytes(before)
    (error,) = planes.errors()
    assert "weight of unit blocks.2" in str(error)
    planes.store.close()


def test_a_block_written_in_part_is_not_known():
    """Nobody has said what the rest of it is."""
    blocks = checksums.Blocks(Stripes((Extent(0, 0, 3 * checksums.BLOCK_BYTES),)))
    buffer = torch.zeros(3 * checksums.BLOCK_BYTES, dtype=torch.uint8)
    blocks.record(buffer, PAGE, 2 * checksums.BLOCK_BYTES)
    buffer[0] = 1
    assert blocks.mismatch(buffer, buffer.numel()) is None
    buffer[checksums.BLOCK_BYTES] = 1
    assert blocks.mismatch(buffer, buffer.numel())[:2] == (checksums.BLOCK_BYTES, 2 * checksums.BLOCK_BYTES)
    buffer[checksums.BLOCK_BYTES] = 0
    blocks.record(buffer, 0, 2 * checksums.BLOCK_BYTES)
    buffer[0] = 2
    assert blocks.mismatch(buffer, checksums.BLOCK_BYTES) is not None
