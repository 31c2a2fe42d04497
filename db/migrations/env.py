"""Alembic's entry point: migrate in the transaction of the store's connection. Alembic runs it as a loose file."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
