"""Where parameters lie, what stands for them while they are elsewhere, and what of user code is noticed.

Oracles: the rules of the layout by arithmetic, torch's own strides, and exact masters bit for bit.
"""

import math

import pytest
import torch
from torch import nn

from offload.errors import ConfigError, OffloadError
from offload.optim import kernels
from offload.partition import Partition, StoredParam, absent_tensor

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
SHAPES = [(), (1,), (5,), (3, 4), (2, 3, 4, 5), (0,), (3, 0, 2)]


class Net(nn.Module):
    """Sizes that are no multiple of a boundary; tied, frozen, integer, empty, 0-d and channels_last."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.conv = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
        self.blocks = nn.ModuleList(nn.Linear(5, 9) for _ in range(3))
        self.counts = nn.Parameter(torch.arange(11), requires_grad=False)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def partition_of(net, precision="bf16", groups=None):
    return Partition(net, groups or [{"params": list(net.parameters())}], precision)


def plane_of(partition, unit, fill=0):
    return torch.full((partition.inventory.units[unit].weight_bytes,), fill, dtype=torch.uint8)


def stored_by_name(partition):
    return {stored.name: stored for unit in partition.units for stored in unit}


def fill(partition):
    """A plane for every unit, with the parameters' own values in it, and the parameters pointed at it."""
    planes = []
    for unit, params in enumerate(partition.units):
        planes.append(plane_of(partition, unit))
        for stored in params:
            stored.write(planes[unit], None, stored.param.detach().clone())
        partition.attach(unit, planes[unit])
    return planes


# -- names, groups, layout --------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_parameter_lies_on_its_boundary_and_on_no_other(precision, net):
    partition = partition_of(net, precision)
    assert set(partition.of_param) == set(net.parameters())
    for unit in range(len(partition.units)):
        plane = plane_of(partition, unit)
        taken = torch.zeros_like(plane)
        for stored in partition.units[unit]:
            view, flat = stored.view(plane), stored.flat_view(plane)
            assert view.shape == stored.param.shape and flat.shape == (stored.param.numel(),)
            assert flat.storage_offset() * flat.itemsize % 256 == 0
            flat.view(torch.uint8).add_(1)
            taken[stored.placed.offset : stored.placed.offset + flat.nbytes] += 1
            elements = torch.zeros(partition.inventory.units[unit].elements)
            if stored.trainable:
                stored.view_elements(elements).fill_(1.0)
                assert elements.sum() == stored.param.numel()
                assert elements[stored.placed.begin : stored.placed.end].all()
        assert torch.equal(plane, taken) and plane.max() <= 1


def test_a_tied_weight_is_stored_once_under_its_first_name(net):
    partition = partition_of(net)
    stored = partition.of_param[net.head.weight]
    assert stored is partition.of_param[net.embed.weight]
    assert (stored.name, stored.names) == ("embed.weight", ("embed.weight", "head.weight"))
    assert "head.weight" not in stored_by_name(partition)


def test_elements_are_numbered_whatever_is_trained(net):
    """In the order of registration, a tied weight once: the numbers key the noise of rounded state."""
    elements, at = {}, 0
    for name, param in net.named_parameters():
        elements[name] = at
        at += param.numel()
    groups = [{"params": [net.blocks[1].weight]}, {"params": [*net.conv.parameters()]}]
    for partition in (partition_of(net), partition_of(net, groups=groups)):
        assert {stored.name: stored.element for stored in partition.of_param.values()} == elements


def test_what_is_in_no_group_or_asks_for_no_gradient_is_frozen(net):
    groups = [{"params": [net.blocks[1].weight]}, {"params": [*net.conv.parameters(), net.frozen.weight]}]
    partition = partition_of(net, groups=groups)
    assert {s.name: s.group for s in partition.trainable} == {
        "conv.weight": 1, "conv.bias": 1, "blocks.1.weight": 0,
    }  # fmt: skip
    assert {s.group for unit in partition.units for s in unit if not s.trainable} == {-1}


