"""The network, its optimizer and average, and the files that hold them. Knows no process group."""
