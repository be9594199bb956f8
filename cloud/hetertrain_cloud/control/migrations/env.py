"""What Alembic runs to migrate: on the connection that ``Database.migrate`` gives."""

from __future__ import annotations

from alembic import context

from hetertrain_cloud.control.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
