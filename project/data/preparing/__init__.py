"""A folder of smaller images, made once: `python -m project.prepare`."""