def test_compute_types(net):
    dtypes = {name: stored.dtype for name, stored in stored_by_name(partition_of(net)).items()}
    assert dtypes.pop("counts") is torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}


def test_groups_that_cannot_be_trained_are_refused(net):
    with pytest.raises(ConfigError, match=r"embed\.weight is in parameter groups 0 and 1"):
        partition_of(net, groups=[{"params": [net.embed.weight]}, {"params": [net.head.weight]}])
    with pytest.raises(
        ConfigError, match=r"group 1 has a parameter of shape \(2, 4\) that is not in the model"
    ):
        stranger = nn.Parameter(torch.zeros(2, 4))
        partition_of(net, groups=[{"params": [net.embed.weight]}, {"params": [stranger]}])
    net.sparse = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(
        ConfigError, match=r"sparse: parameters of layout torch\.sparse_coo are not supported"
    ):
        partition_of(net)


def strides():
    """Tensors, and the strides under which their elements lie in a plane: their own where they have no gaps."""
    image = torch.zeros(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    return {
        "contiguous": (image, (60, 20, 5, 1)),
        "channels_last": (last, (60, 1, 15, 3)),
        "transposed": (torch.zeros(3, 4).t(), (1, 4)),
        "with gaps": (torch.zeros(3, 8)[:, ::2], (4, 1)),
        "expanded": (torch.zeros(1).expand(3, 2), (2, 1)),
        "0-d": (torch.zeros(()), ()),
        "empty": (torch.zeros(0, 3).t(), (1, 1)),
    }


@pytest.mark.parametrize("kind", strides())
def test_dense_strides_are_kept(kind):
    value, expected = strides()[kind]
    net = nn.Module()
    net.weight = nn.Parameter(value)
    stored = partition_of(net).of_param[net.weight]
    assert stored.stride == expected
    assert stored.view(plane_of(partition_of(net), 0)).stride() == expected


# -- absent parameters ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_absent_tensors_are_true_to_shape_and_never_plausible(dtype, shape):
    absent = absent_tensor(shape, dtype)
    assert (tuple(absent.shape), absent.dtype, absent.numel()) == (shape, dtype, math.prod(shape))
    assert absent.untyped_storage().nbytes() <= dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        assert absent.isnan().all()
    else:
        smallest = False if dtype is torch.bool else torch.iinfo(dtype).min
        assert (absent == smallest).all()


def test_absent_parameters_are_true_to_shape_and_share_no_element(net):
    partition = partition_of(net)
    shapes = {name: tuple(param.shape) for name, param in net.named_parameters()}
    fill(partition)
    absent = {param for param in net.parameters() if partition.of_param[param].is_absent}
    assert not absent
    for unit in range(len(partition.units)):
        partition.detach(unit)
    assert {name: tuple(param.shape) for name, param in net.named_parameters()} == shapes
    filled = [param for param in net.parameters() if param.numel()]
    assert all(partition.of_param[param].is_absent for param in filled)
    assert not partition.of_param[net.empty].is_absent
    assert len({param.data_ptr() for param in filled}) == len(filled)


def test_coming_and_going_changes_no_value(net):
    expected = {
        name: p.detach().clone().bfloat16() for name, p in net.named_parameters() if p.is_floating_point()
    }
    partition = partition_of(net)
    planes = fill(partition)
    for _ in range(2):
        for unit, plane in enumerate(planes):
            partition.detach(unit)
            partition.attach(unit, plane)
    for name, value in expected.items():
        assert torch.equal(dict(net.named_parameters())[name], value), name
    assert torch.equal(net.counts, torch.arange(11))


def test_how_many_parameters_share_a_plane_is_told(net):
    """Empty, frozen, gathered and tied ones among them."""
    partition = partition_of(net)
    stored = stored_by_name(partition)["blocks.0.weight"]
    stored.gathered = torch.zeros((9, 5), dtype=torch.bfloat16)

    def sharing(unit, plane):
        storage = plane.untyped_storage().data_ptr()
        return sum(s.param.untyped_storage().data_ptr() == storage for s in partition.units[unit])

    for unit in range(len(partition.units)):
        first, second = plane_of(partition, unit), plane_of(partition, unit)
        assert partition.attach(unit, first) == sharing(unit, first)
        assert partition.attach(unit, second) == sharing(unit, second)
        assert not sharing(unit, first)
        assert partition.detach(unit, only_trained=True) == sharing(unit, second)
        assert partition.detach(unit) == sharing(unit, second) == 0


# -- writes of user code ----------------------------------------------------------------------------------


def write_filled(param):
    param.data.fill_(3.0)  # of one expanded element torch lets this one through


def write_in_place(param):
    with torch.no_grad():
        param.zero_()


@pytest.mark.parametrize("write", [write_filled, write_in_place])
@pytest.mark.parametrize("name", ["blocks.1.weight", "scale", "conv.weight", "frozen.bias"])
def test_a_write_to_an_absent_parameter_is_told_once(name, write, net):
    partition = partition_of(net)
    planes = fill(partition)
    stored = stored_by_name(partition)[name]
    value = stored.param.detach().clone()
    partition.detach(stored.unit)
    write(stored.param)
    partition.attach(stored.unit, planes[stored.unit])
    with pytest.raises(OffloadError, match=rf"^{name} was written to while absent"):
        partition.refuse_misuse()
    assert torch.equal(stored.param, value), "the write is lost, and the unit is there all the same"
    partition.detach(stored.unit)
    assert stored.param.isnan().all(), "absent is NaN again"
    partition.attach(stored.unit, planes[stored.unit])
    partition.refuse_misuse()


def test_a_write_to_an_absent_integer_parameter_is_told(net):
    partition = partition_of(net)
    planes = fill(partition)
    unit = partition.of_param[net.counts].unit
    partition.detach(unit)
    write_in_place(net.counts)
    partition.attach(unit, planes[unit])
    with pytest.raises(OffloadError, match="counts was written to"):
        partition.refuse_misuse()


def test_a_write_that_goes_with_its_slot_is_told(net):
    partition = partition_of(net)
    planes = fill(partition)
    stored = stored_by_name(partition)["blocks.2.bias"]
    write_in_place(stored.param)
    partition.detach(stored.unit)
    partition.attach(stored.unit, planes[stored.unit])
    with pytest.raises(OffloadError, match=r"blocks\.2\.bias was written to .* in a slot that it has left"):
        partition.refuse_misuse()


def test_data_that_somebody_else_has_assigned_is_noticed(net):
    partition = partition_of(net)
    planes = fill(partition)
    stored = stored_by_name(partition)["blocks.0.weight"]
    assert not stored.is_replaced
    stored.param.data = torch.ones(9, 5, dtype=torch.bfloat16)
    assert stored.is_replaced
    partition.detach(stored.unit)
    partition.attach(stored.unit, planes[stored.unit])
    with pytest.raises(OffloadError, match=r"blocks\.0\.weight was written to"):
        partition.refuse_misuse()


def test_a_gathered_value_stays_while_its_unit_comes_and_goes(net):
    partition = partition_of(net)
    planes = fill(partition)
    stored = stored_by_name(partition)["blocks.0.weight"]
    stored.gathered = torch.full((9, 5), 4.0, dtype=torch.bfloat16)
    stored.point(stored.gathered)
    write_in_place(stored.param)
    partition.detach(stored.unit)
    partition.attach(stored.unit, planes[stored.unit])
    assert stored.param.data_ptr() == stored.gathered.data_ptr() and not stored.param.any()


# -- values in planes -------------------------------------------------------------------------------------

SPECIAL = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-40, -3e38, 1 + 2**-8, 1 + 3 * 2**-9, 1.0 + 2**-20]


