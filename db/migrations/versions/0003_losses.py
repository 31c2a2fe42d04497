"""Losses of lookups."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "losses",
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in ("gpu_name", "source")),
        sa.Column("upto", sa.Double, nullable=False),
        sa.Column("shapes", sa.Integer, nullable=False),
        sa.Column("loss", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_losses"),
        sa.UniqueConstraint("gpu_name", "source", "upto", name="uq_losses"),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("losses")
