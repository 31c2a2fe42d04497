"""Run by Alembic, as a loose file: migrates over the connection that the store hands over, in its transaction."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], version_table=attributes["version_table"])
with context.begin_transaction():
    context.run_migrations()
