"""Starting runs: the ranks of a node, what a job file would do, and what happened to a run's starts."""
