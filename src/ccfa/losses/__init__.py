"""Losses as functions of tensors: classification criteria, distillation penalties, ranking."""
