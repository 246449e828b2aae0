"""The plan search proposes new valid plans: random plans first, then mutations of the best plans."""

import pytest

from esper.leyline import ActionSpace, LifecycleRules, SlotConfig
from esper.tamiyo.plan_search import propose
from esper.tamiyo.schedule import Schedule, parse_plan

SPACE = ActionSpace(SlotConfig.of_count(3), LifecycleRules(), (1, 2), ("none", "stack", "lora"))
LAST = 40


def entries(plan: str) -> list[tuple[int, int]]:
    parsed = parse_plan(plan, SPACE)
    assert isinstance(parsed, Schedule)
    return [(entry.step, entry.slot) for entry in parsed.entries]


def test_first_proposed_plans_vary_in_number_of_seeds_steps_and_blueprints():
    plans = propose({}, 60, SPACE, LAST)
    assert len(set(plans)) == 60
    assert {len(entries(plan)) for plan in plans} == {1, 2, 3}
    assert {name for plan in plans for name in ("stack", "lora") if name in plan} == {"stack", "lora"}
    for plan in plans:
        steps, slots = zip(*entries(plan), strict=True)
        assert list(slots) == list(range(len(slots))), "upstream first"
        assert list(steps) == sorted(set(steps)), "one germination per step"
        assert 0 <= steps[0] < LAST
    firsts = [entries(plan)[0][0] for plan in plans]
    # Steps 0 to 40 of germinations are uniform on a logarithmic scale, so their median is sqrt(41) - 1 = 5.4.
    assert sum(first <= 5 for first in firsts) > 30


def test_proposed_plans_are_deterministic_and_exclude_known_plans():
    known = dict.fromkeys(propose({}, 5, SPACE, LAST), 1.0)
    assert propose(known, 8, SPACE, LAST) == propose(known, 8, SPACE, LAST)
    assert not set(propose(known, 8, SPACE, LAST)) & set(known)


def test_later_proposed_plans_are_mutations_of_the_best_plans():
    best = "stack@r0c0:10,stack@r0c1:20"
    known = {
        best: 1.0,
        "stack@r0c0:11,stack@r0c1:20": 1.1,
        "stack@r0c0:10,stack@r0c1:21": 1.2,
        "lora@r0c0:0": 9.0,
    }
    for plan in propose(known, 30, SPACE, LAST):
        steps = [step for step, _ in entries(plan)]
        kept = sum(any(near in steps for near in pair) for pair in ((10, 11), (20, 21)))
        assert kept >= 1, plan
        assert 1 <= len(steps) <= 3


@pytest.mark.parametrize("count", [1, 7])
def test_propose_returns_fewer_plans_than_requested_if_no_more_plans_exist(count):
    """With one slot, one blueprint and one step there is only one plan."""
    space = ActionSpace(SlotConfig.of_count(1), LifecycleRules(), (1,), ("none", "stack"))
    assert propose({}, count, space, 1) == ["stack@r0c0:0"]
