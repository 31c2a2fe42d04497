"""The run-time lookup, and the exports that it reads beside the database."""
