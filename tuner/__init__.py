"""The loop that finds the best variant: generate, compile, check, time, choose, store; and its commands."""
