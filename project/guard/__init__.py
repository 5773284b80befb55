"""Watches that the ranks of a training stay replicas of each other: one file, plain torch, for anyone's script."""

from project.guard.replica_guard import ReplicaError, ReplicaGuard

__all__ = ["ReplicaError", "ReplicaGuard"]
