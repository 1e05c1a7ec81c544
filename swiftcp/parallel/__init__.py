"""Parallel layouts: the mesh, the context-parallel partition, core attention, layer specs, the shim for CPUs."""