def masters(shape, seed=1):
    """fp32 values over many magnitudes, with ties, infinities, a signed zero and a denormal among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    values.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values


def bits(value):
    return value.contiguous().view(torch.int32)


def joined(stored: StoredParam, plane, residual):
    master = torch.empty(stored.placed.info.numel)
    weight = stored.flat_view(plane)
    kernels.join_master(weight, residual[stored.placed.begin : stored.placed.end], master)
    return master.as_strided(stored.placed.info.shape, stored.stride)


@pytest.mark.parametrize("laid_out", ["as the parameter", "otherwise"])
@pytest.mark.parametrize("name", ["blocks.1.weight", "conv.weight"])
def test_weight_and_residual_are_the_exact_master(name, laid_out, net):
    partition = partition_of(net)
    stored = stored_by_name(partition)[name]
    value = masters(stored.placed.info.shape)
    if laid_out == "as the parameter":
        value = torch.empty_strided(value.shape, stored.stride).copy_(value)
    elif name == "blocks.1.weight":
        value = value.t().contiguous().t()
    plane = plane_of(partition, stored.unit, fill=0xA5)
    residual = torch.full((partition.inventory.units[stored.unit].elements,), 12345, dtype=torch.int16)
    around, around_residual = plane.clone(), residual.clone()
    stored.write(plane, residual, value)
    assert torch.equal(bits(joined(stored, plane, residual)), bits(value))
    half_up = ((bits(value) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    assert torch.equal(stored.view(plane), half_up)
    stored.flat_view(plane).copy_(stored.flat_view(around))  # nothing else has been touched
    begin, end = stored.placed.begin, stored.placed.end
    residual[begin:end] = around_residual[begin:end]
    assert torch.equal(plane, around) and torch.equal(residual, around_residual)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_a_value_of_another_type_is_a_master_as_fp32(dtype, net):
    partition = partition_of(net)
    stored = stored_by_name(partition)["conv.weight"]
    value = torch.randn(stored.placed.info.shape, dtype=torch.float64).to(dtype)
    plane = plane_of(partition, stored.unit)
    residual = torch.zeros(partition.inventory.units[stored.unit].elements, dtype=torch.int16)
    stored.write(plane, residual, value)
    assert torch.equal(joined(stored, plane, residual), value.float())


def test_a_value_of_the_compute_type_leaves_no_residual(net):
    partition = partition_of(net)
    stored = stored_by_name(partition)["blocks.0.weight"]
    value = torch.randn(9, 5).bfloat16()
    plane = plane_of(partition, stored.unit)
    residual = torch.ones(partition.inventory.units[stored.unit].elements, dtype=torch.int16)
    stored.write(plane, residual, value)
    assert torch.equal(joined(stored, plane, residual), value.float())
    assert residual.sum() == residual.numel() - value.numel()


@pytest.mark.parametrize("name", ["frozen.weight", "blocks.0.weight"])
def test_without_a_residual_values_are_rounded_to_the_nearest(name, net):
    partition = partition_of(net)
    stored = stored_by_name(partition)[name]
    value = masters(stored.placed.info.shape)
    plane = plane_of(partition, stored.unit)
    residual = torch.ones(partition.inventory.units[stored.unit].elements, dtype=torch.int16)
    stored.write(plane, None if stored.trainable else residual, value)
    assert torch.equal(stored.view(plane), value.bfloat16())
    assert residual.sum() == residual.numel(), "a frozen parameter has no elements in the residual plane"


def test_flatten_gives_the_order_of_the_planes_and_copies_only_where_it_must(net):
    partition = partition_of(net)
    stored = stored_by_name(partition)["conv.weight"]
    value = torch.arange(162.0).view(6, 3, 3, 3)
    expected = value.permute(0, 2, 3, 1).flatten()
    assert torch.equal(stored.flatten(value), expected)
    assert torch.equal(stored.flatten(value, torch.float64), expected.double())
    last = value.to(memory_format=torch.channels_last)
    assert stored.flatten(last).data_ptr() == last.data_ptr()
    assert torch.equal(stored.flatten(last), expected)
    assert torch.equal(stored.flatten(nn.Parameter(last)), expected), "no graph comes along"
    for name in ("scale", "empty"):
        param = dict(net.named_parameters())[name].detach()
        flat = stored_by_name(partition)[name].flatten(param)
        assert torch.equal(flat, param.reshape(-1)) and flat.dim() == 1
