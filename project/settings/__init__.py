"""What a run is asked to do: the YAML's settings, the command line, and the arithmetic of batches. Knows no process group."""
