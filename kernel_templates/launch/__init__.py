"""Planning, compiling and launching a variant: what the launchers of all templates share."""
