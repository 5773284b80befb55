"""Running other commands, for comparison, timeline and benchmarks: clean processes that end with this one, and new folders."""
