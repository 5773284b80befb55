"""What training costs, in turns with what a person would write by hand: `python -m project.bench`."""
