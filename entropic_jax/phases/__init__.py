"""The phases of a step: gather, forward, emit, scatter; and prefill, which runs the same forward pass."""
