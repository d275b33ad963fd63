"""Offline generation for the command line: the decode loop on batches, without the serving engine."""
