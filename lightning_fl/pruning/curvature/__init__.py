"""Pruning rates from the curvature of the training loss."""
