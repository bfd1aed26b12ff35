"""Copies run beside compute: asserted on the time line that `benchmarks/overlap.py` draws."""

import pytest

from benchmarks import overlap
from offload.accel.simulated import Span


def span(begin, end, name="0"):
    return Span("compute", name, begin, end)


def test_the_measures():
    """By hand: two bars of compute, one copy that bridges them and one that is late."""
    compute = [span(0, 4, "1"), span(5, 9, "2")]
    lifts, gradients = [span(3, 5, "2")], [span(8, 10)]
    step = overlap.Step(compute, lifts, gradients, 0, 10)
    assert step.compute_share == 0.8 and step.beside_share == 2 / 8 and step.hidden_share == 0.5
    assert step.late() == [(lifts[0], compute[0])]
    assert overlap.length([span(0, 2), span(1, 3), span(5, 6)]) == 4
    parts = [span(0, 1), span(1, 2), span(2, 3, "1"), span(4, 5, "1")]
    assert [*overlap.merged(parts)] == [span(0, 2), span(2, 3, "1"), span(4, 5, "1")]


@pytest.mark.parametrize("update", ["step", "backward"])
def test_weights_of_the_next_unit_come_while_one_is_computed_with(update, swap_path):
    """With compute slower than the link, only the start of a step waits: its weights have just been updated."""
    options = overlap.parse([f"--swap={swap_path}", f"--update={update}", "--compute=200"])
    step = overlap.trace(options)
    units = [int(bar.name) for bar in step.compute]
    last = options.layers + 1
    assert units == [*range(last + 1), *range(last)[::-1]]
    forward, backward = step.compute[1 : last + 1], step.compute[last:]
    lifts = {True: {}, False: {}}
    for lift in step.lifts:
        lifts[lift.begin < forward[-1].begin][int(lift.name)] = lift
    assert [*lifts[True]] == units[: last + 1]
    assert [*lifts[False]] == [*range(last - 3)][::-1]  # four slots still hold the others
    for before in forward[:-1]:
        lift = lifts[True][int(before.name) + 1]
        assert lift.end <= before.end, "the next unit's weights are there when it is its turn"
        assert overlap.overlap([lift], step.compute) > 0
    for before in backward[3:-1]:
        lift = lifts[False][int(before.name) - 1]
        assert backward[0].begin <= lift.begin and lift.end <= before.end
        assert overlap.overlap([lift], backward) == pytest.approx(lift.end - lift.begin), (
            "wholly beside compute"
        )
    assert [(lift.name, before.name) for lift, before in step.late()] == [("1", "0")]
    assert step.compute_share > 0.95 and step.hidden_share > 0.8


def test_a_slow_link_is_seen(swap_path):
    """The time line is not right by construction: with a link slower than compute, uses wait."""
    step = overlap.trace(overlap.parse([f"--swap={swap_path}", "--pcie=1", "--layers=4"]))
    assert len(step.late()) > 3 and step.compute_share < 0.6


def test_the_script(swap_path, capsys, tmp_path):
    picture = tmp_path / "overlap.png"
    assert overlap.main([f"--swap={swap_path}", "--layers=2", f"--picture={picture}"]) == 0
    assert "copies beside compute" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
