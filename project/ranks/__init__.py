"""What coordinates the ranks of a training, for both trainers: start, stop and save together, same settings, one verdict."""
