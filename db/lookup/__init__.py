"""The run-time lookup, and the exported files that it reads in addition to the database."""
