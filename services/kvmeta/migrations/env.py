"""Alembic's entry: migrate the connection that sql.schema.upgrade hands over."""

from __future__ import annotations

from alembic import context

from services.kvmeta.sql.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
with context.begin_transaction():
    context.run_migrations()
