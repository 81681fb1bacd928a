"""Each alert fires in its trouble and stays silent otherwise, by promtool's own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.unit.deploy.promtool import promtool

FOLDER = Path(__file__).parents[3] / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yml"
TESTS = FOLDER / "alerts_test.yml"


@pytest.mark.parametrize(
    "arguments", [("check", "rules", str(RULES)), ("test", "rules", str(TESTS))]
)
def test_promtool_accepts_the_rules_and_their_tests(arguments: tuple[str, ...]) -> None:
    done = promtool(*arguments)

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_is_seen_to_fire_and_to_stay_silent() -> None:
    rules = yaml.safe_load(RULES.read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    fired: set[str] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            (fired if case.get("exp_alerts") else silent).add(case["alertname"])

    assert fired == alerts
    assert silent == alerts
