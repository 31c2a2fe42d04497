"""The choice of the next variant to try: the Optuna study and its samplers."""
