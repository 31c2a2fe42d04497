"""Kernel variants: records, launch and reference. Only this folder imports triton."""
