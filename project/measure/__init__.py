"""What a training costs: the timeline of a few steps, rank by rank."""
