"""Runs handed to where people already look: TensorBoard, W&B, MLflow, Trackio, and plain tables."""
