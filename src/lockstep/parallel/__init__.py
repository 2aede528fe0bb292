"""Parallel training: the mesh, collectives, tensor and pipeline parallel, schedules and their runtime."""
