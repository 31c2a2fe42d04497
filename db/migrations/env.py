"""Entry point of Alembic, which runs it as a loose file: migrate over the store's connection, in its transaction."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
