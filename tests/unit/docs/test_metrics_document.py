"""docs/metrics.md lists what the services have, and all of it."""

from __future__ import annotations

from tests.unit.docs.metrics_document import LABEL_VALUES, PAGE, services, with_tables


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text()

    assert page == with_tables(page), "run: python -m tests.unit.docs.metrics_document"


def test_every_label_is_described_and_no_other() -> None:
    labels = {
        (family.family.name, label)
        for families in services().values()
        for family in families
        for label in family.labels
    }

    assert LABEL_VALUES.keys() == labels


def test_metrics_are_named_after_their_service() -> None:
    for service in ("router", "kvmeta", "worker"):
        for family in services()[service]:
            assert family.family.name.startswith(f"kvloop_{service}_")
