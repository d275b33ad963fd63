"""Continuous batching in entropic time: jobs go in, deltas of text and measurements come out."""
