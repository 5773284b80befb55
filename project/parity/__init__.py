"""The comparison: two recorded runs in, findings out; it knows records, not trainers."""
