"""The sub-commands of `entropic`: a module each, with `add_arguments` and `run`, and what they share."""
