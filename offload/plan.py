"""Computes every size, slot count and home before step 1; says yes with a table or no with sums.

Pure: sizes in, sizes out. The same plan is printed by `offload plan`, carried out by the engine, and
compared with the ledger afterwards: `ledger == plan.bytes_moved(steps)`, byte for byte.

Note [What host memory holds]
- weights: all planes (home host), or `weight_slots` slots of the largest unit (home nvme);
- gradients: all planes where they wait for the step, or `grad_slots` slots where the update runs in
  backward;
- optimizer state: all planes (home host), or a ring of `chunk_slots` chunks (home nvme);
- gradient staging: where gradients of an accelerator arrive that are widened or added (``landing``);
- gradient sums: by which the host decides whether a unit is updated on the device (``squares``);
- activations: what the computation keeps, as estimated by whoever knows the model;
- library code and scratch: what libraries take when they first run, as measured by whoever starts them;
- an fp32 piece of a bf16 weight (``matmul``): on CPUs without bf16 units it is made for each product, and
  those with bf16 units reorder the weight instead.
The interpreter with torch (a few hundred MiB) is not counted: it is there before we start.

Note [What device memory holds]
Only with an accelerator; otherwise device and host are one memory, and "none" is "cpu".
- weights: with everything at home on the device their planes; else slots, as many as there are host slots (home
  nvme), or a few (home host), or one for each unit (home device: the host has a copy that the update changes);
- optimizer state and gradients of the units whose state is at home there (all, or a part: ``ratio``): they are
  updated there;
- gradients of the others on their way to the host;
- activations.

Note [How much to take]
Slots and chunks start generous and shrink until the sum fits `memory.host_bytes`. More is better for speed
only up to a point, so a large budget is not filled: four weight slots hide the disk behind compute, and
beyond READ_AHEAD_BYTES_MAX a deeper ring of chunks buys nothing measurable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .bytesize import GiB, align_up, format_bytes, round_up_bytes
from .errors import PlanError
from .inventory import ELEMENTS_ALIGNMENT, Inventory, UnitLayout
from .placement import Placement
from .plan_table import table
from .schedule import PrefetchScheduler, steady_moves

CHUNK_ELEMENTS_MIN = 1 << 16
PIECE_ELEMENTS = 2 << 20
"""Of a bf16 weight, widened to fp32 at a time. 8 MiB: what the last-level cache of a small machine holds
beside the rest."""
READ_AHEAD_BYTES_MAX = 1 * GiB
READ_AHEAD_SHARE = 1 / 8
"""Of the host budget, for a ring of chunks deeper than CHUNK_SLOTS."""
CHUNK_SLOTS = 4
"""One chunk read, one updated, one written, and one more so that the reader never waits for the writer."""

GRAD_STAGING_SLOTS = 4
GRAD_STAGING_BYTES_MAX = 4 << 20
UPDATE_SCRATCH_BYTES = 64 << 20
"""What an update on the device takes beside its planes (see ``optim.device``)."""
GRAD_SUM_ELEMENTS = 16 << 10
"""Elements to a sum of squares; as in ``optim.kernels``."""

LinkPlane = tuple[str, str]
"""A link and a plane: the key of a count of bytes, here and in the ledger."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Elements [begin, end) of a unit's trainable region: read, updated and written as one."""

    index: int
    unit: int
    begin: int
    end: int

    @property
    def elements(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One row of the table: `count` pieces of `size` bytes for one purpose in one tier."""

    tier: str
    purpose: str
    count: int
    size: int

    @property
    def total(self) -> int:
        return self.count * self.size

    def __str__(self) -> str:
        pieces = (
            f"{self.count} x {format_bytes(self.size)} " if self.count != 1 else f"{format_bytes(self.size)} "
        )
        return pieces + self.purpose


@dataclass(frozen=True)
class MemoryPlan:
    """Every size of a run. Build it with :meth:`build`."""

    placement: Placement
    inventory: Inventory
    weight_slots: int
    grad_slots: int
    chunk_elements: int
    chunk_slots: int

    # -- building -----------------------------------------------------------------------------------------

    @classmethod
    def build(cls, placement: Placement, inventory: Inventory) -> MemoryPlan:
        """The most generous plan that fits the budgets.

        Raises:
            PlanError: nothing fits; the message has the sum of the smallest plan and what fits.
        """
        if not inventory.trainable_parameters:
            raise PlanError(
                f"the model has {inventory.parameters} parameters and none is trainable;"
                " set requires_grad on what should be trained, or use the model without an engine"
            )
        for plan in cls._candidates(placement, inventory):
            if plan._fits():
                return plan
        raise PlanError(plan._refusal())

    @classmethod
    def _candidates(cls, placement: Placement, inventory: Inventory) -> Iterator[MemoryPlan]:
        """Plans from the largest to the smallest. See Note [How much to take]."""
        largest_unit = max(unit.elements for unit in inventory.units)
        wanted = max(placement.chunk_elements_max, ELEMENTS_ALIGNMENT)
        sizes = [min(align_up(wanted, ELEMENTS_ALIGNMENT), largest_unit)]
        if placement.chunk_elements is not None:
            sizes = [placement.chunk_elements]
        while placement.chunk_elements is None and sizes[-1] > CHUNK_ELEMENTS_MIN:
            sizes.append(align_up(sizes[-1] // 2, ELEMENTS_ALIGNMENT))
        units = len(inventory.units)
        for weight_slots, grad_slots in ((4, 2), (3, 2), (3, 1), (2, 1)):
            for chunk_elements in sizes:
                plan = cls(
                    placement,
                    inventory,
                    units if placement.param_home == "device" else min(weight_slots, units),
                    min(grad_slots, units),
                    chunk_elements,
                    CHUNK_SLOTS,
                )
                if chunk_elements == sizes[0]:
                    yield plan._deepened()
                yield plan
                if placement.state_home != "nvme":
                    break  # the chunk size costs no memory there
        yield replace(plan, chunk_slots=2)

    def _deepened(self) -> MemoryPlan:
        """With a ring of chunks that reads far ahead, as far as the budget's share allows."""
        chunk_bytes = self.placement.state_bytes(self.chunk_elements)
        share = min(READ_AHEAD_BYTES_MAX, int(self.placement.host_bytes * READ_AHEAD_SHARE))
        slots = max(self.chunk_slots, min(share // max(1, chunk_bytes), len(self.chunks)))
        return replace(self, chunk_slots=slots)

    def _fits(self) -> bool:
        return all(budget is None or self.bytes_total(tier) <= budget for tier, budget in self.budgets)

    @property
    def budgets(self) -> tuple[tuple[str, int | None], ...]:
        placement = self.placement
        return (
            ("device", placement.device_bytes), ("host", placement.host_bytes), ("nvme", placement.nvme_bytes),
        )  # fmt: skip

    @cached_property
    def smallest(self) -> MemoryPlan:
        """The plan of the same placement that takes least."""
        return list(self._candidates(self.placement, self.inventory))[-1]

    def _refusal(self) -> str:
        """Why this smallest plan does not fit, and what does. Every number and setting it names is enough."""
        placement = self.placement
        problems, budgets = [], []
        names = {"device": "device memory", "host": "host memory", "nvme": "the nvme tier"}
        for tier, budget in self.budgets:
            need, name = self.bytes_total(tier), names[tier]
            if budget is not None and need > budget:
                least = "" if tier == "nvme" else "at least "
                problems.append(f"{name} needs {least}{format_bytes(need)} = {self._sum(tier)}")
                problems.append(f"memory.{tier}_bytes is {format_bytes(budget)}")
                budgets.append(f'memory.{tier}_bytes = "{round_up_bytes(need)}"')
        budget_hint = f"write {' and '.join(budgets)}"
        for remedy in placement.remedies:
            other = replace(self, placement=placement.with_remedy(remedy)).smallest
            if other._fits():
                needs = format_bytes(other.bytes_total("host"))
                if placement.has_device:
                    on_device = format_bytes(other.bytes_total("device"))
                    needs = f"{on_device} of device memory and {needs} of host memory"
                budget_hint += f", or {remedy.settings}, which needs {needs}"
                break
        return "; ".join((*problems, budget_hint))

    # -- sizes --------------------------------------------------------------------------------------------

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """All chunks, unit by unit; a unit without trainable parameters has none."""
        chunks: list[Chunk] = []
        for unit, layout in enumerate(self.inventory.units):
            for begin in range(0, layout.elements, self.chunk_elements):
                end = min(begin + self.chunk_elements, layout.elements)
                chunks.append(Chunk(len(chunks), unit, begin, end))
        return tuple(chunks)

    @cached_property
    def chunks_of(self) -> tuple[tuple[Chunk, ...], ...]:
        """The chunks of each unit."""
        grouped: list[list[Chunk]] = [[] for _ in self.inventory.units]
        for chunk in self.chunks:
            grouped[chunk.unit].append(chunk)
        return tuple(tuple(group) for group in grouped)

    def chunk_bytes(self, chunk: Chunk) -> int:
        """Bytes of the chunk's state extent."""
        return self.placement.state_bytes(chunk.elements)

    def plane_bytes(self, elements: int) -> Counter[str]:
        """Bytes of the state planes of a unit with so many trained elements, over all its chunks."""
        whole, rest = divmod(elements, self.chunk_elements)
        total = Counter(dict(self.placement.plane_bytes(rest)))
        for name, size in self.placement.plane_bytes(self.chunk_elements):
            total[name] += whole * size
        return total

    def state_bytes(self, units: Iterable[UnitLayout]) -> int:
        """Bytes of the units' optimizer state."""
        of_chunk = self.placement.state_bytes(self.chunk_elements)
        cut = [divmod(unit.elements, self.chunk_elements) for unit in units]
        return sum(whole * of_chunk + self.placement.state_bytes(rest) for whole, rest in cut)

    @cached_property
    def lines(self) -> tuple[PlanLine, ...]:
        """Every purpose in every tier. See Note [What host memory holds], Note [What device memory holds]."""
        return (*self._weight_lines(), *self._grad_lines(), *self._state_lines(), *self._compute_lines())

    def _weight_lines(self) -> Iterator[PlanLine]:
        placement, whole = self.placement, self.inventory.weight_bytes
        if placement.stores_weights:
            saved = "weights" if placement.param_home == "nvme" else "weights, as committed"
            yield PlanLine("nvme", saved, 1, whole)
            if placement.generations == 2:
                again = self.inventory.elements * self.inventory.weight_itemsize
                yield PlanLine("nvme", "weights, second generation", 1, again)
        if self.weights_stay:
            yield PlanLine("device" if placement.has_device else "host", "weights", 1, whole)
            return
        if placement.param_home == "nvme":
            yield PlanLine("host", "weight slots", self.weight_slots, self._slot_bytes_max)
        else:
            yield PlanLine("host", "weights", 1, whole)
        if placement.param_home == "device":
            yield PlanLine("device", "weights", 1, whole)
        elif placement.has_device:
            yield PlanLine("device", "weight slots", self.weight_slots, self._slot_bytes_max)

    def _grad_lines(self) -> Iterator[PlanLine]:
        placement = self.placement
        for tier, units in self._units_by_update:
            if placement.update == "backward":
                size = max(unit.elements for unit in units) * placement.grad_itemsize
                yield PlanLine(tier, "gradient slots", self.grad_slots, size)
            else:
                elements = sum(unit.elements for unit in units)
                yield PlanLine(tier, "gradients", 1, elements * placement.grad_itemsize)
        if placement.has_device and not self.updates_all_on_device:
            yield PlanLine("host", "gradient staging", GRAD_STAGING_SLOTS, self.grad_staging_bytes)
            yield PlanLine("device", "gradients on their way", 1, self.grad_crossing_bytes)
        if self.grad_sum_bytes:
            yield PlanLine("host", "gradient sums", 1, self.grad_sum_bytes)

    def _state_lines(self) -> Iterator[PlanLine]:
        placement = self.placement
        if placement.state_home == "nvme":
            size = placement.state_bytes(self.chunk_elements)
            yield PlanLine("host", "optimizer state chunks", self.chunk_slots, size)
        for tier, units in self._units_by_update:
            home = tier if tier == "device" else placement.state_home
            size = self.state_bytes(units)
            if size:
                yield PlanLine(home, "optimizer state", 1, size)
        if placement.generations == 2:
            size = self.state_bytes(self.inventory.units)
            if placement.state_home != "nvme":
                yield PlanLine("nvme", "state, as committed", 1, size)
            yield PlanLine("nvme", "state, second generation", 1, size)
        if self.on_device:
            yield PlanLine("device", "update scratch", 1, UPDATE_SCRATCH_BYTES)

    def _compute_lines(self) -> Iterator[PlanLine]:
        inventory = self.inventory
        tier = "device" if self.placement.has_device else "host"
        for where, purpose, size in (
            (tier, "activations", inventory.activation_bytes),
            ("host", "library code and scratch", inventory.library_bytes),
            (tier, "fp32 piece of a bf16 weight", self._piece_bytes),
        ):
            if size:
                yield PlanLine(where, purpose, 1, size)

    @cached_property
    def on_device(self) -> frozenset[int]:
        """Units whose optimizer state and gradients are on the device: they are updated there.

        Of a part, the first units: what backward has used last is still in the slots when they are updated.
        """
        units = self.inventory.units
        if self.placement.state_home == "device":
            return frozenset(range(len(units)))
        chosen, left = [], int(self.inventory.elements * self.placement.device_share)
        for index, unit in enumerate(units):
            if unit.elements > left:
                break
            if unit.elements:
                chosen.append(index)
            left -= unit.elements
        return frozenset(chosen)

    @property
    def updates_all_on_device(self) -> bool:
        return len(self.on_device) == len(self.inventory.units)

    @property
    def _units_by_update(self) -> Iterator[tuple[str, list[UnitLayout]]]:
        """The tiers where units are updated, and which."""
        for tier in ("device", "host"):
            units = enumerate(self.inventory.units)
            members = [unit for index, unit in units if (index in self.on_device) == (tier == "device")]
            if members:
                yield tier, members

    @property
    def weights_stay(self) -> bool:
        """Whether every weight stays in the one place where it is computed with and updated."""
        home = self.placement.param_home
        if self.placement.has_device:
            return home == "device" and self.updates_all_on_device
        return home == "host"

    @property
    def device_slot_bytes(self) -> list[int]:
        """Bytes of each slot of weights on the device. Where every unit has its own, they differ."""
        if self.placement.param_home == "device":
            return [unit.weight_bytes for unit in self.inventory.units]
        return [self._slot_bytes_max] * self.weight_slots

    @property
    def grad_staging_bytes(self) -> int:
        """Bytes of one buffer where gradients arrive that are widened or added."""
        return min(GRAD_STAGING_BYTES_MAX, max(unit.elements for unit in self.inventory.units) * 4)

    @property
    def grad_crossing_bytes(self) -> int:
        """Device memory for gradients on their way to the host: those of two units."""
        return 2 * max(unit.elements for unit in self.inventory.units) * self.inventory.weight_itemsize

    @property
    def grad_sum_counts(self) -> dict[int, int]:
        """Sums of squares of a unit whose gradients pass by on the device, at most: one to a block or part of it."""
        if self.placement.update != "backward":
            return {}
        return {
            unit: layout.elements // GRAD_SUM_ELEMENTS + len(layout.trainable) + 1
            for unit, layout in enumerate(self.inventory.units)
            if unit in self.on_device
        }

    @property
    def grad_sum_bytes(self) -> int:
        """Host memory for them: 8 bytes each."""
        return 8 * sum(self.grad_sum_counts.values())

    @property
    def _slot_bytes_max(self) -> int:
        return max(unit.weight_bytes for unit in self.inventory.units)

    @property
    def _piece_bytes(self) -> int:
        if self.placement.precision != "bf16" or self.placement.has_device:
            return 0
        return 4 * min(self.inventory.matrix_elements_max, PIECE_ELEMENTS)

    def bytes_total(self, tier: str) -> int:
        """Bytes this plan takes in a tier."""
        return sum(line.total for line in self.lines if line.tier == tier)

    def _sum(self, tier: str) -> str:
        return " + ".join(str(line) for line in self.lines if line.tier == tier)

    # -- traffic ------------------------------------------------------------------------------------------

    def scheduler(self) -> PrefetchScheduler:
        """The scheduler of the weights, as the engine starts with it.

        Backward ends at the first unit that is trained: nothing before it needs a gradient.
        """
        units = self.inventory.units
        trained = [index for index, unit in enumerate(units) if unit.elements]
        use_slots = trained
        if self.placement.param_home != "nvme":
            use_slots = [index for index in trained if index in self.on_device]
        return PrefetchScheduler(
            len(units),
            self.weight_slots,
            micro_batches=self.placement.micro_batches,
            backward=range(trained[0], len(units))[::-1],
            update=use_slots if self.placement.update == "step" else (),
            updated_by_compute=self.on_device,
        )

    def bytes_at_start(self) -> Counter[LinkPlane]:
        """Bytes written before step 1: weights and residuals; moments start as zeros that nobody writes."""
        moved: Counter[LinkPlane] = Counter()
        if self.placement.param_home == "nvme":
            moved["nvme_write", "weight"] += self.inventory.weight_bytes
        if self.placement.state_home == "nvme":
            moved["nvme_write", "residual"] += self.inventory.elements * self.placement.residual_itemsize
        return +moved

    def bytes_moved(self, steps: int, *, goes_on: bool = False) -> Counter[LinkPlane]:
        """Bytes per link and plane in the first `steps` steps, of a model that uses its units in order.

        The first step finds no weights present, and reads no moments (they are zeros).

        Args:
            goes_on: from steps of another process: there are moments.
        """
        moved: Counter[LinkPlane] = Counter()
        if steps < 1:
            return moved
        if self.placement.state_home == "nvme":
            planes = (self.plane_bytes(unit.elements) for unit in self.inventory.units)
            for name, size in sum(planes, Counter[str]()).items():
                moved["nvme_read", name] += size * (steps if goes_on or name == "residual" else steps - 1)
                moved["nvme_write", name] += size * steps
        if not self.weights_stay:
            moved += self._weights_moved(steps)
        if self.placement.has_device:
            crossing = [
                unit for index, unit in enumerate(self.inventory.units) if index not in self.on_device
            ]
            gradients = sum(param.info.nbytes for unit in crossing for param in unit.trainable)
            moved["d2h", "grad"] += steps * self.placement.micro_batches * gradients
        return +moved

    def _weights_moved(self, steps: int) -> Counter[LinkPlane]:
        moved: Counter[LinkPlane] = Counter()
        inventory = self.inventory
        on_host = {index for index, unit in enumerate(inventory.units) if unit.elements} - self.on_device
        steps_moves = steady_moves(self.scheduler(), steps, updated_on_host=on_host)
        if self.placement.param_home == "nvme":
            moved["nvme_write", "weight"] += steps * inventory.elements * inventory.weight_itemsize
            moved["nvme_read", "weight"] += sum(self._bytes_of(moves.fetched) for moves in steps_moves)
        if self.placement.has_device:
            for moves in steps_moves:
                renewed = sum(inventory.units[unit].elements for unit in moves.renewed)
                moved["h2d", "weight"] += self._bytes_of(moves.lifted) + renewed * inventory.weight_itemsize
            updated_there = sum(inventory.units[unit].elements for unit in self.on_device)
            moved["d2h", "weight"] += steps * updated_there * inventory.weight_itemsize
        return moved

    def _bytes_of(self, units: Iterable[int]) -> int:
        return sum(self.inventory.units[unit].weight_bytes for unit in units)

    def report(self) -> str:
        """The plan as a table: a line for each purpose, the sums, and what a step moves."""
        return table(self)
