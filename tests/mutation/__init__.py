"""Mutation tests of the core: faults made by rule in the loop, page selection and the engine."""
