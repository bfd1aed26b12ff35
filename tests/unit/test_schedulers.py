"""The schedules of the configuration. Oracle: sequences that DeepSpeed 0.19.8's own gave, literally.

A sequence is the learning rate in the optimizer when step 1, 2, 3, ... trains, with `scheduler.step()` after
each step.
"""

import math

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from offload import ConfigError, OffloadConfig
from offload.integrations.schedulers import build_scheduler


def config(type_, **params):
    return OffloadConfig.from_dict({"scheduler": {"type": type_, "params": params}})


def make_optimizer(*lrs, betas=(0.9, 0.999)):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": lr} for lr in lrs]
    return torch.optim.AdamW(groups, betas=betas)


def steps_of(scheduler, optimizer, count, read):
    """What `read` finds in each group while steps 1, 2, ... train."""
    seen = []
    for _ in range(count):
        seen.append([read(group) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return seen


def rates(settings, *lrs, count, total_steps=None):
    optimizer = make_optimizer(*lrs)
    scheduler = build_scheduler(settings, optimizer, total_steps=total_steps)
    seen = steps_of(scheduler, optimizer, count, lambda group: group["lr"])
    return [step[0] for step in seen] if len(lrs) == 1 else seen


GOLDEN = {
    "warmup, log": (
        config("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=2e-3, warmup_num_steps=5),
        [1e-05, 1e-05, 0.0008670463505660522, 0.001368386327027111, 0.0017240927011321044, 0.002, 0.002],
    ),
    "warmup, linear": (
        config("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=2e-3, warmup_num_steps=5, warmup_type="linear"),
        [1e-05, 1e-05, 0.000408, 0.000806, 0.001204, 0.001602, 0.002, 0.002],
    ),
    "warmup of one step": (
        config("WarmupLR", warmup_max_lr=5e-7, warmup_num_steps=1),
        [0.0, 0.0, 5e-07, 5e-07, 5e-07],
    ),
    "decay, log": (
        config(
            "WarmupDecayLR", total_num_steps=10, warmup_min_lr=1e-5, warmup_max_lr=2e-3, warmup_num_steps=4
        ),
        [
            1e-05,
            1e-05,
            0.001005,
            0.0015870376882175506,
            0.002,
            0.002,
            0.0016683333333333335,
            0.0013366666666666666,
            0.001005,
            0.0006733333333333333,
            0.00034166666666666666,
            1e-05,
            1e-05,
        ],
    ),
    "decay, linear": (
        config(
            "WarmupDecayLR",
            total_num_steps=10,
            warmup_max_lr=2e-3,
            warmup_num_steps=4,
            warmup_type="linear",
        ),
        [
            0.0,
            0.0,
            0.0005,
            0.001,
            0.0015,
            0.002,
            0.0016666666666666668,
            0.0013333333333333333,
            0.001,
            0.0006666666666666666,
            0.0003333333333333333,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "cosine, log": (
        config("WarmupCosineLR", total_num_steps=10, warmup_num_steps=4),
        [
            0.0,
            0.0,
            0.0005,
            0.0007924812503605781,
            0.001,
            0.0009330194006220301,
            0.000750025,
            0.00050005,
            0.0002500750000000001,
            6.708059937796987e-05,
            1.0000000000000001e-07,
            1.0000000000000001e-07,
        ],
    ),
    "one cycle, decay": (
        config(
            "OneCycle",
            cycle_min_lr=1e-4,
            cycle_max_lr=1e-2,
            cycle_first_step_size=4,
            cycle_second_step_size=6,
            decay_step_size=2,
            decay_lr_rate=0.5,
        ),
        [
            0.0001,
            0.002575,
            0.00505,
            0.007525,
            0.01,
            0.00835,
            0.0067,
            0.00505,
            0.0034,
            0.00175,
            0.0001,
            8e-05,
            6.666666666666667e-05,
            5.714285714285715e-05,
        ],
    ),
    "one cycle, stairs": (
        config(
            "OneCycle",
            cycle_min_lr=1e-4,
            cycle_max_lr=1e-2,
            cycle_first_step_size=6,
            cycle_second_step_size=4,
            cycle_first_stair_count=3,
            cycle_second_stair_count=2,
        ),
        [0.0001, 0.0001, 0.0034, 0.0034, 0.0067, 0.0067, 0.01, 0.00505, 0.00505, 0.0001, 0.0001, 0.0001],
    ),
    "range test": (
        config(
            "LRRangeTest",
            lr_range_test_min_lr=1e-4,
            lr_range_test_step_size=3,
            lr_range_test_step_rate=5.0,
        ),
        [
            0.0001,
            0.0002666666666666667,
            0.0004333333333333333,
            0.0006,
            0.0007666666666666667,
            0.0009333333333333334,
            0.0011,
        ],
    ),
    "range test, stairs": (
        config(
            "LRRangeTest",
            lr_range_test_min_lr=1e-4,
            lr_range_test_step_size=3,
            lr_range_test_step_rate=5.0,
            lr_range_test_staircase=True,
        ),
        [0.0001, 0.0001, 0.0001, 0.0006, 0.0006, 0.0006, 0.0011, 0.0011],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_sequence_is_deepspeeds(name):
    settings, golden = GOLDEN[name]
    assert rates(settings, 1e-3, count=len(golden)) == pytest.approx(golden, rel=1e-12, abs=1e-18)


def test_groups_rise_to_their_own_rate():
    """Golden: DeepSpeed's WarmupLR, whose maximum is each group's learning rate where none is given."""
    golden = [[0.0, 0.0], [0.0, 0.0], [0.0005, 0.02], [0.0007924812503605781, 0.03169925001442313]]
    golden += [[0.001, 0.04], [0.001, 0.04]]
    seen = rates(config("WarmupLR", warmup_num_steps=4), 1e-3, 4e-2, count=6)
    assert [lr for step in seen for lr in step] == pytest.approx([lr for step in golden for lr in step])


def test_groups_follow_the_cosine_of_their_own_rate():
    golden = [0.0, 0.004, 0.013, 0.022, 0.031, 0.03745448267190434, 0.0305, 0.021, 0.0115]
    golden += [0.004545517328095665, 0.002, 0.002]
    settings = config(
        "WarmupCosineLR",
        total_num_steps=10,
        warmup_min_ratio=0.1,
        warmup_num_steps=4,
        cos_min_ratio=0.05,
        warmup_type="linear",
    )
    seen = rates(settings, 1e-3, 4e-2, count=12)
    assert [step[1] for step in seen] == pytest.approx(golden)
    assert [step[0] * 40 for step in seen] == pytest.approx(golden)


@pytest.mark.parametrize("type_", ["WarmupLR", "WarmupDecayLR"])
def test_absent_maximum_is_the_optimizers_rate(type_):
    """DeepSpeed's WarmupDecayLR would rise to 0.001 whatever the optimizer says."""
    settings = config(type_, warmup_num_steps=3)
    assert max(rates(settings, 5e-7, count=8, total_steps=20)) == pytest.approx(5e-7)


def test_momentum_cycles_against_the_rate():
    """Golden: DeepSpeed's first betas; the second one stays the optimizer's own."""
    golden = [0.7, 0.95, 0.8666666666666666, 0.8666666666666666, 0.7833333333333333, 0.7833333333333333]
    golden += [0.7, 0.825, 0.825, 0.95, 0.95, 0.95]
    settings = config(
        "OneCycle",
        cycle_min_lr=1e-4,
        cycle_max_lr=1e-2,
        cycle_first_step_size=6,
        cycle_second_step_size=4,
        cycle_first_stair_count=3,
        cycle_second_stair_count=2,
        cycle_min_mom=0.7,
        cycle_max_mom=0.95,
    )
    optimizer = make_optimizer(1e-3, 1e-3, betas=(0.9, 0.98))
    scheduler = build_scheduler(settings, optimizer, total_steps=None)
    seen = steps_of(scheduler, optimizer, len(golden), lambda group: group["betas"])
    assert [step[0][0] for step in seen] == pytest.approx(golden)
    assert {betas[1] for step in seen for betas in step} == {0.98}
    assert all(step[0] == step[1] for step in seen)


def test_momentum_stays_without_cycle():
    settings = config(
        "OneCycle", cycle_min_lr=1e-4, cycle_max_lr=1e-2, cycle_momentum=False, cycle_first_step_size=2
    )
    optimizer = make_optimizer(1e-3, betas=(0.85, 0.98))
    scheduler = build_scheduler(settings, optimizer, total_steps=None)
    seen = steps_of(scheduler, optimizer, 6, lambda group: group["betas"])
    assert all(step == [(0.85, 0.98)] for step in seen)


def test_of_sgd_the_rate_alone_is_cycled():
    """As in DeepSpeed, whose cycle of the momentum is for optimizers that have betas."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    cycle = config("OneCycle", cycle_min_lr=0.01, cycle_max_lr=0.1, cycle_first_step_size=2)
    scheduler = build_scheduler(cycle, optimizer, total_steps=None)
    seen = steps_of(scheduler, optimizer, 4, lambda group: (group["lr"], group["momentum"]))
    assert len({lr for ((lr, _),) in seen}) > 1
    assert {momentum for ((_, momentum),) in seen} == {0.9}


def test_momentum_that_would_reach_one_is_refused():
    params = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-2, "cycle_first_step_size": 3}
    growing = config("OneCycle", **params, decay_step_size=4, decay_mom_rate=0.01)
    # 0.9 * (1 + 0.01 * n / 4) reaches 1 at n = 44.4, after a cycle of 6
    for total_steps in (None, 60):
        with pytest.raises(ConfigError, match=r"decay_mom_rate: 0.01 .* about 50 steps"):
            build_scheduler(growing, make_optimizer(1e-3), total_steps=total_steps)
    optimizer = make_optimizer(1e-3)
    scheduler = build_scheduler(growing, optimizer, total_steps=45)
    seen = [step[0] for step in steps_of(scheduler, optimizer, 45, lambda group: group["betas"][0])]
    # golden: DeepSpeed's
    assert seen[:10] == pytest.approx(
        [
            0.8,
            0.8666666666666667,
            0.8333333333333334,
            0.8,
            0.8333333333333334,
            0.8666666666666667,
            0.9,
            0.90225,
            0.9045,
            0.9067500000000001,
        ]
    )
    assert max(seen) < 1


def test_length_comes_from_the_configuration_or_the_run():
    without, with_ = config("WarmupCosineLR"), config("WarmupCosineLR", total_num_steps=1500)
    with pytest.raises(ConfigError, match=r"scheduler\.params\.total_num_steps: .* write it"):
        build_scheduler(without, make_optimizer(1.0), total_steps=None)
    assert rates(without, 1.0, count=1200, total_steps=1500) == rates(with_, 1.0, count=1200, total_steps=9)


def test_rate_is_valid_before_the_first_step():
    optimizer = make_optimizer(4e-3)
    scheduler = build_scheduler(
        config("WarmupLR", warmup_min_lr=1e-6, warmup_num_steps=10), optimizer, total_steps=None
    )
    assert isinstance(scheduler, LRScheduler)
    assert scheduler.get_last_lr() == scheduler.get_lr() == [1e-6]


def test_no_schedule_is_none():
    assert build_scheduler(OffloadConfig.from_dict({}), make_optimizer(1e-3), total_steps=10) is None


@pytest.mark.parametrize("name", GOLDEN)
def test_resuming_goes_on_where_it_was(name):
    settings, golden = GOLDEN[name]
    optimizer = make_optimizer(1e-3)
    scheduler = build_scheduler(settings, optimizer, total_steps=None)
    steps_of(scheduler, optimizer, 3, lambda group: None)
    state, optimizer_state = scheduler.state_dict(), optimizer.state_dict()

    resumed_optimizer = make_optimizer(1e-3)
    resumed = build_scheduler(settings, resumed_optimizer, total_steps=None)
    resumed.load_state_dict(state)
    resumed_optimizer.load_state_dict(optimizer_state)
    seen = steps_of(resumed, resumed_optimizer, len(golden) - 3, lambda group: group["lr"])
    assert [step[0] for step in seen] == pytest.approx(golden[3:], rel=1e-12, abs=1e-18)
    assert all(isinstance(value, (int, float, list)) for value in state.values())


def test_last_batch_iteration_starts_there_at_once():
    """The formula at count 2; DeepSpeed would train one step with the optimizer's 0.5 first."""
    settings = config("WarmupLR", warmup_max_lr=2e-3, warmup_num_steps=5, last_batch_iteration=2)
    expected = [2e-3 * math.log(3) / math.log(5), 2e-3 * math.log(4) / math.log(5), 2e-3, 2e-3]
    assert rates(settings, 0.5, count=4) == pytest.approx(expected)
