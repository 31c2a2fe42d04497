"""The run-time lookup, and the exports and folders of configs that it reads beside the database."""
