"""A function that reads params in a snapshot of its own.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add it where statements do not see what was committed while they waited."""
    if op.get_bind().dialect.name != "postgresql":
        return
    op.execute(
        "CREATE FUNCTION params_as_committed(of_params_id bigint) RETURNS bytea"
        " LANGUAGE plpgsql VOLATILE AS $$ BEGIN RETURN"
        " (SELECT params FROM handle_params WHERE params_id = of_params_id);"
        " END $$"
    )
