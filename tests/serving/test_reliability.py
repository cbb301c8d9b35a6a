"""The script that makes `docs/reliability.md`, in small."""

import copy
from typing import Any

import pytest

from tests.serving.reliability import WAYS, killed, overload, traffic, wrong

GOOD: dict[str, Any] = {
    "traffic": {
        "way": {"requests": 9, "finished": 8, "aborted": 1, "differing": 0, "pages_returned": True},
    },
    "kill": {"differing_after_the_restart": 0, "differing_on_another_server": 0, "refused": 0},
    "overload": {
        "statuses": {"200": 6, "429": 54},
        "accepted_differing": 0,
        "pages_in_use_afterwards": 0.0,
        "most_waiting": 4,
        "max_waiting": 4,
    },
}


@pytest.mark.tier("full")
def test_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.serving.reliability.WAYS", {"speculation": WAYS["speculation"]})
    found = traffic(60)
    assert wrong(GOOD | {"traffic": found}) == []
    assert found["speculation"]["preemptions"] > 0
    assert found["speculation"]["finished"] > 40


@pytest.mark.tier("full")
def test_servers() -> None:
    assert wrong(GOOD | {"kill": killed(12), "overload": overload(10, max_waiting=4)}) == []


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("traffic", {"way": GOOD["traffic"]["way"] | {"differing": 1}}),
        ("traffic", {"way": GOOD["traffic"]["way"] | {"pages_returned": False}}),
        ("traffic", {"way": GOOD["traffic"]["way"] | {"aborted": 0}}),
        ("kill", {"differing_after_the_restart": 1}),
        ("kill", {"differing_on_another_server": 1}),
        ("kill", {"refused": 1}),
        ("overload", {"statuses": {"200": 60}}),
        ("overload", {"accepted_differing": 1}),
        ("overload", {"pages_in_use_afterwards": 0.1}),
        ("overload", {"most_waiting": 5}),
    ],
)
def test_what_is_wrong_is_found(part: str, change: dict[str, Any]) -> None:
    results = copy.deepcopy(GOOD)
    assert wrong(results) == []
    results[part] |= change
    assert len(wrong(results)) == 1
