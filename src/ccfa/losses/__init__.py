"""Losses as functions of tensors: class scores and distillation."""
