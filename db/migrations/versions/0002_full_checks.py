"""Full checks."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the table."""
    texts = ("spec", "template", "variant", "gpu_name", "kernel_hash", "triton", "torch", "driver", "result", "cases",
             "checked_at")
    op.create_table(
        "full_checks",
        sa.Column("id", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text, nullable=False) for name in texts),
        sa.Column("page_size", sa.Integer, nullable=False),
        *(sa.Column(name, sa.Text) for name in ("failed_case", "reason")),
        sa.PrimaryKeyConstraint("id", name="pk_full_checks"),
        sa.UniqueConstraint("spec", "variant", "gpu_name", "kernel_hash", "triton", "torch", "driver",
                            name="uq_full_checks"),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("full_checks")
