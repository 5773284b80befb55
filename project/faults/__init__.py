"""Mistakes made on purpose in the raw trainer, which the comparison must name: `python -m project.compare --inject`."""
