"""This process and its machine: how it starts and ends, writes files, which device it has. Knows no other process."""
