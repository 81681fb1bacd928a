"""docs/configuration.md lists the settings of the services, and all of them."""

from __future__ import annotations

import re

import pytest
from pydantic_settings import BaseSettings, CliApp

from services.router.settings import RouterSettings
from tests.unit.docs.configuration_document import BY_ROLE, DEFAULTS, PAGE, SERVICES, page


def test_the_configuration_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.unit.docs.configuration_document"


def test_every_setting_is_explained() -> None:
    silent = [
        f"{service}: {name}"
        for service, settings in SERVICES.items()
        for name, field in settings.model_fields.items()
        if not field.description
    ]
    assert not silent


def test_defaults_are_described_where_they_are_computed_and_only_there() -> None:
    computed = {
        (service, name)
        for service, settings in SERVICES.items()
        for name, field in settings.model_fields.items()
        if field.default_factory is not None
    }
    # A plain default, but that of the interpreter that writes the page.
    assert DEFAULTS.keys() == computed | {("worker", "engine_python")}
    assert BY_ROLE in DEFAULTS.values()


@pytest.mark.parametrize("service", SERVICES)
def test_flags_on_the_page_are_those_that_the_service_takes(
    service: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        CliApp.run(SERVICES[service], cli_args=["--help"])
    usage = capsys.readouterr().out.partition("\n\n")[0]
    taken = set(re.findall(r"--[a-z-]+", usage))

    section = PAGE.read_text().partition(f"\n## {service}\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| `(--[]\[a-z-]+)`", section, re.MULTILINE)
    spelled = {flag.replace("[no-]", no) for flag in listed for no in ("", "no-")}
    assert len(listed) == len(SERVICES[service].model_fields)
    assert taken <= spelled
    assert {flag.replace("[no-]", "") for flag in listed} <= taken


def test_variables_on_the_page_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "`KVLOOP_ROUTER_MAX_RUNNING_TURNS`" in PAGE.read_text()
    monkeypatch.setenv("KVLOOP_ROUTER_MAX_RUNNING_TURNS", "7")

    settings: BaseSettings = CliApp.run(RouterSettings, cli_args=[])

    assert settings.model_dump()["max_running_turns"] == 7
