"""What a training costs: benchmarks, and the timeline of a few steps, rank by rank."""
