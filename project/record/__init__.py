"""What a training did, exactly: one file of JSON lines per rank, written while it runs and readable without the trainers."""
