"""From the files of a folder to batches of pixels: one sample is the same wherever it is read. Knows no process group."""
