"""Ablation studies: the benefit and the cost of each scale of control."""
