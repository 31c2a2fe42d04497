"""Launches template `fused`."""

# pyright: basic
from __future__ import annotations

from .balanced_launch import BalancedLauncher


class FusedLauncher(BalancedLauncher):
    """One program for each item and KV head."""
