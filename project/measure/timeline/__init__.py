"""Where each rank's time goes in a few steps: `python -m project.trace`."""
