"""What a run needs around the method: set-up, checkpoints, metrics, alarms, plan, post-mortem."""
